"""Losses against slow float64 references, values and gradients, and the identities all of them keep."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loss_terms import AGGREGATIONS, count_denominators
from asyncrl.algorithms.losses import LOSSES, load_loss
from asyncrl.algorithms.types import CorrectionOutputs, Denominators, LossConfig, effective_sample_size
from asyncrl.config.algorithm import (
    KLConfig,
    MaskedGeometric,
    MaskedSequence,
    MaskedToken,
    OffPolicySequenceMask,
    SecondMomentClip,
    SecondMomentMask,
    StalenessMask,
    StalenessWeight,
    TruncatedSequence,
    TruncatedToken,
    Veto,
)
from asyncrl.errors import ConfigError

DROPPING = [
    MaskedToken(low=0.6, high=1.9),
    MaskedSequence(low=0.4, high=3.0, weight="token"),
    MaskedGeometric(low=0.85, high=1.2),
    Veto(threshold=0.4),
    OffPolicySequenceMask(threshold=-0.1),
    SecondMomentMask(threshold=0.1),
    StalenessMask(max_versions=2),
]
CORRECTIONS = [
    (),
    (TruncatedToken(cap=1.4, floor=0.6),),
    (TruncatedSequence(cap=1.8), StalenessWeight(decay=0.8)),
    (SecondMomentClip(threshold=0.02),),
    *[(item,) for item in DROPPING],
    (StalenessMask(max_versions=3), OffPolicySequenceMask(threshold=0.0), MaskedToken(low=0.5, high=2.0)),
]
seeds = st.integers(0, 10_000)
any_loss = pytest.mark.parametrize("name", LOSSES)
any_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def differentiate(loss, inputs):
    return torch.autograd.grad(loss, inputs.logprobs)[0]


def run(name, inputs, config):
    loss = LOSSES[name](inputs, config).loss
    return loss, differentiate(loss, inputs)


def full_config(**options):
    """Narrow bounds, so that every branch is taken, and both penalties."""
    return LossConfig(**{
        "clip_low": 0.1, "clip_high": 0.25, "dual_clip": 1.3, "max_ratio": 1.5, "min_ratio": 0.4,
        "tau_positive": 1.2, "tau_negative": 1.7, "entropy_coefficient": 0.3,
        "kl": KLConfig(cap=0.4), "kl_coefficient": 0.7,
    } | options)  # fmt: skip


def slow_clipped(ratio, advantage, config):
    loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high))
    if config.dual_clip is not None and advantage < 0:
        loss = torch.min(loss, -advantage * config.dual_clip)
    return loss


def slow_objective(name, inputs, config, kept, t):
    """X of token t, by the formula of each paper."""
    current, advantage = inputs.logprobs[t], inputs.advantages[t]
    ratio = torch.exp(current - inputs.proximal_logprobs[t])
    of_behaviour = torch.exp(current - inputs.behaviour_logprobs[t])
    tau = config.tau_positive if advantage > 0 else config.tau_negative

    def row(chosen):
        return (chosen & (inputs.sequence_ids == inputs.sequence_ids[t])).nonzero().flatten().tolist()

    def geometric():
        differences = [inputs.logprobs[u] - inputs.proximal_logprobs[u] for u in row(kept)]
        return torch.exp(torch.as_tensor(sum(differences) / max(len(differences), 1), dtype=torch.float64))

    def product():
        return torch.exp(sum(inputs.logprobs[u] - inputs.behaviour_logprobs[u] for u in row(inputs.mask))).detach()

    return {
        "ppo_clip": lambda: slow_clipped(ratio, advantage, config),
        "decoupled_ppo": lambda: slow_clipped(ratio, advantage, config),
        "gspo": lambda: slow_clipped(geometric(), advantage, config),
        "gspo_token": lambda: slow_clipped(geometric().detach() * current.exp() / current.exp().detach(), advantage, config),
        "cispo": lambda: -ratio.detach().clamp(config.min_ratio, config.max_ratio) * advantage * current,
        "sapo": lambda: -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1))),
        "reinforce": lambda: -advantage * current,
        "importance_sampling": lambda: -advantage * of_behaviour,
        "aipo": lambda: -of_behaviour.detach().clamp(max=config.max_ratio) * advantage * current,
        "topr": lambda: -(1.0 if advantage >= 0 else product().clamp(max=1.0)) * advantage * current,
    }[name]()


def slow_kl(inputs, config, t):
    """k3, capped, with its own gradient."""
    difference = inputs.logprobs[t] - inputs.reference_logprobs[t]
    return (torch.exp(-difference) - 1 + difference).clamp(max=config.kl.cap)


def slow_loss(name, inputs, config):
    corrections = correct(inputs, config.corrections)
    if corrections.clip_low is not None:
        config = replace(config, clip_low=corrections.clip_low, clip_high=corrections.clip_high)
    counted = corrections.kept if config.denominator == "kept" else inputs.mask
    total = 0.0 * torch.where(inputs.mask, inputs.logprobs, 0.0).sum()
    has_weight = any(
        isinstance(item, TruncatedToken | TruncatedSequence | MaskedToken) or getattr(item, "weight", "none") != "none"
        for item in config.corrections
    )
    for t in counted.nonzero().flatten().tolist():
        weight = corrections.weights[t]
        if name == "decoupled_ppo" and not has_weight:
            weight = weight * torch.exp(inputs.proximal_logprobs[t] - inputs.behaviour_logprobs[t])
        loss = weight * slow_objective(name, inputs, config, corrections.kept, t)
        loss = loss - config.entropy_coefficient * inputs.entropy[t] + config.kl_coefficient * slow_kl(inputs, config, t)
        length = int(((inputs.sequence_ids == inputs.sequence_ids[t]) & counted).sum())
        total = (
            total
            + loss
            / {
                "token-mean": inputs.denominators.num_tokens,
                "seq-mean-token-mean": inputs.denominators.num_sequences * length,
                "seq-mean-token-sum": inputs.denominators.num_sequences,
                "constant": inputs.denominators.num_sequences * inputs.denominators.constant,
            }[config.aggregation]
        )
    return total


def counted_for(inputs, config):
    """The same inputs with the denominators that the config asks for."""
    kept = correct(inputs, config.corrections).kept
    return replace(
        inputs,
        denominators=count_denominators(
            inputs.mask, kept, inputs.sequence_ids, inputs.num_sequences, constant=7.0, denominator=config.denominator
        ),
    )


@any_loss
@any_aggregation
@settings(max_examples=5, deadline=None)
@given(seed=seeds, corrections=st.sampled_from(CORRECTIONS), denominator=st.sampled_from(["all", "kept"]))
def test_losses_equal_a_slow_reference(name, aggregation, seed, corrections, denominator, loss_inputs):
    config = full_config(corrections=corrections, aggregation=aggregation, denominator=denominator)
    inputs = counted_for(loss_inputs(seed, tokens=20, row_advantages=False), config)
    loss, gradient = run(name, inputs, config)
    expected = slow_loss(name, inputs, config)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradient, differentiate(expected, inputs), rtol=1e-11, atol=1e-12)


@any_loss
@any_aggregation
@settings(max_examples=2, deadline=None)
@given(seed=seeds, row_advantages=st.booleans())
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name, aggregation, seed, row_advantages, on_policy):
    """-A of each token over the denominator; of `gspo`, -(mean of A over the sequence)."""
    inputs = on_policy(seed, row_advantages=row_advantages)
    config = LossConfig(aggregation=aggregation, dual_clip=3.0, corrections=(TruncatedToken(), Veto(), StalenessMask()))
    advantages = torch.where(inputs.mask, inputs.advantages, 0.0)
    lengths_S = torch.bincount(inputs.sequence_ids[inputs.mask], minlength=inputs.num_sequences).clamp(min=1)
    if name == "gspo":
        sums_S = torch.zeros(inputs.num_sequences, dtype=torch.float64).index_add(0, inputs.sequence_ids, advantages)
        advantages = torch.where(inputs.mask, (sums_S / lengths_S)[inputs.sequence_ids], 0.0)
    sequences = inputs.denominators.num_sequences
    share = {
        "token-mean": 1 / inputs.denominators.num_tokens,
        "seq-mean-token-mean": 1 / (sequences * lengths_S[inputs.sequence_ids]),
        "seq-mean-token-sum": 1 / sequences,
        "constant": 1 / (sequences * 7.0),
    }[aggregation]
    torch.testing.assert_close(run(name, inputs, config)[1], -advantages * share)


@any_loss
@settings(max_examples=8, deadline=None)
@given(
    seed=seeds,
    corrections=st.sampled_from(CORRECTIONS),
    aggregation=st.sampled_from(list(AGGREGATIONS)),
    gradient=st.sampled_from(["own", "k2", "ratio"]),
)
def test_whatever_stands_at_a_masked_token_does_not_matter(name, seed, corrections, aggregation, gradient, loss_inputs):
    config = full_config(corrections=corrections, aggregation=aggregation, kl=KLConfig(gradient=gradient))
    clean = loss_inputs(seed)
    names = ("logprobs", "proximal_logprobs", "behaviour_logprobs", "reference_logprobs", "advantages", "entropy")
    spoilt = {field: torch.where(clean.mask, getattr(clean, field).detach(), math.nan) for field in names}
    dirty = replace(clean, **(spoilt | {"logprobs": spoilt["logprobs"].requires_grad_()}))
    (loss, slope), (dirty_loss, dirty_slope) = run(name, clean, config), run(name, dirty, config)
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(slope, dirty_slope)
    assert (dirty_slope[~clean.mask] == 0).all()


def taken(whole, positions, num_sequences, first_sequence=0):
    """The tokens at `positions`, as inputs of their own over the same denominators."""
    names = ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs", "advantages", "entropy", "mask", "versions")
    fields = {name: getattr(whole, name)[positions] for name in names}
    fields["logprobs"] = whole.logprobs.detach()[positions].requires_grad_()
    fields["sequence_ids"] = whole.sequence_ids[positions] - first_sequence
    if whole.corrections is not None:
        fields["corrections"] = replace(
            whole.corrections, weights=whole.corrections.weights[positions], kept=whole.corrections.kept[positions]
        )
    return replace(whole, **fields, num_sequences=num_sequences)


@any_loss
@settings(max_examples=10, deadline=None)
@given(
    seed=seeds,
    corrections=st.sampled_from(CORRECTIONS),
    aggregation=st.sampled_from(list(AGGREGATIONS)),
    denominator=st.sampled_from(["all", "kept"]),
    cuts=st.sets(st.integers(1, 5), min_size=1, max_size=3),
)
def test_micro_batches_add_up_to_the_whole(name, seed, corrections, aggregation, denominator, cuts, loss_inputs):
    """Corrections are those of the whole update, sliced; denominators are the sums of the parts' counts."""
    config = full_config(corrections=corrections, aggregation=aggregation, denominator=denominator)
    drawn = loss_inputs(seed)
    whole = counted_for(replace(drawn, corrections=correct(drawn, corrections)), config)
    bounds = [0, *sorted(cuts), whole.num_sequences]
    total, slopes, counts = 0.0, [], []
    for low, high in itertools.pairwise(bounds):
        positions = ((whole.sequence_ids >= low) & (whole.sequence_ids < high)).nonzero().flatten()
        part = taken(whole, positions, high - low, low)
        loss, slope = run(name, part, config)
        total, slopes = total + loss, [*slopes, slope]
        counts.append(
            count_denominators(part.mask, part.corrections.kept, part.sequence_ids, part.num_sequences, denominator=denominator)
        )
    loss, slope = run(name, whole, config)
    torch.testing.assert_close(torch.cat(slopes), slope, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-14)
    assert sum(count.num_tokens for count in counts) == whole.denominators.num_tokens
    assert sum(count.num_sequences for count in counts) == whole.denominators.num_sequences


@any_loss
@pytest.mark.parametrize("shifted", ["proximal_logprobs", "behaviour_logprobs", "reference_logprobs"])
def test_policies_a_hundred_nats_apart_overflow_nothing(name, shifted, loss_inputs):
    near = loss_inputs(0, dtype=torch.float32)
    inputs = replace(near, **{shifted: getattr(near, shifted) + torch.tensor([100.0, -100.0]).repeat(20)})
    for corrections in CORRECTIONS:
        config = full_config(corrections=corrections, kl=KLConfig(gradient="ratio", cap=float("inf")))
        loss, slope = run(name, inputs, config)
        assert torch.isfinite(loss)
        assert torch.isfinite(slope).all()


def test_entropy_and_kl_of_dropped_tokens_stay_under_all_and_go_under_kept(loss_inputs):
    drawn = loss_inputs(4)
    dropped = CorrectionOutputs(torch.zeros_like(drawn.advantages), torch.zeros_like(drawn.mask))
    inputs = replace(drawn, corrections=dropped)
    config = LossConfig(entropy_coefficient=0.5, kl=KLConfig(), kl_coefficient=0.1)
    outputs = LOSSES["ppo_clip"](inputs, config)
    expected = 0.1 * outputs.reference_kl[inputs.mask].mean() - 0.5 * inputs.entropy[inputs.mask].mean()
    torch.testing.assert_close(outputs.loss, expected)
    assert LOSSES["ppo_clip"](inputs, replace(config, denominator="kept")).loss == 0


def test_reference_kl_is_the_estimate_without_its_coefficient(loss_inputs):
    inputs = loss_inputs(5)
    outputs = LOSSES["reinforce"](inputs, LossConfig(kl=KLConfig(estimator="k1", cap=float("inf")), kl_coefficient=0.1))
    expected = torch.where(inputs.mask, (inputs.logprobs - inputs.reference_logprobs).detach(), 0.0)
    assert torch.equal(outputs.reference_kl, expected)
    assert LOSSES["reinforce"](inputs, LossConfig()).reference_kl is None


def test_load_loss_knows_names_and_a_users_own(tmp_path, loss_inputs):
    assert load_loss("sapo") is LOSSES["sapo"]
    (tmp_path / "mine.py").write_text(
        "from asyncrl.algorithms.losses import LOSSES\ndef mine(inputs, config): return LOSSES['reinforce'](inputs, config)\n"
    )
    inputs = loss_inputs(0)
    got = load_loss(f"{tmp_path}/mine.py:mine")(inputs, LossConfig())
    assert torch.equal(got.loss, LOSSES["reinforce"](inputs, LossConfig()).loss)


def test_load_loss_lists_the_known_names():
    with pytest.raises(ConfigError, match=r"algorithm\.loss must be one of ppo_clip, .*topr.*, got 'ppo'"):
        load_loss("ppo")


def test_effective_sample_size_runs_from_one_token_to_all():
    mask = torch.tensor([True, True, True, True, False])
    assert effective_sample_size(torch.ones(5), mask) == 1.0
    assert effective_sample_size(torch.tensor([9.0, 0, 0, 0, 5]), mask) == 0.25


REJECTING = [
    MaskedToken(low=1e-9, high=2e-9),
    MaskedSequence(low=1e-9, high=2e-9),
    MaskedGeometric(low=1e-9, high=2e-9),
    Veto(threshold=1e9),
    StalenessMask(max_versions=0),
]


@any_loss
@any_aggregation
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_an_update_that_is_all_masked_rejected_or_empty_is_zero_everywhere(name, aggregation, denominator, loss_inputs):
    drawn = loss_inputs(3, tokens=12, sequences=3, versions=torch.zeros(12, dtype=torch.int64))
    of_length_one = replace(
        drawn,
        mask=torch.tensor([True, *[False] * 11]),
        sequence_ids=torch.tensor([0, *[2] * 11]),
        denominators=Denominators(1, 1),
    )
    nothing = replace(drawn, mask=torch.zeros(12, dtype=torch.bool), denominators=Denominators(0, 0))
    cases = [(nothing, corrections) for corrections in CORRECTIONS]
    cases += [(taken(nothing, torch.tensor([], dtype=torch.int64), 3), ()), *[(drawn, (item,)) for item in REJECTING]]
    cases += [(of_length_one, (item,)) for item in REJECTING]
    for inputs, corrections in cases:
        config = LossConfig(corrections=corrections, aggregation=aggregation, denominator=denominator, dual_clip=3.0)
        counted = counted_for(inputs, config)
        loss, slope = run(name, counted, config)
        assert loss == 0
        assert (slope == 0).all()
