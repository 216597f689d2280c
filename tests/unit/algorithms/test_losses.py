"""Identities every loss keeps, and slow float64 references."""

import math

import pytest
import torch

from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.ratios import CORRECTIONS, effective_sample_size
from asyncrl.algorithms.types import Denominators, LossConfig, LossInputs


def inputs_of(seed=0, tokens=40, sequences=6, spread=0.5, **replaced):
    random = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(tokens, generator=random, dtype=torch.float64) * spread

    base = draw() - 2
    ids = torch.arange(tokens) * sequences // tokens
    mask = torch.rand(tokens, generator=random) < 0.8
    values = {
        "logprobs": (base + draw()).requires_grad_(),
        "proximal_logprobs": base + draw(),
        "behaviour_logprobs": base + draw(),
        "advantages": torch.randn(sequences, generator=random, dtype=torch.float64)[ids],
        "mask": mask,
        "sequence_ids": ids,
        "num_sequences": sequences,
        "denominators": Denominators(int(mask.sum()), len(ids[mask].unique()), constant=7.0),
    }
    return LossInputs(**(values | replaced))


def slow_weight(inputs, index, correction, cap):
    def log_rho(position):
        return (inputs.proximal_logprobs[position] - inputs.behaviour_logprobs[position]).item()

    if correction == "none":
        return 1.0
    if correction == "tis_token":
        return min(math.exp(log_rho(index)), cap)
    same = (inputs.sequence_ids == inputs.sequence_ids[index]) & inputs.mask
    return min(math.exp(sum(log_rho(position) for position in torch.nonzero(same).flatten())), cap)


def slow_loss(inputs, config, *, weighted):
    total, config_low, config_high = 0.0, 1 - config.clip_low, 1 + config.clip_high
    for index in torch.nonzero(inputs.mask).flatten().tolist():
        ratio, advantage = torch.exp(inputs.logprobs[index] - inputs.proximal_logprobs[index]), inputs.advantages[index]
        loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, config_low, config_high))
        if config.dual_clip is not None and advantage < 0:
            loss = torch.min(loss, -advantage * config.dual_clip)
        if weighted:
            loss = loss * slow_weight(inputs, index, config.correction, config.correction_cap)
        length = int(((inputs.sequence_ids == inputs.sequence_ids[index]) & inputs.mask).sum())
        share = {
            "token-mean": inputs.denominators.num_tokens,
            "seq-mean-token-mean": inputs.denominators.num_sequences * length,
            "seq-mean-token-sum": inputs.denominators.num_sequences,
            "constant": inputs.denominators.num_sequences * inputs.denominators.constant,
        }[config.aggregation]
        total = total + loss / share
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_losses_equal_a_slow_reference(aggregation, correction, dual_clip):
    config = LossConfig(0.1, 0.25, dual_clip, correction, correction_cap=1.4, aggregation=aggregation)
    for name, loss in LOSSES.items():
        inputs = inputs_of()
        (gradient,) = torch.autograd.grad(loss(inputs, config).loss, inputs.logprobs)
        slow = slow_loss(inputs, config, weighted=name == "decoupled_ppo")
        (expected,) = torch.autograd.grad(slow, inputs.logprobs)
        torch.testing.assert_close(loss(inputs, config).loss, slow, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name):
    current = inputs_of().logprobs.detach()
    inputs = inputs_of(logprobs=current.clone().requires_grad_(), proximal_logprobs=current, behaviour_logprobs=current)
    (gradient,) = torch.autograd.grad(LOSSES[name](inputs, LossConfig(correction="tis_token")).loss, inputs.logprobs)
    torch.testing.assert_close(gradient, -inputs.advantages * inputs.mask / inputs.mask.sum())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_whatever_stands_at_a_masked_token_does_not_matter(name, correction, aggregation):
    config = LossConfig(correction=correction, aggregation=aggregation, dual_clip=2.0)
    clean = inputs_of()

    def spoilt(values):
        return torch.where(clean.mask, values.detach(), math.nan)

    dirty = inputs_of(
        logprobs=spoilt(clean.logprobs).requires_grad_(),
        proximal_logprobs=spoilt(clean.proximal_logprobs),
        behaviour_logprobs=spoilt(clean.behaviour_logprobs),
        advantages=spoilt(clean.advantages),
    )
    losses = [LOSSES[name](inputs, config).loss for inputs in (clean, dirty)]
    assert losses[0] == losses[1]
    gradients = [torch.autograd.grad(loss, inputs.logprobs)[0] for loss, inputs in zip(losses, (clean, dirty), strict=True)]
    assert torch.equal(gradients[0], gradients[1])
    assert (gradients[1][~clean.mask] == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_add_up_to_the_whole(aggregation):
    config = LossConfig(aggregation=aggregation, correction="tis_sequence")
    whole = inputs_of()
    total = 0.0
    for kept in (whole.sequence_ids < 2, whole.sequence_ids >= 2):
        fields = ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages", "mask")
        part = {name: getattr(whole, name)[kept] for name in fields}
        ids = whole.sequence_ids[kept]
        part |= {"sequence_ids": ids - ids[0], "num_sequences": len(ids.unique()), "denominators": whole.denominators}
        total = total + LOSSES["decoupled_ppo"](LossInputs(**part), config).loss
    torch.testing.assert_close(total, LOSSES["decoupled_ppo"](whole, config).loss)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_are_one_on_policy(correction):
    inputs = inputs_of()
    same = inputs_of(proximal_logprobs=inputs.behaviour_logprobs, behaviour_logprobs=inputs.behaviour_logprobs)
    weights = CORRECTIONS[correction](same, LossConfig())
    assert torch.equal(weights, same.mask.to(weights.dtype))


def test_far_apart_policies_overflow_nothing():
    far = torch.tensor([-500.0, 0.0], requires_grad=True)
    inputs = inputs_of(
        tokens=2, sequences=1, logprobs=far, proximal_logprobs=torch.tensor([0.0, -500.0]),
        behaviour_logprobs=torch.tensor([-500.0, -1000.0]), advantages=torch.tensor([1.0, -1.0]),
        mask=torch.ones(2, dtype=torch.bool), denominators=Denominators(2, 1),
    )  # fmt: skip
    for correction in CORRECTIONS:
        loss = LOSSES["decoupled_ppo"](inputs, LossConfig(correction=correction)).loss
        (gradient,) = torch.autograd.grad(loss, far)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


def test_effective_sample_size_runs_from_one_token_to_all():
    mask = torch.tensor([True, True, True, True, False])
    assert effective_sample_size(torch.ones(5), mask) == 1.0
    assert effective_sample_size(torch.tensor([9.0, 0, 0, 0, 5]), mask) == 0.25


def test_entropy_bonus_is_the_mean_entropy_times_its_coefficient():
    inputs = inputs_of(entropy=torch.arange(40, dtype=torch.float64))
    with_bonus = LOSSES["ppo_clip"](inputs, LossConfig(entropy_coefficient=0.5)).loss
    without = LOSSES["ppo_clip"](inputs, LossConfig()).loss
    torch.testing.assert_close(without - with_bonus, 0.5 * inputs.entropy[inputs.mask].mean())
