"""The buffer as the controller sees it. (Signatures first; bodies follow.)

Every method returns at once. `on_committed` is called on the event loop once the ledger holds what the call recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.buffer.events import BufferInstruction
from asyncrl.schema.samples import Prompt, Sample, SampleFailure, Score, ScoredGroup, ScoreRequest

OnCommitted = Callable[[], None]


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """What a GroupWork message needs besides sampling parameters and seed."""

    group_id: int
    attempt: int
    prompt: Prompt
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a sample, a score or a failure. `stored` and `refused` may carry instructions; ack in every case."""

    status: Literal["stored", "duplicate", "refused"]
    reason: str = ""
    instructions: Sequence[BufferInstruction] = ()


@dataclass(frozen=True, slots=True)
class StalenessFigures:
    """See buffer/staleness.py."""


@dataclass(frozen=True, slots=True)
class TakenStep:
    """One step's groups, to be packed: packing.tensors.pack_step(step, groups, ...)."""

    step: int
    groups: tuple[ScoredGroup, ...]
    mask_below: int
    tokens_per_row: int
    temperature: float
    replay: bool
    staleness: StalenessFigures
    instructions: Sequence[BufferInstruction] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why there is no step yet."""

    step: int
    reason: str
    group_ids: tuple[int, ...] = ()
    instructions: Sequence[BufferInstruction] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """Groups per state; `issued` is the sum of all."""

    issued: int
    running: int
    scoring: int
    ready: int
    taken: int
    trained: int
    dropped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


class Buffer:
    """State, ledger and payloads joined."""

    def issue(self, prompt: Prompt, generator: str, version: int, now: float, *, cursor: int = 0) -> WorkOrder: ...
    def reissue(self, group_id: int, generator: str, version: int, now: float) -> WorkOrder | None: ...
    def add_sample(self, sample: Sample, now: float, on_committed: OnCommitted | None = None) -> Receipt: ...
    def add_score(self, score: Score, now: float, on_committed: OnCommitted | None = None) -> Receipt: ...
    def add_failure(self, failure: SampleFailure, now: float, on_committed: OnCommitted | None = None) -> Receipt: ...
    def submit_group(self, prompt: Prompt, samples: Sequence[Sample], submitter: str, now: float) -> Receipt: ...
    def score_request(self, group_id: int, index: int) -> ScoreRequest: ...
    def outstanding_scores(self) -> list[ScoreRequest]: ...
    def version_published(self, version: int) -> None: ...
    def take(self, step: int, now: float, on_committed: OnCommitted | None = None) -> TakenStep | Waiting: ...
    def mark_trained(self, step: int, now: float, on_committed: OnCommitted | None = None) -> Sequence[BufferInstruction]: ...
    def learner_restarted(self, version: int, now: float) -> tuple[int, ...]: ...
    def generator_lost(self, name: str, now: float) -> Sequence[BufferInstruction]: ...
    def next_returned_prompt(self) -> Prompt | None: ...
    def forget(self, before_step: int) -> None: ...
    def counts(self) -> Counts: ...
    def check(self) -> None: ...
    async def flush(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...
