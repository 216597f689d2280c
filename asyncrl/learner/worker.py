"""The learner process: it receives batches and publishes versions. Also the processes of its other ranks (`run_rank_worker`).

The learner owns the policy from start to Shutdown, one thread that does all work on the policy (start, steps, publishing,
checkpoints), and four loops over one connection:
- batches (DATA): decode the next step's batch on a thread while the step before still trains; at most one batch is ready;
- steps: switch to the requested phase, else write a checkpoint that is due, else (in phase `train`) train the batch that is
  ready, publish the version, report StepDone, acknowledge;
- orders (CONTROL): phase, checkpoint, shut down;
- heartbeat: what the learner does or waits for, and its gauges.

Invariants: steps are trained in order, each once since the checkpoint that the learner started from (a repeat is answered, not
trained); the learner waits only for batches and, on a device that is shared in turns, for its turn; publishing blocks for one
copy of the weights; on Shutdown the current step is finished first. `publish`, worked examples and the alphabet are passed in:
stages do not import each other. What another rank calls, and in which order, depends only on rank 0's commands, config and
batches, so that all ranks take part in every collective.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from asyncrl.clock import Clock
from asyncrl.config.live import with_settings
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.checkpoint import (
    VERSIONS_FILE,
    Examples,
    InitialState,
    VersionRecord,
    build_train_state,
    contribute_checkpoint,
    load_or_make,
    load_trainer,
    record_of,
    save_checkpoint,
)
from asyncrl.learner.checkpoint_folder import TrainerState
from asyncrl.learner.model.policy import compile_now, make_probe, publishable_tensors
from asyncrl.learner.model.sft_warmup import StartAbandoned
from asyncrl.learner.ranks.group import Begin, Help, RankLauncher, ReachPhase, command_decoder, join_run, whole
from asyncrl.learner.step.microbatch import PreparedBatch, prepare
from asyncrl.learner.step.train_step import StepResult, division_of, train_step
from asyncrl.learner.train_state import TrainState, needs_offload, open_offload
from asyncrl.observe.decisions import RECORD_FOLDER
from asyncrl.observe.samples import TokenFile
from asyncrl.observe.steps import JsonLines
from asyncrl.schema.control import Checkpoint, CheckpointDone, LearnerReady, Message, Phase, PhaseReached, SetPhase, Shutdown
from asyncrl.schema.samples import StepBatch, StepDone
from asyncrl.schema.weights import Probe
from asyncrl.transport.protocol import Connection, Delivery
from asyncrl.transport.stage import Stage
from asyncrl.weights.media.collective_group import join_store

log = logging.getLogger(__name__)

T = TypeVar("T")

PublishVersion = Callable[[int, Mapping[str, torch.Tensor], Probe | None], float]
"""(version, tensors, probe) -> milliseconds blocked; the tensors may change once the call has returned."""

NAME = "learner"
"""The controller's name for all ranks together."""
FAILED_FOLDER = "failed"


class LearnerWorker:
    """The learner's state and loops.

    Args:
        config: The run's config.
        run_folder: The run's folder; the learner writes `model/`, `checkpoints/` and `failed/` in it.
        connection: The connection to the controller.
        clock: Times steps and heartbeats.
        publish: Makes a version available to generators; called on the learner's own thread.
        launcher: Starts the other ranks.
    """

    def __init__(
        self, config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, publish: PublishVersion,
        launcher: RankLauncher,
    ) -> None:  # fmt: skip
        self._config, self._run_folder, self._clock = config, run_folder, clock
        self._publish, self._launcher = publish, launcher
        self._thread = ThreadPoolExecutor(1, "asyncrl-learner", torch.set_num_threads, (config.learner.num_threads,))
        self._initial: InitialState | None = None
        self._ready: asyncio.Queue[tuple[PreparedBatch, Delivery]] = asyncio.Queue(1)
        """A decoded batch, and the delivery to acknowledge when its step is done."""
        self._checkpoint: Checkpoint | None = None
        self._wanted_phase: SetPhase | None = None
        self._phase: Phase = "rollout" if config.placement.takes_turns else "train"
        """On a device that is shared in turns, the learner trains only after the controller has set phase `train`."""
        self._is_ending = False
        self._failure: Exception | None = None
        """The publisher's error: no version reaches the generators any more."""
        self._is_started = asyncio.Event()
        self._news = asyncio.Event()
        """Set when a batch is ready, a phase or checkpoint is requested, publishing failed, or the run ends."""
        self._versions: JsonLines[VersionRecord] | None = None
        """Records the resulting weights of each step, if batches are recorded; else None."""
        self._num_tokens = 0
        self._token_file = TokenFile(
            run_folder, lambda token: self._policy.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        )
        self._stage = Stage(connection, clock, NAME, config.supervision.heartbeat_s, self._report)

    async def run(self, examples: Examples, alphabet: str) -> None:
        """Prepare the policy, train until Shutdown arrives or the connection closes, then close.

        Args:
            examples: Worked (prompt, completion) texts of the task's train split, for a warm start.
            alphabet: Every character of the task's prompts and completions, for scratch models.

        Raises:
            ConfigError: The model cannot be opened or made.
            LearnerError: A step could not be trained, or came out of order.
            BroadcastError: A version could not be published.
        """

        async def work() -> None:
            try:
                with self._stage.idle.running():
                    await self._start(examples, alphabet)
                self._is_started.set()
                await self._serve()
            except StartAbandoned as abandoned:
                log.info("%s", abandoned)

        all_well = False
        try:
            all_well = await self._stage.run(self._obey, self._prefetch(), work=work())
        finally:
            await self.close(all_well=all_well)

    def publish_failed(self, error: Exception) -> None:
        """End the learner with the publisher's error. Nothing else waits for it, and without the version no batch may come."""
        self._failure = error
        self._news.set()

    async def close(self, *, all_well: bool) -> None:
        """Wait for the thread to finish its current work, then end it and the other ranks."""
        self._is_ending = True
        try:
            await asyncio.to_thread(self._thread.shutdown)
            self._token_file.close()
            if self._initial is not None and (offload := self._initial.train_state.offload) is not None:
                offload.manager.close()
            if self._versions is not None:
                self._versions.close()
        finally:
            # Shielded: a cancelled future that no thread has begun is never run, and the other ranks would keep running.
            closing = asyncio.get_running_loop().run_in_executor(None, lambda: self._launcher.close(all_well=all_well))
            await asyncio.shield(closing)

    # -- loops -----------------------------------------------------------------------------------------------------------

    async def _start(self, examples: Examples, alphabet: str) -> None:
        """Load or make the policy, publish it, and report LearnerReady."""
        initial = await self._on_thread(
            lambda: load_or_make(self._config, self._run_folder, examples, alphabet, self._launcher, lambda: self._is_ending)
        )
        self._initial = initial
        is_whole = initial.train_state.ranks.size == 1 and not needs_offload(self._config)  # else the first step compiles
        if self._config.learner.compile and is_whole and not self._is_ending:
            state = initial.train_state
            await self._on_thread(lambda: compile_now(state.model, state.optimizer, self._config, state.reference))
        if self._config.observe.records_batches and initial.train_state.ranks.size == 1:
            (self._run_folder / RECORD_FOLDER).mkdir(exist_ok=True)
            self._versions = JsonLines(self._run_folder / RECORD_FOLDER / VERSIONS_FILE)
        await self._on_thread(self._publish_version)
        if needs_offload(self._config):

            def start_offload() -> None:
                self._launcher.tell(Help("offload"))
                open_offload(initial.train_state, self._config, self._run_folder, self._clock)

            await self._on_thread(start_offload)
        checkpoint = str(initial.checkpoint or "")
        ready = LearnerReady(initial.version, str(initial.model_folder), initial.metrics, checkpoint)
        await self._stage.tell(ready)

    async def _obey(self, order: Message) -> None:
        """Note orders; `_serve` carries them out between steps."""
        match order:
            case Checkpoint():
                self._checkpoint = order
            case SetPhase():
                self._wanted_phase = order
            case Shutdown():
                self._is_ending = True
        self._news.set()

    async def _prefetch(self) -> None:
        """Decode one batch ahead."""
        await self._is_started.wait()
        async for batch, delivery in self._stage.requests(StepBatch):
            prepared = await asyncio.to_thread(prepare, batch, division_of(self._policy.train_state, self._config))
            await self._ready.put((prepared, delivery))
            self._news.set()

    async def _serve(self) -> None:
        """Change phase, write checkpoints and train steps, one at a time, until the end."""
        waiting_from_s = self._clock.now()
        while not self._is_ending:
            if self._failure is not None:
                raise self._failure
            with self._stage.idle.running():
                if self._wanted_phase is not None:
                    wanted_phase, self._wanted_phase = self._wanted_phase, None
                    await self._reach(wanted_phase)
                    continue
                if self._checkpoint is not None and self._checkpoint.version <= self._policy.version:
                    self._checkpoint = None
                    await self._write_checkpoint()
                    continue
                if not self._ready.empty() and self._phase == "train":
                    await self._take_step(*self._ready.get_nowait(), waiting_from_s)
                    waiting_from_s = self._clock.now()
                    continue
            self._news.clear()
            await self._news.wait()

    async def _reach(self, wanted: SetPhase) -> None:
        """Switch to a phase, between steps, and report PhaseReached."""
        offload, self._phase = self._policy.train_state.offload, wanted.phase
        assert offload is not None, "only a device that is shared in turns has phases"

        def move() -> PhaseReached:
            self._launcher.tell(ReachPhase(wanted.phase, wanted.number))
            return offload.reach(wanted.phase, wanted.number)

        await self._stage.tell(await self._on_thread(move))

    def _report(self) -> tuple[str, dict[str, float]]:
        waiting_for = ""
        if self._stage.idle.is_idle and self._initial is not None:
            no_batch = f"the batch of step {self._policy.version}"
            waiting_for = no_batch if self._ready.empty() else "the device, which others use"
        version = -1 if self._initial is None else self._initial.version
        return waiting_for, {"process/tokens_trained": float(self._num_tokens), "process/version": float(version)}

    # -- steps and checkpoints -------------------------------------------------------------------------------------------

    async def _take_step(self, prepared: PreparedBatch, delivery: Delivery, waiting_from_s: float) -> None:
        """Train a batch and report StepDone; a batch that was trained before is only reported again."""
        step = prepared.batch.step
        if step > self._policy.version:
            raise LearnerError(f"step {step} came while the learner is at version {self._policy.version}: steps go in order")
        started_s = self._clock.now()
        done = StepDone(step, step + 1, {}, started_s, started_s)
        if step == self._policy.version:
            result = await self._on_thread(lambda: self._train(prepared))
            finished_s, waited_s = self._clock.now(), started_s - waiting_from_s
            await self._on_thread(self._publish_version)
            self._num_tokens += result.num_tokens
            metrics, device = result.metrics | result.timings_s, self._policy.train_state.model.device
            if device.type == "cuda":
                held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
                share = peak / torch.cuda.get_device_properties(device).total_memory
                metrics |= {"memory/allocated_gb": held / 1e9, "memory/peak_gb": peak / 1e9, "memory/peak_share": share}
            else:
                metrics["memory/allocated_gb"] = psutil.Process().memory_info().rss / 1e9
            done = StepDone(step, result.version, metrics, started_s, finished_s, waited_s)
        await self._stage.tell(done)
        delivery.ack()
        every, version = self._config.checkpoint.every_steps, self._policy.version
        if every and version == step + 1 and version % every == 0:
            await self._write_checkpoint()

    def _train(self, prepared: PreparedBatch) -> StepResult:
        policy = self._policy
        if prepared.batch.settings:
            self._config = with_settings(self._config, prepared.batch.settings)
            policy.train_state.follow(self._config)
        self._launcher.tell(prepared.batch)
        failed = self._run_folder / FAILED_FOLDER
        result = train_step(policy.train_state, prepared, self._config, failed_folder=failed)
        if result.recipe_reason:
            log.info("step %d trains by %s", result.version - 1, result.recipe_reason)
        self._token_file.write(result.tokens)
        policy.version = result.version
        if self._versions is not None:
            self._versions.write(record_of(result.version, policy.train_state.model))
        return result

    def _publish_version(self) -> float:
        model = self._policy.train_state.model
        self._launcher.tell(Help("publish"))
        probe = make_probe(model, self._config.generate.engine.max_sequence_tokens)
        return self._publish(self._policy.version, publishable_tensors(model), probe)

    async def _write_checkpoint(self) -> None:
        """Write a checkpoint of the current version, unless it is on disk already, and report its folder."""
        started_s = self._clock.now()
        folder = await self._on_thread(self._save)
        seconds = self._clock.now() - started_s
        await self._stage.tell(CheckpointDone(self._policy.version, str(folder), seconds))

    def _save(self) -> Path:
        policy = self._policy
        memory = copy.deepcopy(policy.train_state.memory)
        saved = TrainerState(policy.version, memory=memory)
        if policy.checkpoint is None or policy.saved != saved:
            folder, keep_last = self._run_folder / "checkpoints", self._config.checkpoint.keep_last
            self._launcher.tell(Help("save"))
            offload = policy.train_state.offload
            with contextlib.nullcontext() if offload is None else offload.manager.readable():
                policy.checkpoint = save_checkpoint(folder, policy.train_state, policy.tokenizer, saved, keep_last)
            policy.saved = saved
        return policy.checkpoint

    # -- small things ----------------------------------------------------------------------------------------------------

    @property
    def _policy(self) -> InitialState:
        assert self._initial is not None, "the policy is used before it is ready"
        return self._initial

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def run_rank_worker(config: RunConfig, run_folder: Path, rank: int, address: str, clock: Clock) -> None:
    """Run a rank other than 0: join rank 0 and carry out its commands until it says stop; there is no other connection.

    Args:
        config: The run's config.
        run_folder: The run's folder.
        rank: This process's rank.
        address: The address where rank 0 listens.
        clock: The run's clock; it times moves between host and device.

    Raises:
        ConfigError: The policy cannot be opened.
        LearnerError: A step could not be trained; rank 0 has the same error.
        RuntimeError: Another rank is gone.
    """
    torch.set_num_threads(config.learner.num_threads)
    store = join_store(address, config.supervision.start_timeout_s)
    state: TrainState | None = None
    with join_run(config, rank, store) as ranks, contextlib.ExitStack() as leaving:
        while (command := command_decoder.decode(ranks.hear())) != Help("stop"):
            if isinstance(command, Begin):
                checkpoint = Path(command.checkpoint) if command.checkpoint else None
                state = build_train_state(config, run_folder / "model", checkpoint, ranks)
                if checkpoint is not None:
                    load_trainer(checkpoint, state)
                log.info("rank %d of %d begins from %s", ranks.rank, ranks.size, checkpoint or run_folder / "model")
                continue
            assert state is not None, "rank 0 says Begin first"
            match command:
                case StepBatch():
                    if command.settings:
                        config = with_settings(config, command.settings)
                        state.follow(config)
                    train_step(state, command, config)
                case Help("publish"):
                    make_probe(state.model, config.generate.engine.max_sequence_tokens)
                    for tensor in publishable_tensors(state.model).values():
                        whole(tensor)  # as rank 0 does when it copies them out
                case Help("offload"):
                    leaving.callback(open_offload(state, config, run_folder, clock).manager.close)
                case Help("save"):
                    with contextlib.nullcontext() if state.offload is None else state.offload.manager.readable():
                        contribute_checkpoint(state)
                case ReachPhase():
                    assert state.offload is not None, "rank 0 has its offload first"
                    state.offload.reach(command.phase, command.number)
