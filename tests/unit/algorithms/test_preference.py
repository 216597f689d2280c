"""Preference losses against a slow float64 reference, and what must change nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.preference import PREFERENCE_LOSSES, PreferenceInputs, preference_loss
from asyncrl.config.algorithm import PreferenceConfig

CONFIGS = [
    PreferenceConfig(beta=0.3),
    PreferenceConfig(beta=0.3, label_smoothing=0.2),
    PreferenceConfig(beta=0.3, average=True),
    PreferenceConfig(loss="robust", beta=0.3, label_smoothing=0.2),
    PreferenceConfig(loss="hinge", beta=0.3),
    PreferenceConfig(loss="ipo", beta=0.3),
    PreferenceConfig(loss="ipo", beta=0.3, average=True),
]


def inputs_of(lengths, pair_ids, is_chosen, *, seed=0, num_pairs=None):
    random = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    mask = torch.rand(tokens, generator=random) < 0.7
    return PreferenceInputs(
        logprobs=(-2 + torch.randn(tokens, generator=random, dtype=torch.float64)).requires_grad_(),
        reference_logprobs=-2 + torch.randn(tokens, generator=random, dtype=torch.float64),
        mask=mask,
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        num_sequences=len(lengths),
        pair_ids=torch.tensor(pair_ids),
        is_chosen=torch.tensor(is_chosen),
        num_pairs=num_pairs or len({pair for pair in pair_ids if pair >= 0}),
    )


def slow(inputs, config):
    """Python floats and loops; loss, and gradient by token from the chain rule."""
    logprobs, reference = inputs.logprobs.tolist(), inputs.reference_logprobs.tolist()
    tokens = [[] for _ in range(inputs.num_sequences)]
    for position, sequence in enumerate(inputs.sequence_ids.tolist()):
        if inputs.mask[position]:
            tokens[sequence].append(position)
    share = [1 / max(len(positions), 1) if config.average else 1.0 for positions in tokens]
    score = [s * sum(logprobs[t] - reference[t] for t in positions) for s, positions in zip(share, tokens, strict=True)]
    sides = list(zip(inputs.pair_ids.tolist(), inputs.is_chosen.tolist(), strict=True))
    total, gradient = 0.0, [0.0] * len(logprobs)
    for pair in sorted({pair for pair, _ in sides if pair >= 0}):
        chosen, rejected = sides.index((pair, True)), sides.index((pair, False))
        margin, beta, e = score[chosen] - score[rejected], config.beta, config.label_smoothing
        if config.loss == "ipo":
            loss, slope = (margin - 1 / (2 * beta)) ** 2, 2 * (margin - 1 / (2 * beta))
        elif config.loss == "hinge":
            loss, slope = max(0.0, 1 - beta * margin), -beta if beta * margin < 1 else 0.0
        elif config.loss == "robust":
            up = 1 / (1 + math.exp(-beta * margin))
            loss = (-(1 - e) * math.log(up) + e * math.log(1 - up)) / (1 - 2 * e)
            slope = (-(1 - e) * beta * (1 - up) - e * beta * up) / (1 - 2 * e)
        else:
            up = 1 / (1 + math.exp(-beta * margin))
            loss = -(1 - e) * math.log(up) - e * math.log(1 - up)
            slope = -(1 - e) * beta * (1 - up) + e * beta * up
        total += loss / inputs.num_pairs
        for sequence, sign in ((chosen, 1), (rejected, -1)):
            for position in tokens[sequence]:
                gradient[position] += sign * share[sequence] * slope / inputs.num_pairs
    return total, torch.tensor(gradient, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), pairs=st.integers(1, 4), unpaired=st.integers(0, 2), which=st.sampled_from(CONFIGS))
def test_value_and_gradient_are_those_of_the_slow_reference(seed, pairs, unpaired, which):
    random = torch.Generator().manual_seed(seed)
    sides = [(pair, chosen) for pair in range(pairs) for chosen in (True, False)] + [(-1, False)] * unpaired
    sides = [sides[i] for i in torch.randperm(len(sides), generator=random).tolist()]
    lengths = torch.randint(1, 9, (len(sides),), generator=random).tolist()
    inputs = inputs_of(lengths, [pair for pair, _ in sides], [chosen for _, chosen in sides], seed=seed, num_pairs=pairs + 3)
    outputs = preference_loss(inputs, which)
    outputs.loss.backward()
    expected, gradient = slow(inputs, which)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(inputs.logprobs.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
def test_micro_batches_add_up(config):
    whole = inputs_of([3, 5, 4, 6], [0, 0, 1, 1], [True, False, False, True])
    preference_loss(whole, config).loss.backward()
    halves, gradients = 0.0, []
    for first, last in ((0, 2), (2, 4)):
        tokens = (whole.sequence_ids >= first) & (whole.sequence_ids < last)
        part = PreferenceInputs(
            logprobs=whole.logprobs.detach()[tokens].requires_grad_(),
            reference_logprobs=whole.reference_logprobs[tokens],
            mask=whole.mask[tokens],
            sequence_ids=whole.sequence_ids[tokens] - first,
            num_sequences=2,
            pair_ids=whole.pair_ids[first:last],
            is_chosen=whole.is_chosen[first:last],
            num_pairs=2,
        )
        loss = preference_loss(part, config).loss
        loss.backward()
        halves += loss.item()
        gradients.append(part.logprobs.grad)
    assert halves == pytest.approx(preference_loss(whole, config).loss.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat(gradients), whole.logprobs.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_masked_tokens_change_nothing(config, garbage):
    clean = inputs_of([3, 5, 4, 6], [0, 1, 1, 0], [True, False, True, False])
    logprobs = torch.where(clean.mask, clean.logprobs.detach(), garbage).requires_grad_()
    reference = torch.where(clean.mask, clean.reference_logprobs, garbage)
    dirty = PreferenceInputs(
        logprobs, reference, clean.mask, clean.sequence_ids, 4, clean.pair_ids, clean.is_chosen, clean.num_pairs
    )
    expected, got = preference_loss(clean, config), preference_loss(dirty, config)
    expected.loss.backward()
    got.loss.backward()
    assert got.loss.item() == expected.loss.item()
    assert torch.equal(logprobs.grad, clean.logprobs.grad)
    assert (logprobs.grad[~clean.mask] == 0).all()


def test_figures_come_by_rising_pair_id_with_summed_rewards():
    inputs = inputs_of([2, 2, 2, 2, 3], [7, 4, 4, 7, -1], [False, True, False, True, False])
    outputs = preference_loss(inputs, PreferenceConfig(beta=0.5, average=True))
    difference = ((inputs.logprobs - inputs.reference_logprobs).detach() * inputs.mask).tolist()
    sums = [sum(difference[2 * i : 2 * i + 2]) for i in range(4)]
    counts = [max(int(inputs.mask[2 * i : 2 * i + 2].sum()), 1) for i in range(4)]
    assert outputs.chosen_rewards.tolist() == pytest.approx([0.5 * sums[1], 0.5 * sums[3]])
    assert outputs.rejected_rewards.tolist() == pytest.approx([0.5 * sums[2], 0.5 * sums[0]])
    margins = [sums[1] / counts[1] - sums[2] / counts[2], sums[3] / counts[3] - sums[0] / counts[0]]
    assert outputs.margins.tolist() == pytest.approx(margins)
    assert outputs.correct.tolist() == [margin > 0 for margin in margins]
    assert not outputs.chosen_rewards.requires_grad


@pytest.mark.parametrize(
    ("pair_ids", "is_chosen"), [([0, 0], [True, True]), ([0, 1], [True, False]), ([0, 0, 0, 0], [True, True, False, False])]
)
def test_a_pair_without_exactly_two_sides_is_refused(pair_ids, is_chosen):
    inputs = inputs_of([2] * len(pair_ids), pair_ids, is_chosen)
    with pytest.raises(AssertionError, match="pair"):
        preference_loss(inputs, PreferenceConfig())


def test_margins_far_out_stay_finite():
    margins = torch.tensor([-1e4, 1e4], dtype=torch.float64, requires_grad=True)
    losses = PREFERENCE_LOSSES["sigmoid"](margins, PreferenceConfig(beta=1.0))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([1e4, 0.0])
    assert margins.grad.tolist() == pytest.approx([-1.0, 0.0])


def test_robust_losses_of_pairs_turned_round_at_their_rate_mean_the_plain_loss():
    """What makes rDPO unbiased: (1 - e) of the pairs stand as they are, e the wrong way round."""
    margins = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    told = PreferenceConfig(beta=0.7, label_smoothing=0.3)
    seen = 0.7 * PREFERENCE_LOSSES["robust"](margins, told) + 0.3 * PREFERENCE_LOSSES["robust"](-margins, told)
    torch.testing.assert_close(seen, PREFERENCE_LOSSES["sigmoid"](margins, PreferenceConfig(beta=0.7)))
