"""Weights after a step against a slow one: padded batches, float64, loops over samples and tokens, torch's own AdamW.

Every case runs under several packings, so that it also shows that packing and micro-batching change nothing.
"""

import copy
import math

import pytest
import torch

from asyncrl.config.algorithm import CriticConfig, KLConfig, TruncatedToken
from asyncrl.learner.model.critic import SeparateCritic, ValueHead, build_critic_optimizer
from asyncrl.learner.model.policy import Reference
from asyncrl.learner.step.train_step import train_step

PACKINGS = [45, 10_000]
LEARNER = {"learning_rate": 1e-2, "epsilon": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1}
"""A large epsilon keeps AdamW from turning rounding of tiny gradients into whole steps."""
CAP, GAMMA, LAMBDA = 1.1, 0.97, 0.9


def adamw(model, learning_rate):
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-2)


def apply(optimizer, model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def grpo_advantages(samples):
    advantages = []
    for sample in samples:
        group = [other["reward"] for other in samples if other["group_id"] == sample["group_id"]]
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
        advantages.append([(sample["reward"] - mean) / (deviation + 1e-6)] * len(sample["response"]))
    return advantages


def gae(samples, token_rewards, values):
    """Advantages and returns by the recursion over trained tokens; what lies between them is skipped."""
    all_advantages, all_returns = [], []
    for sample, rewards, old in zip(samples, token_rewards, values, strict=True):
        advantages, returns = [0.0] * len(old), [0.0] * len(old)
        following, running = 0.0, 0.0
        for token in reversed(range(len(old))):
            if sample["mask"][token]:
                delta = rewards[token] + GAMMA * following - old[token].item()
                running = delta + GAMMA * LAMBDA * running
                following = old[token].item()
                advantages[token], returns[token] = running, running + old[token].item()
        all_advantages.append(advantages)
        all_returns.append(returns)
    return all_advantages, all_returns


def last_token_rewards(samples):
    rewards = [[0.0] * len(sample["response"]) for sample in samples]
    for sample, of_sample in zip(samples, rewards, strict=True):
        of_sample[max(token for token, trained in enumerate(sample["mask"]) if trained)] = sample["reward"]
    return rewards


def policy_term(current, proximal, behaviour, advantage):
    ratio = torch.exp(current - proximal)
    objective = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return min(math.exp(proximal - behaviour), CAP) * objective


def value_term(value, old, target):
    clipped = value.clamp(old - 0.2, old + 0.2)
    return 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2)


def mean_over_tokens(samples, term):
    """Mean of `term(sample, token)` over trained tokens, both by number."""
    terms = [
        term(number, token) for number, sample in enumerate(samples) for token, trained in enumerate(sample["mask"]) if trained
    ]
    return sum(terms) / len(terms)


def behaviour_near(kit, model, samples, seed=3):
    """Make the behaviour policy one that is some way off the learner, in float32 as it travels."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for sample, logprobs in zip(samples, kit.plain_logprobs(model, samples), strict=True):
            noise = 0.3 * torch.randn(len(logprobs), generator=generator)
            sample["logprobs"] = (logprobs + noise).float().numpy()
    return samples


def assert_same_weights(got, expected, atol=2e-6):
    """Steps are about 1e-2 long, so this is a few parts in ten thousand of one at the very worst."""
    for (name, ours), slow in zip(got.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, slow, rtol=0, atol=atol, msg=name)


def detached(per_sample):
    return [values.detach() for values in per_sample]


CACHE = {}


def once(case, slow):
    """Run a slow step once for all packings of a case."""
    if case not in CACHE:
        CACHE[case] = slow()
    return CACHE[case]


@pytest.mark.parametrize("tokens_per_row", PACKINGS)
@pytest.mark.parametrize(("minibatches", "epochs", "temperature"), [(1, 1, 0.8), (2, 2, 1.0)])
def test_grpo_with_decoupled_ppo(kit, tokens_per_row, minibatches, epochs, temperature):
    updates = {"minibatches": minibatches, "epochs": epochs}
    config = kit.config({"corrections": (TruncatedToken(CAP),)}, LEARNER | updates)
    start = kit.model().double()
    samples = behaviour_near(kit, start, kit.samples(groups=4, group_size=3))

    def slow():
        model = copy.deepcopy(start)
        optimizer, losses = adamw(model, 1e-2), []
        advantages, proximal = grpo_advantages(samples), detached(kit.plain_logprobs(model, samples, temperature))
        parts = [range(6), range(6, 12)] if minibatches == 2 else [range(12)]
        for part in parts * epochs:
            current = kit.plain_logprobs(model, samples, temperature)

            def term(place, token, part=part, current=current):
                number = part[place]
                behaviour = float(samples[number]["logprobs"][token])
                return policy_term(current[number][token], proximal[number][token], behaviour, advantages[number][token])

            loss = mean_over_tokens([samples[number] for number in part], term)
            loss.backward()
            losses.append(loss.item())
            apply(optimizer, model)
        return model, sum(losses) / len(losses)

    expected, loss = once(("grpo", minibatches), slow)
    model = copy.deepcopy(start)
    result = train_step(kit.train_state(model, config), kit.batch(samples, tokens_per_row, temperature=temperature), config)
    assert result.metrics["policy/updates"] == minibatches * epochs
    assert result.metrics["policy/loss"] == pytest.approx(loss, abs=1e-6)
    assert_same_weights(model, expected)


def with_random_output(critic, seed=5):
    """A critic starts at 0; one that says something shows more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in critic.output.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return critic.double()


def critic_train_state(kit, model, critic, config):
    train_state = kit.train_state(model, config)
    train_state.critic = critic
    train_state.critic_optimizer = build_critic_optimizer(
        critic, config.algorithm.critic, config.learner, config.num_steps, train_state.optimizer
    )
    return train_state


def slow_ppo(kit, model, critic, samples, epochs, reference=None):
    """PPO with GAE and a clipped value loss; with a reference, its k1 KL is taken from token rewards."""
    body = model.base_model if isinstance(critic, ValueHead) else critic.body
    optimizers = adamw(model, 1e-2), adamw(critic, 2e-2)

    def values_now():
        hidden = kit.plain_hidden(body, samples)
        return [(states @ critic.output.weight[0] + critic.output.bias[0]) for states in hidden]

    old, proximal = detached(values_now()), detached(kit.plain_logprobs(model, samples))
    rewards = last_token_rewards(samples)
    if reference is not None:
        for of_sample, policy, frozen in zip(rewards, proximal, detached(kit.plain_logprobs(reference, samples)), strict=True):
            for token in range(len(of_sample)):
                of_sample[token] -= 0.3 * (policy[token] - frozen[token]).item()
    advantages, returns = gae(samples, rewards, old)
    policy_losses, value_losses = [], []
    for _ in range(epochs):
        current, values = kit.plain_logprobs(model, samples), values_now()

        def policy(number, token, current=current):
            behaviour = float(samples[number]["logprobs"][token])
            return policy_term(current[number][token], proximal[number][token], behaviour, advantages[number][token])

        def value(number, token, values=values):
            return value_term(values[number][token], old[number][token], returns[number][token])

        policy_loss, value_loss = mean_over_tokens(samples, policy), mean_over_tokens(samples, value)
        scale = 0.5 if isinstance(critic, ValueHead) else 1.0
        (policy_loss + scale * value_loss).backward()
        for optimizer, module in zip(optimizers, (model, critic), strict=True):
            apply(optimizer, module)
        policy_losses.append(policy_loss.item())
        value_losses.append(value_loss.item())
    return model, critic, sum(policy_losses) / epochs, sum(value_losses) / epochs


@pytest.mark.parametrize("tokens_per_row", PACKINGS)
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", ["head", "separate"])
def test_ppo_with_a_critic(kit, tokens_per_row, epochs, kind):
    algorithm = {
        "advantage": "gae", "gamma": GAMMA, "gae_lambda": LAMBDA, "corrections": (TruncatedToken(CAP),),
        "critic": CriticConfig(kind=kind, learning_rate=2e-2),
    }  # fmt: skip
    config = kit.config(algorithm, LEARNER | {"epochs": epochs})
    start = kit.model().double()
    first = with_random_output(ValueHead(32) if kind == "head" else SeparateCritic(kit.model(seed=1).base_model))
    samples = behaviour_near(kit, start, kit.samples(groups=3, group_size=2))
    model, critic = copy.deepcopy(start), copy.deepcopy(first)
    result = train_step(critic_train_state(kit, model, critic, config), kit.batch(samples, tokens_per_row), config)
    slow_model, slow_critic, policy_loss, value_loss = once(
        (kind, epochs), lambda: slow_ppo(kit, copy.deepcopy(start), copy.deepcopy(first), samples, epochs)
    )
    assert result.metrics["policy/loss"] == pytest.approx(policy_loss, abs=1e-6)
    assert result.metrics["value/loss"] == pytest.approx(value_loss, abs=1e-6)
    assert_same_weights(model, slow_model)
    assert_same_weights(critic, slow_critic)


@pytest.mark.parametrize("tokens_per_row", PACKINGS)
def test_kl_in_the_reward(kit, tokens_per_row):
    algorithm = {
        "advantage": "gae", "gamma": GAMMA, "gae_lambda": LAMBDA, "corrections": (TruncatedToken(CAP),),
        "critic": CriticConfig(kind="separate", learning_rate=2e-2),
        "kl": KLConfig(coefficient=0.3, estimator="k1", where="reward", cap=float("inf")),
    }  # fmt: skip
    config = kit.config(algorithm, LEARNER)
    start, reference = kit.model().double(), kit.model(seed=2).double()
    first = with_random_output(SeparateCritic(kit.model(seed=1).base_model))
    samples = behaviour_near(kit, start, kit.samples(groups=3, group_size=2))
    model, critic = copy.deepcopy(start), copy.deepcopy(first)
    train_state = critic_train_state(kit, model, critic, config)
    train_state.reference = Reference(copy.deepcopy(reference), 64)
    train_step(train_state, kit.batch(samples, tokens_per_row), config)
    slow_model, slow_critic, _, _ = once(
        "kl in reward", lambda: slow_ppo(kit, copy.deepcopy(start), copy.deepcopy(first), samples, 1, reference)
    )
    assert_same_weights(model, slow_model)
    assert_same_weights(critic, slow_critic)


@pytest.mark.parametrize("tokens_per_row", PACKINGS)
@pytest.mark.parametrize("is_brought", [False, True], ids=["a model of its own", "brought by the batch"])
def test_kl_in_the_loss(kit, tokens_per_row, is_brought):
    kl = KLConfig(coefficient=0.3, estimator="k3", where="loss", cap=float("inf"))
    config = kit.config({"corrections": (TruncatedToken(CAP),), "kl": kl}, LEARNER)
    start, reference = kit.model().double(), kit.model(seed=2).double()
    samples = behaviour_near(kit, start, kit.samples(groups=3, group_size=3))
    frozen = detached(kit.plain_logprobs(reference, samples))

    def slow():
        model, advantages = copy.deepcopy(start), grpo_advantages(samples)
        current = kit.plain_logprobs(model, samples)
        proximal = detached(current)

        def term(number, token):
            behaviour, advantage = float(samples[number]["logprobs"][token]), advantages[number][token]
            policy = policy_term(current[number][token], proximal[number][token], behaviour, advantage)
            distance = current[number][token] - frozen[number][token]
            return policy + 0.3 * (torch.exp(-distance) - 1 + distance)

        loss = mean_over_tokens(samples, term)
        loss.backward()
        apply(adamw(model, 1e-2), model)
        return model, loss.item()

    expected, loss = once("kl in loss", slow)
    model = copy.deepcopy(start)
    train_state = kit.train_state(model, config)
    if is_brought:
        for sample, logprobs in zip(samples, frozen, strict=True):
            sample["reference"] = logprobs.float().numpy()
    else:
        train_state.reference = Reference(copy.deepcopy(reference), 64)
    result = train_step(train_state, kit.batch(samples, tokens_per_row), config)
    assert result.metrics["policy/loss"] == pytest.approx(loss, abs=1e-6)
    assert_same_weights(model, expected, atol=1e-5 if is_brought else 2e-6)
