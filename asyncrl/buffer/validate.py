"""The checks that every sample and score must pass before the buffer accepts it, whatever process made it.

Pure; they run on the controller's event loop, so they must take only microseconds: samples that arrive together are checked
together, and one by one only if something is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from asyncrl.algorithms.screening import Screen
from asyncrl.buffer.events import VersionCounts
from asyncrl.schema.samples import Progress, Sample, Samples, Score, ids_from_bytes, logprobs_from_bytes

LOGPROB_SLACK = 1e-3
"""Log-probabilities may exceed 0 by this much: rounding of a log-softmax in low precision."""
FEW_TOKENS = 128
"""Up to this many tokens, versions are counted faster without numpy."""
MAX_ATTEMPT = 2**31 - 1
MAX_ID = 2**31
MAX_TEXT, MAX_TEXT_PER_TOKEN = 1 << 20, 256
"""Maximum number of characters of a sample's text: this many, and this many more per token."""


def examine(samples: Samples, *, newest_version: int, max_tokens: int = 0, vocab_size: int = 0) -> list[VersionCounts | str]:
    """Check samples that arrived together and count their trained tokens by version.

    Args:
        samples: As received.
        newest_version: The newest published version; no token can have a later one.
        max_tokens: Maximum number of tokens of prompt and response together; 0: no limit.
        vocab_size: The model's vocabulary size; 0: not known.

    Returns:
        For each sample, version counts over the tokens with loss mask 1; or why it is refused: lengths disagree, a value is
        impossible, or there is nothing to train.
    """
    num, lengths = len(samples.indices), samples.lengths
    if fault := shape_fault(samples):
        return [fault] * num
    versions, first = samples.versions, int.from_bytes(samples.versions[:4], "little", signed=True)
    room = max_tokens - len(samples.prompt_ids) // 4
    if (
        not samples.loss_mask
        and (not max_tokens or max(lengths) <= room)
        and 0 <= first <= newest_version
        and versions == versions[:4] * (len(versions) // 4)
        and largest_id(samples.prompt_ids + samples.token_ids) < (vocab_size or MAX_ID)
        and _are_logprobs(samples.logprobs)
    ):
        return [((first, length),) for length in lengths]
    return [_examine(sample, newest_version, room if max_tokens else 0, vocab_size) for sample in samples.members()]


def shape_fault(samples: Samples) -> str:
    """Return why the fields of these samples contradict each other, or nothing; call this before adding up lengths."""
    num, lengths, prompt_bytes = len(samples.indices), samples.lengths, len(samples.prompt_ids)
    num_tokens, arrays = sum(lengths), (samples.token_ids, samples.logprobs, samples.versions)
    if not num or not num == len(lengths) == len(samples.finish_reasons) == len(samples.texts) or min(lengths) < 1:
        return f"{num} samples with lengths {lengths[:8]}, {len(samples.texts)} texts; each has one token or more, and one text"
    if any(len(array) != 4 * num_tokens for array in arrays):
        sizes = ", ".join(f"{len(array) / 4:g}" for array in arrays)
        return f"{num_tokens} tokens, but {sizes} token ids, logprobs and versions"
    if prompt_bytes % 4 or not prompt_bytes:
        return f"prompt_ids has {prompt_bytes} bytes; it must be 4 x tokens, 1 or more"
    if (longest := max(map(len, samples.texts))) > MAX_TEXT + MAX_TEXT_PER_TOKEN * max(lengths):
        return f"{max(lengths)} tokens, but a text of {longest} characters"
    if samples.loss_mask and len(samples.loss_mask) != num_tokens:
        return f"{num_tokens} tokens, but a loss mask of {len(samples.loss_mask)}"
    if not 0 <= samples.attempt <= MAX_ATTEMPT:
        return f"the attempt is {samples.attempt}; attempts are counted from 0"
    if not math.isfinite(samples.started_s + samples.finished_s):
        return f"the times are {samples.started_s} and {samples.finished_s} s; they must be finite"
    return ""


def progress_fault(piece: Progress, most_tokens: int) -> str:
    """Return why these cannot be further tokens of a sample with at most `most_tokens` tokens, or nothing."""
    num = len(piece.token_ids) // 4
    if not num or len(piece.token_ids) % 4 or len(piece.logprobs) != 4 * num:
        return f"{len(piece.token_ids) / 4:g} tokens and {len(piece.logprobs) / 4:g} logprobs; there is one of each or more"
    if piece.start < 0 or piece.start + num > most_tokens:
        return f"tokens {piece.start} to {piece.start + num} of a sample that has {most_tokens} at most"
    if largest_id(piece.token_ids) >= MAX_ID or not _are_logprobs(piece.logprobs):
        return "a token id is negative, or a logprob not finite and at most 0"
    return ""


def _examine(sample: Sample, newest_version: int, room: int, vocab_size: int) -> VersionCounts | str:
    """Check the values of one sample; `room`: most response tokens, 0: no limit."""
    if room and sample.num_tokens > room:
        total = sample.num_tokens + len(sample.prompt_ids) // 4
        most = room + len(sample.prompt_ids) // 4
        return f"{total} tokens with its prompt; at most {most} fit into a row (packing.tokens_per_row)"
    largest = largest_id(sample.prompt_ids + sample.token_ids)
    if largest >= MAX_ID:
        return f"token id {largest - 2 * MAX_ID} is negative"
    if vocab_size and largest >= vocab_size:
        return f"token id {largest} is beyond the model's vocabulary of {vocab_size}"
    if not _are_logprobs(sample.logprobs):
        logprobs = logprobs_from_bytes(sample.logprobs)
        return f"logprobs span {logprobs.min():g} to {logprobs.max():g}; they must be finite and at most 0"
    mask = np.frombuffer(sample.loss_mask, dtype=np.uint8)
    if len(mask) and mask.max() > 1:
        return "the loss mask has values other than 0 and 1"
    if not (counts := version_counts(sample)):
        return "its loss mask is 0 everywhere: there is nothing to train"
    if counts[0][0] < 0 or counts[-1][0] > newest_version:
        return f"versions span {counts[0][0]} to {counts[-1][0]}, but only 0 to {newest_version} were ever published"
    return counts


def version_counts(sample: Sample) -> VersionCounts:
    """Return the trained tokens of a sample by version."""
    if not sample.loss_mask and sample.num_tokens <= FEW_TOKENS:
        return tuple(sorted(Counter(memoryview(sample.versions).cast("i")).items()))
    versions = ids_from_bytes(sample.versions)
    if sample.loss_mask:
        versions = versions[np.frombuffer(sample.loss_mask, dtype=np.uint8) > 0]
    values, counts = np.unique(versions, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def largest_id(ids: bytes) -> int:
    """Return the largest token id; ids are read as unsigned, so that a negative id gives MAX_ID or more."""
    return int(np.maximum.reduce(np.frombuffer(ids, "<u4")))


def _are_logprobs(raw: bytes) -> bool:
    logprobs = logprobs_from_bytes(raw)
    # NaN fails both comparisons: the reductions pass it on.
    return bool(np.maximum.reduce(logprobs) <= LOGPROB_SLACK and np.minimum.reduce(logprobs) > -math.inf)


def group_error(samples: Sequence[Sample], screen: Screen, tokens_per_row: int) -> str:
    """Return why these samples, each of them valid, cannot be a group, or nothing.

    Args:
        samples: The samples, in order of their index.
        screen: The run's screen; two samples of a preference pair share a row, so any two that may be paired must fit.
        tokens_per_row: Row budget; 0: no limit.
    """
    if not samples or len({sample.prompt_ids for sample in samples}) != 1:
        return f"a group is 1 or more samples of one prompt; got {len(samples)} samples"
    if screen.greedy_index >= len(samples):
        return f"member {screen.greedy_index} of a group is its greedy baseline (ReMax); got {len(samples)} samples"
    longest = tokens_together(samples, screen)
    if tokens_per_row and longest > tokens_per_row:
        return (
            f"its two longest samples have {longest} tokens with their prompts, and a preference pair shares a row of "
            f"{tokens_per_row} (packing.tokens_per_row)"
        )
    return ""


def tokens_together(samples: Iterable[Sample], screen: Screen) -> int:
    """Return how many tokens of a group may have to share a row: its longest sample, or its two longest if pairs are trained."""
    sizes, paired = [0], [0, 0]
    for sample in samples:
        sizes.append(len(sample.prompt_ids) // 4 + sample.num_tokens)
        if screen.preference is not None and not (screen.mask_truncated and sample.finish_reason == "length"):
            paired.append(sizes[-1])
    return max(max(sizes), sum(sorted(paired)[-2:]))


def score_error(score: Score, num_tokens: int, *, needs_reference: bool = False) -> str:
    """Return what is wrong with a score (from rules, models or both) for a sample of `num_tokens` tokens, or nothing.

    Args:
        score: A complete score.
        num_tokens: T.
        needs_reference: Whether the score must have reference log-probabilities, because the reference is on inference workers.
    """
    if score.error:
        return score.error
    if not math.isfinite(score.reward):
        return f"the reward is {score.reward}"
    if odd := [name for name, value in score.parts.items() if not math.isfinite(value)]:
        return f"the reward's part {odd[0]!r} is {score.parts[odd[0]]}"
    if not score.reference_logprobs:
        return "the score brings no reference logprobs (algorithm.reference.where = 'worker')" if needs_reference else ""
    if len(score.reference_logprobs) != 4 * num_tokens:
        return f"{num_tokens} tokens, but {len(score.reference_logprobs) / 4:g} reference logprobs"
    if not np.isfinite(logprobs_from_bytes(score.reference_logprobs)).all():
        return "reference logprobs are not all finite"
    return ""
