"""A loop of one's own: generators, rewards, buffer and bound of a run, and a learner that this program drives.

The learner lives in the caller's process, so a loss or a reward may be any function of the caller's. Everything else is a run's
own processes. Generation goes on while the caller trains, as far as `buffer.max_staleness` lets it: no token that is older is
handed out.

Invariants: steps are trained in order; training the step that was trained last again gives the same answer and trains nothing,
so a call whose answer was lost may be repeated; a version is announced only once it can be fetched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import torch

from asyncrl.algorithms.losses import LOSSES, Loss
from asyncrl.algorithms.screening import Screen
from asyncrl.client import Run
from asyncrl.clock import SystemClock
from asyncrl.config.load import Overrides, resolve_config
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.processes import plan_ranks
from asyncrl.errors import ConfigError, LearnerError, RunError
from asyncrl.learner.checkpoint import TrainerState, save_checkpoint
from asyncrl.learner.model.lora import publishable_tensors
from asyncrl.learner.model.policy import make_probe
from asyncrl.learner.resume import InitialState, load_or_make
from asyncrl.learner.step.microbatch import prepare
from asyncrl.learner.step.train_step import StepResult, division_of, train_step
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.batches import GroupsTaken
from asyncrl.schema.samples import Prompt, ScoredGroup
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.tasks.registry import build_task
from asyncrl.weights.publisher import Publisher

Reward = Callable[[Prompt, str], float | Awaitable[float]]
T = TypeVar("T")


class Session:
    """A run whose learner this program drives; use as an async context manager.

    Leaving it writes a checkpoint and ends the run; `Session(resume=...)` goes on from there. An exception stops the run.

    Args:
        config: A `RunConfig`, nested dicts, or the path of a TOML file or name of a shipped one; as `Run`.
        overrides: Laid over it.
        resume: The folder of a session that has ended.
        prompts: What to train on in place of the config's task: `{"prompt": ..., "answer": ...}` each.
        reward: (prompt, text) to a reward, in this process, plain or async; the config's reward functions are not used then.

    Raises:
        ConfigError: As `Run`; or something that only a learner process of its own can do.

    Example:
        >>> async with asyncrl.Session("quickstart") as session:  # doctest: +SKIP
        ...     async for taken in session.batches():
        ...         step = await session.train_step(taken, loss="gspo")
        ...         print(step.version, step.metrics["reward/mean"])
    """

    def __init__(
        self,
        config: RunConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        overrides: Overrides = (),
        resume: str | Path | None = None,
        prompts: Sequence[Mapping[str, str]] | None = None,
        reward: Reward | None = None,
    ) -> None:
        if config is None and resume is None:
            raise ConfigError("Session takes a config (RunConfig, dict or TOML path) or resume=RUN_FOLDER, got neither")
        resolved = resolve_config(config if config is not None else Path(resume or "") / "config.toml", overrides)
        if resolved.learner.ranks > 1 or resolved.placement.kind != "disaggregated":
            advice = "set learner.ranks = 1, placement.kind = 'disaggregated'"
            raise ConfigError(f"a session drives one learner on a device of its own: {advice}")
        raw = msgspec.to_builtins(resolved)
        raw["learner"]["kind"] = "builtin"
        raw["eval"] = {**raw["eval"], "at_start": False, "at_end": False, "every_steps": 0}
        if reward is not None:
            raw["reward"]["functions"] = [{"kind": "format_check", "pattern": ""}]
        if prompts is not None:
            raw["task"] = _written(prompts, Path(resolved.folder), resolved.name)
        self.config = resolve_config(raw)
        """As the learner here reads it."""
        self.run = Run(resolve_config({**raw, "learner": {**raw["learner"], "kind": "external"}}), resume=resume)
        """The run that feeds this session: `status`, `pause`, ..."""
        self.version = -1
        """Of the policy as it is now."""
        self._reward = reward
        self._thread = ThreadPoolExecutor(1, "asyncrl-session", torch.set_num_threads, (self.config.learner.num_threads,))
        self._published: asyncio.Queue[WeightsAvailable] = asyncio.Queue()
        self._policy: InitialState | None = None
        self._publisher: Publisher | None = None
        self._last: StepResult | None = None
        self._training = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.run.__aenter__()
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None and self._policy is not None:
                await self.save()
        finally:
            if self._publisher is not None:
                await asyncio.to_thread(self._publisher.close)
            await self.run.__aexit__(kind, error, trace)
            await asyncio.to_thread(self._thread.shutdown)

    async def _start(self) -> None:
        loop, folder, config = asyncio.get_running_loop(), self.run.run_folder, self.config
        task = await asyncio.to_thread(build_task, config.task, config.seed)
        policy = await self._on_thread(lambda: load_or_make(config, folder, lambda: list(task.worked_examples), task.alphabet))
        waiting = (await self.run.status()).version
        if policy.version != waiting:
            raise LearnerError(
                f"the newest whole checkpoint of {folder} is of version {policy.version} and its ledger goes on at {waiting}: a "
                "session that was killed after its last `save` cannot be resumed"
            )

        def available(one: WeightsAvailable) -> None:
            loop.call_soon_threadsafe(self._published.put_nowait, one)

        self._publisher = Publisher(self.run.config.broadcast, folder, available, SystemClock())
        self._policy, self.version = policy, policy.version
        await self._publish()

    # -- the loop --------------------------------------------------------------------------------------------------------

    async def take(self) -> GroupsTaken:
        """Return the next step's groups, oldest first, waiting until they are scored.

        Raises:
            RunError: All steps are trained, the step before is taken and not trained, or the run has ended.
        """
        taken = await self.run.take()
        if self._reward is None:
            return taken
        rewards = await self._scored(taken.groups)
        return with_rewards(taken, rewards)

    async def batches(self) -> AsyncIterator[GroupsTaken]:
        """Yield each step's groups until `num_steps` are trained; train one before asking for the next."""
        while self.version < self.config.num_steps:
            yield await self.take()

    async def train_step(
        self,
        taken: GroupsTaken,
        *,
        loss: str | Loss | None = None,
        rewards: Sequence[Sequence[float]] | None = None,
        learning_rate: float | None = None,
    ) -> StepResult:
        """Train a step's groups, publish the version that comes of it, and have the run count them as trained.

        Args:
            taken: From `take`.
            loss: A name, or a function (LossInputs, LossConfig) -> LossOutputs; None: the config's.
            rewards: By group and member, in place of those that came; None: those.
            learning_rate: The peak of the schedule from this step on; None: as before.

        Returns:
            The new version and its metrics; of the step that was trained last, those of then.

        Raises:
            LearnerError: The step is not the next one, or could not be trained; the weights are those of before.
            ConfigError: There is no such loss.
            RunError: The run has ended.
        """
        async with self._training:
            if self._last is not None and taken.step == self._last.version - 1:
                return self._last
            if taken.step != self.version:
                raise LearnerError(f"step {taken.step} was given and the policy is at version {self.version}: steps go in order")
            taken = taken if rewards is None else with_rewards(taken, rewards)
            config = self._with(loss, learning_rate)
            result = await self._on_thread(lambda: self._train(taken, config))
            self.version, self._last = result.version, result
            await self._publish()
            metrics = {name: value for name, value in (result.metrics | result.timings_s).items() if abs(value) < float("inf")}
            await self.run.trained(taken.step, metrics)
            return result

    async def save(self) -> Path:
        """Write a checkpoint of the policy as it is now, and return its folder."""
        policy = self._ready
        folder, keep_last = self.run.run_folder / "checkpoints", self.config.checkpoint.keep_last
        saved = TrainerState(self.version, "", memory=policy.train_state.memory)
        return await self._on_thread(lambda: save_checkpoint(folder, policy.train_state, policy.tokenizer, saved, keep_last))

    @property
    def model(self) -> torch.nn.Module:
        """The policy; read it between steps."""
        model: torch.nn.Module = self._ready.train_state.model
        return model

    # -- small things ----------------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> InitialState:
        if self._policy is None:
            raise RunError("this session is not open; use it inside `async with`")
        return self._policy

    def _with(self, loss: str | Loss | None, learning_rate: float | None) -> RunConfig:
        """Return the config that a step is trained by; a new learning rate stays."""
        if learning_rate is not None:
            self.config = resolve_config(self.config, {"learner.learning_rate": learning_rate})
            self._ready.train_state.optimizer.follow(self.config.learner, self.config.num_steps)
        if loss is None:
            return self.config
        if isinstance(loss, str):
            return resolve_config(self.config, {"algorithm.loss": loss})
        name = next((name for name, known in LOSSES.items() if known is loss), f"session-{uuid.uuid4().hex}")
        LOSSES[name] = loss
        return msgspec.structs.replace(self.config, algorithm=msgspec.structs.replace(self.config.algorithm, loss=name))

    def _train(self, taken: GroupsTaken, config: RunConfig) -> StepResult:
        state = self._ready.train_state
        batch = pack_step(
            taken.step, taken.groups,
            tokens_per_row=config.packing.tokens_per_row, temperature=config.generate.sampling.temperature,
            mask_below=taken.mask_below, ranks=dataclasses.replace(plan_ranks(config), minibatches=config.learner.minibatches),
            screen=Screen.of(config.algorithm),
        )  # fmt: skip
        prepared = prepare(batch, division_of(state, config))
        return train_step(state, prepared, config, failed_folder=self.run.run_folder / "failed")

    async def _publish(self) -> None:
        publisher, model = self._publisher, self._ready.train_state.model
        assert publisher is not None
        length = self.config.generate.engine.max_sequence_tokens
        await self._on_thread(lambda: publisher.publish(self.version, publishable_tensors(model), make_probe(model, length)))
        while (available := await self._published.get()).version < self.version:
            pass
        await self.run.announce_weights(available, str(self._ready.model_folder))

    async def _scored(self, groups: Sequence[ScoredGroup]) -> list[list[float]]:
        assert self._reward is not None
        scored = []
        for group in groups:
            answers = [self._reward(group.prompt, member.sample.text) for member in group.members]
            scored.append([float(await answer if inspect.isawaitable(answer) else answer) for answer in answers])
        return scored

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Work on the session's own thread; a caller that is cancelled leaves once the work is done."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


def with_rewards(taken: GroupsTaken, rewards: Sequence[Sequence[float]]) -> GroupsTaken:
    """Return a step's groups with other rewards, by group and member.

    Raises:
        LearnerError: There are not as many as members, or one is not finite.
    """
    sizes, given = [len(group.members) for group in taken.groups], [len(row) for row in rewards]
    if sizes != given:
        raise LearnerError(f"rewards must be given for each member of each group, {sizes}, got {given}")
    if not all(abs(reward) < float("inf") for row in rewards for reward in row):
        raise LearnerError("rewards must be finite numbers")
    replace = msgspec.structs.replace
    groups = tuple(
        replace(group, members=tuple(replace(one, reward=float(reward)) for one, reward in zip(group.members, row, strict=True)))
        for group, row in zip(taken.groups, rewards, strict=True)
    )
    return replace(taken, groups=groups)


def _written(prompts: Sequence[Mapping[str, str]], folder: Path, name: str) -> dict[str, Any]:
    """Write prompts beside the run's folder, and return the task that reads them."""
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt.get("prompt"), str) or not isinstance(prompt.get("answer", ""), str):
            raise ConfigError(f"prompts[{number}] must have a text `prompt`, and may have a text `answer`; got {dict(prompt)!r}")
    if not prompts:
        raise ConfigError("prompts is empty: give at least one")
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{name}.prompts.jsonl").resolve()
    path.write_text("".join(json.dumps({"answer": "", **prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return {"kind": "jsonl", "path": str(path), "prompt_field": "prompt", "answer_field": "answer", "held_out": 0, "chat": False}
