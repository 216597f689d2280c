"""Recording of all events of a run's pure state machines (machine.py), and reading it.

RUN/record/decisions-NNNN.bin contains the events of one life of the controller and the instructions of the machines. The file is
a sequence of chunks, and the length of each chunk is written before it. The first chunk contains the `Beginning`. Every other
chunk contains the events up to the end of one optimizer step, compressed. With `observe.record = "all"`, the samples that no step
trains are between the events. Each chunk has a hash of its own contents and of the hash before. So a truncated file is valid up
to its last whole chunk, and a changed file shows where the change begins.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zstandard

from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

RECORD_FOLDER = "record"
STEPS_FOLDER = "steps"
"""Folder in RECORD_FOLDER for the groups of each step, with `observe.record = "batches"` and "all"."""
UNTRAINED = "untrained"
"""Name of the entries that are samples which no step trains, instead of a machine, with `observe.record = "all"`."""
MOST_EVENTS, MOST_BYTES = 8192, 16 << 20
"""Limits of a chunk before compression. The events of a long step are written in several chunks."""
MOST_CHUNK_BYTES = 1 << 30
"""No longer chunk is read, so that a damaged length does not allocate gigabytes."""
LENGTH_BYTES = 4
Entry = tuple[str, float, msgspec.Raw, msgspec.Raw]
"""Machine, clock seconds, event, and the instructions or the error."""
T = TypeVar("T")


class Beginning(msgspec.Struct, frozen=True):
    """Inputs from which the machines of one life of the controller were made."""

    config: RunConfig
    evaluate_first: bool
    evaluate_last: bool
    logs_folder: str


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of events."""

    step: int
    """The optimizer step with which the chunk ends; -1: it ends within a step."""
    is_last: bool
    """The controller closed the file after this chunk."""
    chain: bytes
    """Hash of this chunk and all chunks before it."""
    data: bytes
    """list[Entry] or the Beginning, as msgpack compressed with zstd."""


def chained(before: bytes, step: int, is_last: bool, data: bytes) -> bytes:
    """Return the hash of a chunk after the hash `before`."""
    return hashlib.sha256(b"%s %d %d " % (before, step, is_last) + data).digest()


class Recorder:
    """Records one life of a controller.

    If the disk cannot be written, the recording ends with one log line, and the run continues.

    Args:
        run_folder: Folder of the run.
    """

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / RECORD_FOLDER
        self.folder.mkdir(exist_ok=True)
        self.life = max(recordings(self.folder), default=-1) + 1
        self._file = (self.folder / f"decisions-{self.life:04}.bin").open("xb", buffering=0)
        self._encoder = msgspec.msgpack.Encoder()
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._chain = b""
        self._begun = False
        self._events = bytearray()
        self._num_events = 0

    def begin(self, beginning: Beginning) -> None:
        """Write the inputs of the machines. Events that were noted earlier (a restored ledger) are written after them."""
        self._write(-1, self._encoder.encode(beginning), is_last=False)
        self._begun = True

    def note(self, machine: str, event: Any, now: float, instructions: Sequence[Any] | str) -> None:  # noqa: ANN401 - any machine's
        """Note one event: a `Watch`."""
        self._encoder.encode_into((machine, now, event, instructions), self._events, -1)
        self._num_events += 1
        if (self._num_events >= MOST_EVENTS or len(self._events) >= MOST_BYTES) and self._begun:
            self.end_chunk(-1)

    def end_chunk(self, step: int, *, is_last: bool = False) -> None:
        """Write the events that were noted since the previous chunk; the chunk ends with `step`."""
        entries = b"\xdd" + self._num_events.to_bytes(4, "big") + self._events  # a msgpack array of that many
        self._events.clear()
        self._num_events = 0
        self._write(step, entries, is_last=is_last)

    def close(self) -> None:
        """Write the remaining events and mark the end; write nothing if the run did not begin. Safe to repeat."""
        if not self._file.closed:
            if self._begun:
                self.end_chunk(-1, is_last=True)
            self._file.close()

    def _write(self, step: int, content: bytes, *, is_last: bool) -> None:
        if self._file.closed:
            return
        data = self._compressor.compress(content)
        self._chain = chained(self._chain, step, is_last, data)
        chunk = self._encoder.encode(Chunk(step, is_last, self._chain, data))
        rest = memoryview(len(chunk).to_bytes(LENGTH_BYTES, "little") + chunk)
        try:
            while rest:  # a disk that is nearly full accepts only a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            log.error("%s cannot be written; the run continues without it: %s", self._file.name, error)  # noqa: TRY400
            self._file.close()


@dataclass(frozen=True, slots=True)
class Journal:
    """Contents of a file."""

    path: Path
    beginning: Beginning
    chunks: tuple[Chunk, ...]
    """All chunks after the first."""
    fault: str
    """Why the file ends here, in words; empty if the controller closed the file."""

    def entries(self, chunk: Chunk) -> list[Entry]:
        """Return the events of a chunk.

        Raises:
            ConfigError: The chunk cannot be read.
        """
        return _unpacked(self.path, chunk, list[Entry])


def recordings(folder: Path) -> dict[int, Path]:
    """Return the files of a folder RUN/record by the number of the controller's life, in order."""
    named = ((re.fullmatch(r"decisions-(\d{4,})\.bin", path.name), path) for path in folder.glob("decisions-*.bin"))
    return dict(sorted((int(found[1]), path) for found, path in named if found is not None))


def read_journal(path: Path) -> Journal | None:
    """Read the whole chunks of a file; return None if not even its first chunk is whole.

    Raises:
        ConfigError: This version cannot read its first chunk.
    """
    content, place, chain, chunks = path.read_bytes(), 0, b"", list[Chunk]()
    fault = "it was cut off: the controller was killed, is still running, or its disk was full"
    while place + LENGTH_BYTES <= len(content):
        start = place + LENGTH_BYTES
        length = int.from_bytes(content[place:start], "little")
        if length > MOST_CHUNK_BYTES or start + length > len(content):
            break
        try:
            chunk = msgspec.msgpack.decode(content[start : start + length], type=Chunk)
        except msgspec.MsgspecError:
            chunk = None
        if chunk is None or chunk.chain != chained(chain, chunk.step, chunk.is_last, chunk.data):
            fault = f"what follows was changed: at byte {place} the hash is not that of the contents"
            break
        chunks.append(chunk)
        place, chain = start + length, chunk.chain
        if chunk.is_last:
            fault = ""
    if not chunks:
        return None
    return Journal(path, _unpacked(path, chunks[0], Beginning), tuple(chunks[1:]), fault)


def _unpacked(path: Path, chunk: Chunk, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(chunk.data), type=kind)
    except (zstandard.ZstdError, msgspec.MsgspecError, MemoryError) as error:
        raise ConfigError(f"{path} is damaged, or of another version of asyncrl: {error}") from error
