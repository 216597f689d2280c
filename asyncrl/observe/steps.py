"""The lines of steps.jsonl, eval.jsonl, events.jsonl and seconds.jsonl: one per optimizer step, evaluation, event and second.

memory/NAME.jsonl records what was on a shared device at which time. Every process that moves components writes its own file,
because moves also happen within a phase, and only the process itself knows their times. All files are written with `JsonLines`.
The controller writes the first four.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections import deque
from collections.abc import Iterator, Sequence
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
"""No line that is written is longer."""
AT_ONCE_BYTES = 64 << 10
"""The event loop itself reads new data of at most this size, because a thread would take longer."""
MOST_READ_BYTES = 256 << 10
"""Bytes that are read at once, plus the rest of the last row. A client that does not read its stream holds this much memory."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one optimizer step."""

    step: int
    """The step trained version `step` and made version `step + 1`."""
    version: int
    """`step + 1`, which is the version that this step made."""
    time_s: float
    """Clock seconds at which the step was done."""
    reward_mean: float
    reward_std: float = 0.0
    staleness_mean: float = 0.0
    """Mean over the trained samples, in versions. The staleness of a sample is that of its oldest trained token."""
    staleness_max: int = 0
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    groups_ready: int = 0
    groups_running: int = 0
    groups_scoring: int = 0
    learner_idle: float = 0.0
    """Share of the time since the previous step in which the learner had nothing to train."""
    generators_idle: float = 0.0
    """Share of the time between heartbeats in which a generator had nothing to generate, mean over generators."""
    dropped: dict[str, int] = {}
    """Groups dropped or failed since the run began, by reason."""
    failed_samples: int = 0
    """Samples that failed since this controller began."""
    failed_share: float = 0.0
    """Share of failed groups among the newest 64 groups that were completed or failed."""
    over_limit_samples: int = 0
    """Samples since this controller began that scored 0 because a reward exceeded its time or memory limit."""
    over_limit_share: float = 0.0
    """Share of such samples among the newest 256 scored samples."""
    weight_sync_ms: float = 0.0
    """Time from publication to live on the slowest generator, for the newest version that all generators have."""
    metrics: dict[str, float] = {}
    """All other metrics, named as in observe/metrics.py; only finite values (`metrics.finite`)."""


def step_line(report: StepReport, num_steps: int = 0) -> str:
    """Return a step as one line, for logs and pipes."""
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
    """Result of the held-out prompts under one version, or under this one and later ones (`newest_version`)."""

    version: int
    accuracy: float | None = None
    """Share of samples that the rules judge correct; None if no rule judges (only reward models)."""
    num_samples: int
    reward_mean: float = 0.0
    started_s: float = 0.0
    finished_s: float = 0.0
    newest_version: int = -1
    """Newest version that sampled a token of it; above `version` if training went on meanwhile. -1: not known."""
    num_failed: int = 0
    """Number of samples that failed, which count as wrong and with reward 0."""

    @property
    def failed(self) -> str:
        """Return how many samples failed, as an addition to a line; empty if none did."""
        return f", {self.num_failed} of {self.num_samples} failed" if self.num_failed else ""

    @property
    def headline(self) -> tuple[str, float]:
        """Return name and value of the main result: `accuracy`, or `reward` if there is no accuracy."""
        return ("reward", self.reward_mean) if self.accuracy is None else ("accuracy", self.accuracy)


EventKind = Literal[
    "phase", "death", "restart", "swap", "drops", "change", "alarm", "checkpoint", "evaluation", "joined", "left", "set_aside"
]  # fmt: skip
"""Kind of an event; docs/observability.md describes when each kind occurs."""


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a run. Numbers begin at 1 without a gap, also over resumes, so a reader can continue after the last number."""

    seq: int
    time_s: float
    kind: EventKind
    subject: str = ""
    """The phase, the process, the checkpoint, the rule, or who asked; a file is given by its path in the run folder."""
    text: str = ""
    """Reason, in words."""
    version: int = -1
    """Newest policy version at that time."""


class SecondReport(msgspec.Struct, frozen=True):
    """State of a run, recorded once per second, independently of its steps."""

    time_s: float
    values: dict[str, float]
    """By name of observe/metrics.py."""


class MemoryLine(msgspec.Struct, frozen=True):
    """One switch of a process to a phase."""

    process: str
    phase: str
    """Phase that begins with this switch."""
    number: int
    """Number of the controller's switch; -1: a switch of the process itself, within a phase."""
    started_s: float
    """Clock seconds."""
    finished_s: float
    moves: tuple[ComponentMove, ...] = ()
    """Moves in order; each begins when the one before has ended."""
    resident: dict[str, int] = {}
    """Bytes on the device after the moves, by component."""
    peak_bytes: int = 0
    """Largest number of bytes on the device since the previous line."""
    ended_phase: str = ""
    """Phase in which this peak was measured."""


T = TypeVar("T", bound=msgspec.Struct)


class JsonLines(Generic[T]):
    """Appends structs to a file, one JSON object per line, always whole lines.

    Args:
        path: File to append to. If a killed writer left half a line at its end, this half line is removed.
        most_bytes: A larger file is renamed to NAME.old.jsonl, which replaces an older file of this name; 0: no limit.
        buffer_bytes: Size of the buffer in memory until `flush`; 0: every line is passed to the system when `write` returns.
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
            OSError: The disk is full or broken. The file then contains none of these rows, and later rows may be appended.
        """
        if self._most_bytes and self._num_bytes > self._most_bytes:
            self._file.close()
            self._path.replace(set_behind(self._path))
            self._file, self._num_bytes = self._path.open("ab", self._buffer_bytes), 0
        lines = rest = memoryview(self._encoder.encode_lines(rows))
        try:
            while rest:  # a disk that is nearly full accepts only a part
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # of data that is still in the buffer
                self._file.truncate(self._num_bytes)  # or the next line would continue a half line
            raise
        self._num_bytes += len(lines)

    def flush(self) -> None:
        """Write the buffer to the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file; safe to repeat."""
        self._file.close()


def set_behind(path: Path) -> Path:
    """Return the path to which a full file is renamed."""
    return path.with_suffix(".old.jsonl")


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the rows of a JSON-lines file, after those of its older half (`set_behind`); no rows if there is no file.

    Lines that are not JSON are left out: a killed writer may leave half a line, and another writer may continue after it.

    Raises:
        ConfigError: A line is JSON, but not of this kind: another program or another version wrote the file.
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
    """Yield the rows at the end of a file of JSON lines, the last row first; no rows if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_LINE_BYTES))
        *lines, _torn = file.read().split(b"\n")
    for line in reversed(lines):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=kind)


def newest_row(path: Path, kind: type[T]) -> T | None:
    """Return the last row of a file of JSON lines, read from its end, because the steps of a long run take gigabytes.

    Raises:
        ConfigError: As `read_lines`, if no row is of this kind.
    """
    newest = next(newest_rows(path, kind), None)
    return newest if newest is not None else next(iter(deque(read_lines(path, kind), maxlen=1)), None)


class NewLines:
    """Reads the whole lines that a file has received since the last read, also if the file was renamed because it was full.

    Args:
        path: File to read; it may be created later.
        offset: Byte at which reading begins.
        from_old: Begin with the older half of the file (`set_behind`).
    """

    def __init__(self, path: Path, offset: int = 0, *, from_old: bool = False) -> None:
        self._path, self._old = path, set_behind(path)
        self._offset, self._inode = offset, -1 if from_old else 0

    @property
    def are_few(self) -> bool:
        """At most AT_ONCE_BYTES are new, and the file was not renamed."""
        try:
            return 0 <= self._path.stat().st_size - self._offset <= AT_ONCE_BYTES
        except FileNotFoundError:
            return True

    def read(self, most_bytes: int = -1) -> list[bytes]:
        """Return the new lines: about `most_bytes` of the file and all of a renamed file; all if `most_bytes` is negative."""
        behind = chunk = b""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            if self._inode not in {0, about.st_ino} or about.st_size < self._offset:  # the old file is full and was renamed
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
    """Reads the rows of a file of JSON lines after a given number, each row once.

    Numbers increase through the file, except where a run went back to a checkpoint. Rows before that place may be left out.
    """

    def __init__(self, path: Path, number: str, kind: str, after: int, offset: int = 0) -> None:
        """Read `path` from byte `offset`; the field `number` has a row's number, and rows up to number `after` are left out."""
        self._number, self._kind, self._after = number, kind, after
        self._decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._lines = NewLines(path, self._near(path, offset))

    def _near(self, path: Path, first: int) -> int:
        """Return a byte, at `first` or later, shortly before the requested rows; binary search in the file."""
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
        # A line that a killed writer left may contain anything.
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError, KeyError):
            return int(msgspec.json.decode(self._decoder.decode(line)[self._number], type=float))
        return None

    async def rows(self) -> list[tuple[int, str, bytes]]:
        """Return the new rows, at most MOST_READ_BYTES of them; an empty list if there are none."""
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
    """Return the steps of a run in order; if a step was repeated after a crash, its last line counts."""
    newest = {report.step: report for report in read_lines(run_folder / STEPS_FILE, StepReport)}
    return [newest[step] for step in sorted(newest)]


def accuracies(evals: Sequence[EvalReport]) -> tuple[float | None, float | None]:
    """Return the held-out accuracy of version 0 and that of the newest later version; None where there is none."""
    before = next((report.accuracy for report in evals if report.version == 0), None)
    return before, next((report.accuracy for report in reversed(evals) if report.version > 0), None)


def read_evals(run_folder: Path) -> list[EvalReport]:
    """Return the evaluations of a run, by version."""
    return sorted(read_lines(run_folder / EVAL_FILE, EvalReport), key=lambda report: (report.version, report.finished_s))


def read_events(run_folder: Path, after: int = 0) -> Iterator[RunEvent]:
    """Yield the events of a run after number `after`."""
    return (event for event in read_lines(run_folder / EVENTS_FILE, RunEvent) if event.seq > after)


def open_memory(run_folder: Path, process: str) -> JsonLines[MemoryLine]:
    """Open a process's file for appending."""
    folder = run_folder / MEMORY_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return JsonLines(folder / f"{process}.jsonl")


def read_memory(run_folder: Path) -> list[MemoryLine]:
    """Return the lines of all processes, ordered by time."""
    lines = [line for path in (run_folder / MEMORY_FOLDER).glob("*.jsonl") for line in read_lines(path, MemoryLine)]
    return sorted(lines, key=lambda line: line.finished_s)
