"""What a step remembers of those before it: the adaptive KL coefficient, and what `auto` picks from."""

import math

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.algorithms.auto import applied
from asyncrl.config.algorithm import CriticConfig, KLConfig
from asyncrl.learner.critic import ValueHead, build_critic_optimizer
from asyncrl.learner.reference import FrozenReference
from asyncrl.learner.step import train_step
from asyncrl.learner.trainee import StepMemory


def adaptive_trainee(kit, target):
    config = kit.config({"kl": KLConfig(coefficient=0.5, target=target, horizon=100)}, {"learning_rate": 1e-2})
    trainee = kit.trainee(kit.model(), config)
    trainee.reference = FrozenReference(kit.model(seed=2), 64)
    return trainee, config


@pytest.mark.parametrize(("target", "sign"), [(1e-6, 1.0), (1e6, -1.0)])
def test_the_adaptive_coefficient_follows_the_measured_kl(kit, target, sign):
    """Clipped at 0.2: with 12 samples on a horizon of 100 a step changes it by 2.4 percent."""
    trainee, config = adaptive_trainee(kit, target)
    used = [train_step(trainee, kit.batch(kit.samples(), step=step), config).metrics["kl/coefficient"] for step in range(3)]
    factor = 1.0 + sign * 0.2 * 12 / 100
    assert used == pytest.approx([0.5, 0.5 * factor, 0.5 * factor**2])
    assert trainee.memory.kl_coefficient == pytest.approx(0.5 * factor**3)


def test_a_fixed_coefficient_is_not_remembered(kit):
    config = kit.config({"kl": KLConfig(coefficient=0.5)})
    trainee = kit.trainee(kit.model(), config)
    trainee.reference = FrozenReference(kit.model(seed=2), 64)
    train_step(trainee, kit.batch(kit.samples()), config)
    assert trainee.memory == StepMemory()


def plain_divergence(kit, model, reference, samples):
    """Mean over trained tokens of log-probability under the model less that under the reference (k1)."""
    pairs = zip(*(kit.plain_logprobs(one, samples) for one in (model, reference)), samples, strict=True)
    return np.mean([
        (ours[token] - theirs[token]).item() for ours, theirs, sample in pairs for token in np.flatnonzero(sample["mask"])
    ])


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_coefficient_follows_the_penalty_s_own_estimate(kit, where):
    """k1 is told and answered to, not the k3 of the same two policies."""
    samples, (policy, reference) = kit.samples(), (kit.model(seed, initializer_range=0.3) for seed in (0, 2))
    if plain_divergence(kit, policy, reference, samples) < 0:
        policy, reference = reference, policy
    measured = plain_divergence(kit, policy, reference, samples)
    penalty = KLConfig(coefficient=0.5, estimator="k1", where=where, cap=math.inf, target=measured / 0.9, horizon=100)
    config = kit.config({"advantage": "reinforce_pp", "kl": penalty})
    trainee = kit.trainee(policy, config)
    trainee.reference = FrozenReference(reference, 64)
    metrics = train_step(trainee, kit.batch(samples, 40), config).metrics
    assert metrics["kl/penalty_mean"] == pytest.approx(measured, rel=1e-4)
    assert metrics["kl/reference_mean"] != pytest.approx(measured, rel=1e-2)
    assert trainee.memory.kl_coefficient == pytest.approx(0.5 * (1.0 - 0.1 * 12 / 100), rel=1e-5)


def test_nothing_is_adapted_while_the_critic_is_trained_alone(kit):
    penalty = KLConfig(coefficient=0.5, where="reward", target=1e-6, horizon=100)
    critic = CriticConfig(kind="head", warmup_steps=1)
    config = kit.config({"advantage": "gae", "kl": penalty, "critic": critic})
    trainee = kit.trainee(kit.model(), config)
    trainee.reference, trainee.critic = FrozenReference(kit.model(seed=2), 64), ValueHead(32)
    trainee.critic_optimizer = build_critic_optimizer(trainee.critic, critic, config.learner, 100, trainee.optimizer)
    alone = train_step(trainee, kit.batch(kit.samples()), config).metrics
    assert alone["kl/penalty_mean"] > 0
    assert trainee.memory == StepMemory()
    train_step(trainee, kit.batch(kit.samples(), step=1), config)
    assert trainee.memory.kl_coefficient == pytest.approx(0.5 * (1.0 + 0.2 * 12 / 100))


def test_auto_picks_from_what_was_measured_and_says_when_it_changes(kit):
    config = kit.config({"kind": "auto"})
    trainee, samples = kit.trainee(kit.model(), config), kit.samples()
    first = train_step(trainee, kit.batch(samples), config)
    assert trainee.memory.recipe == "lagging"
    assert first.metrics["policy/recipe"] == 1
    assert "no mismatch measured yet" in first.recipe_reason
    for sample in samples:
        sample["logprobs"] += 2.0
    far = [train_step(trainee, kit.batch(samples, step=step), config) for step in (1, 2)]
    assert trainee.memory.recipe == "far"
    assert far[1].metrics["policy/recipe"] == 2
    assert far[1].metrics["policy/kept_fraction"] < 1.0
    assert "kl/mean" in (far[0].recipe_reason + far[1].recipe_reason)
    again = train_step(trainee, kit.batch(samples, step=3), config)
    assert again.recipe_reason == ""


def test_auto_trains_as_the_recipe_it_picks(kit):
    samples, weights = kit.samples(), []
    recipe = applied(kit.config({"kind": "auto"}).algorithm, "lagging")
    for config in (kit.config({"kind": "auto"}), msgspec.structs.replace(kit.config(), algorithm=recipe)):
        model = kit.model()
        train_step(kit.trainee(model, config), kit.batch(samples), config)
        weights.append(list(model.parameters()))
    assert all(torch.equal(auto, plain) for auto, plain in zip(*weights, strict=True))
