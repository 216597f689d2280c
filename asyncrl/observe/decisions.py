"""Every event of the pure state machines of a run (buffer, lifecycle, phases, scaling): where it enters, and how it is recorded.

Invariant: a machine changes by `handle` alone. So what went in, in order and with its time, gives the same instructions again in
another process.

RUN/record/decisions-NNNN.bin holds what entered the machines in one life of the controller, and what they said to it. The file
is a row of chunks, each with its length before it. The first holds the `Beginning`; every further one the events up to the end
of one optimizer step, compressed. With `observe.record = "all"` the samples that no step trains lie between the events. Each
chunk carries a hash over itself and the hash before. So a file that was cut off holds up to its last whole chunk, and one that
was changed says from where on.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import zstandard

from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

RECORD_FOLDER = "record"
STEPS_FOLDER = "steps"
"""In it, with `observe.record = "batches"` and "all": the groups of each step."""
UNTRAINED = "untrained"
"""In place of a machine's name, with `observe.record = "all"`: samples that no step trains."""
MOST_EVENTS, MOST_BYTES = 8192, 16 << 20
"""Of a chunk, before it is compressed: what a long step brings is written in several."""
MOST_CHUNK_BYTES = 1 << 30
"""No longer one is read: a damaged length must not become gigabytes."""
LENGTH_BYTES = 4
Entry = tuple[str, float, msgspec.Raw, msgspec.Raw]
"""Machine, clock seconds, event, and its instructions or the error."""
Event = TypeVar("Event")
Instruction = TypeVar("Instruction")
T = TypeVar("T")
Watch = Callable[[str, Any, float, "Sequence[Any] | str"], None]
"""(machine, event, now, instructions); in place of instructions the error, where the event could not come."""


class Value(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An event or an instruction; in a recording a row of its name and its fields."""


class Machine(Generic[Event, Instruction]):
    """A pure state machine."""

    name: ClassVar[str]
    """In recordings."""
    watchers: tuple[Watch, ...] = ()
    """Told of every event, once it is decided."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event in and return what is to be done about it, in order.

        Args:
            event: What happened.
            now: Clock seconds; never less than at the call before.

        Raises:
            AssertionError: The event cannot follow what happened before: a bug of the caller.
        """
        try:
            instructions = self._decide(event, now)
        except AssertionError as error:
            for watch in self.watchers:
                watch(self.name, event, now, str(error))
            raise
        for watch in self.watchers:
            watch(self.name, event, now, instructions)
        return instructions

    def _decide(self, event: Event, now: float, /) -> list[Instruction]:
        raise NotImplementedError


class Beginning(msgspec.Struct, frozen=True):
    """What the machines of one life of the controller were made from."""

    config: RunConfig
    evaluate_first: bool
    evaluate_last: bool
    logs_folder: str


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Some events in a row."""

    step: int
    """The optimizer step that it ends with; -1: it ends within one."""
    is_last: bool
    """The controller closed the file."""
    chain: bytes
    """Of this chunk and all before."""
    data: bytes
    """msgpack, zstd: list[Entry], or the Beginning."""


def chained(before: bytes, step: int, is_last: bool, data: bytes) -> bytes:
    """Return the hash of a chunk behind another."""
    return hashlib.sha256(b"%s %d %d " % (before, step, is_last) + data).digest()


class Recorder:
    """Records one life of a controller.

    A disk that cannot be written ends the recording, with one log line, and not the run.

    Args:
        run_folder: Of the run.
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
        """Write what the machines were made from; what is noted before, as when a ledger is restored, comes behind it."""
        self._write(-1, self._encoder.encode(beginning), is_last=False)
        self._begun = True

    def note(self, machine: str, event: Any, now: float, instructions: Sequence[Any] | str) -> None:  # noqa: ANN401 - any machine's
        """Note one event: a `Watch`."""
        self._encoder.encode_into((machine, now, event, instructions), self._events, -1)
        self._num_events += 1
        if (self._num_events >= MOST_EVENTS or len(self._events) >= MOST_BYTES) and self._begun:
            self.end_chunk(-1)

    def end_chunk(self, step: int, *, is_last: bool = False) -> None:
        """Write what was noted since the chunk before; it ends with `step`."""
        entries = b"\xdd" + self._num_events.to_bytes(4, "big") + self._events  # a msgpack array of that many
        self._events.clear()
        self._num_events = 0
        self._write(step, entries, is_last=is_last)

    def close(self) -> None:
        """Write what is left, and that it is all; nothing where the run did not begin. Safe to repeat."""
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
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            log.error("%s cannot be written, and the run goes on without: %s", self._file.name, error)  # noqa: TRY400
            self._file.close()


@dataclass(frozen=True, slots=True)
class Journal:
    """What a file holds."""

    path: Path
    beginning: Beginning
    chunks: tuple[Chunk, ...]
    """Behind the first."""
    fault: str
    """Why there is no more, in words; empty where the controller closed the file."""

    def entries(self, chunk: Chunk) -> list[Entry]:
        """Return the events of a chunk.

        Raises:
            ConfigError: It cannot be read.
        """
        return _unpacked(self.path, chunk, list[Entry])


def recordings(folder: Path) -> dict[int, Path]:
    """Return the files of a RUN/record, by the number of the controller's life, in order."""
    named = ((re.fullmatch(r"decisions-(\d{4,})\.bin", path.name), path) for path in folder.glob("decisions-*.bin"))
    return dict(sorted((int(found[1]), path) for found, path in named if found is not None))


def read_journal(path: Path) -> Journal | None:
    """Read as much of a file as is whole; None where not even its beginning is.

    Raises:
        ConfigError: It begins with what this version cannot read.
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
