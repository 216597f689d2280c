"""Data that is sent between prompts, generators, reward workers, the ledger and the learner.

Members of a group that finish together are sent together. A learner gets the samples of one optimizer step, packed in rows.

Arrays are raw little-endian bytes: `token_ids` int32, `logprobs` float32, `versions` int32, `loss_mask` uint8; `ids_to_bytes`
and friends convert. T below is the number of generated (response) tokens of a sample.

A group is one prompt issued once to the generators; it has `group_size` members, numbered from 0. `attempt` counts how often a
member was handed out again (0 at first; more after a generator died). A repeat of a member that the ledger has is harmless.

`gc=False`: there are thousands of these structs, without reference cycles, so the garbage collector need not scan them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.schema.control import Message

FinishReason = Literal["stop", "length", "abort"]
Purpose = Literal["train", "eval"]
Member = tuple[Purpose, int, int]
"""Purpose, group and index."""


class ChatMessage(msgspec.Struct, frozen=True, gc=False):
    """One turn of a chat prompt."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One problem: the model's input, and the data to score its answer."""

    prompt_id: str
    """Stable and unique within the task, `addition/train/4711`."""
    text: str = ""
    """A plain prompt, tokenised as it is; used if `messages` is empty."""
    messages: tuple[ChatMessage, ...] = ()
    """A chat prompt; the model's own template turns it into tokens."""
    token_ids: bytes = b""
    """int32; if given, these are the prompt's tokens, and neither `text` nor `messages` is tokenised."""
    answer: str = ""
    """The reference answer, in the form that the configured rewards understand."""
    reference_json: str = ""
    """Other data that the task's own scorer needs (a reasoning-gym entry, unit tests), as JSON text."""

    @property
    def columns(self) -> dict[str, Any]:
        """The task's other columns by name: of a JSONL task, the whole line; empty where there are none."""
        found = msgspec.json.decode(self.reference_json) if self.reference_json else {}
        return found if isinstance(found, dict) else {}


class PreferenceAnswers(msgspec.Struct, frozen=True):
    """The contents of `Prompt.reference_json` in a preferences task, as JSON."""

    chosen: str
    rejected: str


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How tokens are sampled. Behaviour logprobs are those of the distribution that results from all these settings."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy: the behaviour logprob of every token is then 0."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids in addition to the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Generate exactly `max_new_tokens` tokens (load tests)."""


class GroupWork(Message, frozen=True, gc=False, tag="group_work"):
    """Controller to generator: generate these members of this group."""

    group_id: int
    attempt: int
    prompt: Prompt
    indices: tuple[int, ...]
    """Members still missing; all of them at the first attempt."""
    sampling: SamplingParams
    seed: int
    """The run's seed; a member's own is `derive_seed(seed, group_id, index)`."""
    purpose: Purpose = "train"
    greedy_index: int = -1
    """The member that is decoded greedily, as a baseline (ReMax); -1: none."""
    is_followed: bool = False
    """Whether each member's tokens are sent as they are generated (`Progress`)."""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One finished completion, with everything training needs to know about it."""

    group_id: int
    index: int
    attempt: int
    prompt_ids: bytes
    """int32 token ids of the prompt as the engine saw them."""
    token_ids: bytes
    """int32 [T], exactly the sampled tokens, the stop token included; never re-tokenised from text."""
    logprobs: bytes
    """float32 [T], behaviour log-probability of each token under the sampling distribution."""
    versions: bytes
    """int32 [T], the policy version that sampled each token."""
    finish_reason: FinishReason
    text: str
    """The decoded completion, without special tokens."""
    generator: str
    """Name of the process that made it; outside code gives its own name."""
    started_s: float
    """Clock seconds at submit; with `finished_s`, generation time."""
    finished_s: float
    loss_mask: bytes = b""
    """uint8 [T], 0 on tokens the policy did not write (tool output); empty means all ones."""
    purpose: Purpose = "train"

    @property
    def num_tokens(self) -> int:
        """Return T, the number of response tokens."""
        return len(self.token_ids) // 4


class Samples(Message, frozen=True, gc=False, tag="samples"):
    """Generator to controller: members of one group that finished together; their N tokens are concatenated."""

    group_id: int
    attempt: int
    generator: str
    """Name of the process that made them."""
    prompt_ids: bytes
    """As in `Sample`; the same for all members."""
    indices: tuple[int, ...]
    """Which members they are."""
    lengths: tuple[int, ...]
    """Tokens of each; N in all."""
    token_ids: bytes
    """int32 [N]; this and what follows as in `Sample`."""
    logprobs: bytes
    """float32 [N]."""
    versions: bytes
    """int32 [N]."""
    finish_reasons: tuple[FinishReason, ...]
    texts: tuple[str, ...]
    started_s: float
    finished_s: float
    loss_mask: bytes = b""
    """uint8 [N], or empty: all ones."""
    purpose: Purpose = "train"

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Samples:
        """Return samples of one group and attempt together; the times are those of the first."""
        first, masked = samples[0], any(sample.loss_mask for sample in samples)
        return cls(
            first.group_id, first.attempt, first.generator, first.prompt_ids,
            tuple([sample.index for sample in samples]), tuple([sample.num_tokens for sample in samples]),
            b"".join([sample.token_ids for sample in samples]), b"".join([sample.logprobs for sample in samples]),
            b"".join([sample.versions for sample in samples]), tuple([sample.finish_reason for sample in samples]),
            tuple([sample.text for sample in samples]), first.started_s, first.finished_s,
            b"".join([sample.loss_mask or b"\1" * sample.num_tokens for sample in samples]) if masked else b"", first.purpose,
        )  # fmt: skip

    def members(self) -> list[Sample]:
        """Return each member as a separate sample."""
        samples, start = list[Sample](), 0
        for index, length, finish_reason, text in zip(self.indices, self.lengths, self.finish_reasons, self.texts, strict=True):
            end = start + length
            samples.append(
                Sample(
                    self.group_id, index, self.attempt, self.prompt_ids, self.token_ids[4 * start : 4 * end],
                    self.logprobs[4 * start : 4 * end], self.versions[4 * start : 4 * end], finish_reason, text, self.generator,
                    self.started_s, self.finished_s, self.loss_mask[start:end], self.purpose,
                )
            )  # fmt: skip
            start = end
        return samples


class Progress(Message, frozen=True, gc=False, tag="progress"):
    """Generator to controller: further tokens of a followed member; its `Samples` message comes after the last of them."""

    group_id: int
    index: int
    attempt: int
    start: int
    """Number of this member's tokens sent before; 0 again if it starts again, in a later attempt or with older weights."""
    token_ids: bytes
    """int32 [N], the next N tokens of its sample, unless it starts again."""
    logprobs: bytes
    """float32 [N], as in `Sample`."""


class SampleFailure(Message, frozen=True, tag="sample_failure"):
    """A member that will never be trained, with the reason; data, not a crash."""

    group_id: int
    index: int
    attempt: int
    stage: Literal["generate", "reward"]
    reason: str
    purpose: Purpose = "train"
    kind: str = ""
    """Type and place of the exception (`errors.kind_of`), by which failures are counted. Empty: the reason is used."""
    trace: str = ""
    """The traceback, where there is one."""


class ScoreRequest(Message, frozen=True, gc=False, tag="score_request"):
    """Controller to reward worker: score these completions of one prompt; the answer is one `Scores`."""

    group_id: int
    attempt: int
    prompt: Prompt
    indices: tuple[int, ...]
    """Which members of the group they are."""
    texts: tuple[str, ...]
    finish_reasons: tuple[FinishReason, ...]
    lengths: tuple[int, ...]
    """Tokens of each."""
    purpose: Purpose = "train"
    timeout_s: float | None = None
    """The time limit of each, for a connected program; None: reward workers read the config."""

    @classmethod
    def of(cls, prompt: Prompt, samples: Sequence[Sample]) -> ScoreRequest:
        """Return the request for samples of one group."""
        first = samples[0]
        return cls(
            first.group_id, first.attempt, prompt, tuple([sample.index for sample in samples]),
            tuple([sample.text for sample in samples]), tuple([sample.finish_reason for sample in samples]),
            tuple([sample.num_tokens for sample in samples]), first.purpose,
        )  # fmt: skip


class Score(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The score of one member, or why there is none."""

    index: int
    reward: float
    """The weighted sum; 0.0 and meaningless where `error` is set."""
    parts: dict[str, float] = {}
    """Each configured reward by name, unweighted."""
    error: str = ""
    """Empty, or why the sample is failed: the reward raised, timed out, or its process died."""
    reference_logprobs: bytes = b""
    """float32 [T], from an inference worker's reference model; empty where the run has none there."""
    error_kind: str = ""
    """As `SampleFailure.kind`, of `error`."""
    trace: str = ""
    """As `SampleFailure.trace`."""
    over_limit: str = ""
    """The function that exceeded its time or memory on this sample, and therefore counts 0; empty: none."""


class Scores(Message, frozen=True, gc=False, tag="scores"):
    """Reward worker to controller: the scores for one request."""

    group_id: int
    attempt: int
    scores: tuple[Score, ...]
    worker: str = ""
    started_s: float = 0.0
    finished_s: float = 0.0
    purpose: Purpose = "train"


class InferRequest(Message, frozen=True, gc=False, tag="infer_request"):
    """Controller to inference worker: run the named models over this completion, forward only."""

    group_id: int
    index: int
    attempt: int
    prompt_ids: bytes
    """int32."""
    token_ids: bytes
    """int32 [T]."""
    temperature: float = 1.0
    """Temperature at which the tokens were sampled; the reference divides its logits by it."""
    purpose: Purpose = "train"


class InferResult(Message, frozen=True, gc=False, tag="infer_result"):
    """Inference worker to controller: the results of its models, or why there are none."""

    group_id: int
    index: int
    attempt: int
    reference_logprobs: bytes = b""
    """float32 [T]; empty where the run has no reference there."""
    rewards: dict[str, float] = {}
    """Each reward model by name, normalised, unweighted."""
    error: str = ""
    worker: str = ""
    started_s: float = 0.0
    finished_s: float = 0.0
    purpose: Purpose = "train"


class ScoredSample(msgspec.Struct, frozen=True, gc=False):
    """A sample with its reward: what the buffer holds and packing reads."""

    sample: Sample
    reward: float
    parts: dict[str, float] = {}
    reference_logprobs: bytes = b""
    """float32 [T], or empty."""


class ScoredGroup(Message, frozen=True, tag="scored_group"):
    """All scored members of one group, by index; failed members are absent."""

    group_id: int
    prompt: Prompt
    members: tuple[ScoredSample, ...]


# -- one step's worth of samples, packed, and what became of it ------------------------------------------------------------
# A row is one micro-batch: several whole samples laid end to end, L tokens. Position t of `behaviour_logprobs`, `versions` and
# `loss_mask` belongs to token t itself (not to the next one); prompt tokens have mask 0, version -1, logprob 0.


class PackedSample(msgspec.Struct, frozen=True):
    """The position of one sample in the batch, and the data needed to compute its advantage."""

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
    """Whether it is its group's greedy baseline (ReMax): its reward counts, but none of its tokens is trained."""
    pair: int = -1
    """Number of the preference pair it belongs to, within the batch; -1: none."""
    is_chosen: bool = False
    """Whether it is the better one of its pair."""


class PackedRow(msgspec.Struct, frozen=True):
    """L tokens of complete samples, concatenated. All arrays are little-endian."""

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
    """Temperature at which the samples were generated; the learner divides its logits by it."""
    settings: dict[str, float | int | None] = {}
    """Config values that the learner reads again at each step, by field; missing fields: as at its start."""


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
    """Tokens of versions below this one are too old to train (`buffer.policy = "mask"`)."""


# -- seeds and arrays ----------------------------------------------------------------------------------------------------------


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else.

    Args:
        parts: For a sample: run seed, group id, member index. The attempt is left out on purpose: the same request under the
            same weights gives the same tokens.

    Returns:
        An integer in [0, 2^63).
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def ids_to_bytes(ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Return token ids or versions as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(raw: bytes | memoryview) -> NDArray[np.int32]:
    """Return a read-only int32 view of `raw`, without a copy."""
    return np.frombuffer(raw, dtype="<i4")


def logprobs_to_bytes(logprobs: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Return log-probabilities as little-endian float32 bytes."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def logprobs_from_bytes(raw: bytes | memoryview) -> NDArray[np.float32]:
    """Return a read-only float32 view of `raw`, without a copy."""
    return np.frombuffer(raw, dtype="<f4")


def mask_from_bytes(raw: bytes | memoryview, num_tokens: int) -> NDArray[np.uint8]:
    """Return the loss mask [T]; empty bytes mean every token counts."""
    return np.frombuffer(raw, dtype=np.uint8) if len(raw) else np.ones(num_tokens, dtype=np.uint8)
