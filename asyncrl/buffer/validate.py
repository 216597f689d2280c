"""Is this sample what it says? The checks that every sample and score passes before it is held, whoever made it.

Pure; they run on the controller's event loop, so they stay in the microseconds: samples that came together are looked at
together, and one by one only where something is wrong with one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.screening import Screen
from asyncrl.buffer.staleness import VersionCounts
from asyncrl.schema.samples import Sample, Score, ids_from_bytes, logprobs_from_bytes

LOGPROB_SLACK = 1e-3
"""Log-probabilities may exceed 0 by this much: rounding of a log-softmax in low precision."""

FEW_TOKENS = 128
"""Up to here versions are counted faster without numpy."""
MAX_ATTEMPT = 2**31 - 1
MAX_ID = 2**31


class SampleRefusedError(ValueError):
    """The sample contradicts itself; the message says how."""


def examine_all(
    samples: Sequence[Sample], *, newest_version: int, max_tokens: int, vocab_size: int = 0
) -> list[VersionCounts | SampleRefusedError]:
    """Return what `examine` says of each: its version counts, or why it is refused."""
    try:
        for sample in samples:
            _check_lengths(sample, max_tokens)
        largest = largest_id(samples)
        logprobs = logprobs_from_bytes(b"".join([sample.logprobs for sample in samples]))
        is_plain = largest < (vocab_size or MAX_ID) and _are_logprobs(logprobs)
    except ValueError:  # of one of them, or there is none
        is_plain = False
    answers: list[VersionCounts | SampleRefusedError] = []
    for sample in samples:
        try:
            counts = (
                _checked_versions(sample, newest_version)
                if is_plain
                else examine(sample, newest_version=newest_version, max_tokens=max_tokens, vocab_size=vocab_size)
            )
            answers.append(counts)
        except SampleRefusedError as error:
            answers.append(error)
    return answers


def examine(sample: Sample, *, newest_version: int, max_tokens: int, vocab_size: int = 0) -> VersionCounts:
    """Check a sample's arrays and count its trained tokens by version.

    Args:
        sample: As it came in.
        newest_version: No token can be of a later version: it does not exist yet.
        max_tokens: Most tokens of prompt and response together; 0: no limit.
        vocab_size: Of the model; 0: not known.

    Returns:
        Version counts over the tokens with loss mask 1.

    Raises:
        SampleRefusedError: Lengths disagree, a value is impossible, or there is nothing to train.
    """
    _check_lengths(sample, max_tokens)
    largest = largest_id([sample])
    if largest >= MAX_ID:
        raise SampleRefusedError(f"token id {largest - 2 * MAX_ID} is negative")
    if vocab_size and largest >= vocab_size:
        raise SampleRefusedError(f"token id {largest} is beyond the model's vocabulary of {vocab_size}")
    logprobs = logprobs_from_bytes(sample.logprobs)
    if not _are_logprobs(logprobs):
        raise SampleRefusedError(f"logprobs span {logprobs.min():g} to {logprobs.max():g}; they must be finite and at most 0")
    return _checked_versions(sample, newest_version)


def largest_id(samples: Sequence[Sample]) -> int:
    """Return the largest token id of these samples; read without a sign, so that a negative one is MAX_ID or more."""
    ids = [sample.token_ids for sample in samples]
    return int(np.maximum.reduce(np.frombuffer(b"".join(ids + [sample.prompt_ids for sample in samples]), "<u4")))


def _are_logprobs(logprobs: NDArray[np.float32]) -> bool:
    # NaN fails both comparisons: the reductions pass it on.
    return bool(np.maximum.reduce(logprobs) <= LOGPROB_SLACK and np.minimum.reduce(logprobs) > -math.inf)


def _checked_versions(sample: Sample, newest_version: int) -> VersionCounts:
    versions, num_tokens = sample.versions, sample.num_tokens
    if not sample.loss_mask and versions == versions[:4] * num_tokens:
        counts: VersionCounts = ((int.from_bytes(versions[:4], "little", signed=True), num_tokens),)
    else:
        counts = _count_versions(sample)
    if counts[0][0] < 0 or counts[-1][0] > newest_version:
        raise SampleRefusedError(
            f"versions span {counts[0][0]} to {counts[-1][0]}, but only 0 to {newest_version} were ever published"
        )
    return counts


def group_error(samples: Sequence[Sample], screen: Screen, tokens_per_row: int) -> str:
    """Return why these samples, each of them valid, cannot be a group, or nothing.

    Args:
        samples: By index.
        screen: Of the run; two samples of a preference pair share a row, and any two that may be paired are asked to fit.
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
    """Return the most tokens of a group that may have to share a row: its longest sample, or two where there may be a pair."""
    sizes, paired = [0], [0, 0]
    for sample in samples:
        sizes.append(len(sample.prompt_ids) // 4 + sample.num_tokens)
        if screen.preference is not None and not (screen.mask_truncated and sample.finish_reason == "length"):
            paired.append(sizes[-1])
    return max(max(sizes), sum(sorted(paired)[-2:]))


def score_error(score: Score, num_tokens: int, *, needs_reference: bool = False) -> str:
    """Return what is wrong with a score, of rules, of models or of both, for a sample of `num_tokens`, or nothing.

    Args:
        score: Complete.
        num_tokens: T.
        needs_reference: The run's reference is on inference workers: a score without its log-probabilities cannot be trained.
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


def _check_lengths(sample: Sample, max_tokens: int) -> None:
    num_bytes, prompt_bytes = len(sample.token_ids), len(sample.prompt_ids)
    if num_bytes % 4 or prompt_bytes % 4 or not num_bytes or not prompt_bytes:
        raise SampleRefusedError(
            f"prompt_ids has {prompt_bytes} bytes and token_ids {num_bytes}; each must be 4 x tokens, 1 or more"
        )
    num_tokens = num_bytes // 4
    if len(sample.logprobs) != num_bytes or len(sample.versions) != num_bytes:
        raise SampleRefusedError(
            f"{num_tokens} tokens, but {len(sample.logprobs) / 4:g} logprobs and {len(sample.versions) / 4:g} versions"
        )
    if sample.loss_mask and len(sample.loss_mask) != num_tokens:
        raise SampleRefusedError(f"{num_tokens} tokens, but a loss mask of {len(sample.loss_mask)}")
    total = num_tokens + prompt_bytes // 4
    if max_tokens and total > max_tokens:
        raise SampleRefusedError(f"{total} tokens with its prompt; at most {max_tokens} fit into a row (packing.tokens_per_row)")
    if not 0 <= sample.attempt <= MAX_ATTEMPT:
        raise SampleRefusedError(f"its attempt is {sample.attempt}; attempts are counted from 0")
    if not math.isfinite(sample.started_s + sample.finished_s):
        raise SampleRefusedError(f"its times are {sample.started_s} and {sample.finished_s} s; they must be finite")


def _count_versions(sample: Sample) -> VersionCounts:
    if not sample.loss_mask and sample.num_tokens <= FEW_TOKENS:
        return tuple(sorted(Counter(memoryview(sample.versions).cast("i")).items()))
    versions = ids_from_bytes(sample.versions)
    if sample.loss_mask:
        mask = np.frombuffer(sample.loss_mask, dtype=np.uint8)
        if int(np.maximum.reduce(mask)) > 1:
            raise SampleRefusedError("the loss mask has values other than 0 and 1")
        versions = versions[mask > 0]
        if not len(versions):
            raise SampleRefusedError("its loss mask is 0 everywhere: there is nothing to train")
    values, counts = np.unique(versions, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))
