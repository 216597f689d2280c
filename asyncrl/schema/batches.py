"""What travels between the controller and the learner: one optimizer step's worth of packed samples, and what became of it.

A row is one micro-batch: several whole samples laid end to end, L tokens. Position t of `behaviour_logprobs`, `versions` and
`loss_mask` belongs to token t itself (not to the next one); prompt tokens have mask 0, version -1, logprob 0.
"""

from __future__ import annotations

import msgspec

from asyncrl.schema.control import Message
from asyncrl.schema.samples import ScoredGroup


class PackedSample(msgspec.Struct, frozen=True):
    """Where one sample lies in the batch, and what advantage computation needs of it."""

    group_id: int
    index: int
    row: int
    start: int
    """Offset of its first prompt token in the row."""
    prompt_tokens: int
    response_tokens: int
    """Tokens after the prompt, tool output included."""
    reward: float
    oldest_version: int
    """The smallest version among its trained tokens."""
    is_greedy: bool = False
    """The greedy baseline of its group (ReMax): its reward counts, none of its tokens is trained."""
    pair: int = -1
    """Number of the preference pair it belongs to, within the batch; -1: none."""
    is_chosen: bool = False
    """Whether it is the better one of its pair."""


class PackedRow(msgspec.Struct, frozen=True):
    """L tokens of whole samples, end to end. All arrays little-endian."""

    token_ids: bytes
    """int32 [L]."""
    loss_mask: bytes
    """uint8 [L], 1 on the tokens that are trained."""
    behaviour_logprobs: bytes
    """float32 [L]."""
    versions: bytes
    """int32 [L]."""
    rank: int = 0
    """Learner rank that trains this row."""
    reference_logprobs: bytes = b""
    """float32 [L], 0 on prompt tokens; empty where the batch brings none."""


class StepBatch(Message, frozen=True, tag="step_batch"):
    """Controller to learner: train exactly this at optimizer step `step`, which makes version `step + 1`."""

    step: int
    samples: tuple[PackedSample, ...]
    rows: tuple[PackedRow, ...]
    num_trained_tokens: int
    """Sum of the loss masks over all rows and ranks: the denominator of a token mean."""
    temperature: float
    """That the samples were drawn at; the learner divides its logits by it."""
    replay: bool = False
    """True when this step was trained before on this line of checkpoints and is repeated after a crash."""
    settings: dict[str, float | int | None] = {}
    """What the learner reads anew at each step, by field of the config; left out: as it was started with."""


class StepDone(Message, frozen=True, tag="step_done"):
    """Learner to controller: the optimizer step is done and its version exists."""

    step: int
    version: int
    """`step + 1`."""
    metrics: dict[str, float]
    started_s: float
    finished_s: float
    waited_s: float = 0.0
    """How long the learner had nothing to train before this step."""


class GroupsTaken(Message, frozen=True, tag="groups_taken"):
    """Controller to an outside learner: one step's worth of scored groups, oldest first."""

    step: int
    groups: tuple[ScoredGroup, ...]
    mask_below: int = 0
    """Tokens of a version under this one are too old to train (`buffer.policy = "mask"`)."""
