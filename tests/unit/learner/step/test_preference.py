"""A step on preference pairs, against a slow float64 one and in its corner cases."""

import copy

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import PreferenceConfig
from asyncrl.learner.step.train_step import train_step

LEARNER = {"learning_rate": 1e-2, "epsilon": 1e-2, "max_grad_norm": 0.5}


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
    torch.optim.AdamW(slow.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.0).step()
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
