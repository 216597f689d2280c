"""A sample's score: asked of rules (reward workers) and models (inference workers) at once, complete when both have answered.

Owns what is asked and not yet answered. Invariants:
- A member has at most one score outstanding; asking again for it changes nothing, and neither does an answer that comes twice.
- A half is waiting for a worker with room, out at one, or answered. What a dead worker held is asked again, first of all, and
  given up (the sample fails) once `MOST_LOSSES` workers died with it.
- A score's reward is the rules' sum plus weight x each reward model's score. An error of either half fails the sample with both
  reasons.

A half that has answered lives in memory only: the ledger lists the member as unscored until both have, and a resume asks both
again. Nothing here waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from asyncrl.control.peers import Peers
from asyncrl.schema.samples import InferRequest, InferResult, Purpose, Score, ScoreRequest

MOST_LOSSES = 3
ScoreKey = tuple[Purpose, int, int]
JudgeKind = Literal["reward", "inference"]
JUDGES: tuple[JudgeKind, JudgeKind] = ("reward", "inference")


@dataclass(slots=True)
class _Half:
    """What the workers of one kind are asked about a sample and have not answered."""

    request: ScoreRequest | InferRequest
    asked_s: float
    worker: str = ""
    """Who has it; empty: it waits."""
    lost: tuple[str, ...] = ()
    """Workers that were taken for dead while they held it."""


class ScoreDispatcher:
    """Scores asked for and not complete.

    Args:
        weights: Of each reward model, by name.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._open: dict[JudgeKind, dict[ScoreKey, _Half]] = {kind: {} for kind in JUDGES}
        """In the order they were asked for."""
        self._answered: dict[ScoreKey, Score | InferResult] = {}
        """Halves whose other half is open."""
        self._waiting: dict[JudgeKind, deque[ScoreKey]] = {kind: deque() for kind in JUDGES}
        """In the order they are sent; what was answered meanwhile is passed over."""

    def __len__(self) -> int:
        """Return how many scores are not complete."""
        rules, models = self._open.values()
        return len(rules.keys() | models.keys() if models else rules)

    def num_open(self, kind: JudgeKind) -> int:
        """Return how many requests the workers of this kind have not answered."""
        return len(self._open[kind])

    def open_since_s(self, kind: JudgeKind) -> float | None:
        """Return since when the oldest open request to this kind is waited for; None where there is none."""
        return next((half.asked_s for half in self._open[kind].values()), None)

    def ask(self, rules: ScoreRequest | None, models: InferRequest | None, now: float) -> None:
        """Ask for a sample's score, of the rules, of the models, or of both; `dispatch` sends the requests."""
        request = rules or models
        assert request is not None, "a score has at least one half"
        key = key_of(request)
        if key in self._open["reward"] or key in self._open["inference"]:
            return
        for kind, half in zip(JUDGES, (rules, models), strict=True):
            if half is not None:
                self._open[kind][key] = _Half(half, now)
                self._waiting[kind].append(key)

    def dispatch(self, peers: Peers) -> None:
        """Send waiting requests, oldest first, to the worker with the least to do, while one has room."""
        for kind, waiting in self._waiting.items():
            halves = self._open[kind]
            by_load = [(peer.connection.unacknowledged(), place, peer) for place, peer in enumerate(peers.of(kind))]
            heapq.heapify(by_load)
            while waiting and by_load:
                half = halves.get(waiting[0])
                if half is not None and not half.worker:
                    load, place, worker = by_load[0]
                    if not worker.offer(half.request):
                        heapq.heappop(by_load)
                        continue
                    heapq.heapreplace(by_load, (load + 1, place, worker))
                    half.worker = worker.name
                waiting.popleft()

    def refusal(self, answer: Score | InferResult, worker: str) -> str:
        """Return why this answer of this worker cannot be taken, or nothing; a repeated answer can, and changes nothing."""
        half = self._open[_judge(answer)].get(key_of(answer))
        if half is None:
            return ""
        if worker != half.worker and worker not in half.lost:
            return f"g{answer.group_id}.{answer.index} was asked of another worker"
        if isinstance(answer, InferResult):
            expected = set() if answer.error else self._weights.keys()
            if answer.rewards.keys() != expected:
                return f"it judges by {sorted(answer.rewards)}, expected are {sorted(expected)}"
        return ""

    def take(self, answer: Score | InferResult) -> Score | None:
        """Take one half in; return the score where it is complete now, None where it is not or the answer is not awaited."""
        kind, key = _judge(answer), key_of(answer)
        if self._open[kind].pop(key, None) is None:
            return None
        if key in self._open["inference" if kind == "reward" else "reward"]:
            self._answered[key] = answer
            return None
        other = self._answered.pop(key, None)
        if isinstance(answer, Score):
            assert not isinstance(other, Score), "one half is of each kind"
            return merge_score(answer, other, self._weights)
        assert not isinstance(other, InferResult), "one half is of each kind"
        return merge_score(other, answer, self._weights)

    def worker_lost(self, name: str) -> list[Score]:
        """Ask again what a dead worker had not answered; return the scores that are complete because a half is given up."""
        reason = f"{MOST_LOSSES} workers died while they held this sample, the last was {name}"
        complete = []
        for kind, halves in self._open.items():
            for key, half in reversed([item for item in halves.items() if item[1].worker == name]):
                half.worker = ""
                half.lost += (name,)
                if len(half.lost) < MOST_LOSSES:
                    self._waiting[kind].appendleft(key)
                    continue
                of = (*key[1:], half.request.attempt)
                complete.append(
                    self.take(
                        Score(*of, 0.0, error=reason, purpose=key[0])
                        if kind == "reward"
                        else InferResult(*of, error=reason, purpose=key[0])
                    )
                )
        return [score for score in complete if score is not None]


def _judge(answer: Score | InferResult) -> JudgeKind:
    return "reward" if isinstance(answer, Score) else "inference"


def merge_score(rules: Score | None, models: InferResult | None, weights: Mapping[str, float]) -> Score:
    """Join what the rules and the models say about a sample; at least one of them is there.

    Args:
        rules: The rules' weighted sum and parts.
        models: Each reward model's normalised score, and the reference's log-probabilities.
        weights: Of the reward models.

    Returns:
        The sample's score: sums and parts added, reasons joined, from the first beginning to the last end.
    """
    if models is None:
        assert rules is not None, "a score has at least one half"
        return rules
    reward = sum(weights[name] * value for name, value in models.rewards.items())
    halves = [half for half in (rules, models) if half is not None]
    return Score(
        models.group_id,
        models.index,
        models.attempt,
        reward + (rules.reward if rules else 0.0),
        {**(rules.parts if rules else {}), **models.rewards},
        "; ".join(half.error for half in halves if half.error),
        "+".join(half.worker for half in halves if half.worker),
        min(half.started_s for half in halves),
        max(half.finished_s for half in halves),
        models.purpose,
        models.reference_logprobs,
        *((rules.error_kind, rules.trace, rules.over_limit) if rules else ()),
    )


def key_of(message: ScoreRequest | InferRequest | Score | InferResult) -> ScoreKey:
    """Return which member a request or an answer is about."""
    return (message.purpose, message.group_id, message.index)
