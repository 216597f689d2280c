"""The Python async API: start and own a run, or connect to a live run from outside.

`Run` starts the controller as a separate process and talks to it over HTTP. `connect` uses the same HTTP API from any other
process on the machine, and so does the CLI: a program can do what the CLI does. If a `Run` context is left by an exception or a
cancelled task, the run's processes are stopped before the exception is raised further: no process is left behind.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
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
from asyncrl.config.check import doubts_about
from asyncrl.config.live import CONFIG_BEFORE, ChangeResult, undo_resume
from asyncrl.config.load import ConfigLike, Overrides, dump_config, pairs_of, read_toml, resolve_config
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
from asyncrl.control.lifecycle.state import GOAL_REACHED
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
from asyncrl.user_code import takes_batches

CONTROLLER_LOG = Path("logs", "controller.log")
LOCK_FILE = "ledger.sqlite.lock"
"""Locked by the controller while it has the ledger open (buffer/ledger/store.py)."""
UNLOCK_S = 5.0
"""How long a killed controller has to release its ledger's lock; by then it is in no list of processes."""
LOOK_S = 1.0
"""Between looks whether a controller has ended, or answers again."""
START_TIMEOUT_S = 120.0
"""How long the controller has to answer; models load later."""
CONTROLLER_END_S = 60.0
"""How long the controller of an ended run has to exit."""
FULL_DISK_BYTES = 1 << 20
"""A disk with less free space than this counts as full."""
ANSWER_TIMEOUT_S = 60.0
"""Timeout of requests that a live controller answers at once."""
STOP_TIMEOUT_S = 1.0
"""How long a run has to end by itself after `stop`; then its processes are killed."""

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
        """With a URL: the run's folder on the run's own machine."""
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
            if not isinstance(error, RunError) or (isinstance(error, RunLostError) and not self._url):
                raise
            what = "does not answer" if isinstance(error, RunLostError) else "refuses"
            raise LaunchError(f"the run in {self._url or self.run_folder} {what} ({error})") from error
        if self._url:
            self.run_folder = Path(status.run_folder)
        elif _is_copy(self.run_folder, Path(status.run_folder)):
            await self._close()
            copied = f"{self.run_folder} is a copy of {status.run_folder}, whose run is live"
            raise LaunchError(f"{copied}: name that one, or `asyncrl resume {self.run_folder}` continues the copy")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._close()

    async def status(self) -> RunStatus:
        """Return the run's current status.

        Raises:
            RunError: The run does not answer.
        """
        return await self._call("GET", "status", RunStatus, timeout_s=ANSWER_TIMEOUT_S)

    async def steps(self, first: int = 0) -> AsyncIterator[StepReport]:
        """Yield the report of every step from `first` on, past steps at once and later ones as they finish, until the run ends.

        Raises:
            RunError: The run failed; the message is its reason. Or (RunLostError) its daemon ends before it.
        """
        async with self._answer("GET", "steps", params={"first": str(first)}) as response:
            async for line in response.content:
                if line.strip():
                    yield msgspec.json.decode(line, type=StepReport)
        status = await self.status()
        if status.phase == "failed":
            raise RunError(status.reason)
        await self._check_ended()

    async def events(self, *kinds: EventKind, after: int = 0) -> AsyncIterator[RunEvent]:
        """Yield the run's events, past ones at once and later ones as they happen, until the run ends.

        Args:
            kinds: Kinds of events to yield; empty: all.
            after: Begin after the event with this number (`RunEvent.seq`); 0: at the first event.

        Raises:
            RunError: The run does not answer.
        """
        async with self._answer("GET", "events", params={"after": str(after)}, headers={"Accept": "*/*"}) as response:
            async for line in response.content:
                event = msgspec.json.decode(line, type=RunEvent)
                if not kinds or event.kind in kinds:
                    yield event
        await self._check_ended()

    async def _check_ended(self) -> None:
        """Raise RunLostError if a stream has ended because the daemon does, and the run has not."""
        if self._url and (status := await self.status()).phase not in ENDED:
            raise RunLostError(f"the daemon at {self._url} ends, and its run is {status.phase}: connect again later")

    async def evaluations(self) -> list[EvalReport]:
        """Return the held-out evaluations so far, oldest first."""
        return await self._call("GET", "evaluations", list[EvalReport], timeout_s=ANSWER_TIMEOUT_S)

    async def pause(self) -> RunStatus:
        """Stop generating and training at the next boundary; nothing in flight is lost."""
        return await self._call("POST", "pause", RunStatus)

    async def resume(self) -> RunStatus:
        """Continue after `pause`."""
        return await self._call("POST", "resume", RunStatus)

    async def checkpoint(self) -> str:
        """Write a checkpoint and return its folder once it is complete."""
        return await self._call("POST", "checkpoint", str)

    async def drain(self) -> RunStatus:
        """Finish the current step, write a checkpoint and end the run; returns when the run has ended."""
        return await self._call("POST", "drain", RunStatus)

    async def stop(self) -> RunStatus:
        """End the run at once, without a checkpoint; it can still be resumed. Returns when it has ended."""
        return await self._call("POST", "stop", RunStatus)

    async def change(self, values: Mapping[str, Any], *, who: str = "a client") -> ChangeResult:
        """Change the config of the live run (docs/running.md lists the fields); it applies from the next step taken.

        Args:
            values: New values by field, for example `{"buffer.max_staleness": 1}`.
            who: Who makes the change, for the ledger and the events.

        Raises:
            RunError: A field cannot change now, or a value is not allowed; nothing is changed then.
        """
        return await self._call("POST", "change", ChangeResult, {"values": dict(values), "who": who})

    async def submit(self, group: ExternalGroup) -> SubmitResult:
        """Submit a group of samples generated elsewhere; it is checked, scored and bounded in staleness like any other."""
        if not isinstance(group, ExternalGroup):
            raise ConfigError(f"submit takes an ExternalGroup, got {type(group).__name__}")
        return await self._call("POST", "submit", SubmitResult, group)

    async def score(self, function: Reward) -> None:
        """Score the run's samples with a function in this process, until the run has ended (`reward.functions` of kind `caller`).

        One program scores at a time: if it ends, scoring waits, `status` says so, and another program may take over.

        Args:
            function: A plain or async function (prompt, text) -> reward; an async one scores many samples at once, each within
                `reward.timeout_s`. A sample for which it raises an error, or is late, fails.

        Raises:
            RunError: The run has reward functions of its own, another program scores already, or the run does not answer.
        """
        refused: BaseException | None = None
        try:
            await judge_for(self.judge, function)
        except* RunError as errors:
            refused = errors.exceptions[0]
        if refused is not None and (await self.status()).phase not in {*ENDED, "draining"}:
            raise refused

    async def judge(self, judged: Judged) -> list[ScoreRequest]:
        """Send scores, and return the next samples to score, waiting a little for some; `score` calls this in a loop."""
        return await self._call("POST", "score", list[ScoreRequest], judged)

    async def take(self) -> GroupsTaken:
        """Wait until the next step has enough scored groups, and take them (`learner.kind = "external"`).

        Raises:
            RunError: The run has its own learner, or has ended.
        """
        return await self._call("POST", "take", GroupsTaken)

    async def generate(self, asked: GroupsAsked) -> list[GroupGiven]:
        """Request groups, and return the first of them once they are ready (`learner.kind = "driven"`).

        Groups that are not returned yet are generated too; the same request again returns the same groups.
        """
        return await self._call("POST", "generate", list[GroupGiven], asked)

    async def progress(self, asked: GroupsAsked) -> AsyncGenerator[Progress, None]:
        """Request groups as `generate` does, and yield the tokens of the first one as they are generated; it must be followed.

        Ends once the group is ready, or over. If a generator or the newest weights were lost, all tokens are yielded again.

        Raises:
            RunError: The run does not generate for callers, the stream is closed, or the run does not answer.
        """
        body = io.BytesIO(msgspec.msgpack.encode(asked))
        async with self._answer("POST", "progress", data=body, headers={"Accept": "*/*"}) as response:
            async for line in response.content:
                yield msgspec.json.decode(line, type=Progress)

    async def release(self, released: Released) -> None:
        """Free the places of groups that will not be trained (`learner.kind = "driven"`)."""
        await self._call("POST", "release", NoneType, released)

    async def take_these(self, group_ids: Sequence[int]) -> int:
        """Take exactly these groups for the next step (`learner.kind = "driven"`); a repeat changes nothing.

        Returns:
            The oldest version whose tokens may be trained (`buffer.policy = "mask"`).

        Raises:
            RunError: A group is too old, over or not ready, or the number of groups is wrong.
        """
        return await self._call("POST", "lease", int, {"groups": tuple(group_ids)})

    async def trained(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Report that optimizer step `step` is done, so that its groups count as trained (`learner.kind = "external"`)."""
        await self._call("POST", "trained", NoneType, {"step": step, "metrics": metrics or {}})

    async def announce_weights(self, available: WeightsAvailable, model_folder: str = "") -> None:
        """Tell the generators about a version published by a `WeightPublisher` (`learner.kind = "external"`).

        The first call after a start or a resume needs `model_folder`, the initial model's folder, unless `model.path` names it.
        """
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
        """Return the error for a run that does not answer: what happened to the run, and what to do."""
        if self._url:
            return RunLostError(f"nothing answers at {self._url}")
        folder = self.run_folder
        if is_live(folder):
            return RunLostError(f"the run in {folder} does not answer; its controller is alive: see {folder}/logs")
        if not folder.exists():
            return RunLostError(f"{folder} was moved or removed while the run was live, and its controller has ended")
        lost = f"the run in {folder} is lost, its controller has ended"
        if machine := _elsewhere(folder):
            lost = f"the run in {folder} is on {machine} and answers there only; where that machine is gone"
        if full := _full_disk(folder):
            return RunLostError(f"{lost}: {full}")
        reason, end_of_log = _last_words(folder)
        if reason and (folder / "ledger.sqlite.lock").exists() and not (folder / "ledger.sqlite").exists():
            return RunLostError(f"{lost}: {reason}")  # without its ledger it cannot be resumed
        return RunLostError(f"{end_of_log}{lost}: {f'{reason}; ' if reason else ''}`asyncrl resume {folder}` goes on with it")

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
        """Send a request to the run; `asked` are arguments of aiohttp's `request`.

        Raises:
            RunError: The run refuses, or (RunLostError) gives no complete answer within `timeout_s`.
        """
        if self._http is None:
            raise RunError("this client is closed; use it inside `async with`")
        try:
            async with asyncio.timeout(timeout_s), self._http.request(method, path, **asked) as response:  # type: ignore[arg-type]
                if response.status >= 400:
                    raise RunError(error_in(await response.read()))
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


def error_in(answer: bytes) -> str:
    """Return the error in an answer: of a run as text, of a daemon as JSON."""
    said: str = msgspec.json.decode(answer).get("error", "") if answer.startswith(b"{") else answer.decode(errors="replace")
    return said


def connect(run: str | Path, token: str = "") -> RunClient:
    """Connect to a live run; use as an async context manager. A detached run does not end while a program is connected.

    Args:
        run: The run's folder on this machine, or its URL at a daemon, `http://HOST:PORT/v1/runs/ID` (docs/service.md).
        token: The daemon's token, needed with a URL.

    Raises:
        LaunchError: On entering, if there is no live run, or nothing answers at the URL.
        RunLostError: On entering, if the run's controller is gone, or does not answer.
    """
    return RunClient(run, token)


def given_config(config: ConfigLike | None, resume: str | Path | None, overrides: Overrides) -> RunConfig:
    """Return the given config, or the config of the resumed run, with values replaced by `overrides`.

    Raises:
        ConfigError: As in `load_config`, `resume` is no run folder, or `overrides` would give a resumed run another folder.
    """
    if config is None and resume is None:
        raise ConfigError("give a config (RunConfig, dict or TOML path) or resume=RUN_FOLDER, got neither")
    if resume is not None and not Path(resume, "config.toml").is_file():
        raise ConfigError(f"{resume} is no run folder: it has no config.toml")
    resolved = resolve_config(config if config is not None else Path(resume or "") / "config.toml", overrides)
    moves = [given for key, _, given in pairs_of(overrides) if key in {"name", "folder"}]
    if resume is not None and moves and Path(resolved.folder, resolved.name).resolve() != Path(resume).resolve():
        instead = "move or copy the folder, and resume the run there (`name` is the folder's name)"
        raise ConfigError(f"{', '.join(moves)}: a run that is resumed stays in {resume}; {instead}")
    return resolved


class Run(RunClient):
    """A run that this program starts and owns.

    Args:
        config: A `RunConfig`, nested dicts, or the path of a TOML file. With `resume`, may be left out.
        resume: The folder of a run to continue where it stopped.
        overrides: Values that replace those of the config: `["buffer.max_staleness=1"]` or `{"buffer.max_staleness": 1}`.
        detached: The run continues after the context is left and after this program ends; `connect` reaches it again.
        environment: Variables for the processes of a detached run, in addition to this program's environment.
        reward: Scores every sample in this process instead of the config's reward functions; see `RunClient.score`. A slow plain
            function blocks this program's event loop.

    Raises:
        ConfigError: The config is wrong, it names a function or file that does not exist, or the folder already holds a run.

    Example:
        >>> async with asyncrl.Run("configs/quickstart.toml") as run:  # doctest: +SKIP
        ...     async for step in run.steps():
        ...         print(step.version, step.reward_mean)
    """

    def __init__(
        self, config: ConfigLike | None = None, *, resume: str | Path | None = None, overrides: Overrides = (),
        detached: bool = False, environment: Mapping[str, str] | None = None, reward: Reward | None = None,
    ) -> None:  # fmt: skip
        if reward is not None and (not callable(reward) or takes_batches(reward)):
            batch = "one of (prompts, texts) is for reward functions of kind 'python'"
            raise ConfigError(f"reward must be a function of (prompt, text), got {reward!r}; {batch}")
        resolved = given_config(config, resume, overrides)
        if reward is not None:
            resolved = resolve_config(resolved, {"reward.functions": [{"kind": "caller"}]})
        elif resolved.reward.is_caller and not detached:
            raise ConfigError("reward.functions says that the caller judges: give the function, as Run(config, reward=f)")
        self.config, self.choices = with_choices(resolved)
        self.choices += [f"WARNING: {doubt}" for doubt in doubts_about(resolved)]
        """A line for each `auto`, with its value on this machine, and for each setting that is probably a mistake."""
        self._reward = reward
        self._scoring: asyncio.Task[None] | None = None
        super().__init__(resume if resume is not None else Path(self.config.folder) / self.config.name)
        try:
            str(self.run_folder).encode()
        except UnicodeEncodeError as error:
            named = f"the name of the run's folder, {str(self.run_folder)!a}, is not UTF-8 text"
            raise ConfigError(f"{named}: take another folder, or a UTF-8 locale (LC_ALL=C.UTF-8)") from error
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
        clock = asyncio.get_running_loop().time
        until_s = clock() + CONTROLLER_END_S
        while self._resumed and not is_live(self.run_folder) and not await until_gone(self.run_folder, LOOK_S):
            if clock() > until_s:
                late = f"the controller of {self.run_folder} has not ended after {CONTROLLER_END_S:g} s; see its logs/ folder"
                raise AlreadyRunsError(late)
        until_s = clock() + UNLOCK_S
        while not is_live(self.run_folder) and is_locked(self.run_folder / LOCK_FILE) and clock() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await self._start()
        if self._reward is not None:
            self._scoring = asyncio.get_running_loop().create_task(self._score_all(self._reward), name="rewards")
        return self

    async def _start(self) -> None:
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
                undo_resume(self.run_folder)
                late = f"the controller did not answer within {START_TIMEOUT_S:.0f} s; see {self.run_folder}/logs"
                raise LaunchError(late) from error
            except BaseException:
                await self._close()
                await self._controller.end()
                if not self._detached:  # a detached one goes on, with the new config
                    undo_resume(self.run_folder)
                raise
            if endpoint is None:
                await self._controller.end()
                undo_resume(self.run_folder)
                # A controller that ended itself has said why; one that was killed may well start the next time.
                reason, end_of_log = _last_words(self.run_folder, said_before)
                if not reason:
                    raise RunLostError(f"{end_of_log}the run could not start: its controller ended and gave no reason")
                raise LaunchError(f"the run could not start: {reason}")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        async def stop() -> None:
            with contextlib.suppress(RunError):
                await self.stop()

        loop = asyncio.get_running_loop()
        leaving: list[asyncio.Task[Any]] = [loop.create_task(self._leave(polite=error is None))]
        while not leaving[0].done():
            try:
                await asyncio.shield(leaving[0])
            except asyncio.CancelledError:  # a drain that is under way becomes a stop
                leaving.append(loop.create_task(stop()))
        why_failed = await leaving[0]
        if len(leaving) > 1:
            await asyncio.wait(leaving)
            raise asyncio.CancelledError
        if why_failed:  # there may be no checkpoint of its last version
            raise RunError(why_failed)

    async def end_now(self) -> None:
        """End the run within seconds: tell it to stop, then kill processes that have not ended. The run can be resumed."""
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
        """Write the run's folder and config, and hold the folder's lock while the run starts: only one start can succeed."""
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
            kl, new = was.algorithm.kl, self.config.algorithm.kl
            if kl and new and kl.target and new.target and kl.coefficient != new.coefficient:
                raise ConfigError("algorithm.kl.coefficient cannot change: algorithm.kl.target adapts it")
        elif config_file.exists() and not self._resumed:
            if _holds_samples(self.run_folder) or not (self.run_folder / "logs").is_dir():
                instead = f"`asyncrl resume {self.run_folder}` goes on with it, `--set name=...` starts another"
                raise ConfigError(f"{self.run_folder} already holds a run: {instead}")
            # What a start left that ended before its first sample may be of another config. Its pids.jsonl stays: a process of
            # it may still be there.
            for pattern in ("ledger.sqlite*", EVAL_FILE, EVENTS_FILE, "seconds*.jsonl", "spans*.jsonl", "metrics.jsonl"):
                for path in self.run_folder.glob(pattern):
                    path.unlink()
            for name in ("model", RECORD_FOLDER, MEMORY_FOLDER, "revisions", "tensorboard", "wandb"):
                shutil.rmtree(self.run_folder / name, ignore_errors=True)
        try:
            kept = self.run_folder / CONFIG_BEFORE
            if not self._resumed:
                kept.unlink(missing_ok=True)
            elif config_file.exists() and not kept.exists():  # else the last resume was ended before it was running
                shutil.copyfile(config_file, kept)
            # A run whose config is cut short cannot be resumed.
            write_whole(config_file, "".join(f"# {choice}\n" for choice in self.choices) + dump_config(self.config))
            (self.run_folder / "logs").mkdir(exist_ok=True)
            with (self.run_folder / CONTROLLER_LOG).open("a", encoding="utf-8") as log:
                log.write("".join(f"{choice}\n" for choice in self.choices))
        except OSError as error:
            raise self._unwritable(config_file, error) from error

    async def _leave(self, *, polite: bool) -> str:
        """End the run, unless it is detached; return why it failed as it was drained, if it did."""
        drained: RunStatus | None = None
        try:
            with contextlib.suppress(RunError):
                if not self._detached and (await self.status()).phase not in ENDED:
                    drained = await (self.drain() if polite else self.stop())
        finally:
            if self._scoring is not None:
                self._scoring.cancel()
                await asyncio.wait([self._scoring])
            await self._close()
            if self._controller is not None:
                await self._controller.end()
        return drained.reason if polite and drained is not None and drained.phase == "failed" else ""

    async def _score_all(self, reward: Reward) -> None:
        with contextlib.suppress(RunError):  # the run says why it ended
            await self.score(reward)


def newest_saved(run_folder: Path) -> int:
    """Return the version of a run's newest checkpoint; -1 if there is none."""
    numbers = [path.name.removeprefix("step-") for path in (run_folder / "checkpoints").glob("step-*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)


def has_done(run_folder: Path, num_steps: int, reason: str) -> bool:
    """Return whether a run that made its last version and ended for this reason needs no resume.

    It needs one if its last evaluation is missing, or, of a run that failed, its last checkpoint.
    """
    is_saved = newest_saved(run_folder) >= num_steps
    return reason == GOAL_REACHED or (is_saved and not read_toml(run_folder / "config.toml").get("eval", {}).get("at_end", True))


def _elsewhere(run_folder: Path) -> str:
    """Return the name of the machine that a run answers on, or nothing if it is this machine."""
    endpoint = read_endpoint(run_folder)
    return "" if endpoint is None or endpoint.machine == platform.node() else endpoint.machine


def _is_copy(run_folder: Path, original: Path) -> bool:
    """Return whether the run whose folder this is a copy of answered: its own folder is another one, on this machine."""
    return original.is_dir() and run_folder.is_dir() and not original.samefile(run_folder)


def _holds_samples(run_folder: Path) -> bool:
    """Return whether a run folder has samples or a checkpoint; a ledger that cannot be read counts as having samples."""
    if any((run_folder / "checkpoints").glob("step-*")) or newest_row(run_folder / STEPS_FILE, StepReport):
        return True
    try:
        return bool(LedgerReader(run_folder).versions())
    except LedgerError:
        return (run_folder / "ledger.sqlite").exists()


def _full_disk(run_folder: Path) -> str:
    """Return what to do about a full disk; empty if the disk is not full."""
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(run_folder).free
        if free_bytes < FULL_DISK_BYTES:
            return f"its disk is full ({free_bytes} bytes free): make room, then `asyncrl resume {run_folder}`"
    return ""


def _last_words(run_folder: Path, after: int = 0) -> tuple[str, str]:
    """Return the controller's own error after a byte position of its log; or, without one, the log's last lines."""
    log = run_folder / CONTROLLER_LOG
    lines = log.read_bytes()[after:].decode(errors="replace").splitlines()[-200:] if log.exists() else []
    errors = [place for place, line in enumerate(lines) if line.startswith("asyncrl: ") or " CRITICAL " in line]
    if errors:
        first, *rest = lines[errors[-1] :]
        more = itertools.takewhile(lambda line: line.startswith(" "), rest)  # an error's further lines are indented
        return "\n".join([first.removeprefix("asyncrl: ").rpartition(" | ")[2], *more]), ""
    return "", "".join(f"{line}\n" for line in (f"the end of {log} is", *lines[-12:])) if lines else ""
