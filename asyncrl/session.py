"""Your own training loop: a run generates and scores samples within the staleness bound, and this program drives the learner.

The learner is in the caller's process, so a loss or a reward may be any function of the caller's. Everything else runs in the
run's own processes. Generation continues while the caller trains, as far as `buffer.max_staleness` allows: no older token is
trained.

Invariants: steps are trained in order, each on exactly the groups that the run's ledger has for it; training the last trained
groups again returns the same result and trains nothing, so a call whose result was lost may be repeated; a change of weights is
always completed, even if its caller is cancelled; a version is announced only once it can be fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, cast

import torch

from asyncrl.algorithms.losses import Loss, fault_in
from asyncrl.algorithms.screening import Screen
from asyncrl.algorithms.types import LossConfig, LossInputs, LossOutputs
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.client import Run, given_config
from asyncrl.clock import SystemClock
from asyncrl.config.load import ConfigLike, Overrides, resolve_config
from asyncrl.errors import AsyncRLError, BroadcastError, ConfigError, LearnerError, RunError
from asyncrl.groups import GroupStream, PromptLike, by_member, to_its_end, with_rewards
from asyncrl.learner.checkpoint import InitialState, load_or_make, save_checkpoint
from asyncrl.learner.checkpoint_folder import TrainerState
from asyncrl.learner.model.policy import make_probe, publishable_tensors
from asyncrl.learner.step.microbatch import PreparedBatch, prepare
from asyncrl.learner.step.train_step import OpenStep, StepResult, division_of
from asyncrl.observe.metrics import finite
from asyncrl.observe.samples import TokenFile
from asyncrl.packing.pack import RankPlan, pack_step
from asyncrl.reward.registry import Reward
from asyncrl.schema.samples import ScoredGroup, ids_from_bytes
from asyncrl.schema.status import Released
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import PromptSequence, warm_start_examples
from asyncrl.user_code import checked
from asyncrl.weights.publisher import Publisher

LogprobLoss = Callable[[torch.Tensor, LossInputs], torch.Tensor]
"""(logprobs [N], inputs) -> scalar: this micro-batch's share of the step's loss. Its first argument must be named `logprobs`."""
LossLike = str | Loss | LogprobLoss | None
NOT_OPEN = "this session is not open; use it inside `async with`"
LOSS_FORMS = "a loss is a name, a function (logprobs, inputs) to a scalar tensor, or one (LossInputs, LossConfig) to LossOutputs"
Numbers = Sequence[Sequence[float]] | None
"""Numbers by group and member; None: not given."""
LEASE_S = 2.0
"""How long to wait for the run to give a step its groups; a paused run gives none and is asked again."""
P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["Session", P], Coroutine[Any, Any, T]]
log = logging.getLogger(__name__)


class _PausedError(Exception):
    """The run is paused and gives no groups; nothing of the step was done."""


def _whole(method: Method[P, T]) -> Method[P, T]:
    """Decorate a call of an open session: calls run one at a time, in order, and complete even if the caller is cancelled."""

    @functools.wraps(method)
    async def call(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def in_turn() -> T:
            async with self._training:
                _ = self._ready
                return await method(self, *args, **kwargs)

        return await to_its_end(in_turn())

    return call


def _in_order(method: Method[P, T]) -> Method[P, T]:
    """Decorate a call that trains: it waits for earlier calls and for a paused run; while it waits it can be cancelled."""

    @functools.wraps(method)
    async def call(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._steps:
            while True:
                with contextlib.suppress(_PausedError):
                    return await method(self, *args, **kwargs)

    return call


class Session:
    """A run whose learner this program drives; use as an async context manager.

    Leaving the context, also by an exception, writes a checkpoint and ends the run; `Session(resume=...)` continues from there.

    Args:
        config: A `RunConfig`, nested dicts, the path of a TOML file, or the name of a shipped config; as in `Run`.
        overrides: Values that replace those of the config.
        resume: The folder of a session that has ended.
        reward: A plain or async function (prompt, text) -> reward, called in this process instead of the config's functions.
        sync: `auto`: each version is sent to the generators automatically; `manual`: `sync_weights` sends the newest version.

    Raises:
        ConfigError: As in `Run`; or the config asks for something that needs a learner process, such as several ranks.

    Example:
        >>> async with asyncrl.Session("quickstart") as session:  # doctest: +SKIP
        ...     async for groups in session.batches():
        ...         step = await session.train_step(groups, loss="gspo")
        ...         print(step.version, step.metrics["reward/mean"])
    """

    def __init__(
        self, config: ConfigLike | None = None, *, overrides: Overrides = (), resume: str | Path | None = None,
        reward: Reward | None = None, sync: Literal["auto", "manual"] = "auto",
    ) -> None:  # fmt: skip
        if sync not in {"auto", "manual"}:
            raise ConfigError(f"sync must be 'auto' or 'manual', got {sync!r}")
        resolved = given_config(config, resume, overrides)
        if resolved.learner.ranks > 1 or resolved.placement.kind != "disaggregated":
            advice = "set learner.ranks = 1, placement.kind = 'disaggregated'"
            raise ConfigError(f"a session drives one learner on a device of its own: {advice}")
        own: dict[str, Any] = {"eval.at_start": False, "eval.at_end": False, "eval.every_steps": 0}
        own |= {} if reward is None else {"reward.functions": [{"kind": "caller"}]}
        resolve_config(resolved, {**own, "learner.kind": "builtin"})  # so the learner here reads it
        self.run = Run(resolve_config(resolved, {**own, "learner.kind": "driven"}), resume=resume, reward=reward)
        """The run that feeds this session: `status`, `pause`, ..."""
        self.config = resolve_config(self.run.config, {"learner.kind": "builtin"})
        """The config for the learner in this process: `auto` is replaced by what it means on this machine."""
        self.version = -1
        """The policy's current version."""
        self._is_manual = sync == "manual"
        self._thread = ThreadPoolExecutor(1, "asyncrl-session", torch.set_num_threads, (self.config.learner.num_threads,))
        self._published: asyncio.Queue[WeightsAvailable | BroadcastError] = asyncio.Queue()
        self._fetchable: WeightsAvailable | None = None
        """The newest published version."""
        self._synced = -1
        """The version announced to the generators last."""
        self._is_open = False
        self._policy: InitialState | None = None
        self._publisher: Publisher | None = None
        self._token_file: TokenFile | None = None
        self._training, self._steps = asyncio.Lock(), asyncio.Lock()
        self._open: OpenStep | None = None
        """The step that has gradients and no new weights yet."""
        self._group_ids: tuple[int, ...] = ()
        """Group ids of the newest step, open or done."""
        self._in_step: tuple[int, ...] = ()
        """Group ids of a step that has begun and of which the run has not heard yet."""
        self._metrics: dict[str, float] = {}
        """Metrics of the newest finished step, to report to the run."""
        self._last: StepResult | None = None
        self._is_told = True
        """Whether the run knows of the newest step."""
        self._prompts: PromptSequence | None = None
        """Those of the config's task."""
        self._own: GroupStream | None = None
        """The stream of these prompts; None: `take` opens it."""
        self._first_prompt = self._after_taken = self._next_prompt = 0
        """Positions in the config's task: where its stream began, and after the last taken and the last trained prompt. A resume
        begins at the last of them."""
        self._behind: dict[int, int] = {}
        """By group id, for each untrained group of the task: the position after its prompt."""
        self._taking = asyncio.Lock()
        self._gathered: list[ScoredGroup] = []
        """The groups that arrived so far for the next `take`."""
        self._coming: asyncio.Task[list[ScoredGroup]] | None = None
        """Gathers these groups; started when a step begins, for the step after it."""
        self._taken: tuple[int, ...] = ()
        """Ids of the groups that `take` returned last; empty once they are released or a step has trained other groups."""
        self._packed: tuple[int, list[ScoredGroup], PreparedBatch] | None = None
        """A step, its groups as received, and the batch packed from them while the step before is trained."""

    async def __aenter__(self) -> Self:
        await self.run.__aenter__()
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        async with contextlib.AsyncExitStack() as leaving:  # whatever fails or is cancelled, the rest is done
            if self._token_file is not None:
                leaving.callback(self._token_file.close)
            leaving.push_async_callback(asyncio.to_thread, self._thread.shutdown)
            leaving.push_async_exit(lambda *why: self.run.__aexit__(*(why if why[0] else (kind, error, trace))))
            if self._publisher is not None:
                leaving.push_async_callback(asyncio.to_thread, self._publisher.close)
            leaving.push_async_callback(self._end_gathering)
            leaving.callback(setattr, self, "_is_open", False)
            try:
                if self._is_open:
                    await self.save()
            except (AsyncRLError, OSError) as failed:
                if error is None:
                    raise
                log.warning("version %d is not saved: %s", self.version, failed)

    async def _end_gathering(self) -> None:
        """Stop to gather the groups of the next `take`; those that arrived are in `_gathered` then."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()
            await asyncio.wait([coming])
            if not coming.cancelled() and coming.exception() is None:  # an exception is looked at: the run says it too
                self._gathered = coming.result()

    async def _start(self) -> None:
        loop, folder, config = asyncio.get_running_loop(), self.run.run_folder, self.config
        task = await asyncio.to_thread(build_task, config.task, config.seed)
        policy = await self._on_thread(
            lambda: load_or_make(config, folder, lambda: warm_start_examples(task, config.seed), task.alphabet)
        )
        waiting, group_ids = (await self.run.status()).version, policy.saved.group_ids
        # Where the run ended before it heard of the newest step, the ledger has the groups of that step as taken.
        rows = [] if config.buffer.ledger == "memory" else await asyncio.to_thread(LedgerReader(folder).steps, 1)
        taken = next((row.group_ids for row in rows if (row.step, row.state) == (waiting, "taken")), ())
        is_untold = policy.version == waiting + 1 and bool(taken) and taken == group_ids
        if policy.version != waiting and not is_untold:
            why = f"is of version {policy.version} and its ledger goes on at {waiting}"
            lost = "a session that was killed after its last `save` cannot be resumed"
            raise LearnerError(f"the newest whole checkpoint of {folder} {why}: {lost}")

        def hear(published: WeightsAvailable | BroadcastError) -> None:
            loop.call_soon_threadsafe(self._published.put_nowait, published)

        self._publisher = Publisher(config.broadcast, folder, hear, SystemClock(), on_failure=hear)
        self._token_file = TokenFile(folder, lambda token: policy.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        self._policy, self.version, self._is_open = policy, policy.version, True
        self._group_ids, self._metrics = group_ids, policy.saved.metrics
        self._next_prompt = policy.saved.next_prompt
        if self._next_prompt < 0:  # a new session, or a checkpoint that does not say it
            self._next_prompt = self.version * config.algorithm.groups_per_step
        self._prompts, self._after_taken = PromptSequence(task.train, config.seed), self._next_prompt
        await self.sync_weights()
        if is_untold:
            await self.run.take_these(group_ids)
            await self.run.trained(waiting, self._metrics)
        elif taken:  # the run ended during a step: nobody holds its groups any more
            await self.run.release(Released(groups=taken))

    # -- groups ----------------------------------------------------------------------------------------------------------

    def stream(
        self, prompts: Iterable[PromptLike], *, n: int | None = None, max_new_tokens: int | None = None, is_followed: bool = False
    ) -> GroupStream:
        """Return groups for these prompts, in this order, generated ahead as far as the staleness bound allows.

        Use as an async context manager: leaving it releases the untrained groups and stops their generation. The stream ends
        after the last prompt, or once `num_steps` are trained.

        Args:
            prompts: Texts, `{"prompt": ..., "answer": ...}` or Prompts; read when needed, so the iterable may be endless.
            n: Members of each group; None: `algorithm.group_size`.
            max_new_tokens: Limit for each member, at most the config's; None: the config's.
            is_followed: Whether the stream's `progress` yields the tokens of its next group as they are generated.

        Raises:
            ConfigError: `n` or `max_new_tokens` is not allowed, or groups of `n` lack the greedy sample of `remax`.
        """
        for name, value in (("n", n), ("max_new_tokens", max_new_tokens)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number and at least 1, got {value!r}")
        if (max_new_tokens or 0) > (most := self.config.generate.sampling.max_new_tokens):
            raise ConfigError(f"max_new_tokens must be at most generate.sampling.max_new_tokens ({most}), got {max_new_tokens}")
        algorithm = self.config.algorithm
        if n is not None and n <= algorithm.group_size and algorithm.has_greedy_baseline:
            why = f"has a greedy sample as member {algorithm.group_size} of each group, and groups of n = {n} would lack it"
            raise ConfigError(f"algorithm.advantage = 'remax' {why}: leave n out, or choose another advantage")
        _ = self._ready
        stream = self._stream(prompts, n or 0, max_new_tokens or 0, is_followed=is_followed)
        stream.make_room = self._put_task_aside
        return stream

    def _stream(
        self, prompts: Iterable[PromptLike], size: int = 0, max_new_tokens: int = 0, *, is_followed: bool = False
    ) -> GroupStream:
        window = (self.config.buffer.max_staleness + 2) * self.config.algorithm.groups_per_step
        return GroupStream(
            self.run, prompts, size, max_new_tokens, window, is_over=lambda: self.version >= self.config.num_steps,
            is_followed=is_followed,
        )  # fmt: skip

    async def generate(
        self, prompts: Sequence[PromptLike], *, n: int | None = None, max_new_tokens: int | None = None
    ) -> list[ScoredGroup]:
        """Return one group per prompt. Each holds a place under the staleness bound until it is trained, released or too old.

        Args:
            prompts: A list, with items as in `stream`.
            n: As in `stream`.
            max_new_tokens: As in `stream`.

        Raises:
            ConfigError: There are more prompts than places.
            RunError: A group could not be generated, or the run has ended; all groups of this call are then released.
        """
        stream = self.stream(prompts, n=n, max_new_tokens=max_new_tokens)
        if not isinstance(prompts, Sequence):
            raise ConfigError(f"generate takes a list of prompts, `stream` anything that gives them one by one; got {prompts!r}")
        places = (self.config.buffer.max_staleness + 1) * self.config.algorithm.groups_per_step
        if len(prompts) > places:
            allowed = f"buffer.max_staleness and algorithm.groups_per_step have places for {places}"
            raise ConfigError(f"{len(prompts)} prompts were given, and {allowed}: give fewer at once, or take `stream`")
        try:
            return await stream.all()
        except BaseException:
            await stream.close()
            raise

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        """Free the places of groups that will not be trained.

        Raises:
            RunError: They are in a step that has begun and is not done, or the run has ended.
        """
        _ = self._ready
        if groups:
            group_ids = _ids_of(groups)
            if begun := set(group_ids) & set(self._in_step):
                raise RunError(f"groups {', '.join(map(str, sorted(begun)))} are in a step that has begun: finish it first")
            await to_its_end(self.run.release(Released(groups=group_ids)))
            if not set(group_ids).isdisjoint(self._taken):
                self._taken = ()

    def is_too_old(self, group: ScoredGroup) -> bool:
        """Return whether this group, or with `buffer.policy = "mask"` each token of it, is too old for the next step to train."""
        versions = [int(version) for member in group.members for version in ids_from_bytes(member.sample.versions)]
        age = max(versions) if self.config.buffer.policy == "mask" else min(versions)
        return self.version - age > self.config.buffer.max_staleness

    async def take(self) -> list[ScoredGroup]:
        """Wait for the next step's scored groups of the config's task, and return them.

        Raises:
            RunError: All steps are trained, the groups taken before are not trained yet, or the run has ended.
        """
        async with self._taking:
            _ = self._ready
            if self.version >= self.config.num_steps:
                raise RunError(f"all {self.config.num_steps} steps are trained")
            if self._taken and self._taken != self._group_ids:
                raise RunError(f"the groups of step {self.version} are taken and not trained yet; train them first")
            if self._coming is None:
                self._coming = asyncio.get_running_loop().create_task(self._gather(self.version), name="take")
            coming = self._coming
            await asyncio.wait([coming])  # a caller that is cancelled leaves them to the next
            self._coming = None
            if coming.cancelled():
                raise RunError(NOT_OPEN)
            groups = coming.result()
            self._taken = _ids_of(groups)
            self._after_taken = max(self._behind[group_id] for group_id in self._taken)
            return groups

    async def _put_task_aside(self) -> bool:
        """Release what was generated ahead for `take`, so that other prompts find a place; the next `take` asks for it again.

        A call of `take` or of a step that is under way keeps it: the places are free once that step is trained.
        """
        if self._taking.locked() or self._steps.locked():
            return False
        async with self._taking:
            if self._own is None:
                return False
            await to_its_end(self._release_ahead(self._own))
            return True

    async def _release_ahead(self, own: GroupStream) -> None:
        await self._end_gathering()
        gathered, self._own, self._gathered = self._gathered, None, []
        await own.close(first=own.num_given)
        with contextlib.suppress(RunError):  # the run is over, and all of them with it
            await self.release(gathered)

    async def _gather(self, step: int) -> list[ScoredGroup]:
        """Wait until a step's groups are scored, pack them, and return them."""
        if self._own is None:
            prompts, self._first_prompt = self._prompts, self._after_taken
            assert prompts is not None
            self._own = self._stream(prompts[index] for index in itertools.count(self._first_prompt))
        while (missing := self.config.algorithm.groups_per_step - len(self._gathered)) > 0:
            self._own.wanted = missing
            self._gathered.append(group := await anext(self._own))
            self._behind[group.group_id] = self._first_prompt + self._own.num_given
        groups = self._gathered
        if self.config.buffer.policy != "mask":  # there the run says what is masked once they are trained
            with contextlib.suppress(AsyncRLError):  # said by the step that trains them
                self._packed = step, list(groups), await asyncio.to_thread(self._pack, step, groups, 0)
        self._gathered = []
        return groups

    def _pack(self, step: int, groups: Sequence[ScoredGroup], mask_below: int) -> PreparedBatch:
        config = self.config
        batch = pack_step(
            step, sorted(groups, key=lambda group: group.group_id),
            tokens_per_row=config.packing.tokens_per_row, temperature=config.generate.sampling.temperature,
            mask_below=mask_below, ranks=RankPlan(minibatches=config.learner.minibatches),
            screen=Screen.of(config.algorithm),
        )  # fmt: skip
        return prepare(batch, division_of(self._ready.train_state, config))

    async def batches(self) -> AsyncIterator[list[ScoredGroup]]:
        """Yield each step's groups of the config's task until `num_steps` are trained; train each before requesting the next."""
        while self.version < self.config.num_steps:
            yield await self.take()

    # -- steps -----------------------------------------------------------------------------------------------------------

    @_in_order
    @_whole
    async def train_step(
        self, groups: Sequence[ScoredGroup], *, loss: LossLike = None, rewards: Numbers = None, advantages: Numbers = None,
        learning_rate: float | None = None,
    ) -> StepResult:  # fmt: skip
        """Train one step on these groups: gradients, then the optimizer. The new version is sent to the generators.

        Args:
            groups: `algorithm.groups_per_step` groups from `take`, `stream` or `generate`.
            loss: A name, a function (LossInputs, LossConfig) -> LossOutputs, or a function (logprobs, LossInputs) -> scalar that
                returns the micro-batch's share of the loss; None: the config's loss.
            rewards: By group and member, to replace the groups' own rewards; None: the groups' own.
            advantages: By group and member, to replace those computed by `algorithm.advantage`; None: the computed ones.
            learning_rate: The peak of the schedule from this step on; None: as before.

        Returns:
            The new version and its metrics; if these groups were trained last already, the result of that step.

        Raises:
            LearnerError: The step could not be trained; the weights are unchanged.
            ConfigError: There is no such loss.
            RunError: A group is too old or over (the message names it), the number of groups is wrong, or the run has ended.
            BroadcastError: The step is done, but generators cannot fetch the new version; repeat the call to send it again.
        """
        group_ids = _ids_of(groups)
        if learning_rate is not None:
            resolve_config(self.config, {"learner.learning_rate": learning_rate})  # a wrong one before anything is done
        if self._last is None or self._open is not None or self._group_ids != group_ids:
            await self._backward(groups, loss, rewards, advantages)
        return await self._optimize(learning_rate)

    @_in_order
    @_whole
    async def forward_backward(
        self, groups: Sequence[ScoredGroup], *, loss: LossLike = None, rewards: Numbers = None, advantages: Numbers = None
    ) -> float:
        """Compute the gradients of a step, for `optim_step`; arguments and errors are those of `train_step`.

        A second call with the same groups adds nothing to the gradients.

        Returns:
            The loss.
        """
        if self._open is None and self._last is not None and self._group_ids == _ids_of(groups):
            return self._last.metrics["policy/loss"]
        return (await self._backward(groups, loss, rewards, advantages)).loss

    @_in_order
    @_whole
    async def optim_step(self, *, learning_rate: float | None = None) -> StepResult:
        """Apply the gradients of `forward_backward` to the weights; without new gradients, return the last step's result.

        Raises:
            LearnerError: There are no gradients, or they are not finite; the weights are unchanged.
            BroadcastError: As in `train_step`.
        """
        return await self._optimize(learning_rate)

    @_whole
    async def sync_weights(self) -> None:
        """Send the newest version to the generators, if they do not have it; needed only with `sync="manual"`.

        Raises:
            BroadcastError: The generators cannot fetch it.
        """
        await self._publish()

    @_whole
    async def save(self) -> Path:
        """Write a checkpoint of the current policy, and return its folder."""
        folder, keep_last, policy = self.run.run_folder / "checkpoints", self.config.checkpoint.keep_last, self._ready
        # Those of an open step are not in the weights yet, and the run knows of the steps before it.
        group_ids, metrics = (self._group_ids, self._metrics) if self._open is None else ((), {})
        saved = TrainerState(
            self.version, memory=policy.train_state.memory, group_ids=group_ids, metrics=metrics, next_prompt=self._next_prompt
        )  # fmt: skip
        return await self._on_thread(lambda: save_checkpoint(folder, policy.train_state, policy.tokenizer, saved, keep_last))

    @property
    def model(self) -> torch.nn.Module:
        """The policy; read it only between steps. It can still be used after the session."""
        if self._policy is None:
            raise RunError(NOT_OPEN)
        model: torch.nn.Module = self._policy.train_state.model
        return model

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - transformers is untyped
        """The policy's tokenizer."""
        return self._ready.tokenizer

    # -- inside ----------------------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> InitialState:
        if self._policy is None or not self._is_open:
            raise RunError(NOT_OPEN)
        return self._policy

    async def _backward(self, groups: Sequence[ScoredGroup], loss: LossLike, rewards: Numbers, advantages: Numbers) -> OpenStep:
        """Return the step, with the gradients of these groups; the caller must hold the lock."""
        group_ids = _ids_of(groups)
        if self._open is not None:
            if group_ids == self._group_ids:
                return self._open
            raise LearnerError(f"step {self.version} has the gradients of other groups; `optim_step` comes first")
        await self._tell()
        trained = list(groups) if rewards is None else with_rewards(groups, rewards)
        given: dict[tuple[int, int], float] | None = None
        if advantages is not None:
            given = {
                (group.group_id, member.sample.index): value
                for group, row in zip(groups, by_member("advantages", groups, advantages), strict=True)
                for member, value in zip(group.members, row, strict=True)
            }
        chosen = {"algorithm.loss": loss} if isinstance(loss, str) else {}
        if loss is not None and self.config.algorithm.kind == "auto":
            chosen["algorithm.kind"] = "policy"
        config = resolve_config(self.config, chosen) if chosen else self.config
        own_loss = None if loss is None or isinstance(loss, str) else _as_loss(loss)

        def gradients(packed: tuple[int, list[ScoredGroup], PreparedBatch] | None, mask_below: int) -> OpenStep:
            if packed is not None and packed[:2] == (self.version, trained) and not mask_below:
                prepared = packed[2]
            else:
                prepared = self._pack(self.version, trained, mask_below)
            state, failed = self._ready.train_state, self.run.run_folder / "failed"
            step = OpenStep(state, prepared, config, failed_folder=failed, loss=own_loss, advantages=given)
            try:
                step.backward(0)
            except BaseException:
                step.abandon()
                raise
            return step

        with self._in_a_step(group_ids):
            try:
                async with asyncio.timeout(LEASE_S):
                    mask_below = await self.run.take_these(group_ids)  # a repeat changes nothing
            except TimeoutError as error:
                raise _PausedError from error
            packed, self._packed = self._packed, None
            is_more = self._is_open and self.version + 1 < self.config.num_steps
            if is_more and self._coming is None and self._taken == group_ids:
                self._coming = asyncio.get_running_loop().create_task(self._gather(self.version + 1), name="take")
            if self._taken != group_ids:
                self._taken = ()
            self._open = await self._on_thread(lambda: gradients(packed, mask_below))
        self._group_ids = group_ids
        return self._open

    @contextlib.contextmanager
    def _in_a_step(self, group_ids: tuple[int, ...]) -> Iterator[None]:
        """Note the groups of a step that begins or goes on; a step that fails has none."""
        self._in_step = group_ids
        try:
            yield
        except BaseException:
            self._in_step = ()
            raise

    async def _optimize(self, learning_rate: float | None) -> StepResult:
        """Change the weights, and tell the run and the generators; the caller must hold the lock."""
        if (step := self._open) is not None:
            if learning_rate is not None:
                self.config = resolve_config(self.config, {"learner.learning_rate": learning_rate})
                self._ready.train_state.optimizer.follow(self.config.learner, self.config.num_steps)
            self._open, group_ids, self._group_ids = None, self._group_ids, ()

            def updated() -> StepResult:
                """Run every update of the step; the gradients of the first one exist already."""
                updates, most = len(step.plan.prepared.updates), step.plan.num_updates
                for number in range(most):
                    try:
                        if number > 0:
                            step.backward(number % updates)
                        step.update()
                    except BaseException as error:
                        step.abandon()
                        if number > 0:
                            error.add_note(f"update {number + 1} of {most} of step {self.version}: those before it stand")
                        raise
                result = step.result()
                if self._token_file is not None:
                    self._token_file.write(result.tokens)
                return result

            with self._in_a_step(group_ids):
                self._last = await self._on_thread(updated)
            self.version, self._group_ids, self._is_told = self._last.version, group_ids, False
            self._metrics = finite(self._last.metrics | self._last.timings_s)
            self._next_prompt = max([self._next_prompt, *(self._behind.get(group_id, 0) for group_id in group_ids)])
            self._behind = {group_id: behind for group_id, behind in self._behind.items() if behind > self._next_prompt}
        if self._last is None:
            raise LearnerError("there are no gradients; `forward_backward` comes first")
        await self._tell()
        return self._last

    async def _tell(self) -> None:
        """Tell the run about the newest step, and the generators about its version, if they do not know yet."""
        if self._is_told or self._last is None:
            return
        if not self._is_manual:
            await self._publish()
        await self.run.trained(self.version - 1, self._metrics)
        self._is_told, self._in_step = True, ()

    async def _publish(self) -> None:
        if self._synced == self.version:
            return
        publisher, model = self._publisher, self._ready.train_state.model
        assert publisher is not None
        length = self.config.generate.engine.max_sequence_tokens
        if self._fetchable is None or self._fetchable.version < self.version:
            await self._on_thread(lambda: publisher.publish(self.version, publishable_tensors(model), make_probe(model, length)))
            while isinstance(published := await self._published.get(), WeightsAvailable) and published.version < self.version:
                pass
            if isinstance(published, BroadcastError):
                raise published
            self._fetchable = published
        await self.run.announce_weights(self._fetchable, str(self._ready.model_folder))
        self._synced = self.version

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Run the work on the session's own thread; a cancelled caller returns only after the work is done."""

        async def working() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

        return await to_its_end(working())


def _ids_of(groups: Sequence[ScoredGroup]) -> tuple[int, ...]:
    if not isinstance(groups, Sequence) or not groups or not all(isinstance(group, ScoredGroup) for group in groups):
        raise ConfigError(f"groups must be a list of groups that this session gave, got {groups!r:.200}")
    group_ids = sorted(group.group_id for group in groups)
    if twice := [first for first, second in itertools.pairwise(group_ids) if first == second]:
        raise ConfigError(f"group {twice[0]} is in the list twice")
    return tuple(group_ids)


def _as_loss(function: Loss | LogprobLoss) -> Loss:
    """Return a caller's loss in the form that the learner calls.

    Raises:
        ConfigError: It cannot be called with two arguments.
    """
    try:
        first = next(iter(inspect.signature(function).bind(None, None).arguments))
    except TypeError as error:
        raise ConfigError(f"{LOSS_FORMS}: {error}") from error

    def loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
        try:
            if first != "logprobs":
                return cast("Loss", function)(inputs, config)
            scalar = cast("LogprobLoss", function)(inputs.logprobs, inputs)
        except Exception as error:
            error.add_note(LOSS_FORMS)
            raise
        nowhere = torch.zeros_like(inputs.mask)
        return LossOutputs(scalar, torch.ones_like(inputs.logprobs.detach()), nowhere, nowhere)

    what = "the loss" if first == "logprobs" else f"a loss whose first argument is `{first}`, not `logprobs`,"
    return checked(loss, what, LossOutputs, fault_in)
