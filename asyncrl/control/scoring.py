"""A sample's score: asked of rules (reward workers) and models (inference workers) at once, complete when both have answered.

Owns what is asked and not yet answered. Invariants:
- A member has at most one score outstanding; asking again for it changes nothing, and neither does an answer that comes twice.
- A half is waiting for a worker with room, out at one, or answered; what a dead worker held is asked again, first of all, and
  given up (the sample fails) once `MOST_LOSSES` workers died with it.
- A score is complete when every half that was asked has answered: its reward is the rules' sum plus weight x each reward model's
  score, and an error of either half fails the sample with both reasons.

A half that has answered lives in memory only: the ledger lists the member as unscored until both have, and a resume asks both
again. Nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from asyncrl.control.peers import Peer, Peers
from asyncrl.schema.samples import InferRequest, InferResult, Purpose, Sample, Score, ScoreRequest

MOST_LOSSES = 3
ScoreKey = tuple[Purpose, int, int]
JudgeKind = Literal["reward", "inference"]

R = TypeVar("R", ScoreRequest, InferRequest)


class RequestQueue(Generic[R]):
    """Requests to the workers of one kind: waiting for one with room, or out at one."""

    def __init__(self) -> None:
        self._waiting: deque[R] = deque()
        self._out: dict[ScoreKey, tuple[str, R]] = {}
        self._lost: dict[ScoreKey, list[str]] = {}
        """Workers that were taken for dead while they held it."""

    def __len__(self) -> int:
        """Return how many requests are not answered yet."""
        return len(self._waiting) + len(self._out)

    def ask(self, request: R) -> None:
        """Add a request; `dispatch` sends it."""
        self._waiting.append(request)

    def dispatch(self, workers: list[Peer]) -> None:
        """Send waiting requests, oldest first, to the worker with the least to do, while one has room."""
        while self._waiting and workers:
            by_load = sorted(workers, key=lambda peer: peer.connection.unacknowledged())
            worker = next((peer for peer in by_load if peer.offer(self._waiting[0])), None)
            if worker is None:
                return
            request = self._waiting.popleft()
            self._out[key_of(request)] = (worker.name, request)

    def close(self, key: ScoreKey) -> None:
        """Let go of an answered request, wherever it is: its worker may have been taken for dead just before it answered."""
        self._lost.pop(key, None)
        if self._out.pop(key, None) is None:
            self._waiting = deque(request for request in self._waiting if key_of(request) != key)

    def was_asked(self, key: ScoreKey, worker: str) -> bool:
        """Return whether this worker holds the request, or was taken for dead while it did."""
        return self._out.get(key, ("", None))[0] == worker or worker in self._lost.get(key, ())

    def worker_lost(self, name: str) -> list[R]:
        """Ask again, first of all, what a dead worker had not answered; return what is given up instead."""
        lost = [key for key, (worker, _) in self._out.items() if worker == name]
        given_up: list[R] = []
        for key in reversed(lost):
            request = self._out.pop(key)[1]
            self._lost.setdefault(key, []).append(name)
            if len(self._lost[key]) < MOST_LOSSES:
                self._waiting.appendleft(request)
            else:
                del self._lost[key]
                given_up.append(request)
        return given_up


@dataclass(slots=True)
class _Pending:
    """A score that is not complete."""

    asked_s: float
    awaits_rules: bool
    awaits_models: bool
    rules: Score | None = None
    models: InferResult | None = None


class ScoreDispatcher:
    """Scores asked for and not complete.

    Args:
        weights: Of each reward model, by name.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._pending: dict[ScoreKey, _Pending] = {}
        self._rules: RequestQueue[ScoreRequest] = RequestQueue()
        self._models: RequestQueue[InferRequest] = RequestQueue()

    def __len__(self) -> int:
        """Return how many scores are not complete."""
        return len(self._pending)

    def num_open(self, kind: JudgeKind) -> int:
        """Return how many requests the workers of one kind have not answered."""
        return len(self._rules if kind == "reward" else self._models)

    def open_since_s(self, kind: JudgeKind) -> float | None:
        """Return since when the oldest of them is waited for; None where there is none."""
        attribute = "awaits_rules" if kind == "reward" else "awaits_models"
        return min((pending.asked_s for pending in self._pending.values() if getattr(pending, attribute)), default=None)

    def ask(self, rules: ScoreRequest | None, models: InferRequest | None, now: float) -> None:
        """Ask for a sample's score, of the rules, of the models, or of both; `dispatch` sends the requests."""
        request = rules or models
        assert request is not None, "a score is asked of somebody"
        if key_of(request) in self._pending:
            return
        self._pending[key_of(request)] = _Pending(now, rules is not None, models is not None)
        if rules is not None:
            self._rules.ask(rules)
        if models is not None:
            self._models.ask(models)

    def dispatch(self, peers: Peers) -> None:
        """Send what can be sent."""
        self._rules.dispatch(peers.of("reward"))
        self._models.dispatch(peers.of("inference"))

    def refusal(self, answer: Score | InferResult, worker: str) -> str:
        """Return why this answer of this worker cannot be taken, or nothing; a repeated answer can, and changes nothing."""
        key, is_rules = key_of(answer), isinstance(answer, Score)
        pending = self._pending.get(key)
        if pending is None or not (pending.awaits_rules if is_rules else pending.awaits_models):
            return ""
        if not (self._rules if is_rules else self._models).was_asked(key, worker):
            return f"g{answer.group_id}.{answer.index} was asked of another worker"
        if isinstance(answer, InferResult) and not answer.error and answer.rewards.keys() != self._weights.keys():
            return f"it judges by {sorted(answer.rewards)}, and the run by {sorted(self._weights)}"
        return ""

    def take(self, answer: Score | InferResult) -> Score | None:
        """Take one half in; return the score where it is complete now, None where it is not or the answer is not awaited."""
        key, is_rules = key_of(answer), isinstance(answer, Score)
        pending = self._pending.get(key)
        if pending is None or not (pending.awaits_rules if is_rules else pending.awaits_models):
            return None
        (self._rules if is_rules else self._models).close(key)
        return self._settle(key, answer)

    def worker_lost(self, name: str) -> list[Score]:
        """Ask again what a dead worker had not answered; return the scores that are complete because a half is given up."""
        reason = f"{MOST_LOSSES} workers died while they held this sample, the last was {name}"
        complete = []
        for request in self._rules.worker_lost(name):
            failed = Score(request.group_id, request.index, request.attempt, 0.0, error=reason, purpose=request.purpose)
            complete.append(self._settle(key_of(request), failed))
        for wanted in self._models.worker_lost(name):
            unjudged = InferResult(wanted.group_id, wanted.index, wanted.attempt, error=reason, purpose=wanted.purpose)
            complete.append(self._settle(key_of(wanted), unjudged))
        return [score for score in complete if score is not None]

    def _settle(self, key: ScoreKey, answer: Score | InferResult) -> Score | None:
        pending = self._pending[key]
        if isinstance(answer, Score):
            pending.rules, pending.awaits_rules = answer, False
        else:
            pending.models, pending.awaits_models = answer, False
        if pending.awaits_rules or pending.awaits_models:
            return None
        del self._pending[key]
        return merge_score(pending.rules, pending.models, self._weights)


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
    if rules is None:
        return Score(
            models.group_id, models.index, models.attempt, reward, dict(models.rewards), models.error, models.worker,
            models.started_s, models.finished_s, models.purpose, models.reference_logprobs,
        )  # fmt: skip
    return Score(
        rules.group_id,
        rules.index,
        rules.attempt,
        rules.reward + reward,
        {**rules.parts, **models.rewards},
        "; ".join(error for error in (rules.error, models.error) if error),
        "+".join(worker for worker in (rules.worker, models.worker) if worker),
        min(rules.started_s, models.started_s),
        max(rules.finished_s, models.finished_s),
        rules.purpose,
        models.reference_logprobs,
        rules.error_kind,
        rules.trace,
    )


def infer_request(sample: Sample, temperature: float) -> InferRequest:
    """Return the message that asks an inference worker about a sample.

    Args:
        sample: With its tokens.
        temperature: Of the run's sampling: the learner divides its logits by it, and so must the reference.
    """
    return InferRequest(
        sample.group_id, sample.index, sample.attempt, sample.prompt_ids, sample.token_ids, temperature, sample.purpose
    )


def key_of(message: ScoreRequest | InferRequest | Score | InferResult) -> ScoreKey:
    """Return which member a request or an answer is about."""
    return (message.purpose, message.group_id, message.index)
