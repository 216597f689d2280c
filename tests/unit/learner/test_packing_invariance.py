"""How samples share rows changes neither values nor gradients: packed = unpacked, whatever the row budget."""

import copy

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.types import Denominators, LossConfig, LossInputs
from asyncrl.config.corrections import (
    MaskedGeometric,
    MaskedToken,
    OffPolicySequenceMask,
    SecondMomentClip,
    SecondMomentMask,
    TruncatedToken,
)
from asyncrl.learner.model import row_logprobs
from asyncrl.learner.rows import prepare
from asyncrl.learner.step import train_step
from asyncrl.learner.trainee import Trainee
from asyncrl.models.attention import PACKED_ATTENTION


def gradients(model, batch):
    """Gradient of a weighted sum of the targets' logprobs, weights by sample so that a mix-up shows."""
    model.zero_grad()
    for row in prepare(batch).rows:
        logprobs, _ = row_logprobs(model, row, temperature=batch.temperature, chunk_tokens=64)
        weights = torch.from_numpy(row.sample_index + 1)[row.sequence_ids].to(logprobs.dtype)
        (logprobs * weights).mean().mul(row.num_targets).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def plain_logprobs(model, sample, temperature=1.0):
    """A sample on its own through transformers' own forward and eager attention."""
    ids = torch.tensor([*sample["prompt"], *sample["response"]])
    model.set_attn_implementation("eager")
    logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
    model.set_attn_implementation(PACKED_ATTENTION)
    chosen = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    return chosen[len(sample["prompt"]) - 1 :][torch.tensor(sample["mask"]).bool()]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_those_of_each_sample_alone(kit, temperature):
    model, samples = kit.model(), kit.samples(groups=4)
    expected = torch.cat([plain_logprobs(model, sample, temperature) for sample in samples])
    rows = prepare(kit.batch(samples)).rows
    got, _ = row_logprobs(model, rows[0], temperature=temperature, chunk_tokens=1024)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens_per_row", [1, 40, 10_000])
def test_packed_gradients_equal_those_of_plain_unpacked_samples(kit, tokens_per_row):
    model, samples = kit.model(), kit.samples(groups=5, response=(1, 40))
    packed = gradients(model, kit.batch(samples, tokens_per_row))
    model.zero_grad()
    for index, sample in enumerate(samples):
        (plain_logprobs(model, sample).sum() * (index + 1)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-5, atol=1e-4, msg=name)


def test_gradients_agree_to_1e5_in_the_loss_s_own_scale(kit):
    config = kit.config({"groups_per_step": 5, "group_size": 4})
    after = []
    for tokens_per_row in (1, 30, 75, 10_000):
        model = kit.model()
        optimizer = kit.optimizer(model, config)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        recorded = record_gradients(model)
        result = train_step(Trainee(model, optimizer), prepare(kit.batch(kit.samples(groups=5), tokens_per_row)), config)
        assert any(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
        after.append((result, recorded))
    for result, recorded in after[1:]:
        for name, gradient in recorded.items():
            torch.testing.assert_close(gradient, after[0][1][name], rtol=0, atol=1e-5)
        assert figures(result) == pytest.approx(figures(after[0][0]), rel=1e-4, abs=1e-5)


CORRECTED = {
    "m2po": {"corrections": (SecondMomentMask(0.01),), "denominator": "kept"},
    "m2po, two updates": {"corrections": (SecondMomentMask(0.01), TruncatedToken(1.5)), "denominator": "kept"},
    "m2po clip": {
        "corrections": (SecondMomentClip(0.01),), "loss": "ppo_clip", "proximal": "behaviour", "denominator": "kept",
    },
    "kept, by sequence": {
        "corrections": (MaskedGeometric(0.97, 1.03),), "denominator": "kept", "aggregation": "seq-mean-token-mean",
    },
    "kept, opsm": {"corrections": (OffPolicySequenceMask(0.05),), "denominator": "kept"},
    "kept, loglinear": {"corrections": (MaskedToken(0.9, 1.1),), "denominator": "kept", "proximal": "loglinear"},
}  # fmt: skip


@pytest.mark.parametrize("case", CORRECTED)
def test_corrections_of_a_whole_update_do_not_depend_on_rows(kit, case):
    """What is dropped, and what the loss divides by, is decided over the update: one row and many rows agree."""
    learner = {"epsilon": 1e-2, "minibatches": 2 if "two" in case else 1}
    config, outcomes, start = kit.config(CORRECTED[case], learner), [], kit.model()
    samples = kit.samples(groups=4, group_size=3)
    with torch.no_grad():
        for sample, logprobs in zip(samples, plain_all(start, samples), strict=True):
            sample["logprobs"] = (logprobs + 0.2 * torch.randn(len(logprobs))).numpy()
            sample["versions"] = torch.randint(0, 5, (len(logprobs),)).numpy()
    for tokens_per_row in (10_000, 45, 1):
        model = copy.deepcopy(start)
        result = train_step(kit.trainee(model, config), kit.batch(samples, tokens_per_row, step=5), config)
        outcomes.append((result, list(model.parameters())))
    (one_row, expected), *others = outcomes
    assert any(not torch.equal(old, new) for old, new in zip(start.parameters(), expected, strict=True))
    if case != "m2po clip":
        assert 0 < one_row.metrics["policy/kept_fraction"] < 1
    for result, weights in others:
        assert result.metrics["policy/loss"] == pytest.approx(one_row.metrics["policy/loss"], abs=1e-5)
        for got, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def plain_all(model, samples):
    return [plain_logprobs(model, sample | {"mask": np.ones(len(sample["response"]))}) for sample in samples]


def test_a_batch_packed_for_several_ranks_trains_alike_on_one(kit):
    config, weights = kit.config({}, {"minibatches": 2, "epsilon": 1e-2}), []
    for num_ranks in (1, 3):
        model = kit.model()
        train_step(kit.trainee(model, config), kit.batch(kit.samples(groups=4), 45, num_ranks=num_ranks), config)
        weights.append(list(model.parameters()))
    assert all(torch.equal(one, three) for one, three in zip(*weights, strict=True))


def figures(result):
    """Everything but how many rows there were."""
    return {name: value for name, value in result.metrics.items() if name != "data/rows"}


def record_gradients(model):
    """Sum up every gradient that reaches a parameter, row by row."""
    recorded = {}

    def add(name):
        return lambda gradient: recorded.__setitem__(name, recorded.get(name, 0) + gradient.clone())

    for name, parameter in model.named_parameters():
        parameter.register_hook(add(name))
    return recorded


def test_a_shared_prompt_is_computed_once(kit):
    samples = kit.samples(groups=2, group_size=4, prompt=(6, 7), response=(3, 4))
    for sample in samples:
        sample["mask"][:] = 1
    (row,) = prepare(kit.batch(samples)).rows
    assert len(row.input_ids) == 2 * (6 + 4 * 2)
    assert row.num_targets == 2 * 4 * 3


def test_members_of_a_group_with_other_prompts_do_not_share(kit):
    samples = kit.samples(groups=1, group_size=2, prompt=(5, 6))
    samples[1]["prompt"] = samples[1]["prompt"][::-1].copy()
    model = kit.model()
    got, _ = row_logprobs(model, prepare(kit.batch(samples)).rows[0], temperature=1.0, chunk_tokens=64)
    torch.testing.assert_close(got, torch.cat([plain_logprobs(model, sample) for sample in samples]), rtol=1e-5, atol=1e-5)


def test_nothing_leaks_between_samples(kit):
    model, samples = kit.model(), kit.samples(groups=2, group_size=2)
    before, _ = row_logprobs(model, prepare(kit.batch(samples)).rows[0], temperature=1.0, chunk_tokens=64)
    samples[-1]["response"] = (samples[-1]["response"] + 1) % kit.vocabulary
    after, _ = row_logprobs(model, prepare(kit.batch(samples)).rows[0], temperature=1.0, chunk_tokens=64)
    changed = int(samples[-1]["mask"].sum())
    assert torch.equal(before[:-changed], after[:-changed])
    assert not torch.equal(before[-changed:], after[-changed:])


def test_sliding_window_is_kept_in_packed_rows(kit):
    from transformers import MistralConfig, MistralForCausalLM

    from asyncrl.config.algorithm import LearnerConfig
    from asyncrl.learner.model import made_ready

    torch.manual_seed(0)
    sizes = {"vocab_size": kit.vocabulary, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_key_value_heads=2, intermediate_size=48, sliding_window=5, bos_token_id=None)
    model = made_ready(MistralForCausalLM(config), LearnerConfig())
    samples = kit.samples(groups=2, response=(8, 20))
    got, _ = row_logprobs(model, prepare(kit.batch(samples)).rows[0], temperature=1.0, chunk_tokens=64)
    expected = torch.cat([plain_logprobs(model, sample) for sample in samples])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_single_update_equals_recomputed_proximal(kit):
    """With one update a step the proximal forward is skipped; running it gives the same bits."""
    model = kit.model()
    (row,) = prepare(kit.batch(kit.samples())).rows
    with torch.no_grad():
        recomputed, _ = row_logprobs(model, row, temperature=1.0, chunk_tokens=64)
    current, _ = row_logprobs(model, row, temperature=1.0, chunk_tokens=64)
    assert torch.equal(recomputed, current.detach())
    inputs = [
        LossInputs(
            logprobs=current,
            proximal_logprobs=proximal,
            behaviour_logprobs=row.behaviour_logprobs,
            advantages=torch.ones_like(proximal),
            mask=torch.ones_like(proximal, dtype=torch.bool),
            sequence_ids=row.sequence_ids,
            num_sequences=len(row.sample_index),
            denominators=Denominators(row.num_targets, len(row.sample_index)),
        )
        for proximal in (recomputed, current.detach())
    ]
    first, second = (LOSSES["decoupled_ppo"](given, LossConfig(corrections=(TruncatedToken(),))).loss for given in inputs)
    assert torch.equal(first, second)
