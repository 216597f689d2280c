"""The interpolated proximal policy."""

import math

import torch

from asyncrl.algorithms.kl import interpolated_proximal


def test_it_is_the_policy_one_version_back_when_logprobs_move_linearly_in_the_version():
    versions = torch.tensor([9, 8, 7, 5, 1])
    slope, start = torch.tensor([0.1, -0.2, 0.3, 0.05, -0.4], dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)

    def policy_of(version):
        return start + slope * version

    got = interpolated_proximal(
        policy_of(torch.tensor(10)), policy_of(versions), versions, torch.ones(5, dtype=torch.bool), current_version=10
    )
    torch.testing.assert_close(got, policy_of(torch.tensor(9)))


def test_fresh_future_and_unknown_tokens_keep_the_behaviour_policy():
    behaviour = torch.tensor([-1.0, -2.0, -3.0])
    got = interpolated_proximal(
        behaviour + 1, behaviour, torch.tensor([4, 6, -1]), torch.ones(3, dtype=torch.bool), current_version=4
    )
    assert torch.equal(got, behaviour)


def test_masked_tokens_are_zero_and_nothing_has_a_gradient():
    current = torch.tensor([-1.0, math.nan], requires_grad=True)
    got = interpolated_proximal(
        current, torch.tensor([-2.0, math.nan]), torch.tensor([0, -1]), torch.tensor([True, False]), current_version=4
    )
    assert got.tolist() == [-1.25, 0.0]
    assert not got.requires_grad
