"""Weights after a step against a slow one: padded batches, float64, loops over samples and tokens, torch's own AdamW.

Every case runs under two packings, so that it also shows that packing and micro-batching change nothing. At the end preferences,
with their corner cases.
"""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from asyncrl.algorithms.advantages import ADVANTAGES, AdvantageConfig, AdvantageInputs
from asyncrl.config.algorithm import CriticConfig, KLConfig, PreferenceConfig, TruncatedToken
from asyncrl.learner.step.train_step import train_step

PACKINGS = [45, 10_000]
LEARNER = {"learning_rate": 1e-2, "epsilon": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1}
"""A large epsilon keeps AdamW from turning rounding of tiny gradients into whole steps, which are about 1e-2 long."""
CAP, GAMMA, LAMBDA, KL = 1.1, 0.97, 0.9, 0.3


def adamw(model, learning_rate):
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-2)


def apply(optimizer, model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def advantages_of(name, samples, rewards, values=None):
    """Advantages and returns by the functions that tests/golden compares with published numbers, of padded samples."""

    def padded(rows):
        return pad_sequence([torch.as_tensor(row, dtype=torch.float64) for row in rows], batch_first=True).numpy()

    mask, ids = padded(sample["mask"] for sample in samples).astype(bool), [sample["group_id"] for sample in samples]
    of_samples = np.array([sample["reward"] for sample in samples])
    inputs = AdvantageInputs(of_samples, np.array(ids), mask, padded(rewards), padded(values) if values else None)
    outputs = ADVANTAGES[name](inputs, AdvantageConfig(gamma=GAMMA, gae_lambda=LAMBDA))
    return outputs.advantages, outputs.returns


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


def mean_over_tokens(samples, numbers, term):
    """Mean of `term(sample, token)` over the trained tokens of the samples of these numbers."""
    terms = [term(number, token) for number in numbers for token, trained in enumerate(samples[number]["mask"]) if trained]
    return sum(terms) / len(terms)


def samples_near(kit, model, **sizes):
    """Samples of a behaviour policy that is some way off the learner, in float32 as it travels."""
    generator, samples = torch.Generator().manual_seed(3), kit.samples(**sizes)
    for sample, logprobs in zip(samples, kit.plain_logprobs(model, samples), strict=True):
        noise = 0.3 * torch.randn(len(logprobs), generator=generator)
        sample["logprobs"] = (logprobs.detach() + noise).float().numpy()
    return samples


def detached(per_sample):
    return [values.detach() for values in per_sample]


def slow_grpo(kit, model, samples, parts, temperature, frozen):
    """Decoupled PPO, an update for each part; with `frozen`, the reference's log-probabilities, its k3 KL is in the loss."""
    optimizer, losses = adamw(model, 1e-2), []
    advantages, _ = advantages_of("grpo", samples, last_token_rewards(samples))
    proximal = detached(kit.plain_logprobs(model, samples, temperature))
    for part in parts:
        current = kit.plain_logprobs(model, samples, temperature)

        def term(number, token, current=current):
            behaviour = float(samples[number]["logprobs"][token])
            loss = policy_term(current[number][token], proximal[number][token], behaviour, advantages[number][token])
            distance = current[number][token] - frozen[number][token] if frozen else torch.zeros(())
            return loss + KL * (torch.exp(-distance) - 1 + distance)

        loss = mean_over_tokens(samples, part, term)
        loss.backward()
        losses.append(loss.item())
        apply(optimizer, model)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("minibatches", "epochs", "temperature", "reference"),
    [(1, 1, 0.8, ""), (2, 2, 1.0, ""), (1, 1, 1.0, "a model of its own"), (1, 1, 1.0, "brought by the batch")],
)
def test_grpo_with_decoupled_ppo(kit, minibatches, epochs, temperature, reference):
    kl = KLConfig(coefficient=KL, estimator="k3", where="loss", cap=math.inf) if reference else None
    learner = LEARNER | {"minibatches": minibatches, "epochs": epochs}
    config = kit.config({"corrections": (TruncatedToken(CAP),), "kl": kl}, learner)
    start, other = kit.model().double(), kit.model(seed=2).double()
    samples, expected = samples_near(kit, start, groups=4, group_size=3), copy.deepcopy(start)
    frozen = detached(kit.plain_logprobs(other, samples)) if reference else []
    parts = [range(6), range(6, 12)] if minibatches == 2 else [range(12)]
    loss = slow_grpo(kit, expected, samples, parts * epochs, temperature, frozen)
    for sample, logprobs in zip(samples, frozen, strict=True) if reference == "brought by the batch" else ():
        sample["reference"] = logprobs.float().numpy()
    for tokens_per_row in PACKINGS:
        model = copy.deepcopy(start)
        train_state = kit.train_state(model, config, reference=other if reference == "a model of its own" else None)
        result = train_step(train_state, kit.batch(samples, tokens_per_row, temperature=temperature), config)
        assert result.metrics["policy/updates"] == minibatches * epochs
        assert result.metrics["policy/loss"] == pytest.approx(loss, abs=1e-6)
        kit.assert_near(model, expected, atol=1e-5 if reference == "brought by the batch" else 2e-6)


def slow_ppo(kit, model, critic, samples, epochs, frozen):
    """PPO with GAE and a clipped value loss; of `frozen`, the reference's log-probabilities, k1 is taken from token rewards."""
    body = model.base_model if critic.body is None else critic.body
    optimizers = adamw(model, 1e-2), adamw(critic, 2e-2)

    def values_now():
        return [states @ critic.output.weight[0] + critic.output.bias[0] for states in kit.plain_hidden(body, samples)]

    old, proximal = detached(values_now()), detached(kit.plain_logprobs(model, samples))
    rewards = last_token_rewards(samples)
    for of_sample, policy, reference in zip(rewards, proximal, frozen, strict=True) if frozen else ():
        for token in range(len(of_sample)):
            of_sample[token] -= KL * (policy[token] - reference[token]).item()
    advantages, returns = advantages_of("gae", samples, rewards, old)
    losses = []
    for _ in range(epochs):
        current, values = kit.plain_logprobs(model, samples), values_now()

        def policy(number, token, current=current):
            behaviour = float(samples[number]["logprobs"][token])
            return policy_term(current[number][token], proximal[number][token], behaviour, advantages[number][token])

        def value(number, token, values=values):
            return value_term(values[number][token], old[number][token], returns[number][token])

        policy_loss, value_loss = (mean_over_tokens(samples, range(len(samples)), term) for term in (policy, value))
        scale = 0.5 if critic.body is None else 1.0
        (policy_loss + scale * value_loss).backward()
        for optimizer, module in zip(optimizers, (model, critic), strict=True):
            apply(optimizer, module)
        losses.append([policy_loss.item(), value_loss.item()])
    return torch.tensor(losses, dtype=torch.float64).mean(dim=0).tolist()


@pytest.mark.parametrize(
    ("kind", "epochs", "has_kl"), [("head", 1, False), ("head", 2, False), ("separate", 2, False), ("separate", 1, True)]
)
def test_ppo_with_a_critic_and_a_kl_in_the_reward(kit, kind, epochs, has_kl):
    algorithm = {
        "advantage": "gae", "gamma": GAMMA, "gae_lambda": LAMBDA, "corrections": (TruncatedToken(CAP),),
        "critic": CriticConfig(kind=kind, learning_rate=2e-2),
        "kl": KLConfig(coefficient=KL, estimator="k1", where="reward", cap=math.inf) if has_kl else None,
    }  # fmt: skip
    config = kit.config(algorithm, LEARNER | {"epochs": epochs})
    start, reference = (kit.model().double(), kit.critic(kind).double()), kit.model(seed=2).double()
    samples, expected = samples_near(kit, start[0], groups=3, group_size=2), copy.deepcopy(start)
    frozen = detached(kit.plain_logprobs(reference, samples)) if has_kl else []
    losses = slow_ppo(kit, *expected, samples, epochs, frozen)
    for tokens_per_row in PACKINGS:
        model, critic = copy.deepcopy(start)
        train_state = kit.train_state(model, config, critic, reference if has_kl else None)
        result = train_step(train_state, kit.batch(samples, tokens_per_row), config)
        assert [result.metrics["policy/loss"], result.metrics["value/loss"]] == pytest.approx(losses, abs=1e-6)
        kit.assert_near(model, expected[0], atol=2e-6)
        kit.assert_near(critic, expected[1], atol=2e-6)


def pair_samples(kit, groups=3):
    """Two samples a group: the pair of the group's number."""
    samples = kit.samples(groups=groups, group_size=2, response=(2, 8))
    for sample in samples:
        sample |= {"pair": sample["group_id"], "is_chosen": sample["index"] == 1, "reward": float(sample["index"])}
    return samples


def dpo_config(kit, preference=None):
    return kit.config({"kind": "dpo", "group_size": 2, "preference": PreferenceConfig(**(preference or {}))}, LEARNER)


SLOW = {
    "sigmoid": lambda logits: torch.log(1 + torch.exp(-logits)),
    "robust": lambda logits: (0.8 * torch.log(1 + torch.exp(-logits)) - 0.2 * torch.log(1 + torch.exp(logits))) / 0.6,
    "hinge": lambda logits: torch.where(logits < 1, 1 - logits, 0.0),
}
"""Of beta x margin; `robust` with a smoothing of 0.2."""


def slow_loss(kit, model, reference, samples, loss, beta):
    """Mean over pairs; rejected and chosen answers follow each other."""
    both = zip(kit.plain_logprobs(model, samples), kit.plain_logprobs(reference, samples), samples, strict=True)
    log_ratios = torch.stack([(torch.tensor(sample["mask"]) * (ours - theirs.detach())).sum() for ours, theirs, sample in both])
    return SLOW[loss](beta * (log_ratios[1::2] - log_ratios[::2])).mean()


@pytest.mark.parametrize("name", SLOW)
def test_gradient_norm_and_weights_after_a_step_equal_a_slow_float64_one(kit, name):
    beta = 5.0  # one of the three pairs is beyond the hinge
    config = dpo_config(kit, {"loss": name, "beta": beta, "label_smoothing": 0.2 if name == "robust" else 0.0})
    start, reference = kit.model().double(), kit.model(seed=2).double()
    samples, slow = pair_samples(kit), copy.deepcopy(start)
    loss = slow_loss(kit, slow, reference, samples, name, beta)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(slow.parameters(), 0.5)
    adamw(slow, 1e-2).step()
    for tokens_per_row in (45, 10_000):
        model = copy.deepcopy(start)
        result = train_step(kit.train_state(model, config, reference=reference), kit.batch(samples, tokens_per_row), config)
        assert [result.metrics[f"{of}/loss"] for of in ("policy", "dpo")] == pytest.approx([loss.item()] * 2, abs=1e-6)
        assert result.metrics["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        kit.assert_near(model, slow, atol=2e-6)


def test_a_pair_with_one_side_masked_is_left_out(kit):
    config, samples = dpo_config(kit), pair_samples(kit)
    samples[1]["mask"][:] = 0
    with_it, without = kit.model(), kit.model()
    for model, given in ((with_it, samples), (without, samples[2:])):
        result = train_step(kit.train_state(model, config, reference=kit.model(seed=2)), kit.batch(given), config)
        assert result.metrics["dpo/pairs"] == 2
    kit.assert_near(with_it, without, atol=1e-6)


@pytest.mark.parametrize("tokens_per_row", [45, 10_000])
def test_of_a_sampler_whose_logprobs_nobody_knows_nothing_is_said(kit, tokens_per_row):
    """Pairs from a file come with 0 at every token; the loss and what is known are told all the same."""
    config, known, unknown = dpo_config(kit), pair_samples(kit), pair_samples(kit)
    for sample in unknown:
        sample["logprobs"] = np.zeros_like(sample["logprobs"])
    metrics = []
    for samples in (known, unknown):
        train_state = kit.train_state(kit.model(), config, reference=kit.model(seed=2))
        metrics.append(train_step(train_state, kit.batch(samples, tokens_per_row), config).metrics)
    told, left = metrics
    assert {"ratio/mean", "kl/mean", "kl/proximal_k1", "mismatch/kl_k3", "ratio/mean_by_staleness/0"} <= told.keys() - left.keys()
    assert left == {name: value for name, value in told.items() if name in left}
    assert {"kl/reference_mean", "policy/entropy", "dpo/loss"} <= left.keys()
