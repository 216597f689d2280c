"""KL estimators beside the numbers of tests/golden."""

import pytest
import torch

from asyncrl.algorithms.kl import KL_ESTIMATORS, interpolated_proximal, kl_penalty
from asyncrl.config.algorithm import KLConfig


def option(estimator, gradient, cap=float("inf")):
    return KLConfig(estimator=estimator, gradient=gradient, cap=cap)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", 0.1487212707), ("abs", 0.5)])
def test_the_value_of_each_estimator(estimator, expected):
    assert KL_ESTIMATORS[estimator](torch.tensor(-0.5, dtype=torch.float64)).item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_with_the_gradient_of_k2_every_estimator_has_the_gradient_of_the_divergence(estimator):
    """By enumeration over a small vocabulary."""
    logits, reference = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    current, reference = logits.requires_grad_().log_softmax(0), reference.log_softmax(0)
    values = kl_penalty(current, current, reference, torch.ones(7, dtype=torch.bool), option(estimator, "k2"))
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
    got = kl_penalty(current, current.detach(), reference, everywhere, option(estimator, gradient, cap=5.0))
    free = KL_ESTIMATORS[estimator](current.detach() - reference)
    beyond = free.abs() > 5
    assert beyond.sum() == 2
    torch.testing.assert_close(got.detach(), free.clamp(-5, 5))
    (slope,) = torch.autograd.grad(got.sum(), current)
    # The ratio's own gradient stays: the penalty there is the constant cap times the ratio.
    torch.testing.assert_close(slope[beyond], got.detach()[beyond] if gradient == "ratio" else torch.zeros(2).double())
    assert slope[~beyond] != 0


def test_fresh_future_and_unknown_tokens_keep_the_behaviour_policy_and_masked_ones_are_zero():
    behaviour = torch.tensor([-1.0, -2.0, -3.0, float("nan"), -2.0])
    current = torch.tensor([0.0, -1.0, -2.0, float("nan"), -1.0], requires_grad=True)
    mask = torch.tensor([True, True, True, False, True])
    got = interpolated_proximal(current, behaviour, torch.tensor([4, 6, -1, -1, 0]), mask, current_version=4)
    assert got.tolist() == [-1.0, -2.0, -3.0, 0.0, -1.25]
    assert not got.requires_grad
