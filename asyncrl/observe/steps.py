"""One line per optimizer step, evaluation, event and second: what steps.jsonl, eval.jsonl, events.jsonl and seconds.jsonl hold.

memory/NAME.jsonl says what lay on a shared device when. Every process that moves components writes its own: moves happen within
a phase too, and only the process itself knows when. All are written through `JsonLines`, the first four by the controller; read
by report.py, display.py, `asyncrl status` and users (`asyncrl.StepReport`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.schema.control import ComponentMove

STEPS_FILE = "steps.jsonl"
EVAL_FILE = "eval.jsonl"
EVENTS_FILE = "events.jsonl"
SECONDS_FILE = "seconds.jsonl"
MEMORY_FOLDER = "memory"
MOST_LINE_BYTES = 1 << 20
"""Longer lines than this are never written."""
AT_ONCE_BYTES = 64 << 10
"""What has just been written and is no more than this is read by the loop itself: a thread would cost more."""
MOST_READ_BYTES = 256 << 10
"""That is read at once, and the row that is cut there to its end: whoever never reads a stream holds so much."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step was like."""

    step: int
    """Trained version `step` and made version `step + 1`."""
    version: int
    """`step + 1`, the version that this step made."""
    time_s: float
    """Clock seconds at which the step was done."""
    reward_mean: float
    reward_std: float = 0.0
    staleness_mean: float = 0.0
    """Over the trained samples, in versions; of a sample: of its oldest trained token."""
    staleness_max: int = 0
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    groups_ready: int = 0
    groups_running: int = 0
    groups_scoring: int = 0
    learner_idle: float = 0.0
    """Fraction of the time since the step before in which the learner had nothing to train."""
    generators_idle: float = 0.0
    """Mean over generators of the fraction of that time in which nothing was being generated."""
    dropped: dict[str, int] = {}
    """Groups dropped or failed since the run began, by reason."""
    failed_samples: int = 0
    """Samples that failed since this controller began."""
    failed_share: float = 0.0
    """Of the newest 64 groups that were completed or failed, the share that failed."""
    over_limit_samples: int = 0
    """Samples that made a reward run out of time or memory, which scores 0, since this controller began."""
    over_limit_share: float = 0.0
    """Their share of the newest 256 that were scored."""
    weight_sync_ms: float = 0.0
    """From publish to live, the slowest generator of the newest version that all of them have."""
    metrics: dict[str, float] = {}
    """Everything else, named as in observe/metrics.py; finite values only (`metrics.finite`)."""


def step_line(report: StepReport, num_steps: int = 0) -> str:
    """Return a step as the one line that logs and pipes get."""
    of, over_share = f"/{num_steps}" if num_steps else "", f"{report.over_limit_share:.0%}"
    return (
        f"step {report.version}{of}  reward {report.reward_mean:.3f} +-{report.reward_std:.2f}  "
        f"staleness {report.staleness_mean:.2f} (max {report.staleness_max})  "
        f"ready {report.groups_ready} running {report.groups_running} scoring {report.groups_scoring}  "
        f"tok/s {report.generated_tokens_per_s:,.0f} generated {report.trained_tokens_per_s:,.0f} trained  "
        f"idle learner {report.learner_idle:.0%} generators {report.generators_idle:.0%}  sync {report.weight_sync_ms:.0f} ms"
        + (f"  FAILED {report.failed_samples} samples, {report.failed_share:.0%} of groups" if report.failed_samples else "")
        + (f"  OVER LIMIT {report.over_limit_samples} samples, {over_share}" if report.over_limit_samples else "")
    )


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """What held-out prompts came to under one version."""

    version: int
    accuracy: float | None = None
    """Fraction of samples that the rules find right; None where no rule judges (reward models alone)."""
    num_samples: int
    reward_mean: float = 0.0
    started_s: float = 0.0
    finished_s: float = 0.0

    @property
    def headline(self) -> tuple[str, float]:
        """Return name and value of what the version is judged by: `accuracy`, or `reward` where there is none."""
        return ("reward", self.reward_mean) if self.accuracy is None else ("accuracy", self.accuracy)


EventKind = Literal[
    "phase", "death", "restart", "swap", "drops", "change", "alarm", "checkpoint", "evaluation", "joined", "left", "set_aside"
]  # fmt: skip
"""Of an event; docs/observability.md says when each comes."""


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to a run, numbered from 1 without a gap, over resumes too: a reader goes on behind the last."""

    seq: int
    time_s: float
    kind: EventKind
    subject: str = ""
    """The phase, the process, the checkpoint, the rule, who asked; files by their place in the run's folder."""
    text: str = ""
    """Why, in words."""
    version: int = -1
    """Newest policy version then."""


class SecondReport(msgspec.Struct, frozen=True):
    """How a run stood, once a second, whatever its steps do."""

    time_s: float
    values: dict[str, float]
    """Named as in observe/metrics.py."""


class MemoryLine(msgspec.Struct, frozen=True):
    """One switch of a process to a phase."""

    process: str
    phase: str
    """That begins with it."""
    number: int
    """Of the controller's switch; -1: the process's own, within a phase."""
    started_s: float
    """Clock seconds."""
    finished_s: float
    moves: tuple[ComponentMove, ...] = ()
    """In order, one after the other."""
    resident: dict[str, int] = {}
    """Component to bytes on the device, after the moves."""
    peak_bytes: int = 0
    """Most that was on the device since the line before."""
    ended_phase: str = ""
    """The phase that the peak is of."""


T = TypeVar("T", bound=msgspec.Struct)


class JsonLines(Generic[T]):
    """Appends structs to a file, one JSON object a line, in whole lines.

    Args:
        path: A torn last line, of a writer that was killed, is cut off.
        most_bytes: A file that has more is set behind as NAME.old.jsonl, and the one before that goes; 0: it may grow.
        buffer_bytes: Kept in memory until `flush`; 0: every line is on its way to the disk when `write` returns.
    """

    def __init__(self, path: Path, most_bytes: int = 0, buffer_bytes: int = 0) -> None:
        self._path, self._most_bytes, self._buffer_bytes = path, most_bytes, buffer_bytes
        self._file = path.open("ab", buffer_bytes)
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(end - MOST_LINE_BYTES, 0))
            self._num_bytes = file.tell() + file.read(MOST_LINE_BYTES).rfind(b"\n") + 1
        if self._num_bytes < end:
            self._file.truncate(self._num_bytes)
        self._encoder = msgspec.json.Encoder()

    def write(self, *rows: T) -> None:
        """Append rows.

        Raises:
            OSError: The disk is full or broken. None of them is there then, and the file may be written on.
        """
        if self._most_bytes and self._num_bytes > self._most_bytes:
            self._file.close()
            self._path.replace(set_behind(self._path))
            self._file, self._num_bytes = self._path.open("ab", self._buffer_bytes), 0
        lines = rest = memoryview(self._encoder.encode_lines(rows))
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # of what is still in the buffer
                self._file.truncate(self._num_bytes)  # or the next line would go on behind a torn one
            raise
        self._num_bytes += len(lines)

    def flush(self) -> None:
        """Let what was written reach the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file; safe to repeat."""
        self._file.close()


def set_behind(path: Path) -> Path:
    """Return where a file is put that is full."""
    return path.with_suffix(".old.jsonl")


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the rows of a JSON-lines file and of the one that was set behind; none where there is none.

    Lines that are not JSON are left out: a writer that was killed tears its last one, and another may have gone on behind it.

    Raises:
        ConfigError: A line is JSON and not of this kind: the file is another's, or of another version.
    """
    decoder = msgspec.json.Decoder(kind)
    for part in (set_behind(path), path):
        with part.open("rb") if part.exists() else io.BytesIO() as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = decoder.decode(line) if line.endswith(b"\n") else None
                except msgspec.ValidationError as error:
                    raise ConfigError(
                        f"{part}, line {number}, is not what this version writes there: {error}; move the file away"
                    ) from error
                except (msgspec.DecodeError, UnicodeDecodeError):
                    row = None
                if row is not None:
                    yield row


def newest_rows(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the rows at the end of a file of JSON lines, the last one first; none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_LINE_BYTES))
        *lines, _torn = file.read().split(b"\n")
    for line in reversed(lines):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=kind)


def newest_row(path: Path, kind: type[T]) -> T | None:
    """Return the last row of a file of JSON lines, read from its end: all of a long run's steps are gigabytes.

    Raises:
        ConfigError: As `read_lines`, where no row is of this kind.
    """
    newest = next(newest_rows(path, kind), None)
    return newest if newest is not None else next(iter(deque(read_lines(path, kind), maxlen=1)), None)


class NewLines:
    """The whole lines that have come to a file since it was looked at last; of one that was set behind meanwhile, the rest too.

    Args:
        path: Of the file; it may come later.
        offset: Byte from which it is read.
        from_old: Begin with the file that was set behind before.
    """

    def __init__(self, path: Path, offset: int = 0, *, from_old: bool = False) -> None:
        self._path, self._old = path, set_behind(path)
        self._offset, self._inode = offset, -1 if from_old else 0

    @property
    def are_few(self) -> bool:
        """No more than AT_ONCE_BYTES have come, to a file that was not set behind."""
        try:
            return 0 <= self._path.stat().st_size - self._offset <= AT_ONCE_BYTES
        except FileNotFoundError:
            return True

    def read(self, most_bytes: int = -1) -> list[bytes]:
        """Return what has come; of a file that is not set behind about `most_bytes`, and all where that is negative."""
        behind = chunk = b""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            if self._inode not in {0, about.st_ino} or about.st_size < self._offset:  # the old one is full and set behind
                with contextlib.suppress(FileNotFoundError), self._old.open("rb") as old:
                    old.seek(self._offset)
                    behind = old.read()
                self._offset = 0
            self._inode = about.st_ino
            file.seek(self._offset)
            chunk = file.read(most_bytes)
            chunk += b"" if chunk.endswith(b"\n") else file.readline()
        behind, chunk = (part[: part.rfind(b"\n") + 1] for part in (behind, chunk))
        self._offset += len(chunk)
        return [*behind.splitlines(), *chunk.splitlines()]


class Tail:
    """The rows of a file of JSON lines, each once, from a number on.

    Numbers grow through the file, but where a run went back to a checkpoint: then what was before may be left out.
    """

    def __init__(self, path: Path, number: str, kind: str, after: int, offset: int = 0) -> None:
        """Read `path` from a byte on; `number` is the field that holds a row's number, and rows up to `after` are left out."""
        self._number, self._kind, self._after = number, kind, after
        self._decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._lines = NewLines(path, self._near(path, offset))

    def _near(self, path: Path, first: int) -> int:
        """Return a byte, from `first` on, little before the rows that are wanted, found by halving the file."""
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            last = file.seek(0, 2)
            while last - first > AT_ONCE_BYTES:
                middle = file.seek((first + last) // 2)
                start = middle + len(file.readline())
                number = self._number_of(file.readline())
                if number is not None and number <= self._after:
                    first = start
                else:
                    last = middle
        return first

    def _number_of(self, line: bytes) -> int | None:
        # A line that was torn by a kill may be anything.
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError, KeyError):
            return int(msgspec.json.decode(self._decoder.decode(line)[self._number], type=float))
        return None

    async def rows(self) -> list[tuple[int, str, bytes]]:
        """Return what has come; no more than MOST_READ_BYTES of it, and none where there is no more."""
        while True:
            rows, is_end = self._read() if self._lines.are_few else await asyncio.to_thread(self._read)
            if rows or is_end:
                return rows

    def _read(self) -> tuple[list[tuple[int, str, bytes]], bool]:
        """Return the next rows, and whether there were no lines at all."""
        rows, lines = list[tuple[int, str, bytes]](), self._lines.read(MOST_READ_BYTES)
        for line in lines:
            number = self._number_of(line)
            if number is not None and number > self._after:
                rows.append((number, self._kind, line))
        return rows, not lines


def read_steps(run_folder: Path) -> list[StepReport]:
    """Return the steps of a run in order; of a step repeated after a crash the last line counts."""
    newest = {report.step: report for report in read_lines(run_folder / STEPS_FILE, StepReport)}
    return [newest[step] for step in sorted(newest)]


def read_evals(run_folder: Path) -> list[EvalReport]:
    """Return the evaluations of a run, by version."""
    return sorted(read_lines(run_folder / EVAL_FILE, EvalReport), key=lambda report: (report.version, report.finished_s))


def read_events(run_folder: Path, after: int = 0) -> Iterator[RunEvent]:
    """Yield the events of a run behind number `after`."""
    return (event for event in read_lines(run_folder / EVENTS_FILE, RunEvent) if event.seq > after)


def open_memory(run_folder: Path, process: str) -> JsonLines[MemoryLine]:
    """Open a process's file for appending."""
    folder = run_folder / MEMORY_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return JsonLines(folder / f"{process}.jsonl")


def read_memory(run_folder: Path) -> list[MemoryLine]:
    """Return the lines of all processes, by time."""
    lines = [line for path in (run_folder / MEMORY_FOLDER).glob("*.jsonl") for line in read_lines(path, MemoryLine)]
    return sorted(lines, key=lambda line: line.finished_s)
