"""Critics: what they see, what they start from, and that they train alone when they should."""

import pytest
import torch

from asyncrl.config.algorithm import CriticConfig, MaskedToken
from asyncrl.errors import LearnerError
from asyncrl.learner.model.critic import (
    SeparateCritic,
    ValueHead,
    build_critic_optimizer,
    load_critic,
    save_critic,
)
from asyncrl.learner.step.train_step import train_step

KINDS = ["head", "separate"]


def critic_of(kit, kind):
    torch.manual_seed(7)
    critic = ValueHead(32) if kind == "head" else SeparateCritic(kit.model(seed=4).base_model)
    torch.nn.init.normal_(critic.output.weight, std=0.3)
    return critic


def ppo_config(kit, kind, learner=None, **critic):
    own = CriticConfig(**{"kind": kind, "learning_rate": 1e-2, "value_clip": float("inf")} | critic)
    return kit.config({"advantage": "gae", "critic": own}, learner)


def train_state_of(kit, model, critic, config):
    train_state = kit.train_state(model, config)
    train_state.critic = critic
    train_state.critic_optimizer = build_critic_optimizer(
        critic, config.algorithm.critic, config.learner, config.num_steps, train_state.optimizer
    )
    return train_state


def bits(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(one, other):
    return all(torch.equal(old, new) for old, new in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_critic_says_nothing_and_changes_no_first_policy_step(kit, kind):
    """At 0 everywhere, GAE(1) is the plain return, and no gradient of the values reaches the policy."""
    samples, config, rewarded = kit.samples(), ppo_config(kit, kind), kit.config({"advantage": "reward"})
    critic = ValueHead(32) if kind == "head" else SeparateCritic(kit.model(seed=4).base_model)
    with_critic, plain = kit.model(), kit.model()
    result = train_step(train_state_of(kit, with_critic, critic, config), kit.batch(samples), config)
    train_step(kit.train_state(plain, rewarded), kit.batch(samples), rewarded)
    assert result.metrics["value/mean"] == 0.0
    for ours, theirs in zip(with_critic.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_trains_the_critic_and_leaves_the_policy_s_bits(kit, kind):
    config = ppo_config(kit, kind, {"weight_decay": 0.1}, warmup_steps=2)
    model, critic = kit.model(), critic_of(kit, kind)
    train_state = train_state_of(kit, model, critic, config)
    policy, values = bits(model), bits(critic)
    for step in range(2):
        result = train_step(train_state, kit.batch(kit.samples(seed=step), 40, step=step), config)
        assert same(policy, model.parameters())
        assert "policy/loss" not in result.metrics
        assert result.metrics["value/grad_norm"] > 0
        assert result.version == step + 1
    assert not same(values, critic.parameters())
    after = train_step(train_state, kit.batch(kit.samples(seed=2), 40, step=2), config)
    assert not same(policy, model.parameters())
    assert after.metrics["policy/grad_norm"] > 0


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("band", [(0.9, 1.1), (90.0, 91.0)], ids=["some kept", "none kept"])
def test_what_corrections_drop_is_no_matter_to_the_critic(kit, band, aggregation):
    """The value loss is over all trained tokens, so its denominator is too, in one row or many."""
    outcomes = []
    for denominator, tokens_per_row in (("all", 10_000), ("kept", 10_000), ("kept", 30)):
        own = CriticConfig(value_clip=float("inf"))
        config = kit.config(
            {
                "advantage": "gae",
                "critic": own,
                "corrections": (MaskedToken(low=band[0], high=band[1]),),
                "denominator": denominator,
                "aggregation": aggregation,
            },
            {"minibatches": 2, "epsilon": 1e-2},
        )
        critic = critic_of(kit, "separate")
        result = train_step(train_state_of(kit, kit.model(), critic, config), kit.batch(kit.samples(), tokens_per_row), config)
        assert (result.metrics["policy/kept_fraction"] > 0.0) == (band[0] < 1.0)
        assert result.metrics["policy/kept_fraction"] < 0.7
        outcomes.append((result.metrics["value/loss"], result.metrics["value/grad_norm"], bits(critic)))
    for loss, norm, weights in outcomes[1:]:
        assert loss == pytest.approx(outcomes[0][0], rel=1e-5)
        assert norm == pytest.approx(outcomes[0][1], rel=1e-5)
        for ours, expected in zip(weights, outcomes[0][2], strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_another_critic_s_file_is_refused(kit, tmp_path):
    save_critic(critic_of(kit, "head"), tmp_path / "critic.safetensors")
    with pytest.raises(LearnerError, match="is of another critic"):
        load_critic(critic_of(kit, "separate"), tmp_path / "critic.safetensors")
    with pytest.raises(LearnerError, match="was written without a critic"):
        load_critic(critic_of(kit, "head"), tmp_path / "step-000001" / "trainer" / "critic.safetensors")


def test_an_advantage_without_returns_is_refused(kit, tmp_path):
    (tmp_path / "own_advantage.py").write_text(
        "from asyncrl.algorithms.advantage_types import AdvantageOutputs\n"
        "def plain(inputs, config):\n"
        "    return AdvantageOutputs(inputs.mask * inputs.rewards[:, None])\n"
    )
    own = f"{tmp_path / 'own_advantage.py'}:plain"
    config = kit.config({"advantage": own, "critic": CriticConfig(kind="head")})
    train_state = train_state_of(kit, kit.model(), critic_of(kit, "head"), config)
    with pytest.raises(LearnerError, match="gives no returns to train the critic towards"):
        train_step(train_state, kit.batch(kit.samples()), config)
