"""Corrections against slow references in plain Python, and what all of them promise."""

import math
import typing
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.corrections import CORRECTIONS, correct
from asyncrl.algorithms.types import CorrectionOutputs
from asyncrl.config.algorithm import (
    CorrectionConfig,
    MaskedGeometric,
    MaskedSequence,
    MaskedToken,
    OffPolicySequenceMask,
    PythonCorrection,
    SecondMomentClip,
    SecondMomentMask,
    StalenessMask,
    StalenessWeight,
    TruncatedSequence,
    TruncatedToken,
    Veto,
)

ALL = [
    TruncatedToken(cap=1.4, floor=0.6),
    TruncatedSequence(cap=1.8, floor=0.1),
    TruncatedToken(cap=1.4, normalize=True),
    TruncatedSequence(cap=1.8, normalize=True),
    MaskedToken(low=0.6, high=1.9),
    MaskedSequence(low=0.2, high=5.0, weight="sequence"),
    MaskedSequence(low=0.2, high=5.0, weight="token"),
    MaskedSequence(low=0.2, high=5.0, weight="none"),
    MaskedGeometric(low=0.8, high=1.3, weight="geometric"),
    MaskedGeometric(low=0.8, high=1.3, weight="token"),
    MaskedGeometric(low=0.8, high=1.3, weight="none"),
    Veto(threshold=0.35),
    OffPolicySequenceMask(threshold=0.05),
    SecondMomentMask(threshold=0.1),
    SecondMomentClip(threshold=0.04),
    StalenessWeight(decay=0.7),
    StalenessMask(max_versions=2),
]
seeds = st.integers(0, 10_000)
by_name = pytest.mark.parametrize("item", ALL, ids=str)


def slow_tokens(inputs):
    """Plain numbers of every trained token: its own, and those of its sequence."""
    tokens = [index for index in range(len(inputs.mask)) if inputs.mask[index]]
    log_rho = {i: (inputs.proximal_logprobs[i] - inputs.behaviour_logprobs[i]).item() for i in tokens}
    facts = {}
    for i in tokens:
        row = [j for j in tokens if inputs.sequence_ids[j] == inputs.sequence_ids[i]]
        product = math.exp(sum(log_rho[j] for j in row))
        facts[i] = {
            "row": inputs.sequence_ids[i].item(),
            "token": math.exp(log_rho[i]),
            "sequence": product,
            "geometric": product ** (1 / len(row)),
            "none": 1.0,
            "smallest": min(math.exp(log_rho[j]) for j in row),
            "divergence": sum((inputs.behaviour_logprobs[j] - inputs.logprobs[j]).item() for j in row) / len(row),
            "advantage": sum(inputs.advantages[j].item() for j in row),
            "staleness": max(inputs.learner_version - inputs.versions[i].item(), 0),
            "square": log_rho[i] ** 2,
        }
    return facts


def slow_weight(item, fact):
    match item:
        case TruncatedToken(cap=cap, floor=floor):
            return min(max(fact["token"], floor), cap)
        case TruncatedSequence(cap=cap, floor=floor):
            return min(max(fact["sequence"], floor), cap)
        case MaskedToken():
            return fact["token"]
        case MaskedSequence(weight=weight) | MaskedGeometric(weight=weight):
            return fact[weight]
        case StalenessWeight(decay=decay):
            return decay ** fact["staleness"]
    return 1.0


def slow_keeps(item, fact):
    match item:
        case MaskedToken(low=low, high=high) | MaskedSequence(low=low, high=high) | MaskedGeometric(low=low, high=high):
            return (
                low <= fact[{MaskedToken: "token", MaskedSequence: "sequence", MaskedGeometric: "geometric"}[type(item)]] <= high
            )
        case Veto(threshold=threshold):
            return fact["smallest"] >= threshold
        case OffPolicySequenceMask(threshold=threshold):
            return fact["advantage"] >= 0 or fact["divergence"] <= threshold
        case StalenessMask(max_versions=most):
            return fact["staleness"] <= most
    return True


def slow(item, inputs):
    """(weights, kept) by the definitions, one token after the other."""
    facts = slow_tokens(inputs)
    kept = {i: slow_keeps(item, fact) for i, fact in facts.items()}
    if isinstance(item, SecondMomentMask):
        rest = sorted(facts, key=lambda i: facts[i]["square"])
        while len(rest) > 1 and sum(facts[i]["square"] for i in rest) / len(rest) >= item.threshold:
            kept[rest.pop()] = False
    weights = [slow_weight(item, facts[i]) if kept.get(i, False) else 0.0 for i in range(len(inputs.mask))]
    if getattr(item, "normalize", False):
        by_place = {(i if isinstance(item, TruncatedToken) else fact["row"]): weights[i] for i, fact in facts.items()}
        weights = [weight / (sum(by_place.values()) / len(by_place)) for weight in weights]
    return torch.tensor(weights, dtype=torch.float64), torch.tensor([kept.get(i, False) for i in range(len(inputs.mask))])


def test_every_kind_of_the_config_has_a_function():
    assert set(CORRECTIONS) == set(typing.get_args(CorrectionConfig))


@by_name
@settings(max_examples=12, deadline=None)
@given(seed=seeds)
def test_corrections_equal_a_slow_reference(item, seed, loss_inputs):
    inputs = loss_inputs(seed, row_advantages=False)
    weights, kept = slow(item, inputs)
    got = correct(inputs, (item,))
    assert torch.equal(got.kept, kept)
    torch.testing.assert_close(got.weights, weights, rtol=1e-12, atol=1e-12)


@by_name
@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_on_policy_every_weight_is_one_and_all_is_kept(item, seed, on_policy):
    inputs = on_policy(seed)
    got = correct(inputs, (item,))
    assert torch.equal(got.kept, inputs.mask)
    assert torch.equal(got.weights, inputs.mask.to(torch.float64))
    if isinstance(item, SecondMomentClip):
        assert (got.clip_low, got.clip_high) == (1.0, math.inf)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, chosen=st.lists(st.sampled_from(ALL), max_size=4))
def test_weights_multiply_and_a_token_stays_where_all_keep_it(seed, chosen, loss_inputs):
    inputs = loss_inputs(seed)
    together = correct(inputs, tuple(chosen))
    alone = [correct(inputs, (item,)) for item in chosen]
    kept, product = inputs.mask, torch.ones_like(inputs.advantages)
    for one in alone:
        kept, product = kept & one.kept, product * one.weights
    assert torch.equal(together.kept, kept)
    torch.testing.assert_close(together.weights, torch.where(kept, product, 0.0))
    assert (together.weights[~together.kept] == 0).all()


@by_name
def test_what_stands_at_masked_tokens_does_not_matter(item, loss_inputs):
    clean = loss_inputs(3)
    assert not clean.mask.all()
    names = ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages")
    dirty = replace(
        clean,
        **{name: torch.where(clean.mask, getattr(clean, name).detach(), math.nan) for name in names},
        versions=torch.where(clean.mask, clean.versions, -(10**9)),
    )
    before, after = correct(clean, (item,)), correct(dirty, (item,))
    assert torch.equal(before.weights, after.weights)
    assert torch.equal(before.kept, after.kept)
    assert (before.clip_low, before.clip_high) == (after.clip_low, after.clip_high)


@by_name
@pytest.mark.parametrize("far", [100.0, -100.0])
def test_policies_a_hundred_nats_apart_overflow_nothing(item, far, loss_inputs):
    near = loss_inputs(1, dtype=torch.float32)
    got = correct(replace(near, proximal_logprobs=near.behaviour_logprobs + far), (item,))
    assert torch.isfinite(got.weights).all()
    assert got.weights.dtype == torch.float32


def test_nothing_to_train_is_no_error(loss_inputs):
    nothing = loss_inputs(0, mask=torch.zeros(40, dtype=torch.bool))
    got = correct(nothing, tuple(ALL))
    assert not got.kept.any()
    assert not got.weights.any()


def test_m2po_mask_drops_until_the_mean_is_under_the_threshold_not_at_it(loss_inputs):
    drawn = loss_inputs(2)
    inputs = replace(drawn, behaviour_logprobs=torch.zeros(40).double(), proximal_logprobs=torch.full((40,), 0.5).double())
    assert correct(inputs, (SecondMomentMask(threshold=0.25),)).kept.sum() == 1
    assert torch.equal(correct(inputs, (SecondMomentMask(threshold=0.2501),)).kept, inputs.mask)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, threshold=st.floats(1e-3, 0.6))
def test_m2po_clip_takes_the_widest_range_at_which_harmful_tokens_stay_under_the_threshold(seed, threshold, loss_inputs):
    inputs = loss_inputs(seed)
    got = correct(inputs, (SecondMomentClip(threshold=threshold),))
    log_r = (inputs.logprobs - inputs.proximal_logprobs).detach()
    harmful = sorted(
        log_r[i].item() ** 2 for i in range(40) if inputs.mask[i] and log_r[i].item() * inputs.advantages[i].item() > 0
    )

    def capped_mean(bound):
        return sum(min(square, bound) for square in harmful) / len(harmful)

    if not harmful or sum(harmful) / len(harmful) <= threshold:
        expected = (1.0, math.inf)
    else:
        tau = math.sqrt(max((square for square in harmful if capped_mean(square) < threshold), default=0.0))
        expected = (1 - math.exp(-tau), math.exp(tau) - 1)
    assert (got.clip_low, got.clip_high) == pytest.approx(expected, abs=1e-12)
    assert torch.equal(got.kept, inputs.mask)


def test_tokens_of_unknown_version_count_as_fresh(loss_inputs):
    inputs = loss_inputs(0)
    unknown = replace(inputs, versions=torch.full_like(inputs.versions, -1))
    assert torch.equal(correct(unknown, (StalenessMask(max_versions=0),)).kept, inputs.mask)
    assert torch.equal(correct(unknown, (StalenessWeight(decay=0.5),)).weights, inputs.mask.double())


USERS_OWN = """
from asyncrl.algorithms.types import CorrectionOutputs

calls = []

def every_other(inputs, config):
    calls.append(config.parameter)
    kept = inputs.sequence_ids % 2 == 0
    return CorrectionOutputs(inputs.logprobs.exp() * config.parameter, kept)
"""


def test_a_users_own_correction_joins_the_others(loss_inputs, tmp_path):
    (tmp_path / "own.py").write_text(USERS_OWN)
    inputs = loss_inputs(0)
    own = PythonCorrection(path=f"{tmp_path}/own.py:every_other", parameter=3.0)
    for _ in range(2):
        got = correct(inputs, (own, TruncatedToken(cap=1.5)))
    kept = inputs.mask & (inputs.sequence_ids % 2 == 0)
    truncated = correct(inputs, (TruncatedToken(cap=1.5),)).weights
    assert isinstance(got, CorrectionOutputs)
    assert torch.equal(got.kept, kept)
    torch.testing.assert_close(got.weights, torch.where(kept, 3 * inputs.logprobs.detach().exp() * truncated, 0.0))
    assert not got.weights.requires_grad
