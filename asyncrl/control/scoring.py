"""Scores of samples: requested from rules (reward workers) and models (inference workers) at once, complete when both answered.

Owns the open requests. Invariants:
- A member has at most one open score; a second request for it changes nothing, and neither does a repeated answer.
- A request waits for a worker with room, is at a worker, or is answered, for all its members together. The requests of a dead
  worker are sent again before all others, and fail their samples once `MOST_LOSSES` workers died with them.
- A score's reward is the rules' sum plus weight x score of each reward model. An error in either half fails the sample, with both
  reasons.

A half that has been answered is kept in memory only: in the ledger the member is unscored until both halves are answered, and a
resume requests both again. Nothing here waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from asyncrl.control.lifecycle.failure_watch import SLOW_SCORE_S, Wait
from asyncrl.control.peers import Peers
from asyncrl.errors import RunError
from asyncrl.schema.samples import InferRequest, InferResult, Member, Score, ScoreRequest, Scores

MOST_LOSSES = 3
JudgeKind = Literal["reward", "inference"]
JUDGES: tuple[JudgeKind, JudgeKind] = ("reward", "inference")


@dataclass(slots=True, eq=False)
class _Asked:
    """An open request to a worker."""

    request: ScoreRequest | InferRequest
    members: list[Member]
    asked_s: float
    worker: str = ""
    """The worker that has it; empty: it waits for one."""
    lost: tuple[str, ...] = ()
    """Workers that died, or were thought dead, while they held it."""


@dataclass(slots=True)
class Caller:
    """The program that scores instead of reward workers (`kind = "caller"`), one at a time."""

    patience_s: float
    """A program that sends nothing for this long counts as lost, and another may take over."""
    heard_s: float
    """Time of its last request; before the first program: since when the run waits for one."""
    name: str = ""

    def is_lost(self, now: float) -> bool:
        """Return whether no program scores now."""
        return not self.name or now - self.heard_s > self.patience_s

    def heard(self, name: str, now: float) -> None:
        """Note a request of a program.

        Raises:
            RunError: Another program scores already.
        """
        if name != self.name and not self.is_lost(now):
            raise RunError("another program judges for this run; one may take over when that is silent (heartbeat_timeout_s)")
        self.name, self.heard_s = name, now


class ScoreDispatcher:
    """Scores that are requested and not complete.

    Args:
        weights: Weight of each reward model, by name.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self.open: dict[JudgeKind, dict[Member, _Asked]] = {kind: {} for kind in JUDGES}
        """Open requests of each kind, in the order of the requests."""
        self._answered: dict[Member, Scores] = {}
        """By member, the answered half of a score whose other half is open."""
        self._waiting: dict[JudgeKind, deque[_Asked]] = {kind: deque() for kind in JUDGES}
        """Requests in the order of sending; those answered meanwhile are skipped."""

    def __len__(self) -> int:
        """Return how many scores are not complete."""
        rules, models = self.open.values()
        return len(rules.keys() | models.keys() if models else rules)

    def ask(self, *requests: ScoreRequest | InferRequest, now: float) -> None:
        """Request scores of samples from rules, models, or both; `dispatch` sends the requests."""
        asked = [(_judge(request), _Asked(request, members_of(request), now)) for request in requests]
        asked = [(kind, each) for kind, each in asked if each.members[0] not in self.open[kind]]
        for kind, each in asked:
            self.open[kind].update(dict.fromkeys(each.members, each))
            self._waiting[kind].append(each)

    def dispatch(self, peers: Peers) -> None:
        """Send waiting requests, oldest first, to the least loaded worker, while one has room."""
        for kind, waiting in self._waiting.items():
            by_load = [(peer.connection.unacknowledged(), place, peer) for place, peer in enumerate(peers.of(kind))]
            heapq.heapify(by_load)
            while waiting and by_load:
                asked = waiting[0]
                if not asked.worker and self.open[kind].get(asked.members[0]) is asked:
                    load, place, worker = by_load[0]
                    if not worker.offer(asked.request):
                        heapq.heappop(by_load)
                        continue
                    heapq.heapreplace(by_load, (load + 1, place, worker))
                    asked.worker = worker.name
                waiting.popleft()

    def hand_out(self, caller: str, held: Container[Member], most: int) -> list[ScoreRequest]:
        """Return to a scoring program the oldest requests that it does not hold."""
        self._waiting["reward"].clear()
        given = list[ScoreRequest]()
        for asked in dict.fromkeys(self.open["reward"].values()):
            if len(given) < most and not (asked.worker == caller and asked.members[0] in held):
                assert isinstance(asked.request, ScoreRequest)
                asked.worker = caller
                given.append(asked.request)
        return given

    def waits(self, kinds: Sequence[JudgeKind], peers: Peers, caller: str, now: float) -> list[Wait]:
        """Return the controller's wait for each kind of worker whose oldest answer is slow to come.

        Args:
            kinds: Kinds that may work now.
            peers: The connected processes; the waits name the workers among them.
            caller: Name of the program that scores instead of reward workers; empty: there is none.
            now: The time.
        """
        waits = []
        for kind in kinds:
            since_s = next((asked.asked_s for asked in self.open[kind].values()), now)
            if now - since_s > SLOW_SCORE_S:
                names = ", ".join(peer.name for peer in peers.of(kind)) or f"{kind} workers, but none is connected"
                names = caller if kind == "reward" and caller else names
                waits.append(Wait("controller", f"{len(self.open[kind])} answers of {names}", since_s))
        return waits

    def refusal(self, answer: Scores | InferResult, worker: str) -> str:
        """Return why this worker's answer is refused, or nothing; a repeated answer is accepted and changes nothing."""
        members = members_of(answer)
        requests = {asked for member in members if (asked := self.open[_judge(answer)].get(member)) is not None}
        if not members or any(asked.members != members for asked in requests):
            return f"group {answer.group_id}: its members are not those of a request"
        for asked in requests:
            if worker != asked.worker and worker not in asked.lost:
                return f"g{answer.group_id}.{members[0][2]} was asked of another worker"
        if requests and isinstance(answer, InferResult):
            expected = set() if answer.error else self._weights.keys()
            if answer.rewards.keys() != expected:
                return f"it judges by {sorted(answer.rewards)}, expected are {sorted(expected)}"
        return ""

    def take(self, answer: Scores | InferResult) -> Scores | None:
        """Enter one half; return the scores that are complete now, or None if there are none or the answer is not awaited."""
        members, is_rules = members_of(answer), isinstance(answer, Scores)
        own, other = (self.open[kind] for kind in (JUDGES if is_rules else JUDGES[::-1]))
        if members[0] not in own:
            return None
        for member in members:
            del own[member]
        if isinstance(answer, Scores):
            scores = answer
        else:
            reward = sum(self._weights[name] * value for name, value in answer.rewards.items())
            score = Score(answer.index, reward, answer.rewards, answer.error, answer.reference_logprobs)
            times = answer.started_s, answer.finished_s
            scores = Scores(answer.group_id, answer.attempt, (score,), answer.worker, *times, answer.purpose)
        complete, halves = [], [scores]
        for member, score in zip(members, scores.scores, strict=True):
            if member in other:
                self._answered[member] = msgspec.structs.replace(scores, scores=(score,))
            elif half := self._answered.pop(member, None):
                halves.insert(0 if not is_rules else 1, half)
                complete.append(_merge(score, half.scores[0]) if is_rules else _merge(half.scores[0], score))
            else:
                complete.append(score)
        if not complete:
            return None
        return msgspec.structs.replace(
            scores,
            scores=tuple(complete),
            worker="+".join(dict.fromkeys(half.worker for half in halves if half.worker)),
            started_s=min(half.started_s for half in halves),
            finished_s=max(half.finished_s for half in halves),
        )

    def worker_lost(self, name: str) -> list[Scores]:
        """Request again what a dead worker had not answered; return scores that are complete because a half is given up."""
        reason = f"{MOST_LOSSES} workers died while they held this sample, the last was {name}"
        complete = []
        for kind, requests in self.open.items():
            for asked in reversed(list(dict.fromkeys(each for each in requests.values() if each.worker == name))):
                asked.worker = ""
                asked.lost += (name,)
                if len(asked.lost) < MOST_LOSSES:
                    self._waiting[kind].appendleft(asked)
                    continue
                request = asked.request
                failed = tuple(Score(index, 0.0, error=reason) for _, _, index in asked.members)
                complete.append(
                    self.take(
                        Scores(request.group_id, request.attempt, failed, purpose=request.purpose)
                        if isinstance(request, ScoreRequest)
                        else InferResult(request.group_id, request.index, request.attempt, error=reason, purpose=request.purpose)
                    )
                )
        return [scores for scores in complete if scores is not None]


def _judge(message: ScoreRequest | InferRequest | Scores | InferResult) -> JudgeKind:
    return "reward" if isinstance(message, ScoreRequest | Scores) else "inference"


def _merge(rules: Score, models: Score) -> Score:
    """Return the score of a sample from its two halves: rewards and parts are added, reasons joined."""
    return msgspec.structs.replace(
        rules,
        reward=rules.reward + models.reward,
        parts={**rules.parts, **models.parts},
        error="; ".join(half.error for half in (rules, models) if half.error),
        reference_logprobs=models.reference_logprobs,
    )


def members_of(message: ScoreRequest | InferRequest | Scores | InferResult) -> list[Member]:
    """Return which members a request or an answer is about."""
    if isinstance(message, Scores):
        indices: Sequence[int] = [score.index for score in message.scores]
    else:
        indices = message.indices if isinstance(message, ScoreRequest) else (message.index,)
    return [(message.purpose, message.group_id, index) for index in indices]
