"""Preference losses against a slow float64 reference, and what must change nothing."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.preference import PREFERENCE_LOSSES, PreferenceInputs, preference_loss
from asyncrl.config.algorithm import PreferenceConfig

CONFIGS = [
    PreferenceConfig(beta=0.3),
    PreferenceConfig(beta=0.3, label_smoothing=0.2, average=True),
    PreferenceConfig(loss="robust", beta=0.3, label_smoothing=0.2),
    PreferenceConfig(loss="hinge", beta=0.3),
    PreferenceConfig(loss="ipo", beta=0.3),
    PreferenceConfig(loss="ipo", beta=0.3, average=True),
]


def inputs_of(sides, seed=0, num_pairs=2.0):
    """Sequences of these (pair, is chosen), of random lengths, some tokens masked."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.arange(len(sides)).repeat_interleave(torch.randint(1, 9, (len(sides),), generator=random))
    logprobs, reference = torch.randn(2, len(ids), generator=random, dtype=torch.float64) - 2
    return PreferenceInputs(
        logprobs=logprobs.requires_grad_(),
        reference_logprobs=reference,
        mask=torch.rand(len(ids), generator=random) < 0.7,
        sequence_ids=ids,
        num_sequences=len(sides),
        pair_ids=torch.tensor([pair for pair, _ in sides]),
        is_chosen=torch.tensor([chosen for _, chosen in sides]),
        num_pairs=num_pairs,
    )


def slow_pair(margin, config):
    """(loss, its slope in the margin)."""
    beta, e, up = config.beta, config.label_smoothing, 1 / (1 + math.exp(-config.beta * margin))
    right, wrong = (-math.log(up), -beta * (1 - up)), (-math.log(1 - up), beta * up)
    if config.loss == "ipo":
        return (margin - 1 / (2 * beta)) ** 2, 2 * (margin - 1 / (2 * beta))
    if config.loss == "hinge":
        return max(0.0, 1 - beta * margin), -beta if beta * margin < 1 else 0.0
    sign, scale = (-1, 1 - 2 * e) if config.loss == "robust" else (1, 1)
    loss, slope = (((1 - e) * a + sign * e * b) / scale for a, b in zip(right, wrong, strict=True))
    return loss, slope


def slow(inputs, config):
    """Python floats and loops: loss, gradient by token, margins and rewards by rising pair id."""
    differences = (inputs.logprobs - inputs.reference_logprobs).tolist()
    tokens = [[] for _ in range(inputs.num_sequences)]
    for position, sequence in enumerate(inputs.sequence_ids.tolist()):
        if inputs.mask[position]:
            tokens[sequence].append(position)
    sums = [sum(differences[t] for t in positions) for positions in tokens]
    share = [1 / max(len(positions), 1) if config.average else 1.0 for positions in tokens]
    sides = list(zip(inputs.pair_ids.tolist(), inputs.is_chosen.tolist(), strict=True))
    total, gradient, margins, rewards = 0.0, [0.0] * len(differences), [], []
    for pair in sorted({pair for pair, _ in sides if pair >= 0}):
        chosen, rejected = sides.index((pair, True)), sides.index((pair, False))
        margins.append(share[chosen] * sums[chosen] - share[rejected] * sums[rejected])
        rewards.append((config.beta * sums[chosen], config.beta * sums[rejected]))
        loss, slope = slow_pair(margins[-1], config)
        total += loss / inputs.num_pairs
        for sequence, sign in ((chosen, 1), (rejected, -1)):
            for position in tokens[sequence]:
                gradient[position] += sign * share[sequence] * slope / inputs.num_pairs
    return total, torch.tensor(gradient, dtype=torch.float64), margins, rewards


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), pairs=st.integers(1, 4), unpaired=st.integers(0, 2))
def test_values_gradients_and_figures_are_those_of_the_slow_reference_whatever_is_masked(config, seed, pairs, unpaired):
    sides = [(9 - 2 * pair, chosen) for pair in range(pairs) for chosen in (True, False)] + [(-1, False)] * unpaired
    order = torch.randperm(len(sides), generator=torch.Generator().manual_seed(seed)).tolist()
    clean = inputs_of([sides[i] for i in order], seed, pairs + 3.0)
    total, gradient, margins, rewards = slow(clean, config)
    for garbage in (math.nan, math.inf, 1e30):
        logprobs = torch.where(clean.mask, clean.logprobs.detach(), garbage).requires_grad_()
        reference = torch.where(clean.mask, clean.reference_logprobs, garbage)
        loss, figures = preference_loss(replace(clean, logprobs=logprobs, reference_logprobs=reference), config)
        loss.backward()
        assert loss.item() == pytest.approx(total, rel=1e-9)
        torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-9, atol=1e-12)
        assert figures["dpo/margin"].tolist() == pytest.approx(margins)
        assert figures["dpo/accuracy"].tolist() == [margin > 0 for margin in margins]
        assert list(zip(figures["dpo/chosen_reward"].tolist(), figures["dpo/rejected_reward"].tolist(), strict=True)) == [
            pytest.approx(pair) for pair in rewards
        ]


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
