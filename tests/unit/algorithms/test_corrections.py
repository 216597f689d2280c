"""Corrections against slow references in plain Python, and what all of them promise."""

import itertools
import math
import typing
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.corrections import CORRECTIONS, MEASURES, correct
from asyncrl.config import algorithm as kinds

BOUNDS = {
    "ratio": (0.6, 1.9), "k1": (-0.5, 0.6), "k2": (-math.inf, 0.2), "k3": (-1.0, 0.25), "tv": (-1.0, 0.1),
    "binary_kl": (-1.0, 0.05),
}  # fmt: skip
"""That cut each measure's values of random tokens in about half; on policy all are inside."""
REJECTIONS = [
    kinds.Rejection(level=level, measure=measure, low=low, high=high, weight=weight)
    for (measure, (low, high)), (level, weight) in itertools.product(
        BOUNDS.items(), {"token": "token", "sum": "sequence", "mean": "none", "max": "none", "geometric": "geometric"}.items()
    )
    if level != "geometric" or measure == "ratio"
]
ALL = [
    kinds.TruncatedToken(cap=1.4, floor=0.6),
    kinds.TruncatedSequence(cap=1.8, floor=0.1),
    kinds.TruncatedGeometric(cap=1.2, floor=0.9),
    kinds.TruncatedToken(cap=1.4, normalize=True),
    kinds.TruncatedSequence(cap=1.8, normalize=True),
    kinds.TruncatedGeometric(cap=1.2, normalize=True),
    *REJECTIONS,
    kinds.Veto(low=0.4),
    kinds.OffPolicySequenceMask(threshold=0.05),
    kinds.SecondMomentMask(threshold=0.1),
    kinds.SecondMomentClip(threshold=0.04),
    kinds.StalenessWeight(decay=0.7),
    kinds.StalenessMask(max_versions=2),
]
seeds = st.integers(0, 10_000)
by_name = pytest.mark.parametrize("item", ALL, ids=str)


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def slow_tokens(inputs):
    """Plain numbers of every trained token: its own, those of its sequence, and its sequence's tokens."""
    tokens = [index for index in range(len(inputs.mask)) if inputs.mask[index]]
    facts = {}
    for i in tokens:
        proximal, behaviour = inputs.proximal_logprobs[i].item(), inputs.behaviour_logprobs[i].item()
        rho, p, q = math.exp(proximal - behaviour), math.exp(proximal), math.exp(behaviour)
        facts[i] = {
            "token": rho, "ratio": rho, "k1": -math.log(rho), "k2": math.log(rho) ** 2 / 2, "k3": rho - 1 - math.log(rho),
            "tv": abs(p - q), "binary_kl": max(binary_kl(p, q), binary_kl(q, p)), "none": 1.0,
            "staleness": max(inputs.learner_version - inputs.versions[i].item(), 0) if inputs.versions[i] >= 0 else 0,
        }  # fmt: skip
    for i in tokens:
        row = [j for j in tokens if inputs.sequence_ids[j] == inputs.sequence_ids[i]]
        product = math.prod(facts[j]["token"] for j in row)
        facts[i] |= {
            "row": row,
            "sequence": product,
            "geometric": product ** (1 / len(row)),
            "divergence": sum((inputs.behaviour_logprobs[j] - inputs.logprobs[j]).item() for j in row) / len(row),
            "advantage": sum(inputs.advantages[j].item() for j in row),
        }
    return facts


def slow_weight(item, fact):
    match item:
        case kinds.Truncated(cap=cap, floor=floor):
            levels = {kinds.TruncatedToken: "token", kinds.TruncatedSequence: "sequence", kinds.TruncatedGeometric: "geometric"}
            return min(max(fact[levels[type(item)]], floor), cap)
        case kinds.Rejection(weight=weight):
            return fact[weight]
        case kinds.StalenessWeight(decay=decay):
            return decay ** fact["staleness"]
    return 1.0


def slow_keeps(item, fact, facts):
    match item:
        case kinds.Rejection(level=level, measure=measure, low=low, high=high):
            of_row = [facts[j][measure] for j in fact["row"]]
            values = {
                "token": [fact[measure]],
                "sum": [fact["sequence"] if measure == "ratio" else sum(of_row)],
                "mean": [sum(of_row) / len(of_row)],
                "max": of_row,
                "geometric": [fact["geometric"]],
            }[level]
            return all(low <= value <= high for value in values)
        case kinds.OffPolicySequenceMask(threshold=threshold):
            return fact["advantage"] >= 0 or fact["divergence"] <= threshold
        case kinds.StalenessMask(max_versions=most):
            return fact["staleness"] <= most
    return True


def slow(item, inputs):
    """(weights, kept) by the definitions, one token after the other."""
    facts = slow_tokens(inputs)
    kept = {i: slow_keeps(item, fact, facts) for i, fact in facts.items()}
    if isinstance(item, kinds.SecondMomentMask):
        rest = sorted(facts, key=lambda i: facts[i]["k2"])
        while len(rest) > 1 and sum(2 * facts[i]["k2"] for i in rest) / len(rest) >= item.threshold:
            kept[rest.pop()] = False
    weights = [slow_weight(item, facts[i]) if kept.get(i, False) else 0.0 for i in range(len(inputs.mask))]
    if getattr(item, "normalize", False):
        by_place = {(i if isinstance(item, kinds.TruncatedToken) else fact["row"][0]): weights[i] for i, fact in facts.items()}
        weights = [weight / (sum(by_place.values()) / len(by_place)) for weight in weights]
    return torch.tensor(weights, dtype=torch.float64), torch.tensor([kept.get(i, False) for i in range(len(inputs.mask))])


def test_every_kind_of_the_config_has_a_function_and_every_measure_is_tried():
    assert set(CORRECTIONS) == set(typing.get_args(kinds.CorrectionConfig))
    assert set(BOUNDS) == set(MEASURES)


@by_name
@pytest.mark.parametrize("seed", range(4))
def test_corrections_equal_a_slow_reference(item, seed, loss_inputs):
    """One token in seven is of unknown version, and counts as fresh."""
    drawn = loss_inputs(seed, row_advantages=False)
    inputs = replace(drawn, versions=drawn.versions.where(drawn.versions != 3, -1))
    weights, kept = slow(item, inputs)
    got = correct(inputs, (item,))
    assert torch.equal(got.kept, kept)
    torch.testing.assert_close(got.weights, weights, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, chosen=st.lists(st.sampled_from(ALL), max_size=4))
def test_weights_multiply_and_a_token_stays_where_all_keep_it(seed, chosen, loss_inputs):
    inputs = loss_inputs(seed)
    together = correct(inputs, tuple(chosen))
    kept, product = inputs.mask, torch.ones_like(inputs.advantages)
    for item in chosen:
        one = correct(inputs, (item,))
        kept, product = kept & one.kept, product * one.weights
    assert torch.equal(together.kept, kept)
    torch.testing.assert_close(together.weights, torch.where(kept, product, 0.0))


@by_name
def test_policies_far_apart_and_nothing_to_train_are_borne_and_on_policy_nothing_is_changed(item, loss_inputs):
    near = loss_inputs(1, dtype=torch.float32)
    for far in (100.0, -100.0):
        got = correct(replace(near, proximal_logprobs=near.behaviour_logprobs + far), (item,))
        assert torch.isfinite(got.weights).all()
        assert got.weights.dtype == torch.float32
    nothing = correct(loss_inputs(0, mask=torch.zeros(40, dtype=torch.bool)), (item,))
    assert not nothing.kept.any()
    assert not nothing.weights.any()
    same = {name: near.logprobs.detach() for name in ("proximal_logprobs", "behaviour_logprobs")}
    got = correct(replace(near, **same, versions=torch.full((40,), near.learner_version)), (item,))
    assert torch.equal(got.kept, near.mask)
    assert torch.equal(got.weights, near.mask.float())


@settings(max_examples=30, deadline=None)
@given(seed=seeds, threshold=st.floats(1e-3, 0.6))
def test_m2po_clip_takes_the_widest_range_at_which_harmful_tokens_stay_under_the_threshold(seed, threshold, loss_inputs):
    inputs = loss_inputs(seed)
    got = correct(inputs, (kinds.SecondMomentClip(threshold=threshold),))
    log_r = (inputs.logprobs - inputs.proximal_logprobs).detach()
    harmful = [log_r[i].item() ** 2 for i in range(40) if inputs.mask[i] and log_r[i].item() * inputs.advantages[i].item() > 0]

    def capped_mean(bound):
        return sum(min(square, bound) for square in harmful) / len(harmful)

    if not harmful or sum(harmful) / len(harmful) <= threshold:
        expected = (1.0, math.inf)
    else:
        tau = math.sqrt(max((square for square in harmful if capped_mean(square) < threshold), default=0.0))
        expected = (1 - math.exp(-tau), math.exp(tau) - 1)
    assert (got.clip_low, got.clip_high) == pytest.approx(expected, abs=1e-12)
    assert torch.equal(got.kept, inputs.mask)
