"""A step on preference pairs, against a slow float64 one and in its corner cases."""

import copy

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import PreferenceConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.model.policy import Reference
from asyncrl.learner.step.train_step import train_step

LEARNER = {"learning_rate": 1e-2, "epsilon": 1e-2, "max_grad_norm": 0.5}


def pair_samples(kit, groups=3):
    """Two samples a group: the pair of the group's number."""
    samples = kit.samples(groups=groups, group_size=2, response=(2, 8))
    for sample in samples:
        sample |= {"pair": sample["group_id"], "is_chosen": sample["index"] == 1, "reward": float(sample["index"])}
    return samples


def dpo_config(kit, preference=None, learner=None):
    preference = PreferenceConfig(**(preference or {}))
    return kit.config({"kind": "dpo", "group_size": 2, "preference": preference}, LEARNER | (learner or {}))


def with_reference(kit, model, config, reference):
    train_state = kit.train_state(model, config)
    train_state.reference = Reference(copy.deepcopy(reference), 64)
    return train_state


def slow_loss(kit, model, reference, samples, beta):
    """Mean over pairs of -log sigmoid(beta x margin), token by token."""
    current = kit.plain_logprobs(model, samples)
    frozen = [values.detach() for values in kit.plain_logprobs(reference, samples)]

    def log_ratio(number):
        trained = [token for token, is_trained in enumerate(samples[number]["mask"]) if is_trained]
        return sum(current[number][token] - frozen[number][token] for token in trained)

    losses = []
    for rejected in range(0, len(samples), 2):
        margin = log_ratio(rejected + 1) - log_ratio(rejected)
        losses.append(-torch.log(1 / (1 + torch.exp(-beta * margin))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("tokens_per_row", [45, 10_000])
def test_weights_after_a_step_equal_a_slow_float64_one(kit, tokens_per_row):
    config = dpo_config(kit, {"beta": 0.7})
    start, reference = kit.model().double(), kit.model(seed=2).double()
    samples = pair_samples(kit)
    slow = copy.deepcopy(start)
    loss = slow_loss(kit, slow, reference, samples, 0.7)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(slow.parameters(), 0.5)
    torch.optim.AdamW(slow.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.0).step()
    model = copy.deepcopy(start)
    result = train_step(with_reference(kit, model, config, reference), kit.batch(samples, tokens_per_row), config)
    assert result.metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert result.metrics["dpo/loss"] == pytest.approx(loss.item(), abs=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6, msg=name)


def test_a_pair_with_one_side_masked_is_left_out(kit):
    config, reference = dpo_config(kit), kit.model(seed=2)
    samples = pair_samples(kit)
    samples[1]["mask"][:] = 0
    model = kit.model()
    result = train_step(with_reference(kit, model, config, reference), kit.batch(samples), config)
    assert result.metrics["dpo/pairs"] == 2
    other = kit.model()
    train_step(with_reference(kit, other, config, reference), kit.batch(samples[2:]), config)
    for ours, alone in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, alone, rtol=0, atol=1e-6)


def test_a_step_without_a_pair_and_a_pair_in_two_rows_are_refused(kit):
    config, model, samples = dpo_config(kit), kit.model(), pair_samples(kit, groups=2)
    single = kit.batch([sample | {"pair": -1} for sample in samples])
    apart = kit.batch([samples[0], samples[2], samples[1], samples[3]], 1)
    for batch, said in ((single, "no preference pair to train"), (apart, "a pair must share one")):
        with pytest.raises(LearnerError, match=said):
            train_step(with_reference(kit, model, config, model), batch, config)


@pytest.mark.parametrize("tokens_per_row", [45, 10_000])
def test_of_a_sampler_whose_logprobs_nobody_knows_nothing_is_said(kit, tokens_per_row):
    """Pairs from a file come with 0 at every token; the loss and what is known are told all the same."""
    config, known, unknown = dpo_config(kit), pair_samples(kit), pair_samples(kit)
    for sample in unknown:
        sample["logprobs"] = np.zeros_like(sample["logprobs"])
    metrics = []
    for samples in (known, unknown):
        train_state = with_reference(kit, kit.model(), config, kit.model(seed=2))
        metrics.append(train_step(train_state, kit.batch(samples, tokens_per_row), config).metrics)
    told, left = metrics
    of_sampler = {name for name in told if name.startswith(("ratio/", "mismatch/", "perplexity/behaviour", "perplexity/log_gap"))}
    of_sampler |= {name for name in told if name.startswith("kl/") and not name.startswith("kl/reference")}
    assert {"ratio/mean", "kl/mean", "kl/proximal_k1", "mismatch/kl_k3", "ratio/mean_by_staleness/0"} <= of_sampler
    assert told.keys() - left.keys() == of_sampler
    assert left == {name: value for name, value in told.items() if name in left}
    assert {"kl/reference_mean", "policy/entropy", "dpo/loss"} <= left.keys()
