"""The answers of an endpoint: each is rewarded and trained, or released with a reason.

Invariant: an answer is held, was given to a step, or is over. Only an answer that was sent whole and has rewards is given to a
step; if the step does not train it, its place is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from asyncrl.clock import SystemClock
from asyncrl.endpoint.openai_schema import MOST_REWARD
from asyncrl.errors import ConfigError, LearnerError, RunError
from asyncrl.groups import with_rewards
from asyncrl.schema.samples import ScoredGroup
from asyncrl.schema.status import ENDED
from asyncrl.session import Session

MOST_FORGOTTEN = 4096
"""Number of answers that can no longer be rewarded and whose reason is remembered."""
LOOK_AGAIN_S = 0.2
LOOKS_A_STATUS = 10
"""After this many waits without a batch, the run's status is read."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answer:
    """An answer that can still be trained."""

    group: ScoredGroup
    since_s: float
    """Clock seconds at which its group was ready."""
    is_sent: bool = False
    """Whether all of it was sent to the client."""
    rewards: list[float] | None = None
    """None: not rewarded yet."""


class Answers:
    """The answers of one endpoint.

    Args:
        session: The session that trains them.
        unrewarded_s: See `Endpoint`.
    """

    def __init__(self, session: Session, unrewarded_s: float) -> None:
        if not (isinstance(unrewarded_s, (int, float)) and math.isfinite(unrewarded_s) and unrewarded_s >= 0):
            raise ConfigError(f"unrewarded_s must be seconds, 0 or more; got {unrewarded_s!r}")
        self._session, self._unrewarded_s, self._clock = session, unrewarded_s, SystemClock()
        self._held: dict[str, _Answer] = {}
        self._over: deque[tuple[str, str]] = deque(maxlen=MOST_FORGOTTEN)
        """Ids of answers that can no longer be rewarded, with the reason."""
        self._rewarded = asyncio.Event()

    def hold(self, answer_id: str, group: ScoredGroup) -> None:
        """Hold an answer that is about to be sent; from now on it can be rewarded."""
        self._held[answer_id] = _Answer(group, self._clock.now())

    def sent(self, answer_id: str) -> None:
        """Note that the answer was sent whole; it may be trained."""
        if (answer := self._held.get(answer_id)) is not None:
            answer.is_sent = True
            self._rewarded.set()

    def drop(self, answer_id: str) -> None:
        """Forget an answer that was not sent whole; the caller must release its group."""
        if self._held.pop(answer_id, None) is not None:
            self._over.append((answer_id, "was not read by its client"))

    def why_over(self, answer_id: str) -> str:
        """Return why an answer can no longer be rewarded; empty if the id is unknown."""
        return next((why for one, why in reversed(self._over) if one == answer_id), "")

    def reward(self, answer_id: str, rewards: Sequence[float]) -> None:
        """Note the rewards of an answer's choices; arguments and errors are those of `Endpoint.reward`."""
        if (answer := self._held.get(answer_id)) is None:
            why = self.why_over(answer_id)
            raise RunError(f"answer {answer_id} {why}" if why else f"there is no answer {answer_id}")
        numbers = [member.reward for member in with_rewards([answer.group], [rewards])[0].members]
        if max(map(abs, numbers)) > MOST_REWARD:
            raise LearnerError(f"rewards must be {-MOST_REWARD:g} to {MOST_REWARD:g}")
        answer.rewards = numbers
        self._rewarded.set()

    async def batches(self) -> AsyncIterator[list[ScoredGroup]]:
        """Yield the groups of each step; see `Endpoint.batches`."""
        size, looks = self._session.config.algorithm.groups_per_step, 0
        while self._session.version < self._session.config.num_steps:
            await self._forget_too_old()
            names = [name for name, one in self._held.items() if one.is_sent and one.rewards is not None][:size]
            if len(names) < size:
                self._rewarded.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._rewarded.wait()
                looks += 1
                if looks % LOOKS_A_STATUS == 0 and (status := await self._session.run.status()).phase in ENDED:
                    raise RunError(f"the run is over ({status.reason}), and no more answers come")
                continue
            answers = [self._held.pop(name) for name in names]
            self._over += [(name, "was given to a step") for name in names]
            groups = [one.group for one in answers]
            try:
                yield with_rewards(groups, [one.rewards or [] for one in answers])
            finally:  # groups that were not trained give their places back
                with contextlib.suppress(RunError):
                    await self._session.release(groups)

    async def forget(self) -> None:
        """Release, in a loop, answers that are too old, and one unrewarded answer for each group that waits for a place."""

        def late() -> list[str]:
            before_s = self._clock.now() - self._unrewarded_s
            return [name for name, one in self._held.items() if one.rewards is None and one.is_sent and one.since_s <= before_s]

        why = f"was not rewarded within {self._unrewarded_s:g} s, and others needed its place"
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            with contextlib.suppress(RunError):  # the run is over, and so are all groups
                await self._forget_too_old()
                num = (await self._session.run.status()).without_place if late() else 0
                await self._release(late()[:num], why)  # oldest first

    async def close(self) -> None:
        """Release everything."""
        with contextlib.suppress(RunError):
            await self._release(list(self._held), "is over: the endpoint was closed")

    async def _forget_too_old(self) -> None:
        old = [name for name, one in self._held.items() if one.is_sent and self._session.is_too_old(one.group)]
        if num := sum(self._held[name].rewards is not None for name in old):
            log.warning("%d rewarded answers are too old by buffer.max_staleness and are not trained", num)
        await self._release(old, "is too old by buffer.max_staleness: newer versions were trained before it was")

    async def _release(self, names: Sequence[str], why: str) -> None:
        groups = [self._held.pop(name).group for name in names if name in self._held]
        self._over += [(name, why) for name in names]
        await self._session.release(groups)
