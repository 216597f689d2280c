"""Critics: what they start from, and that they train alone when they should."""

import math

import pytest

from asyncrl.config.algorithm import CriticConfig, MaskedToken
from asyncrl.learner.step.train_step import train_step

any_kind = pytest.mark.parametrize("kind", ["head", "separate"])


def ppo_config(kit, kind, learner=None, algorithm=None, **critic):
    own = CriticConfig(**{"kind": kind, "learning_rate": 1e-2, "value_clip": math.inf} | critic)
    return kit.config({"advantage": "gae", "critic": own} | (algorithm or {}), learner)


@any_kind
def test_a_new_critic_says_nothing_and_changes_no_first_policy_step(kit, kind):
    """At 0 everywhere, GAE(1) is the plain return, and no gradient of the values reaches the policy."""
    samples, config, rewarded = kit.samples(), ppo_config(kit, kind), kit.config({"advantage": "reward"})
    with_critic, plain = kit.model(), kit.model()
    result = train_step(kit.train_state(with_critic, config, kit.new_critic(kind)), kit.batch(samples), config)
    train_step(kit.train_state(plain, rewarded), kit.batch(samples), rewarded)
    assert result.metrics["value/mean"] == 0.0
    kit.assert_near(with_critic, plain, atol=1e-6)


@any_kind
def test_warmup_trains_the_critic_and_leaves_the_policy_s_bits_and_its_schedule(kit, kind):
    learner = {"weight_decay": 0.1, "learning_rate": 1e-3, "warmup_steps": 4}
    config, model, critic = ppo_config(kit, kind, learner, warmup_steps=2), kit.model(), kit.critic(kind)
    train_state, policy, values = kit.train_state(model, config, critic), kit.bits(model), kit.bits(critic)
    for step in range(2):
        result = train_step(train_state, kit.batch(kit.samples(seed=step), 40, step=step), config)
        assert kit.same(policy, model.parameters())
        assert "policy/loss" not in result.metrics
        assert result.metrics["value/grad_norm"] > 0
        assert result.version == step + 1
    assert not kit.same(values, critic.parameters())
    after = train_step(train_state, kit.batch(kit.samples(seed=2), 40, step=2), config)
    assert not kit.same(policy, model.parameters())
    assert after.metrics["policy/grad_norm"] > 0
    assert after.metrics["policy/learning_rate"] == pytest.approx(1e-3 / 4), "the first of the policy's own warm-up"


@any_kind
def test_a_critic_keeps_its_own_learning_rate_when_the_settings_of_a_step_are_followed(kit, kind):
    config = ppo_config(kit, kind, {"learning_rate": 1e-5})
    train_state = kit.train_state(kit.model(), config, kit.critic(kind))
    train_state.follow(config)
    assert (train_state.optimizer.step(99), train_state.critic_optimizer.step(99)) == (pytest.approx(1e-5), pytest.approx(1e-2))


@pytest.mark.parametrize(("low", "aggregation"), [(0.9, "token-mean"), (90.0, "seq-mean-token-mean")], ids=["some kept", "none"])
def test_what_corrections_drop_is_no_matter_to_the_critic(kit, low, aggregation):
    """The value loss is over all trained tokens, so its denominator is too, in one row or many."""
    outcomes = []
    for denominator, tokens_per_row in (("all", 10_000), ("kept", 10_000), ("kept", 30)):
        algorithm = {"denominator": denominator, "aggregation": aggregation, "corrections": (MaskedToken(low, low + 0.2),)}
        config = ppo_config(kit, "separate", {"minibatches": 2, "epsilon": 1e-2}, algorithm, learning_rate=1e-5)
        critic = kit.critic("separate")
        result = train_step(kit.train_state(kit.model(), config, critic), kit.batch(kit.samples(), tokens_per_row), config)
        assert (0.0 < result.metrics["policy/kept_fraction"] < 0.7) if low < 1.0 else not result.metrics["policy/kept_fraction"]
        outcomes.append(([result.metrics[f"value/{name}"] for name in ("loss", "grad_norm")], critic))
    for figures, critic in outcomes[1:]:
        assert figures == pytest.approx(outcomes[0][0], rel=1e-5)
        kit.assert_near(critic, outcomes[0][1], atol=1e-6)
