"""The scoring process: `python -m asyncrl.reward.worker_process FD MARK_FD`, and the pool's side of it.

The process scores in the event loop of its main thread. Functions that take several samples run first, for all samples that
arrived together; then the samples are scored one after the other. If a function is async, all samples are scored at the same
time instead, and each is answered when it is done. The process may hang, run out of memory or die: the pool notices and replaces
it. It dies with its parent, holds at most `process_memory_bytes` of data, and does not import torch unless a user's reward does.
Before each function it writes the current sample and function into a shared mark, so that the pool can find the cause of a stop.

Pool and process exchange msgpack over a socket pair: `Begin`, `Ready`, then for each `Work` one `Judgement` per sample, in order
(unless they are scored at the same time), sent together if made within `TELL_EVERY_S`. A message is its length in 4 bytes,
little-endian, and the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple

import msgspec
import psutil

from asyncrl.config.reward import RewardConfig, reward_names
from asyncrl.errors import AsyncRLError, ConfigError, RewardError, kind_of, trace_of
from asyncrl.reward.inputs import Judgement, RewardInput

if TYPE_CHECKING:
    from asyncrl.reward.registry import NamedReward

START_TIMEOUT_S = 120.0
"""Time limit for the imports of rewards, on a busy machine."""
AT_REST = -1
MOST_TOGETHER = 128
"""Maximum number of samples in one process if its functions judge several at once or are async."""
TELL_EVERY_S = 0.002
"""Judgements made within this time are sent together."""
MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of one message of judgements, since the pool holds it in memory."""
MAX_ERROR_CHARS = 2000
"""Maximum length of the reason why a sample has no score: it is sent, stored in the ledger and counted by."""
STACK_BYTES = 8 << 20
"""Stack size of a thread, as counted by the memory limit."""
MAX_PRINTED_BYTES = 1 << 20
"""Maximum size of each of two files for the output of rewards; the older one is overwritten."""
_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("<I")
_MARK = struct.Struct("<Qi?d")


class Begin(msgspec.Struct, frozen=True):
    """Pool to process: build these rewards."""

    config: RewardConfig
    parent_pid: int
    """The process ends when this parent dies."""
    import_paths: tuple[str, ...] = ()
    """The pool's `sys.path`, so that the process finds a user's modules too."""


class Ready(msgspec.Struct, frozen=True):
    """Process to pool: the rewards are built, or the reason why not."""

    error: str = ""
    is_config_error: bool = False
    judges: Literal["one by one", "several", "concurrently"] = "one by one"
    """several: a function takes several samples at once. concurrently: a function is async; answers come in any order."""


class Item(msgspec.Struct, frozen=True):
    """One sample to score."""

    sample: RewardInput
    skipped: tuple[int, ...] = ()
    """Functions that score 0 without being called: the sample made them run out of time or memory."""


class Work(msgspec.Struct, frozen=True):
    """Pool to process: score these."""

    items: tuple[Item, ...]
    alone: bool = False
    """Score them one after the other for all kinds of functions: one sample may have ended a process."""


class Mark(NamedTuple):
    """The position of a scoring process."""

    sample: int
    """Number of samples begun, this one included; 0 before the first."""
    function: int
    """Index of the function; `AT_REST`: none, since the process sends judgements or waits for samples."""
    in_batch: bool
    """Whether the function has several samples, of which this is the first."""
    since_s: float
    """Time at which it began the sample, by `time.monotonic`, which all processes of the machine share."""


class ProcessDied(Exception):  # noqa: N818 - an event to handle, not an error of ours
    """The scoring process has ended; the message says how."""


class InvalidJudgements(ProcessDied):
    """It sent invalid judgements: earlier a function wrote into its socket, or returned twice (a fork)."""


_judgements = msgspec.msgpack.Decoder(tuple[Judgement, ...])


def _message(message: msgspec.Struct | list[Judgement]) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


# -- the pool's side -----------------------------------------------------------------------------------------------------------


class PrintedOutput(asyncio.Protocol):
    """The output of rewards: a file of at most `MAX_PRINTED_BYTES` and one older file; without a path, standard error, truncated.

    It receives the pipes of all scoring processes.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._file = path.open("ab", 0) if path is not None else os.fdopen(os.dup(2), "wb", 0)
        self._size = self._file.tell() if path is not None else 0

    def data_received(self, data: bytes) -> None:
        """Append to the file; start a new one if it is full. On a full disk only this output is lost."""
        with contextlib.suppress(OSError):
            if self._size + len(data) > MAX_PRINTED_BYTES:
                if self._path is None:
                    return
                self.close()
                self._path.replace(self._path.with_suffix(".old.log"))
                self._file, self._size = self._path.open("wb", 0), 0
            self._size += len(data)
            self._file.write(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ScoringProcess:
    """A child that scores samples one after the other, in the order sent.

    Owns the process and its connections from the constructor on: the creator must kill and reap it, even if `begin` failed.
    """

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    def __init__(self, config: RewardConfig, output: PrintedOutput) -> None:
        """Start the child, which then waits for the reward config.

        Raises:
            RewardError: The child cannot be started.
        """
        self.num_sent = 0
        self._config, self._names, self._output = config, frozenset(reward_names(config)), output
        self._last_mark = Mark(0, 0, in_batch=False, since_s=0.0)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self._socket, its_socket = socket.socketpair()
                ours.callback(self._socket.close)
                theirs.callback(its_socket.close)
                self._mark_file = ours.enter_context(tempfile.TemporaryFile(buffering=0))
                self._mark_file.truncate(_MARK.size)
                printed_fd, its_printed_fd = os.pipe()
                self._printed = ours.enter_context(os.fdopen(printed_fd, "rb", 0))
                theirs.callback(os.close, its_printed_fd)
                fds = (its_socket.fileno(), self._mark_file.fileno())
                self._process = subprocess.Popen(  # noqa: S603 - our own command line
                    [sys.executable, "-P", "-m", "asyncrl.reward.worker_process", *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=its_printed_fd,
                    stderr=its_printed_fd,
                    pass_fds=fds,
                    start_new_session=True,
                )
            except OSError as error:
                raise RewardError(f"cannot start a scoring process: {error}") from error
            self._open = ours.pop_all()
        self.pid = self._process.pid
        """Process id of the child and id of its process group."""

    async def begin(self) -> Ready:
        """Wait until the child has built its rewards; return its Ready message.

        Raises:
            ConfigError: The rewards are configured wrongly.
            RewardError: The rewards cannot be built here (a missing package, no sandbox), or the child did not start.
        """
        printing, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self._output, self._printed)
        self._open.callback(printing.close)
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._open.callback(self._writer.transport.abort)
        self._writer.write(_message(Begin(self._config, os.getpid(), tuple(sys.path))))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = msgspec.msgpack.decode(await self._read(), type=Ready)
        except TimeoutError as error:
            raise RewardError(f"a scoring process did not start within {START_TIMEOUT_S:g} s") from error
        except ProcessDied as died:
            raise RewardError(f"a scoring process could not start: {died}; the worker's log has its output") from died
        if ready.error:
            raise (ConfigError if ready.is_config_error else RewardError)(ready.error)
        return ready

    @property
    def mark(self) -> Mark:
        """The position of the child, or its last position after its end."""
        if not self._mark_file.closed:
            written = os.pread(self._mark_file.fileno(), _MARK.size, 0)  # a mapped file that a function truncates would kill us
            if len(written) == _MARK.size:
                self._last_mark = Mark(*_MARK.unpack(written))
        return self._last_mark

    def send(self, items: list[Item], *, alone: bool = False) -> None:
        """Send samples to score together; `judgements` notices a dead child.

        Does not wait: a hanging child would not read, and `judgements` applies its time limit. The caller bounds the batch.
        """
        self.num_sent += len(items)
        self._writer.write(_message(Work(tuple(items), alone)))

    async def judgements(self, numbers: Collection[int], *, in_order: bool = True) -> tuple[Judgement, ...]:
        """Return the next judgements, at least one.

        Args:
            numbers: The numbers of the samples that the child still has.
            in_order: Whether it judges them in order.

        Raises:
            ProcessDied: The child ended.
            InvalidJudgements: It sent something other than judgements of those samples.
        """
        try:
            judgements = _judgements.decode(await self._read())
        except msgspec.MsgspecError as error:
            raise InvalidJudgements("it sent something that is not a judgement") from error
        told = [judgement.number for judgement in judgements]
        expected = islice(numbers, len(told)) if in_order else (number for number in dict.fromkeys(told) if number in numbers)
        if not told or told != [*expected]:
            raise InvalidJudgements(f"it sent {len(told)} judgements that were not requested")
        for judgement in judgements:
            figures = (judgement.reward, judgement.seconds, *judgement.parts.values())
            knows_names = self._names.issuperset(judgement.parts) and all(0 <= each < len(self._names) for each in judgement.late)
            if not knows_names or not all(map(math.isfinite, figures)):
                raise InvalidJudgements("it sent an invalid judgement")
        return judgements

    @property
    def ending(self) -> str:
        """How the child ended; empty while it lives. A process that it started may keep its socket open."""
        status = self._process.poll()
        if status is None:
            return ""
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        """Kill the child, its process group and all processes below it, in whatever session. Safe to repeat."""
        below = list[psutil.Process]()
        with contextlib.suppress(psutil.Error):  # it has ended: what it left has another parent now
            below = psutil.Process(self.pid).children(recursive=True) if self._process.poll() is None else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def hang_up(self) -> None:
        """Stop reading: a process that the child started may keep its socket open after the kill. Only after `begin`."""
        self._writer.transport.abort()

    async def reap(self) -> None:
        """Wait for the end of the killed child, and close its connections. Safe to repeat, also when cancelled."""
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._process.wait))  # also reaps if cancelled
        self._last_mark = self.mark
        self._open.close()

    async def _read(self) -> bytes:
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_MESSAGE_BYTES:
                raise InvalidJudgements(f"it announced {size} bytes")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, 5.0)
            raise ProcessDied(self.ending or "it closed its socket") from error


# -- the process -----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve the pool until it closes the connection."""
    # Imported here, since the pool's process also imports this module and must not load rewards.
    from asyncrl.reward.registry import build_rewards  # noqa: PLC0415

    with socket.socket(fileno=int(sys.argv[1])) as pool, pool.makefile("rb") as stream:
        pool.set_inheritable(False)
        mark = mmap.mmap(int(sys.argv[2]), _MARK.size)
        os.close(int(sys.argv[2]))
        begin = msgspec.msgpack.decode(_read_message(stream), type=Begin)
        # The kernel sends SIGKILL when the parent dies: a hanging C call would not notice a closed socket.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != begin.parent_pid:
            return
        most_bytes, hard = begin.config.process_memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.path.extend(path for path in begin.import_paths if path not in sys.path)
        try:
            rewards = build_rewards(begin.config)
        except AsyncRLError as error:
            pool.sendall(_message(Ready(str(error), isinstance(error, ConfigError))))
            return
        asyncio.run(_score_or_end(_score_all(pool, stream, rewards, mark, begin.config)))


async def _score_or_end(scoring: Awaitable[None]) -> None:
    """End the process at once if scoring fails: an orderly end would wait for threads and tasks of the functions."""
    try:
        await scoring
    except BaseException:  # noqa: BLE001 - see above
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        os._exit(1)


async def _score_all(
    pool: socket.socket, stream: BinaryIO, rewards: Sequence[NamedReward], mark: mmap.mmap, config: RewardConfig
) -> None:
    from asyncrl.reward.registry import TimeLimit, batch_values, score_sample  # noqa: PLC0415 - as in `main`

    is_concurrent = any(reward.is_async for reward in rewards)
    takes_several = any(reward.batch for reward in rewards)
    pool.sendall(_message(Ready(judges="concurrently" if is_concurrent else "several" if takes_several else "one by one")))
    decoder, num_read, marker = msgspec.msgpack.Decoder(Work), 0, _Marker(mark)
    limit = TimeLimit(config.timeout_s)
    loop, reading = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    # For `asyncio.to_thread` and host name lookups: one thread per sample, so that no sample waits for another.
    most_threads = min(MOST_TOGETHER, max(config.process_memory_bytes // (4 * STACK_BYTES), 8))
    loop.set_default_executor(ThreadPoolExecutor(most_threads))

    async def tell(judging: Awaitable[Judgement]) -> None:
        pool.sendall(_message([await judging]))

    async with asyncio.TaskGroup() as scoring:
        while payload := (await loop.run_in_executor(reading, _read_message, stream) if is_concurrent else _read_message(stream)):
            work = decoder.decode(payload)
            first, num_read = num_read + 1, num_read + len(work.items)
            together = is_concurrent and not work.alone
            told_by = await batch_values(
                rewards, [(item.sample, item.skipped) for item in work.items], partial(marker.put, first), limit
            )
            judgements, told_s = list[Judgement](), time.monotonic()
            for index, item in enumerate(work.items):
                values = {**told_by.get(index, {}), **dict.fromkeys(item.skipped, 0.0)}
                at = partial(marker.put, first, index, in_batch=together)
                judging = _judge(score_sample(rewards, item.sample, values, at, limit if together else None), first + index)
                if together:
                    scoring.create_task(tell(judging))
                    await asyncio.sleep(0)  # let waiting tasks continue before the next one begins
                    continue
                judgements.append(await judging)
                if judgements[-1].out_of_memory:
                    pool.sendall(_message(judgements))
                    return
                if time.monotonic() - told_s > TELL_EVERY_S:
                    marker.rest()
                    pool.sendall(_message(judgements))
                    judgements, told_s = [], time.monotonic()
            if judgements:
                marker.rest()
                pool.sendall(_message(judgements))


async def _judge(scoring: Awaitable[Judgement], number: int) -> Judgement:
    started_s = time.monotonic()
    try:
        judged = await scoring
    except MemoryError:
        return Judgement(number=number, out_of_memory=True)
    except RewardError as error:
        cause, seconds = error.__cause__ or error, time.monotonic() - started_s
        said, kind = (str(error) or "RewardError")[:MAX_ERROR_CHARS], kind_of(cause)[:MAX_ERROR_CHARS]
        return Judgement(number=number, error=said, kind=kind, trace=trace_of(cause), seconds=seconds)
    return msgspec.structs.replace(judged, number=number, seconds=time.monotonic() - started_s)


class _Marker:
    """Writes the mark."""

    def __init__(self, mark: mmap.mmap) -> None:
        self._mark, self._sample, self._since_s = mark, 0, 0.0

    def put(self, first: int, index: int, function: int, in_batch: bool) -> None:
        if self._sample != first + index:
            self._sample, self._since_s = first + index, time.monotonic()
        _MARK.pack_into(self._mark, 0, self._sample, function, in_batch, self._since_s)

    def rest(self) -> None:
        _MARK.pack_into(self._mark, 0, self._sample, AT_REST, False, self._since_s)


def _read_message(stream: BinaryIO) -> bytes:
    header = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(header)[0]) if header else b""


if __name__ == "__main__":
    main()
