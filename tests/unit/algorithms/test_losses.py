"""Losses against slow float64 references, values and gradients, and what all of them keep. Masked tokens hold NaN throughout.

KL estimators beside the numbers of tests/golden.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loss_terms import AGGREGATIONS, count_denominators, interpolated_proximal, kl_penalty
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.types import KL_ESTIMATORS, Denominators, LossConfig
from asyncrl.config import algorithm as kinds
from asyncrl.config.algorithm_table import LOSS_RULES

CORRECTIONS = [
    (),
    (kinds.TruncatedToken(cap=1.4, floor=0.6),),
    (kinds.TruncatedSequence(cap=1.8), kinds.StalenessWeight(decay=0.8)),
    (kinds.SecondMomentClip(threshold=0.02),),
    (kinds.Rejection(level="geometric", low=0.85, high=1.2, weight="token"),),
    (kinds.Rejection(level="mean", measure="k3", high=0.1), kinds.SecondMomentMask(threshold=0.1)),
    (kinds.StalenessMask(max_versions=3), kinds.OffPolicySequenceMask(threshold=0.0), kinds.MaskedToken(low=0.5, high=2.0)),
]
seeds = st.integers(0, 10_000)
corrected = st.sampled_from(CORRECTIONS)
aggregations = st.sampled_from(list(AGGREGATIONS))
denominators = st.sampled_from(["all", "kept"])
cuts_of_six = st.sets(st.integers(1, 5), min_size=1, max_size=3)
any_loss = pytest.mark.parametrize("name", LOSSES)


def differentiate(loss, inputs):
    return torch.autograd.grad(loss, inputs.logprobs)[0]


def run(name, inputs, config):
    loss = LOSSES[name](inputs, config).loss
    return loss, differentiate(loss, inputs)


def full_config(**options):
    """Narrow bounds, so that every branch is taken, and all penalties."""
    return LossConfig(**{
        "clip_low": 0.1, "clip_high": 0.25, "dual_clip": 1.3, "max_ratio": 1.5, "min_ratio": 0.4,
        "tau_positive": 1.2, "tau_negative": 1.7, "vespo_positive": (1.5, 2.0), "vespo_negative": (2.5, 1.0),
        "entropy_coefficient": 0.3, "log_ratio_penalty": 0.2, "kl": kinds.KLConfig(cap=0.4), "kl_coefficient": 0.7,
    } | options)  # fmt: skip


def slow_clipped(ratio, advantage, config):
    loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high))
    if config.dual_clip is not None and advantage < 0:
        loss = torch.min(loss, -advantage * config.dual_clip)
    return loss


def slow_objective(name, inputs, config, kept, t):
    """X of token t, by the formula of each paper."""
    pi, prox, mu = (getattr(inputs, f"{policy}logprobs")[t] for policy in ("", "proximal_", "behaviour_"))
    advantage = inputs.advantages[t]
    ratio, of_behaviour = torch.exp(pi - prox), torch.exp(pi - mu)
    tau = config.tau_positive if advantage > 0 else config.tau_negative
    p, q = torch.exp(pi).detach(), torch.exp(prox)
    surrogate = -ratio.detach().clamp(max=config.max_ratio) * advantage * pi
    same_row = inputs.sequence_ids == inputs.sequence_ids[t]

    def over(chosen, other, held=lambda u, difference: difference):
        return [held(u, inputs.logprobs[u] - other[u]) for u in (chosen & same_row).nonzero().flatten().tolist()]

    def mean(differences):
        return torch.exp(torch.as_tensor(sum(differences) / max(len(differences), 1), dtype=torch.float64))

    def product(differences):
        return torch.exp(torch.as_tensor(sum(differences), dtype=torch.float64))

    def clip_log(u, difference):
        sign = torch.sign(inputs.advantages[u])
        return sign * torch.min(sign * difference, sign * difference.clamp(-config.clip_low, config.clip_high))

    def binary_kl():
        return q * (prox - pi.detach()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))

    of_row = product(over(inputs.mask, inputs.behaviour_logprobs)).detach()
    k, rate = config.vespo_positive if advantage >= 0 else config.vespo_negative
    geometric = over(kept, inputs.proximal_logprobs)
    return {
        **dict.fromkeys(("ppo_clip", "decoupled_ppo"), lambda: slow_clipped(ratio, advantage, config)),
        "gspo": lambda: slow_clipped(mean(geometric), advantage, config),
        "gspo_token": lambda: slow_clipped(mean(geometric).detach() * pi.exp() / pi.exp().detach(), advantage, config),
        "rloo_product": lambda: slow_clipped(product(geometric), advantage, config),
        "gmpo": lambda: -advantage * mean(over(kept, inputs.proximal_logprobs, clip_log)),
        "dppo_tv": lambda: surrogate * bool(p - q <= config.clip_high if advantage > 0 else p - q >= -config.clip_low),
        "dppo_kl": lambda: (
            surrogate
            * bool((binary_kl() <= config.clip_high or p <= q) if advantage > 0 else (binary_kl() <= config.clip_low or p >= q))
        ),
        "cispo": lambda: -ratio.detach().clamp(config.min_ratio, config.max_ratio) * advantage * pi,
        "sapo": lambda: -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1))),
        **dict.fromkeys(("reinforce", "dro"), lambda: -advantage * pi),
        "importance_sampling": lambda: -advantage * of_behaviour,
        "aipo": lambda: -of_behaviour.detach().clamp(max=config.max_ratio) * advantage * pi,
        "topr": lambda: -(1.0 if advantage >= 0 else of_row.clamp(max=1.0)) * advantage * pi,
        "vespo": lambda: -(of_row**k) * math.e ** (rate - rate * of_row) * advantage * pi,
    }[name]()


def divisor(inputs, aggregation, length):
    tokens, sequences = inputs.denominators.num_tokens, inputs.denominators.num_sequences
    of_constant = sequences * inputs.denominators.constant
    return {"token-mean": tokens, "token-sum": 1, "seq-mean-token-mean": sequences * length, "seq-mean-token-sum": sequences,
            "seq-mean-token-sum-norm": of_constant, "constant": of_constant}[aggregation]  # fmt: skip


def slow_loss(name, inputs, config):
    corrections = correct(inputs, config.corrections)
    if corrections.clip_low is not None and LOSS_RULES[name].has_dual_clip:
        config = replace(config, clip_low=corrections.clip_low, clip_high=corrections.clip_high)
    counted = corrections.kept if config.denominator == "kept" else inputs.mask
    total = 0.0 * torch.where(inputs.mask, inputs.logprobs, 0.0).sum()
    has_weight = any(map(kinds.is_importance_weight, config.corrections))
    for t in counted.nonzero().flatten().tolist():
        weight = corrections.weights[t]
        if name == "decoupled_ppo" and not has_weight:
            weight = weight * torch.exp(inputs.proximal_logprobs[t] - inputs.behaviour_logprobs[t])
        of_reference = inputs.logprobs[t] - inputs.reference_logprobs[t]
        kl = (torch.exp(-of_reference) - 1 + of_reference).clamp(max=config.kl.cap)
        squared = (inputs.logprobs[t] - inputs.behaviour_logprobs[t]) ** 2
        loss = weight * slow_objective(name, inputs, config, corrections.kept, t) - config.entropy_coefficient * inputs.entropy[t]
        loss = loss + config.kl_coefficient * kl + config.log_ratio_penalty * squared
        length = int(((inputs.sequence_ids == inputs.sequence_ids[t]) & counted).sum())
        total = total + loss / divisor(inputs, config.aggregation, length)
    return total


def counted_for(inputs, config):
    """The same inputs with the denominators that the config asks for."""
    counted = correct(inputs, config.corrections).kept if config.denominator == "kept" else inputs.mask
    return replace(inputs, denominators=count_denominators(counted, inputs.sequence_ids, inputs.num_sequences, constant=7.0))


@any_loss
@settings(max_examples=6, deadline=None)
@given(seed=seeds, aggregation=aggregations, corrections=corrected, denominator=denominators)
def test_losses_equal_a_slow_reference(name, seed, aggregation, corrections, denominator, loss_inputs):
    config = full_config(corrections=corrections, aggregation=aggregation, denominator=denominator)
    inputs = counted_for(loss_inputs(seed, tokens=20, row_advantages=False), config)
    loss, gradient = run(name, inputs, config)
    expected = slow_loss(name, inputs, config)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradient, differentiate(expected, inputs), rtol=1e-11, atol=1e-12)
    assert (gradient[~inputs.mask] == 0).all()


def taken(whole, low, high):
    """The tokens of sequences low to high, as inputs of their own over the same denominators."""
    positions = (whole.sequence_ids >= low) & (whole.sequence_ids < high)
    names = ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs", "advantages", "entropy", "mask", "versions")
    fields = {name: getattr(whole, name)[positions] for name in names}
    fields["logprobs"] = whole.logprobs.detach()[positions].requires_grad_()
    fields["sequence_ids"] = whole.sequence_ids[positions] - low
    fields["corrections"] = whole.corrections and replace(
        whole.corrections, weights=whole.corrections.weights[positions], kept=whole.corrections.kept[positions]
    )
    return replace(whole, **fields, num_sequences=high - low)


@any_loss
@settings(max_examples=5, deadline=None)
@given(seed=seeds, corrections=corrected, aggregation=aggregations, denominator=denominators, cuts=cuts_of_six)
def test_micro_batches_add_up_to_the_whole(name, seed, corrections, aggregation, denominator, cuts, loss_inputs):
    """Corrections are those of the whole update, sliced; denominators are the sums of the parts' counts."""
    kl = kinds.KLConfig(gradient="k2")
    config = full_config(corrections=corrections, aggregation=aggregation, denominator=denominator, kl=kl)
    drawn = loss_inputs(seed)
    whole = counted_for(replace(drawn, corrections=correct(drawn, corrections)), config)
    parts = [taken(whole, low, high) for low, high in itertools.pairwise([0, *sorted(cuts), whole.num_sequences])]
    losses, slopes = zip(*(run(name, part, config) for part in parts), strict=True)
    counted = [part.corrections.kept if denominator == "kept" else part.mask for part in parts]
    counts = [count_denominators(own, p.sequence_ids, p.num_sequences) for own, p in zip(counted, parts, strict=True)]
    loss, slope = run(name, whole, config)
    torch.testing.assert_close(torch.cat(slopes), slope, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(losses), loss, rtol=1e-12, atol=1e-14)
    assert sum(count.num_tokens for count in counts) == whole.denominators.num_tokens
    assert sum(count.num_sequences for count in counts) == whole.denominators.num_sequences


@any_loss
@pytest.mark.parametrize("shifted", ["proximal_logprobs", "behaviour_logprobs", "reference_logprobs"])
def test_policies_a_hundred_nats_apart_overflow_nothing(name, shifted, loss_inputs):
    near = loss_inputs(0, dtype=torch.float32)
    inputs = replace(near, **{shifted: getattr(near, shifted) + torch.tensor([100.0, -100.0]).repeat(20)})
    for corrections in CORRECTIONS:
        config = full_config(corrections=corrections, kl=kinds.KLConfig(gradient="ratio", cap=math.inf))
        loss, slope = run(name, inputs, config)
        assert torch.isfinite(loss)
        assert torch.isfinite(slope).all()


@any_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_an_update_that_is_all_masked_rejected_or_empty_is_zero_everywhere(name, aggregation, denominator, loss_inputs):
    drawn = loss_inputs(3, tokens=12, sequences=3, garbage=0.0, versions=torch.zeros(12, dtype=torch.int64))
    nothing = replace(drawn, mask=torch.zeros(12, dtype=torch.bool), denominators=Denominators(0, 0))
    short = {"mask": torch.tensor([True, *[False] * 11]), "sequence_ids": torch.tensor([0, *[2] * 11])}
    cases = [*((nothing, corrections) for corrections in CORRECTIONS), (taken(nothing, 3, 6), ())]
    for rejecting in (kinds.Rejection(level="mean", low=1e-9, high=2e-9), kinds.StalenessMask(max_versions=0)):
        cases += [(drawn, (rejecting,)), (replace(drawn, **short), (rejecting,))]
    for inputs, corrections in cases:
        config = LossConfig(corrections=corrections, aggregation=aggregation, denominator=denominator, dual_clip=3.0)
        loss, slope = run(name, counted_for(inputs, config), config)
        assert loss == 0
        assert (slope == 0).all()


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", 0.1487212707), ("abs", 0.5)])
def test_the_value_of_each_estimator(estimator, expected):
    assert KL_ESTIMATORS[estimator](torch.tensor(-0.5, dtype=torch.float64)).item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_with_the_gradient_of_k2_every_estimator_has_the_gradient_of_the_divergence(estimator):
    """By enumeration over a small vocabulary."""
    logits, reference = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    current, reference = logits.requires_grad_().log_softmax(0), reference.log_softmax(0)
    values = kl_penalty(
        current,
        current,
        reference,
        torch.ones(7, dtype=torch.bool),
        kinds.KLConfig(estimator=estimator, gradient="k2", cap=math.inf),
    )
    torch.testing.assert_close(values, KL_ESTIMATORS[estimator](current - reference))
    both = (current.detach().exp() * values).sum(), (current.exp() * (current - reference)).sum()
    got, wanted = (torch.autograd.grad(each, logits, retain_graph=True) for each in both)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("gradient", ["own", "k2", "ratio"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_beyond_the_cap_the_value_is_the_cap_and_the_gradient_zero(estimator, gradient):
    current = torch.tensor([-1.0, -14.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -14.0], dtype=torch.float64)
    everywhere = torch.ones(3, dtype=torch.bool)
    got = kl_penalty(
        current, current.detach(), reference, everywhere, kinds.KLConfig(estimator=estimator, gradient=gradient, cap=5.0)
    )
    free = KL_ESTIMATORS[estimator](current.detach() - reference)
    beyond = free.abs() > 5
    assert beyond.sum() == 2
    torch.testing.assert_close(got.detach(), free.clamp(-5, 5))
    (slope,) = torch.autograd.grad(got.sum(), current)
    # The ratio's own gradient stays: the penalty there is the constant cap times the ratio.
    torch.testing.assert_close(slope[beyond], got.detach()[beyond] if gradient == "ratio" else torch.zeros(2).double())
    assert slope[~beyond] != 0


def test_fresh_future_and_unknown_tokens_keep_the_behaviour_policy():
    behaviour, current = torch.tensor([-1.0, -2.0, -3.0, -2.0]), torch.tensor([0.0, -1.0, -2.0, -1.0], requires_grad=True)
    got = interpolated_proximal(current, behaviour, torch.tensor([4, 6, -1, 0]), current_version=4)
    assert got.tolist() == [-1.0, -2.0, -3.0, -1.25]
    assert not got.requires_grad
