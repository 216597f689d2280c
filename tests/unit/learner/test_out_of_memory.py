"""A step that runs out of the (simulated) device's memory: halved rows, the same step."""

import logging

import pytest
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.algorithm import CriticConfig, KLConfig
from asyncrl.config.run import PlacementConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.critic import SeparateCritic, ValueHead, build_critic_optimizer
from asyncrl.learner.reference import FrozenReference
from asyncrl.learner.residents import Residents, learner_components, learner_phases
from asyncrl.learner.rows import prepare, split_row
from asyncrl.learner.step import train_step
from asyncrl.observe.memory import open_memory
from asyncrl.residency.device import SimulatedDevice
from asyncrl.residency.manager import ResidencyManager

COLOCATED = PlacementConfig(kind="colocated")


def trainee_under(kit, config, tmp_path, budget_bytes, critic=None):
    """A trainee whose components a manager moves over a simulated device; its device."""
    trainee = kit.trainee(kit.model(initializer_range=0.3), config)
    if config.algorithm.needs_reference:
        trainee.reference = FrozenReference(kit.model(seed=2, initializer_range=0.3), 64)
    if critic is not None:
        trainee.critic = critic()
        trainee.critic_optimizer = build_critic_optimizer(
            trainee.critic, config.algorithm.critic, config.learner, 100, trainee.optimizer
        )
    device = SimulatedDevice(budget_bytes)
    components = learner_components(trainee, config, device, tmp_path / "swap", tmp_path)
    timeline = open_memory(tmp_path, "learner")
    manager = ResidencyManager("learner", components, learner_phases(trainee, config), device, SystemClock())
    trainee.residents = Residents(manager, device, trainee, timeline)
    timeline.close()
    return trainee, device


def roomy_step(kit, config, tmp_path, batch, critic=None):
    """A budget that takes three quarters of what the step took besides weights; the weights after it, and its result."""
    trainee, device = trainee_under(kit, config, tmp_path, 1 << 30, critic)
    before = device.allocated_bytes
    result = train_step(trainee, batch, config)
    return before + (device.peak_bytes - before) * 3 // 4, weights_of(trainee), result


def weights_of(trainee):
    modules = [trainee.model, *([trainee.critic] if trainee.critic is not None else [])]
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


CASES = {
    "plain": ({}, {}, None),
    "two updates, two epochs": ({"proximal": "recompute"}, {"minibatches": 2, "epochs": 2}, None),
    "reference": ({"kl": KLConfig(coefficient=0.1)}, {}, None),
    "value head": ({"advantage": "gae", "critic": CriticConfig(kind="head")}, {}, lambda: ValueHead(32)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_runs_out_once_is_the_step_that_did_not(kit, tmp_path, caplog, name):
    algorithm, learner, critic = CASES[name]
    config = kit.config(algorithm, learner, placement=COLOCATED)
    batch = kit.batch(kit.samples(groups=4, response=(8, 12)))
    budget, wanted, plain = roomy_step(kit, config, tmp_path, batch, critic)
    trainee, _ = trainee_under(kit, config, tmp_path, budget, critic)
    with caplog.at_level(logging.WARNING):
        result = train_step(trainee, batch, config)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "packing.tokens_per_row" in warnings[0]
    for own, other in zip(weights_of(trainee), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    assert result.metrics == pytest.approx(plain.metrics, rel=1e-3, abs=1e-5)


def test_its_gradients_are_those_of_whole_rows(kit, tmp_path):
    """The first moment after one step from zero is the clipped gradient times a constant."""
    config = kit.config({}, {"max_grad_norm": 1e9}, placement=COLOCATED)
    batch = kit.batch(kit.samples(groups=4, response=(8, 12)))
    moments = []
    for budget in (1 << 30, None):
        budget = budget or roomy_step(kit, config, tmp_path, batch)[0]
        trainee, _ = trainee_under(kit, config, tmp_path, budget)
        train_step(trainee, batch, config)
        moments.append({name: value.clone() for name, value in trainee.optimizer.state_tensors() if name.startswith("exp_avg/")})
    for name, gradient in moments[0].items():
        torch.testing.assert_close(moments[1][name], gradient, rtol=1e-4, atol=1e-7)


def test_a_second_time_in_one_step_ends_it_with_what_was_on_the_device(kit, tmp_path):
    config = kit.config(placement=COLOCATED)
    trainee, device = trainee_under(kit, config, tmp_path, None)
    budget = device.allocated_bytes + 20_000
    trainee, _ = trainee_under(kit, config, tmp_path, budget)
    before = weights_of(trainee)
    with pytest.raises(
        LearnerError, match=r"(?s)out of device memory with halved rows.*on the device: policy .*GiB.*tokens_per_row"
    ):
        train_step(trainee, kit.batch(kit.samples(groups=4, response=(8, 12))), config)
    assert all(torch.equal(own, other) for own, other in zip(weights_of(trainee), before, strict=True))


def test_a_row_that_cannot_be_split_says_so(kit, tmp_path):
    config = kit.config(placement=COLOCATED)
    trainee, device = trainee_under(kit, config, tmp_path, None)
    trainee, _ = trainee_under(kit, config, tmp_path, device.allocated_bytes + 20_000)
    batch = kit.batch(kit.samples(groups=1, response=(8, 12)), tokens_per_row=1)
    with pytest.raises(LearnerError, match=r"one sample .* cannot be split.*max_new_tokens"):
        train_step(trainee, batch, config)


def test_halves_train_what_the_row_trains_in_its_order(kit):
    batch = kit.batch(kit.samples(groups=3))
    (row,) = prepare(batch).rows
    halves = split_row(batch, row)
    assert len(halves) == 2
    for name in ("target_ids", "behaviour_logprobs", "versions"):
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(row, name))
    assert [index for half in halves for index in half.sample_index] == list(row.sample_index)
    assert max(len(half.input_ids) for half in halves) < 0.75 * len(row.input_ids)


def test_a_preference_pair_stays_in_one_half(kit):
    samples = kit.samples(groups=3, group_size=2)
    for index, sample in enumerate(samples):
        sample |= {"pair": index // 2, "is_chosen": index % 2 == 0}
    batch = kit.batch(samples)
    (row,) = prepare(batch).rows
    halves = split_row(batch, row)
    assert len(halves) == 2
    for half in halves:
        pairs = [batch.samples[index].pair for index in half.sample_index]
        assert all(pairs.count(pair) == 2 for pair in pairs)


def test_preferences_run_out_and_go_on_too(kit, tmp_path):
    samples = kit.samples(groups=4, group_size=2, response=(8, 12))
    for index, sample in enumerate(samples):
        sample |= {"pair": index // 2, "is_chosen": index % 2 == 0, "mask": sample["mask"] | 1}
    config, batch = kit.config({"kind": "dpo"}, placement=COLOCATED), kit.batch(samples)
    budget, wanted, plain = roomy_step(kit, config, tmp_path, batch)
    trainee, _ = trainee_under(kit, config, tmp_path, budget)
    result = train_step(trainee, batch, config)
    for own, other in zip(weights_of(trainee), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    assert result.metrics == pytest.approx(plain.metrics, rel=1e-3, abs=1e-5)


def test_a_separate_critic_s_gradients_are_dropped_before_the_second_attempt(kit, tmp_path):
    config = kit.config({"advantage": "gae", "critic": CriticConfig(kind="model")}, placement=COLOCATED)
    batch = kit.batch(kit.samples(groups=4, response=(8, 12)))

    def critic():
        return SeparateCritic(kit.model(seed=3).base_model)

    budget, wanted, _ = roomy_step(kit, config, tmp_path, batch, critic)
    trainee, _ = trainee_under(kit, config, tmp_path, budget, critic)
    train_step(trainee, batch, config)
    for own, other in zip(weights_of(trainee), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
