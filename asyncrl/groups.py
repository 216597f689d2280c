"""Groups of samples for a caller's own loop: request them from a run, score and normalise them, and collect them into steps.

Invariant of a stream: its groups come in the order of its prompts, each once. So batches of `algorithm.groups_per_step` groups,
trained in that order, are never too old: a group starts only while there is a place for it under the staleness bound. A cancelled
wait loses nothing: the next one returns the same group.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from asyncrl.client import RunClient
from asyncrl.control.lifecycle.failure_watch import CALLER_HOLDS
from asyncrl.errors import ConfigError, LearnerError, RunError
from asyncrl.schema.samples import Progress, Prompt, ScoredGroup
from asyncrl.schema.status import GroupAsked, GroupGiven, GroupsAsked, Released

log = logging.getLogger(__name__)

PromptLike = str | Mapping[str, Any] | Prompt
"""A text, `{"prompt": ..., "answer": ...}`, where any other keys are the prompt's `columns`, or a Prompt."""
T = TypeVar("T")


class GroupStream:
    """Groups of a caller's prompts, in the order of the prompts; an async context manager that releases untrained groups at exit.

    A group that failed, or that the run has dropped (the reason is in its ledger and in the log), is left out.

    Args:
        run: The run that generates the groups.
        prompts: As in `Session.stream`.
        size: Members of each group; 0: the config's number.
        max_new_tokens: Limit for each member; 0: the config's.
        window: Maximum number of groups that are requested and not given yet.
        is_over: Returns whether the stream ends now.
        say_after_s: After waiting this long for its caller, the stream logs a warning.
        is_followed: Whether `progress` will be used.
    """

    def __init__(
        self, run: RunClient, prompts: Iterable[PromptLike], size: int, max_new_tokens: int, window: int,
        is_over: Callable[[], bool], say_after_s: float = 10.0, *, is_followed: bool = False,
    ) -> None:  # fmt: skip
        if prompts is None or isinstance(prompts, (str, Mapping, Prompt)):
            raise ConfigError(f"prompts must be several, as a list: [prompt]; got {prompts!r}")
        self._run, self._size, self._max_new_tokens = run, size, max_new_tokens
        self._window, self._is_over, self._say_after_s, self._is_followed = window, is_over, say_after_s, is_followed
        self.make_room: Callable[[], Coroutine[Any, Any, bool]] | None = None
        """Called before groups are requested, and while no place is free; returns whether it released some."""
        self._name = uuid.uuid4().hex
        self.num_given = 0
        """Number of prompts whose group was given or left out."""
        self._prompts = enumerate(prompts)
        self._waiting: deque[GroupAsked] = deque()
        """Groups requested and not given yet."""
        self._unsaid: set[int] = set()
        """Numbers of those groups that the run may not know yet."""
        self._given: deque[GroupGiven] = deque()
        """Results for the first of the requested groups."""
        self.wanted = 1
        """How many groups the reader needs now; one request waits for all of them. It must not exceed the number of places."""
        self._reading = asyncio.Lock()
        """Several tasks may read at once; each group goes to one of them."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[ScoredGroup]:
        return self

    async def __anext__(self) -> ScoredGroup:
        while True:
            if self._is_over() or (following := await self._next()) is None:
                raise StopAsyncIteration
            number, given = following
            self.num_given = number + 1
            if given.group is not None:
                return given.group
            log.warning("the group of prompt %d of a stream is left out: %s", number, given.why_over)

    async def all(self) -> list[ScoredGroup]:
        """Return every group.

        Raises:
            RunError: A group failed.
        """
        groups, self.wanted = list[ScoredGroup](), self._window
        while (following := await self._next()) is not None:
            number, given = following
            if given.group is None:
                raise RunError(f"there is no group of prompt {number}: {given.why_over}")
            groups.append(given.group)
        return groups

    async def progress(self) -> AsyncGenerator[Progress, None]:
        """Yield the tokens of the next group as they are generated, until the group is ready; needs `is_followed`.

        Raises:
            RunError: As `RunClient.progress`.
        """
        if (asked := await self._asked()) is not None:
            async with contextlib.aclosing(self._run.progress(asked)) as pieces:
                async for piece in pieces:
                    yield piece

    async def close(self, first: int = 0) -> None:
        """Release every untrained group of the stream; it is completed even if the caller is cancelled meanwhile.

        Args:
            first: Number of the first prompt whose group is released; groups of earlier prompts are kept.
        """
        try:
            await to_its_end(self._run.release(Released(self._name, first=first)))
        except RunError as error:
            log.debug("a stream's groups are not released: %s", error)  # the run is over, and all of them with it

    async def _next(self) -> tuple[int, GroupGiven] | None:
        """Wait for the next prompt's group; return the prompt's number and the group's result. None: no more prompts."""
        async with self._reading:
            if not self._given:
                if (asked := await self._asked()) is None:
                    return None
                saying = asyncio.get_running_loop().create_task(self._say_what_is_held(), name="stream")
                try:
                    self._given.extend(await self._run.generate(asked))
                finally:
                    saying.cancel()
                    await asyncio.wait([saying])
                self._unsaid.clear()
            return self._waiting.popleft().number, self._given.popleft()

    async def _asked(self) -> GroupsAsked | None:
        """Return the request for groups not given yet, filled with new prompts up to the window; None: nothing to request."""
        if self.make_room is not None:
            await self.make_room()
        for number, prompt in itertools.islice(self._prompts, self._window - len(self._waiting)):
            one = _as_prompt(prompt, f"{self._name}/{number}")
            self._waiting.append(GroupAsked(number, one, self._size, self._max_new_tokens, self._is_followed))
            self._unsaid.add(number)
        said = tuple(one if one.number in self._unsaid else GroupAsked(one.number) for one in self._waiting)
        return GroupsAsked(self._name, said, self.wanted) if said else None

    async def _say_what_is_held(self) -> None:
        """Log a warning once, if no group can come until the caller trains or releases some."""
        while True:
            await asyncio.sleep(self._say_after_s)
            with contextlib.suppress(RunError):
                status = await self._run.status()
                is_stuck = CALLER_HOLDS in status.waiting and not status.groups["taken"]
                if is_stuck and not (self.make_room and await self.make_room()):
                    break
        held = "are neither trained nor released, and hold every place under buffer.max_staleness"
        ahead = "if another stream of this program generated them ahead, read and train that, or leave it"
        log.warning("nothing is generated: %d groups %s; train some, or `release` them; %s", status.groups["ready"], held, ahead)


async def batched(groups: AsyncIterable[T], n: int) -> AsyncIterator[list[T]]:
    """Yield lists of `n` items in order; fewer than `n` left at the end are not given."""
    if n < 1:
        raise ConfigError(f"batched takes a size of at least 1, got {n}")
    batch = list[T]()
    async for group in groups:
        batch.append(group)
        if len(batch) == n:
            yield batch
            batch = []


def group_norm(rewards: Sequence[Sequence[float]], epsilon: float = 1e-6) -> list[list[float]]:
    """Return (R - group mean) / (unbiased group standard deviation + epsilon), by group and member.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1; the same as `algorithm.advantage = "grpo"`.
    """
    advantages = []
    for row in numbers_of("rewards", rewards):
        mean = math.fsum(row) / max(len(row), 1)
        deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in row) / max(len(row) - 1, 1))
        advantages.append([(reward - mean) / (deviation + epsilon) for reward in row])
    return advantages


def with_rewards(groups: Sequence[ScoredGroup], rewards: Sequence[Sequence[float]]) -> list[ScoredGroup]:
    """Return the groups with their rewards replaced, by group and member.

    Raises:
        LearnerError: There are not as many as members, or one is not finite.
    """
    rows = by_member("rewards", groups, rewards)
    replace = msgspec.structs.replace
    return [
        replace(group, members=tuple(replace(one, reward=reward) for one, reward in zip(group.members, row, strict=True)))
        for group, row in zip(groups, rows, strict=True)
    ]


def by_member(what: str, groups: Sequence[ScoredGroup], values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the numbers after checking that there is one for each member of each group.

    Raises:
        LearnerError: There are not as many as members, or one is not finite.
    """
    rows = numbers_of(what, values)
    sizes, given = [len(group.members) for group in groups], [len(row) for row in rows]
    if sizes != given:
        raise LearnerError(f"{what} must be given for each member of each group, {sizes}, got {given}")
    if not all(math.isfinite(value) for row in rows for value in row):
        raise LearnerError(f"{what} must be finite numbers")
    return rows


def numbers_of(what: str, values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the argument as lists of numbers, one list per group.

    Raises:
        LearnerError: The argument is something else.
    """
    try:
        return [[float(value) for value in row] for row in values]
    except (TypeError, ValueError) as error:
        raise LearnerError(f"{what} must be a list for each group, of a number for each member: {error}") from error


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Run the work to its end: if the caller is cancelled meanwhile, the cancellation takes effect once the work is done."""
    task, is_cancelled = asyncio.get_running_loop().create_task(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        if not task.cancelled():
            task.exception()  # so that nobody is told that it was never looked at
        raise asyncio.CancelledError
    return task.result()


def _as_prompt(given: PromptLike, name: str) -> Prompt:
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return Prompt(name, text=given)
    if not isinstance(given, Mapping):
        raise ConfigError(f"a prompt must be a text, a dict with `prompt`, or an asyncrl.Prompt; got {given!r}")
    if not isinstance(given.get("prompt"), str) or not isinstance(given.get("answer", ""), str):
        raise ConfigError(f"a prompt must have a text `prompt`, and may have a text `answer`; got {dict(given)!r}")
    columns = dict[str, msgspec.Raw]()
    for key in given.keys() - {"prompt", "answer"}:
        try:
            columns[str(key)] = msgspec.Raw(msgspec.json.encode(given[key]))
        except (TypeError, ValueError, OverflowError) as error:
            log.warning("%s of a prompt is left out of its columns: %s", key, error)
    reference = msgspec.json.encode(columns, order="sorted").decode() if columns else ""
    return Prompt(name, text=given["prompt"], answer=given.get("answer", ""), reference_json=reference)
