"""Preference losses beside the numbers of tests/golden: what must change nothing, and the losses that nobody published."""

import math
from dataclasses import replace

import pytest
import torch

from asyncrl.algorithms.preference import PREFERENCE_LOSSES, PreferenceInputs, preference_loss
from asyncrl.config.algorithm import PreferenceConfig

CONFIGS = [PreferenceConfig(loss=loss, beta=0.3, average=average) for loss in PREFERENCE_LOSSES for average in (False, True)]


def inputs_of(sides, seed=0):
    """Sequences of these (pair, is chosen), of random lengths, some tokens masked."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.arange(len(sides)).repeat_interleave(torch.randint(1, 9, (len(sides),), generator=random))
    logprobs, reference = torch.randn(2, len(ids), generator=random, dtype=torch.float64) - 2
    mask = torch.rand(len(ids), generator=random) < 0.7
    pair_ids, is_chosen = map(torch.tensor, zip(*sides, strict=True))
    return PreferenceInputs(logprobs.requires_grad_(), reference, mask, ids, len(sides), pair_ids, is_chosen, num_pairs=2.0)


def computed(inputs, config):
    loss, figures = preference_loss(inputs, config)
    return loss, torch.autograd.grad(loss, inputs.logprobs)[0], figures


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_masked_tokens_sequences_of_no_pair_and_the_order_of_sides_change_nothing(config, garbage):
    """Two pairs, and a sequence of none in between; then the pairs alone, the other way round."""
    clean = inputs_of([(9, False), (7, True), (-1, False), (9, True), (7, False)])
    logprobs, reference = (torch.where(clean.mask, each.detach(), garbage) for each in (clean.logprobs, clean.reference_logprobs))
    loss, gradient, figures = computed(replace(clean, logprobs=logprobs.requires_grad_(), reference_logprobs=reference), config)
    order = [4, 3, 1, 0]
    at = torch.cat([(clean.sequence_ids == sequence).nonzero().flatten() for sequence in order])
    pairs = replace(
        clean, logprobs=clean.logprobs.detach()[at].requires_grad_(), reference_logprobs=clean.reference_logprobs[at],
        mask=clean.mask[at], sequence_ids=torch.tensor([order.index(i) for i in clean.sequence_ids[at].tolist()]),
        num_sequences=4, pair_ids=clean.pair_ids[order], is_chosen=clean.is_chosen[order],
    )  # fmt: skip
    expected, slopes, expected_figures = computed(pairs, config)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[at], slopes)
    assert (gradient[~clean.mask | (clean.sequence_ids == 2)] == 0).all()
    for name, values in figures.items():
        torch.testing.assert_close(values, expected_figures[name], msg=name)
    margins = (figures["dpo/chosen_reward"] - figures["dpo/rejected_reward"]) / config.beta
    if not config.average:
        torch.testing.assert_close(figures["dpo/margin"], margins)
    assert figures["dpo/accuracy"].tolist() == [margin > 0 for margin in figures["dpo/margin"].tolist()]


@pytest.mark.parametrize("sides", ["0+0+", "0+1-", "0+0+0-0-"])
def test_a_pair_without_exactly_two_sides_is_refused(sides):
    told = [(int(pair), side == "+") for pair, side in zip(sides[::2], sides[1::2], strict=True)]
    with pytest.raises(AssertionError, match="pair"):
        preference_loss(inputs_of(told), PreferenceConfig())


def test_margins_far_out_stay_finite_and_robust_losses_of_turned_pairs_mean_the_plain_loss():
    """What makes rDPO unbiased: (1 - e) of the pairs stand as they are, e the wrong way round."""
    margins = torch.tensor([-1e4, 1e4], dtype=torch.float64)
    assert PREFERENCE_LOSSES["sigmoid"](margins, PreferenceConfig(beta=1.0)).tolist() == pytest.approx([1e4, 0.0])
    margins, told = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64), PreferenceConfig(beta=0.7, label_smoothing=0.3)
    seen = 0.7 * PREFERENCE_LOSSES["robust"](margins, told) + 0.3 * PREFERENCE_LOSSES["robust"](-margins, told)
    torch.testing.assert_close(seen, PREFERENCE_LOSSES["sigmoid"](margins, PreferenceConfig(beta=0.7)))
    assert PREFERENCE_LOSSES["hinge"](margins, told).tolist() == pytest.approx([2.4, 0.65, 0.0])
