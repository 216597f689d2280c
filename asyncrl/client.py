"""The Python async API: own a run, or join one from outside.

`Run` starts the controller as a process of its own and talks to it over the same HTTP API that `connect` uses from anywhere else
on the machine, so what the CLI does, a program can do, and the other way round. A `Run` that is left by an exception or a
cancelled task stops its processes before the exception goes on: nothing stays behind.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.config.live import ChangeResult
from asyncrl.config.load import ConfigLike, Overrides, dump_config, resolve_config
from asyncrl.config.run import RayLaunch, RunConfig
from asyncrl.control.launch.process_main import take_lease
from asyncrl.control.launch.processes import (
    ControllerProcess,
    LocalLauncher,
    ProcessHandle,
    ProcessSpec,
    find_controllers,
    is_live,
    kill_controllers,
    read_endpoint,
    until_gone,
)
from asyncrl.control.tools.choices import start_faults, with_choices, wrong_kinds
from asyncrl.errors import AlreadyRunsError, ConfigError, LaunchError, LedgerError, RunError, RunLostError
from asyncrl.folders import is_locked, lock_folder, write_whole
from asyncrl.observe.decisions import RECORD_FOLDER
from asyncrl.observe.steps import (
    EVAL_FILE,
    EVENTS_FILE,
    MEMORY_FOLDER,
    STEPS_FILE,
    EvalReport,
    EventKind,
    RunEvent,
    StepReport,
    newest_row,
)
from asyncrl.reward.registry import Reward, judge_for
from asyncrl.schema.samples import GroupsTaken, Progress, ScoreRequest
from asyncrl.schema.status import ENDED, ExternalGroup, GroupGiven, GroupsAsked, Judged, Released, RunStatus, SubmitResult
from asyncrl.schema.weights import WeightsAvailable

CONTROLLER_LOG = Path("logs", "controller.log")
LOCK_FILE = "ledger.sqlite.lock"
"""Locked by the controller while it has the ledger open (buffer/ledger/store.py)."""
UNLOCK_S = 5.0
"""For a controller that was killed to let go of its ledger: it is in no list of processes by then."""
START_TIMEOUT_S = 120.0
"""For the controller to answer; models load later."""
CONTROLLER_END_S = 60.0
"""For the controller of a run that has ended to go."""
FULL_DISK_BYTES = 1 << 20
"""A disk with less room than this is full."""
ANSWER_TIMEOUT_S = 60.0
"""For questions that a live controller answers at once."""
STOP_TIMEOUT_S = 1.0
"""For a run to end by itself once it is told to end at once; then its processes are killed."""

T = TypeVar("T")


class RunClient:
    """A connection to a live run. Get one from `connect` or `Run`.

    Example:
        >>> async with asyncrl.connect("runs/quickstart") as run:  # doctest: +SKIP
        ...     print((await run.status()).version)
    """

    def __init__(self, run: str | Path, token: str = "") -> None:
        self._url, self._token = (str(run), token) if "://" in str(run) else ("", "")
        self.run_folder = Path() if self._url else Path(run).resolve()
        """Of a run that was reached by its URL: the folder on its own machine."""
        self._http: aiohttp.ClientSession | None = None
        self._lease: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        url, token = self._url, self._token
        if not url:
            if (endpoint := read_endpoint(self.run_folder)) is None:
                start = "start one with `asyncrl run` or `asyncrl resume`"
                raise LaunchError(f"{self.run_folder} has no live run (no api.json); {start}")
            url, token = endpoint.url, endpoint.token
        try:
            await self._open(url, token)
            status = await self.status()
        except BaseException as error:
            await self._close()
            if not isinstance(error, RunError):
                raise
            raise LaunchError(f"the run in {self._url or self.run_folder} does not answer ({error})") from error
        if self._url:
            self.run_folder = Path(status.run_folder)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._close()

    async def status(self) -> RunStatus:
        """Return the run as it is now.

        Raises:
            RunError: The run does not answer.
        """
        return await self._call("GET", "status", RunStatus, timeout_s=ANSWER_TIMEOUT_S)

    async def steps(self, first: int = 0) -> AsyncIterator[StepReport]:
        """Yield every step's report from step `first`, past ones at once and coming ones as they happen, until the run ends.

        Raises:
            RunError: The run failed; the message is its reason.
        """
        async with self._answer("GET", "steps", params={"first": str(first)}) as response:
            async for line in response.content:
                if line.strip():
                    yield msgspec.json.decode(line, type=StepReport)
        status = await self.status()
        if status.phase == "failed":
            raise RunError(status.reason)

    async def events(self, *kinds: EventKind, after: int = 0) -> AsyncIterator[RunEvent]:
        """Yield what happens to the run, past events at once and coming ones as they happen, until the run ends.

        Args:
            kinds: Those that are wanted; none: all.
            after: Number (`RunEvent.seq`) of the event behind which to begin; 0: at the first.

        Raises:
            RunError: Nothing answers.
        """
        async with self._answer("GET", "events", params={"after": str(after)}, headers={"Accept": "*/*"}) as response:
            async for line in response.content:
                event = msgspec.json.decode(line, type=RunEvent)
                if not kinds or event.kind in kinds:
                    yield event

    async def evaluations(self) -> list[EvalReport]:
        """Return the held-out evaluations so far, oldest first."""
        return await self._call("GET", "evaluations", list[EvalReport], timeout_s=ANSWER_TIMEOUT_S)

    async def pause(self) -> RunStatus:
        """Stop generating and training at the next boundary; nothing in flight is lost."""
        return await self._call("POST", "pause", RunStatus)

    async def resume(self) -> RunStatus:
        """Go on after `pause`."""
        return await self._call("POST", "resume", RunStatus)

    async def checkpoint(self) -> str:
        """Write a checkpoint and return its folder once it is complete."""
        return await self._call("POST", "checkpoint", str)

    async def drain(self) -> RunStatus:
        """Finish the step in hand, write a checkpoint and end the run; returns when it has ended."""
        return await self._call("POST", "drain", RunStatus)

    async def stop(self) -> RunStatus:
        """End the run at once, without a checkpoint; it can still be resumed. Returns when it has ended."""
        return await self._call("POST", "stop", RunStatus)

    async def change(self, values: Mapping[str, Any], *, who: str = "a client") -> ChangeResult:
        """Change the config while the run goes on (docs/running.md has the fields), from the next step that is taken on.

        Args:
            values: By field, `{"buffer.max_staleness": 1}`.
            who: For the ledger and the events.

        Raises:
            RunError: A field cannot change now, or a value is not allowed; nothing is changed then.
        """
        return await self._call("POST", "change", ChangeResult, {"values": dict(values), "who": who})

    async def submit(self, group: ExternalGroup) -> SubmitResult:
        """Hand in a group of samples generated elsewhere; checked, scored and bounded in staleness like any other."""
        if not isinstance(group, ExternalGroup):
            raise ConfigError(f"submit takes an ExternalGroup, got {type(group).__name__}")
        return await self._call("POST", "submit", SubmitResult, group)

    async def score(self, function: Reward) -> None:
        """Judge the run's samples by a function of this process, until the run has ended (`reward.functions` of kind `caller`).

        One program at a time: when it is lost, scoring waits, `status` says so, and another may take over.

        Args:
            function: (prompt, text) to a reward, plain or async; an async one judges several groups at once. What it raises
                fails the sample.

        Raises:
            RunError: The run has reward functions of its own, another program judges, or nothing answers.
        """
        refused: BaseException | None = None
        try:
            await judge_for(self.judge, function)
        except* RunError as errors:
            refused = errors.exceptions[0]
        if refused is not None and (await self.status()).phase not in {*ENDED, "draining"}:
            raise refused

    async def judge(self, judged: Judged) -> list[ScoreRequest]:
        """Say what was judged, and return what else is to be, waiting a little for some; `score` does it over and over."""
        return await self._call("POST", "score", list[ScoreRequest], judged)

    async def take(self) -> GroupsTaken:
        """Take the next step's scored groups, waiting until there are enough (`learner.kind = "external"`).

        Raises:
            RunError: The run has its own learner, or has ended.
        """
        return await self._call("POST", "take", GroupsTaken)

    async def generate(self, asked: GroupsAsked) -> list[GroupGiven]:
        """Have groups generated, and return the first of them once they are there (`learner.kind = "driven"`).

        What is not returned yet is generated all the same; asking for the same again gives the same groups.
        """
        return await self._call("POST", "generate", list[GroupGiven], asked)

    async def progress(self, asked: GroupsAsked) -> AsyncGenerator[Progress, None]:
        """Have groups generated as `generate` does, and yield the tokens of the first, which is followed, as they come.

        It ends once the group is ready, or over. Where a generator or the newest weights were lost, all tokens come again.

        Raises:
            RunError: The run gives no such groups, the stream is closed, or nothing answers.
        """
        body = io.BytesIO(msgspec.msgpack.encode(asked))
        async with self._answer("POST", "progress", data=body, headers={"Accept": "*/*"}) as response:
            async for line in response.content:
                yield msgspec.json.decode(line, type=Progress)

    async def release(self, released: Released) -> None:
        """Give the places of groups back that will not be trained (`learner.kind = "driven"`)."""
        await self._call("POST", "release", NoneType, released)

    async def take_these(self, group_ids: Sequence[int]) -> int:
        """Take exactly these groups for the next step (`learner.kind = "driven"`); a repeat changes nothing.

        Returns:
            Tokens of a version under this one are not to be trained (`buffer.policy = "mask"`).

        Raises:
            RunError: A group is too old, over or not ready, or they are not as many as a step trains.
        """
        return await self._call("POST", "lease", int, {"groups": tuple(group_ids)})

    async def trained(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Say that optimizer step `step` is done, so that its groups count as trained (`learner.kind = "external"`)."""
        await self._call("POST", "trained", NoneType, {"step": step, "metrics": metrics or {}})

    async def announce_weights(self, available: WeightsAvailable, model_folder: str = "") -> None:
        """Tell the generators about a version published by a `WeightPublisher` (`learner.kind = "external"`)."""
        if not isinstance(available, WeightsAvailable):
            raise ConfigError(f"announce_weights takes a WeightsAvailable, got {type(available).__name__}")
        await self._call("POST", "weights", NoneType, {"available": available, "model_folder": model_folder})

    async def _open(self, url: str, token: str) -> None:
        try:
            self._http = aiohttp.ClientSession(
                base_url=url.rstrip("/") + "/",
                headers={"Authorization": f"Bearer {token}", "Accept": "application/msgpack"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                connector=aiohttp.TCPConnector(limit=0),  # each wait for a group has one, and none holds up the others
            )
        except ValueError as error:
            raise LaunchError(f"{url} is no URL of a run, as http://HOST:PORT/v1/runs/ID: {error}") from error
        if not self._url:
            self._lease = await take_lease(self.run_folder)

    def _lost(self) -> RunLostError:
        """Return what became of a run that does not answer, and what to do."""
        if self._url:
            return RunLostError(f"nothing answers at {self._url}")
        folder = self.run_folder
        if is_live(folder):
            return RunLostError(f"the run in {folder} does not answer; its controller is alive: see {folder}/logs")
        if not folder.exists():
            return RunLostError(f"{folder} was moved or removed while the run was live, and its controller has ended")
        reason = _full_disk(folder) or f"{_last_words(folder)[0]}; `asyncrl resume {folder}` goes on with it"
        if machine := _elsewhere(folder):
            return RunLostError(
                f"the run in {folder} is on {machine} and answers there only; where that machine is gone: {reason}"
            )
        return RunLostError(f"the run in {folder} is lost, its controller has ended: {reason}")

    async def _close(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        if self._http is not None:
            await self._http.close()
            self._http = None

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, timeout_s: float | None = None, **asked: object
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask the run for something; `asked` is what aiohttp's request takes.

        Raises:
            RunError: It refuses, or (RunLostError) does not answer, or not within `timeout_s`, up to the end of the context.
        """
        if self._http is None:
            raise RunError("this client is closed; use it inside `async with`")
        try:
            async with asyncio.timeout(timeout_s), self._http.request(method, path, **asked) as response:  # type: ignore[arg-type]
                if response.status >= 400:
                    raise RunError((await response.read()).decode(errors="replace"))
                yield response
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise self._lost() from error

    async def _call(self, method: str, path: str, kind: type[T], body: object = None, timeout_s: float | None = None) -> T:
        try:
            encoded = None if body is None else io.BytesIO(msgspec.msgpack.encode(body))
        except (OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: what was given cannot be sent: {error}") from error
        async with self._answer(method, path, timeout_s, data=encoded) as response:
            answer = await response.read()
        return msgspec.msgpack.decode(answer, type=kind)


def connect(run: str | Path, token: str = "") -> RunClient:
    """Join a live run; use as an async context manager. A detached run is held while it is entered.

    Args:
        run: Its folder on this machine, or its URL at a daemon, `http://HOST:PORT/v1/runs/ID` (docs/service.md).
        token: Of the daemon, with a URL.

    Raises:
        LaunchError: On entering, where no live run answers there.
    """
    return RunClient(run, token)


def given_config(config: ConfigLike | None, resume: str | Path | None, overrides: Overrides) -> RunConfig:
    """Return the config that is given, or that of the run that is resumed, with `overrides` laid over it."""
    if config is None and resume is None:
        raise ConfigError("give a config (RunConfig, dict or TOML path) or resume=RUN_FOLDER, got neither")
    return resolve_config(config if config is not None else Path(resume or "") / "config.toml", overrides)


class Run(RunClient):
    """A run that this program starts and owns.

    Args:
        config: A `RunConfig`, nested dicts, or the path of a TOML file. With `resume`, may be left out.
        resume: A run folder to pick up where it stopped.
        overrides: Laid over the config: `["buffer.max_staleness=1"]` or `{"buffer.max_staleness": 1}`.
        detached: The run goes on when it is left, and when this program ends; `connect` joins it again.
        environment: Of the controller of a detached run and its processes, on top of this program's own.
        reward: Judges every sample in this process, in place of the config's reward functions; see `score`. A plain function that
            takes long holds this program's event loop up.

    Raises:
        ConfigError: The config is wrong, a function or file that it names is not there, or the folder already holds a run.

    Example:
        >>> async with asyncrl.Run("configs/quickstart.toml") as run:  # doctest: +SKIP
        ...     async for step in run.steps():
        ...         print(step.version, step.reward_mean)
    """

    def __init__(
        self, config: ConfigLike | None = None, *, resume: str | Path | None = None, overrides: Overrides = (),
        detached: bool = False, environment: Mapping[str, str] | None = None, reward: Reward | None = None,
    ) -> None:  # fmt: skip
        if reward is not None and not callable(reward):
            raise ConfigError(f"reward must be a function of (prompt, text), got {reward!r}")
        resolved = given_config(config, resume, overrides)
        if reward is not None:
            resolved = resolve_config(resolved, {"reward.functions": [{"kind": "caller"}]})
        elif resolved.reward.is_caller and not detached:
            raise ConfigError("reward.functions says that the caller judges: give the function, as Run(config, reward=f)")
        self.config, self._choices = with_choices(resolved)
        self._reward = reward
        self._scoring: asyncio.Task[None] | None = None
        super().__init__(resume if resume is not None else Path(self.config.folder) / self.config.name)
        self._resumed, self._detached, self._environment = resume is not None, detached, environment or {}
        self._controller: ControllerProcess | None = None

    async def __aenter__(self) -> Self:
        if self._http is not None:
            raise RunError(f"the run in {self.run_folder} is open already; make another Run for another run")
        if self._detached and isinstance(self.config.launch, RayLaunch):
            raise LaunchError(
                "a run on Ray cannot be detached, as Ray ends it with its driver: use `ray job submit` (docs/scale.md)"
            )
        faults = await asyncio.to_thread(start_faults, self.config, resumed=self._resumed)
        if faults := [*faults, *wrong_kinds(self.run_folder)]:
            raise ConfigError("\n".join(faults))
        # The controller of a run that has ended answers no more, and its process is about to go.
        if self._resumed and not is_live(self.run_folder) and not await until_gone(self.run_folder, CONTROLLER_END_S):
            late = f"the controller of {self.run_folder} has not ended after {CONTROLLER_END_S:g} s; see its logs/ folder"
            raise AlreadyRunsError(late)
        if not is_live(self.run_folder):
            until_s = asyncio.get_running_loop().time() + UNLOCK_S
            while is_locked(self.run_folder / LOCK_FILE) and asyncio.get_running_loop().time() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with self._prepared_folder():
            self._controller = ControllerProcess(self.run_folder)
            said_before = (self.run_folder / CONTROLLER_LOG).stat().st_size
            try:
                if self._detached:
                    await self._controller.start(None, self._environment)
                else:
                    await self._controller.start(self._launch)
                async with asyncio.timeout(START_TIMEOUT_S):
                    endpoint = await self._controller.endpoint()
                if endpoint is not None:
                    await self._open(endpoint.url, endpoint.token)
            except TimeoutError as error:
                await self._controller.end(late=True)
                late = f"the controller did not answer within {START_TIMEOUT_S:.0f} s; see {self.run_folder}/logs"
                raise LaunchError(late) from error
            except BaseException:
                await self._close()
                await self._controller.end()
                raise
        if endpoint is None:
            await self._controller.end()
            # A controller that ended itself has said why; one that was killed may well start the next time.
            words, are_its_own = _last_words(self.run_folder, said_before)
            raise (LaunchError if are_its_own else RunLostError)(f"the run could not start: {words}")
        if self._reward is not None:
            self._scoring = asyncio.get_running_loop().create_task(self._score_all(self._reward), name="rewards")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        async def stop() -> None:
            with contextlib.suppress(RunError):
                await self.stop()

        loop = asyncio.get_running_loop()
        leaving = [loop.create_task(self._leave(polite=error is None))]
        while not leaving[0].done():
            try:
                await asyncio.shield(leaving[0])
            except asyncio.CancelledError:  # a drain that is under way becomes a stop
                leaving.append(loop.create_task(stop()))
        for task in leaving:
            await task
        if len(leaving) > 1:
            raise asyncio.CancelledError

    async def end_now(self) -> None:
        """End the run within seconds: it is told to, and what has not ended then is killed. It can be resumed."""
        with contextlib.suppress(RunError, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.stop()
        await asyncio.to_thread(kill_controllers, self.run_folder)

    async def wait(self) -> RunStatus:
        """Wait until the run has ended and return its last status.

        Raises:
            RunError: The run failed; the message is its reason.
        """
        async for _ in self.steps(first=1 << 60):
            pass
        return await self.status()

    @contextlib.contextmanager
    def _prepared_folder(self) -> Iterator[None]:
        """Write the run's folder and config, and hold the folder's lock while the run starts: of several starts one goes on."""
        try:
            self.run_folder.mkdir(parents=True, exist_ok=True)
            self.run_folder.chmod(0o700)
        except OSError as error:
            raise self._unwritable(self.run_folder, error) from error
        with contextlib.ExitStack() as starting:
            try:
                starting.callback(os.close, lock_folder(self.run_folder))
            except BlockingIOError as error:
                starts = f"{self.run_folder} is being started by another process; `asyncrl attach {self.run_folder}` follows it"
                raise AlreadyRunsError(starts) from error
            except OSError:
                pass  # a file system without locks
            self._prepare_folder()
            yield

    async def _launch(self, spec: ProcessSpec) -> ProcessHandle:
        if isinstance(launch := self.config.launch, RayLaunch):
            from asyncrl.control.launch.ray import start_beside  # noqa: PLC0415 - only runs on Ray need Ray

            return await start_beside(launch, spec, self.run_folder)
        return await LocalLauncher().start(spec)

    def _unwritable(self, path: Path, error: OSError) -> LaunchError:
        return LaunchError(f"cannot write {path}: {_full_disk(self.run_folder) or error.strerror}")

    def _prepare_folder(self) -> None:
        if find_controllers(self.run_folder) or is_locked(self.run_folder / LOCK_FILE):  # by one on another machine
            where = f" on {machine}" if (machine := _elsewhere(self.run_folder)) else ""
            raise AlreadyRunsError(f"{self.run_folder} already runs{where}; `asyncrl stop {self.run_folder}`{where} first")
        config_file = self.run_folder / "config.toml"
        if self._resumed and self.config.buffer.ledger == "memory" and (saved := newest_saved(self.run_folder)) > 0:
            raise ConfigError(
                f"{self.run_folder} cannot be resumed: it has a checkpoint of version {saved}, and with buffer.ledger = 'memory' "
                "nothing is known of the steps before; start another run from that checkpoint (`model.path`), with "
                '`buffer.ledger = "disk"` if it is to be resumed'
            )
        if self._resumed and (self.run_folder / "model" / "config.json").exists():
            was = self.config
            with contextlib.suppress(ConfigError):  # it is damaged: what was given takes its place
                was = resolve_config(config_file)
            if was.model != self.config.model:
                made = f"{self.run_folder / 'model'} is made, and a run keeps its model"
                raise ConfigError(f"{made}: what [model] says cannot change; start another run (`--set name=...`)")
        elif config_file.exists() and not self._resumed:
            if _holds_samples(self.run_folder) or not (self.run_folder / "logs").is_dir():
                instead = f"`asyncrl resume {self.run_folder}` goes on with it, `--set name=...` starts another"
                raise ConfigError(f"{self.run_folder} already holds a run: {instead}")
            # What a start left that ended before its first sample may be of another config. Its pids.jsonl stays: a process of
            # it may still be there.
            for pattern in ("ledger.sqlite*", EVAL_FILE, EVENTS_FILE, "seconds*.jsonl", "spans*.jsonl", "metrics.jsonl"):
                for path in self.run_folder.glob(pattern):
                    path.unlink()
            for name in ("model", RECORD_FOLDER, MEMORY_FOLDER, "revisions", "tensorboard"):
                shutil.rmtree(self.run_folder / name, ignore_errors=True)
        try:
            # A run whose config is cut short cannot be resumed.
            write_whole(config_file, "".join(f"# {choice}\n" for choice in self._choices) + dump_config(self.config))
            (self.run_folder / "logs").mkdir(exist_ok=True)
            with (self.run_folder / CONTROLLER_LOG).open("a", encoding="utf-8") as log:
                log.write("".join(f"{choice}\n" for choice in self._choices))
        except OSError as error:
            raise self._unwritable(config_file, error) from error

    async def _leave(self, *, polite: bool) -> None:
        try:
            with contextlib.suppress(RunError):
                if not self._detached and (await self.status()).phase not in ENDED:
                    await (self.drain() if polite else self.stop())
        finally:
            if self._scoring is not None:
                self._scoring.cancel()
                await asyncio.wait([self._scoring])
            await self._close()
            if self._controller is not None:
                await self._controller.end()

    async def _score_all(self, reward: Reward) -> None:
        with contextlib.suppress(RunError):  # the run says why it ended
            await self.score(reward)


def newest_saved(run_folder: Path) -> int:
    """Return the version of a run's newest checkpoint; -1 where there is none."""
    numbers = [path.name.removeprefix("step-") for path in (run_folder / "checkpoints").glob("step-*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)


def _elsewhere(run_folder: Path) -> str:
    """Return the machine that a run answers on, where it is another than this; else nothing."""
    endpoint = read_endpoint(run_folder)
    return "" if endpoint is None or endpoint.machine == platform.node() else endpoint.machine


def _holds_samples(run_folder: Path) -> bool:
    """Return whether anything was generated, or saved, in a run folder; a ledger that cannot be read counts as one that has."""
    if any((run_folder / "checkpoints").glob("step-*")) or newest_row(run_folder / STEPS_FILE, StepReport):
        return True
    try:
        return bool(LedgerReader(run_folder).versions())
    except LedgerError:
        return (run_folder / "ledger.sqlite").exists()


def _full_disk(run_folder: Path) -> str:
    """Return what to do about a disk on which there is no room; empty where there is some."""
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(run_folder).free
        if free_bytes < FULL_DISK_BYTES:
            return f"its disk is full ({free_bytes} bytes free): make room, then `asyncrl resume {run_folder}`"
    return ""


def _last_words(run_folder: Path, after: int = 0) -> tuple[str, bool]:
    """Return what the controller said last behind a byte of its log, and whether that is its own one-line error.

    Where there is no such error it is the end of the log.
    """
    log = run_folder / CONTROLLER_LOG
    lines = log.read_bytes()[after:].decode(errors="replace").splitlines()[-200:] if log.exists() else []
    errors = [line for line in lines if line.startswith("asyncrl: ") or " CRITICAL " in line]
    if errors:
        return errors[-1].removeprefix("asyncrl: ").rpartition(" | ")[2], True
    return "\n".join([f"the end of {log} is", *lines[-12:]]), False
