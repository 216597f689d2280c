"""THE MAP: which process sends what to which, and the one place where stages are connected to channels.

    prompts --> generate --> reward --> buffer --> packing --> learner --> broadcast --> (generate)
                   1            2          3          4           5            6

Every process has one connection, to the controller, with two lanes that never delay each other. The receiver's acknowledgements
limit the messages on each hop (`transport.window`); nothing is dropped for lack of room.

| hop | message | from -> to | lane | waits for | unblocked by | acknowledged when |
|---|---|---|---|---|---|---|
| 0 | LoadModel | controller -> generator, inference worker | control | a model folder | LearnerReady | received |
| 1 | GroupWork | controller -> generator | data | a place under eta, free slots | VersionLive, a ready group | last sample sent |
| 2 | Samples, SampleFailure | generator -> controller | data | the window | ledger commit | committed |
| 2b | Progress | generator -> controller | data | the window; only for groups that somebody follows | | received |
| 3 | ScoreRequest | controller -> reward worker | data | the window | Scores | its scores are sent |
| 3b | InferRequest | controller -> inference worker | data | the window | InferResult | its result is sent |
| 4 | Scores, InferResult | 3, 3b -> controller | data | the window | ledger commit | committed (half a score: received) |
| 5 | StepBatch | controller -> learner | data | B groups; one step ahead | Score, StepDone | the step is done |
| 6 | StepDone, CheckpointDone | learner -> controller | control | nothing | | received |
| 7 | WeightsAvailable | learner -> controller -> generators | control | nothing | | received |
| 8 | the weights' bytes | learner -> generator | the medium | nothing: never the learner | | fingerprint matches |
| 9 | VersionLive | generator -> controller | control | nothing | | received |
| 9b | AbortGroup | controller -> generator | control | a group dropped while it is generated | | received |
| 10 | SetPhase | controller -> everyone on one device | control | its turn | PhaseReached of those before | received |
| 11 | PhaseReached | 10 -> controller | control | the device is given back, or taken | | received |
| - | Heartbeat, Fault | everyone -> controller | control | nothing | | received |
| - | Pause, Resume, Checkpoint, Shutdown | controller -> everyone | control | nothing | | received |

Each process of a run is `python -m asyncrl.pipeline KIND NAME RUN_FOLDER`; the controller of a detached run has `detached` as a
fourth argument. The controller starts all other processes, except the learner's other ranks (`rank`), which rank 0 starts.
Processes that compute on a CPU are forks of one process, `fork-server`. This file changes in the same commit as any hop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.clock import Clock, SystemClock
from asyncrl.config.broadcast import SharedStorageMedium
from asyncrl.config.load import load_run_config
from asyncrl.config.places import needs_of
from asyncrl.config.run import RayLaunch, RunConfig
from asyncrl.control.launch import process_main as process
from asyncrl.control.launch.process_main import EXIT_FAILED, EXIT_FAULT, EXIT_OK, EXIT_WRONG_INPUT, imports_without_gc, leave
from asyncrl.errors import AsyncRLError, LedgerError
from asyncrl.residency.plan import SWAP_FOLDER
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import warm_start_examples
from asyncrl.transport.protocol import Connection, new_hello
from asyncrl.transport.stage import telling_from_threads
from asyncrl.transport.zmq_client import open_connection
from asyncrl.transport.zmq_server import open_listener

if TYPE_CHECKING:
    from asyncrl.control.join import JoinRequest
    from asyncrl.control.launch.processes import Launcher

log = logging.getLogger("asyncrl")

COLLECT_EVERY = 20_000
"""New objects that the controller makes between two runs of the garbage collector."""
ENDPOINT_FILE = "endpoint"
"""File in the run folder with the address that the run's processes connect to."""
NICENESS = 10
"""Niceness of processes that compute beside the learner, so that the learner gets cores first."""
DETACHED = "detached"
"""Argument after the run folder: the controller keeps running when the process that started it has ended."""
CLOCK_ANCHOR = "ASYNCRL_CLOCK_ANCHOR_S"
"""Environment variable that gives the controller's clock anchor to its child processes."""
RANK = "rank"
"""Kind of a learner's rank other than 0; its arguments: rank, run folder, and the address where rank 0 listens."""
JOIN = "join"
"""Kind of a generator that joins a live run; its only argument is a JoinRequest in JSON."""


# -- the controller ------------------------------------------------------------------------------------------------------


async def run_controller(
    config: RunConfig, run_folder: Path, clock: Clock, owner: process.Ownership, launcher: Launcher | None = None
) -> bool:
    """Build and run the controller of one run; return whether the run ended well.

    Args:
        config: The run's config.
        run_folder: The run's folder.
        clock: The run's clock.
        owner: The run's owner; the run ends when it is gone.
        launcher: Starts the run's processes; None: the launcher that the config names.
    """
    from asyncrl.buffer.open import open_buffer
    from asyncrl.control.api import RunApi, serve_api
    from asyncrl.control.controller import Controller
    from asyncrl.control.join import Membership
    from asyncrl.control.launch.fork_server import ForkLauncher
    from asyncrl.control.launch.processes import LocalLauncher, forked_modules, plan_processes
    from asyncrl.control.lifecycle.supervisor import end_left
    from asyncrl.control.placement.memory import check_shares
    from asyncrl.observe.decisions import Recorder
    from asyncrl.reward.registry import check_prompts
    from asyncrl.weights.shm_segments import remove_leftover_segments

    check_shares(config)
    task, planned = build_task(config.task, config.seed), plan_processes(config)
    check_prompts(config.reward, task.train)
    check_prompts(config.reward, task.held_out)
    call_soon = asyncio.get_running_loop().call_soon_threadsafe
    async with contextlib.AsyncExitStack() as leaving:
        recorder = None if config.observe.record == "off" else Recorder(run_folder)
        buffer = open_buffer(
            config, run_folder, call_soon=call_soon, on_failure=_ledger_failed, now=clock.now(),
            watch=recorder.note if recorder else None,
        )  # fmt: skip
        if recorder is not None:
            leaving.callback(recorder.close)
        leaving.callback(buffer.close)
        leaving.callback(shutil.rmtree, run_folder / SWAP_FOLDER, ignore_errors=True)
        leaving.callback(remove_leftover_segments, run_folder)
        membership = Membership(planned, config.placement.most_joining_generators, config.supervision)
        listener = await open_listener(config.transport, run_folder, judge=membership.refusal)
        leaving.push_async_callback(listener.close)
        (run_folder / ENDPOINT_FILE).write_text(listener.address, encoding="utf-8")
        if launcher is None and isinstance(config.launch, RayLaunch):
            from asyncrl.control.launch.ray import open_launcher

            launcher = await open_launcher(config.launch, run_folder, partial(needs_of, config), planned)
        elif launcher is None and (modules := forked_modules(config)):
            launcher = ForkLauncher(run_folder, modules, sum(modules.values(), ()), config.supervision.start_timeout_s)
            leaving.push_async_callback(launcher.close)
        launcher = launcher or LocalLauncher()
        await asyncio.to_thread(end_left, run_folder)  # before any process can ask this run for something
        controller = Controller(config, run_folder, buffer, task, listener, launcher, membership, clock, recorder)
        async with serve_api(RunApi(controller), run_folder):
            gc.freeze()  # what is there by now stays, and what messages leave behind is hardly ever a cycle
            gc.set_threshold(COLLECT_EVERY)
            return await controller.run(owner)


def _ledger_failed(error: LedgerError) -> None:
    """End the controller at once, because what is not in the ledger must not be acknowledged. The run can be resumed."""
    log.critical("%s", error)
    os._exit(EXIT_FAULT)


# -- the stages ----------------------------------------------------------------------------------------------------------


async def _generator(config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, name: str) -> bool:
    """Run a generator; return False if its connection closed before Shutdown arrived."""
    from asyncrl.generate.worker import GeneratorWorker

    # If cores are scarce the learner goes first: while it works generation is ahead; while it waits generators have all cores.
    os.nice(NICENESS)
    if config.learner.fake_step_s is not None or config.generate.engine.replays:  # it holds no weights
        return await GeneratorWorker(config, run_folder, connection, clock, _no_weights, name).run()
    from asyncrl.weights.subscriber import open_source

    _hold_to_share(config, getattr(config.generate.engine, "device", "cpu"), of_learner=False)
    with contextlib.closing(open_source(config, run_folder)) as source:
        return await GeneratorWorker(config, run_folder, connection, clock, source.fetch, name).run()


async def _no_weights(_: WeightsAvailable) -> Mapping[str, Any]:
    return {}


def _hold_to_share(config: RunConfig, device: str, *, of_learner: bool) -> None:
    """Limit this process's tensors to its share of GPU memory, if generation and training use one GPU at the same time."""
    from asyncrl.control.placement.limits import shares_device
    from asyncrl.control.placement.memory import memory_bounds
    from asyncrl.residency.device import hold_to_share

    if shares_device(config) and (of_learner or config.generate.engine.adopts):
        generator_share, learner_share, budget_bytes = memory_bounds(config)
        hold_to_share(device, learner_share if of_learner else generator_share, budget_bytes)


async def _learner(config: RunConfig, run_folder: Path, connection: Connection, clock: Clock) -> None:
    if config.learner.fake_step_s is not None:
        from asyncrl.learner.fake import FakeLearner

        async with telling_from_threads(connection) as announce:
            await FakeLearner(config, run_folder, connection, clock, announce).run()
        return
    from asyncrl.learner.ranks.group import RankLauncher
    from asyncrl.learner.worker import LearnerWorker
    from asyncrl.weights.media.learner_memory import HybridPublisher
    from asyncrl.weights.publisher import Publisher

    _hold_to_share(config, config.learner.device, of_learner=True)
    task = build_task(config.task, config.seed)

    def start_rank(rank: int, address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "asyncrl.pipeline", RANK, str(rank), str(run_folder), address]
        return subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - this program itself

    loop = asyncio.get_running_loop()
    async with telling_from_threads(connection) as announce:
        publisher: HybridPublisher | Publisher
        if isinstance(config.broadcast.medium, SharedStorageMedium):
            publisher = HybridPublisher(config.broadcast, run_folder, announce, clock)
        else:
            publisher = Publisher(
                config.broadcast, run_folder, announce, clock,
                on_failure=lambda error: loop.call_soon_threadsafe(worker.publish_failed, error),
            )  # fmt: skip
        try:
            launcher = RankLauncher(config, start_rank)
            worker = LearnerWorker(config, run_folder, connection, clock, publisher.publish, launcher)
            await worker.run(lambda: warm_start_examples(task, config.seed), task.alphabet)
        finally:
            publisher.close()


async def run_stage(kind: ProcessKind, name: str, config: RunConfig, run_folder: Path, clock: Clock) -> int:
    """Connect to the controller, run one stage until it is told to stop, and return the exit code.

    Everything that the stage needs is imported before it connects: an event loop that imports for a long time, as on a busy
    machine, looks dead to its peer. Errors of the outside world are sent to the controller as a Fault before the process ends.
    """
    from asyncrl.control.launch.processes import stage_modules

    if kind == "generator":
        from asyncrl.control.placement.limits import keep_to_own_cores
        from asyncrl.control.placement.memory import with_own_memory

        config = with_own_memory(config)
        keep_to_own_cores(config)
    with imports_without_gc():
        for module in stage_modules(config, kind):
            import_module(module)
        if kind == "generator" and config.generate.engine.kind == "vllm":
            import_module("asyncrl.generate.vllm.launch").import_vllm()
    address = (run_folder / ENDPOINT_FILE).read_text(encoding="utf-8")
    connection = await open_connection(address, new_hello(kind, name), config.transport, run_folder)
    work: Awaitable[object]
    try:
        if kind == "generator":
            work = _generator(config, run_folder, connection, clock, name)
        elif kind == "learner":
            work = _learner(config, run_folder, connection, clock)
        elif kind == "reward":
            from asyncrl.reward.worker import RewardWorker

            work = RewardWorker(config, run_folder, connection, clock, name).run()
        else:
            from asyncrl.inference.worker import InferenceWorker

            os.nice(NICENESS)
            work = InferenceWorker(config, run_folder, connection, clock, name).run()
        return await process.run_to_exit_code(work, name, connection)
    finally:
        await connection.close()


async def join_run(request: JoinRequest, clock: Clock) -> int:
    """Run a generator for an existing run, until the run ends or a signal says to leave; return the exit code.

    It is EXIT_FAILED if the run dismissed this generator, or the connection to it was lost.
    """
    from asyncrl.control.join import joined, serve_until_told
    from asyncrl.control.placement.limits import as_joined, keep_to_own_cores

    with imports_without_gc():
        # Before it connects, as in `run_stage`; what the run needs is not known yet, so these are for every run with weights.
        for module in ("asyncrl.generate.worker", "asyncrl.weights.subscriber", "asyncrl.residency.device"):
            import_module(module)
    async with joined(request, os.getpid(), ENDPOINT_FILE) as here:
        process.set_up_logging(here.name, here.config.observe.log_level)
        config = as_joined(here.config, on_same_machine=here.is_on_same_machine)
        keep_to_own_cores(config)
        log.info("joined the run %s as %s; Ctrl-C leaves it", config.name, here.name)
        was_told_to_end = list[bool]()

        async def work() -> None:
            was_told_to_end.append(await _generator(config, here.run_folder, here.connection, clock, here.name))

        code = await serve_until_told(process.run_to_exit_code(work(), here.name, here.connection))
        return EXIT_FAILED if was_told_to_end == [False] else code


def run_rank(rank: int, run_folder: Path, address: str) -> int:
    """Run a learner's rank other than 0 until rank 0, at `address`, says stop or is gone; return the exit code.

    The process is a child of rank 0's process, in the same process group. It is unknown to the controller and has no connection.
    """
    config = load_run_config(run_folder)
    process.set_up_logging(f"learner-{rank}", config.observe.log_level)
    process.ignore_interrupts()
    process.watch_parent()
    try:
        with imports_without_gc():
            from asyncrl.learner.ranks.group import rank_device
            from asyncrl.learner.worker import run_rank_worker

        _hold_to_share(config, rank_device(config, rank), of_learner=True)
        run_rank_worker(config, run_folder, rank, address, clock_of("learner"))
    except Exception:
        log.exception("rank %d cannot go on", rank)
        return EXIT_FAULT
    return EXIT_OK


# -- entry point ---------------------------------------------------------------------------------------------------------


def clock_of(kind: ProcessKind) -> SystemClock:
    """Return a process's clock; on the controller's machine it has the controller's anchor, even if the wall clock changed."""
    handed = None if kind == "controller" else os.environ.get(CLOCK_ANCHOR)
    clock = SystemClock(None if handed is None else float(handed))
    os.environ[CLOCK_ANCHOR] = repr(clock.anchor_s)
    return clock


async def _main(kind: ProcessKind, name: str, run_folder: Path, *, detached: bool) -> int:
    config = load_run_config(run_folder)
    process.set_up_logging(name, config.observe.log_level)
    clock = clock_of(kind)
    if kind == "controller":
        async with contextlib.AsyncExitStack() as stack:
            lease = process.own_by_lease(run_folder, config.owner)
            owner = await stack.enter_async_context(lease) if detached else await process.own_by_input()
            return EXIT_OK if await run_controller(config, run_folder, clock, owner) else EXIT_FAILED
    from asyncrl.weights.shm_segments import remove_leftover_segments

    process.ignore_interrupts()
    process.watch_parent(partial(remove_leftover_segments, run_folder) if kind == "learner" else None)
    return await run_stage(kind, name, config, run_folder, clock)


def main() -> None:
    """Run one process: `python -m asyncrl.pipeline KIND NAME RUN_FOLDER`, or a generator that joins a run."""
    kind, *rest = sys.argv[1:]
    if kind == process.FORK_SERVER:
        from asyncrl.control.launch.fork_server import serve_forks

        kind, *rest = serve_forks(int(rest[1]), rest[2:])
    wrong = EXIT_WRONG_INPUT if kind == JOIN else EXIT_FAILED
    try:
        if kind == JOIN:
            from asyncrl.control.join import JoinRequest

            leave(asyncio.run(join_run(msgspec.json.decode(rest[0], type=JoinRequest), SystemClock())))
        if kind == RANK:
            leave(run_rank(int(rest[0]), Path(rest[1]), rest[2]))
        name, folder = rest[:2]
        detached = rest[2:] == [DETACHED]
        if detached:
            process.leave_parent(Path(folder))
        code = asyncio.run(_main(kind, name, Path(folder), detached=detached))  # type: ignore[arg-type]
        if kind in {"generator", "inference", "learner"}:  # with torch: the interpreter is not torn down
            leave(code)
    except AsyncRLError as error:
        print(f"asyncrl: {error}", file=sys.stderr)  # noqa: T201 - the log is not set up where the config is wrong
        code = wrong
    except OSError as error:
        if error.filename is None:
            raise
        traceback.print_exc()
        print(f"asyncrl: {error.filename}: {error.strerror}", file=sys.stderr)  # noqa: T201 - as above
        code = EXIT_FAILED
    sys.exit(code)


if __name__ == "__mp_main__":  # a process that multiprocessing spawned from one of ours: vLLM's engine core, or its worker
    process.follow_parent()
if __name__ == "__main__":
    main()
