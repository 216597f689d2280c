"""How a batch becomes rows: its division over updates and ranks, and what a row knows of its tokens."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from asyncrl.config import algorithm as kinds
from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.model.policy import made_ready, run_row
from asyncrl.learner.step.microbatch import Division, prepare
from asyncrl.learner.step.train_step import train_step


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 50), num_groups=st.integers(1, 5), group_size=st.integers(1, 4),
    tokens_per_row=st.sampled_from([1, 30, 60, 10_000]), num_ranks=st.integers(1, 4), minibatches=st.integers(1, 4),
)  # fmt: skip
def test_a_batch_is_divided_over_ranks_and_updates(kit, seed, num_groups, group_size, tokens_per_row, num_ranks, minibatches):
    """Every trained token is in one row; ranks have equally many rows in an update; whole groups, whatever the packing."""
    samples = kit.samples(seed=seed, groups=num_groups, group_size=group_size)
    batch = kit.batch(samples, tokens_per_row, num_ranks=num_ranks)
    ranks = [prepare(batch, Division(minibatches, rank, num_ranks)) for rank in range(num_ranks)]
    rows = [row for prepared in ranks for row in prepared.rows if not row.is_filler]
    placed = [place for row in rows for place in zip(*map(list, row.places), strict=True)]
    wanted = [(number, offset) for number, sample in enumerate(samples) for offset in np.flatnonzero(sample["mask"]).tolist()]
    assert sorted(placed) == wanted
    assert ranks[0].mask.sum() == len(wanted)
    assert len({tuple(map(len, prepared.updates)) for prepared in ranks}) == 1
    for update in zip(*(prepared.updates for prepared in ranks), strict=True):
        assert any(not any(row.is_filler for row in rows) for rows in update), "one rank needs no filler"
    update_of = ranks[0].update_of_sample
    assert (update_of == prepare(kit.batch(samples), Division(minibatches)).update_of_sample).all()
    groups = {(sample.group_id, int(update)) for sample, update in zip(batch.samples, update_of, strict=True)}
    assert len(groups) == num_groups, "no group is in two updates"
    sizes = np.bincount([update for _, update in groups])
    assert len(sizes) == min(minibatches, num_groups)
    assert sizes.max() - sizes.min() <= 1


def test_an_update_never_holds_only_groups_that_are_masked(kit):
    samples = kit.samples(groups=4, group_size=2)
    for sample in samples[:4]:
        sample["mask"][:] = 0
    prepared = prepare(kit.batch(samples, 30), Division(minibatches=2))
    assert prepared.update_of_sample.tolist() == [-1, -1, -1, -1, 0, 0, 1, 1]
    assert all(update for update in prepared.updates)


def plain_logprobs(kit, model, samples):
    """Of the trained tokens of each sample, by transformers' own forward."""
    whole = kit.plain_logprobs(model, samples)
    return [logprobs[torch.tensor(sample["mask"]).bool()] for logprobs, sample in zip(whole, samples, strict=True)]


def assert_row_is_plain(kit, model, samples):
    """Compare the log-probabilities of samples in one row with those of each by itself."""
    (row,) = prepare(kit.batch(samples)).rows
    got = run_row(model, row, temperature=1.0, chunk_tokens=64).logprobs
    torch.testing.assert_close(got, torch.cat(plain_logprobs(kit, model, samples)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens_per_row", [40, 10_000])
@pytest.mark.parametrize(
    ("common", "sizes"),
    [(0, {"response": (1, 40)}), (0, {"prompt": (30, 33), "response": (1, 9)}), (20, {"response": (1, 9)}),
     (20, {"group_size": 1, "response": (20, 50)})],
    ids=["own", "of a group", "of all", "of all, one member each"],
)  # fmt: skip
def test_packed_gradients_equal_those_of_plain_unpacked_samples(kit, common, sizes, tokens_per_row):
    """Of a weighted sum of the targets' logprobs, weights by sample so that a mix-up shows."""
    model, samples = kit.model(), with_common_prefix(kit.samples(groups=5, **sizes), common)
    rows = prepare(kit.batch(samples, tokens_per_row)).rows
    is_tree = tokens_per_row > 40 and ("prompt" in sizes or (common > 0 and "group_size" not in sizes))
    assert is_tree == any(row.layout.shared for row in rows)
    for row in rows:
        logprobs = run_row(model, row, temperature=1.0, chunk_tokens=64).logprobs
        (logprobs * torch.from_numpy(row.sample_index + 1)[row.sequence_ids]).sum().backward()
    packed = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    sum(logprobs.sum() * (index + 1) for index, logprobs in enumerate(plain_logprobs(kit, model, samples))).backward()
    for (name, parameter), gradient in zip(model.named_parameters(), packed, strict=True):
        # 1e-5 of the parameter's largest element: the sum over samples makes elements of up to 300, and float32 has 7 digits.
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-5 * parameter.grad.abs().max().item(), msg=name)


CORRECTED = {
    "m2po, two updates": {"corrections": (kinds.SecondMomentMask(0.01), kinds.TruncatedToken(1.5))},
    "m2po clip": {"corrections": (kinds.SecondMomentClip(0.01),), "loss": "ppo_clip", "proximal": "behaviour"},
    "by sequence": {"corrections": (kinds.MaskedGeometric(low=0.97, high=1.03),), "aggregation": "seq-mean-token-mean"},
    "opsm": {"corrections": (kinds.OffPolicySequenceMask(0.05),)},
    "loglinear": {"corrections": (kinds.MaskedToken(low=0.9, high=1.1),), "proximal": "loglinear"},
}


@pytest.mark.parametrize("case", CORRECTED)
def test_corrections_of_a_whole_update_do_not_depend_on_rows(kit, case):
    """What is dropped, and what the loss divides by, is decided over the update: one row and many rows agree."""
    learner = {"epsilon": 1e-2, "minibatches": 2 if "two" in case else 1}
    config, outcomes, start = kit.config(CORRECTED[case] | {"denominator": "kept"}, learner), [], kit.model()
    samples = kit.samples(groups=4, group_size=3)
    for sample, logprobs in zip(samples, kit.plain_logprobs(start, samples), strict=True):
        sample["logprobs"] = (logprobs.detach() + 0.2 * torch.randn(len(logprobs))).numpy()
        sample["versions"] = torch.randint(0, 5, (len(logprobs),)).numpy()
    for tokens_per_row in (10_000, 45):
        model = copy.deepcopy(start)
        result = train_step(kit.train_state(model, config), kit.batch(samples, tokens_per_row, step=5), config)
        outcomes.append((result, model))
    (one_row, expected), (result, model) = outcomes
    assert not kit.same(start.parameters(), expected.parameters())
    if case != "m2po clip":
        assert 0 < one_row.metrics["policy/kept_fraction"] < 1
    assert result.metrics["policy/loss"] == pytest.approx(one_row.metrics["policy/loss"], abs=1e-5)
    kit.assert_near(model, expected, atol=1e-6)


def with_common_prefix(samples, num_tokens):
    """The same, each prompt after so many tokens that are alike."""
    prefix = np.arange(num_tokens) % 19 + 2
    return [sample | {"prompt": np.concatenate([prefix, sample["prompt"]])} for sample in samples]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.tuples(st.sampled_from([0, 1, 15, 16, 17, 30]), st.integers(1, 4)), min_size=1, max_size=4),
    group_size=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_logprobs_do_not_depend_on_which_prompts_share_a_row(kit, prompts, group_size, seed):
    """Prompts of which one may begin with another, or be the same in two groups; the last has one that its group has not."""
    samples = kit.samples(seed=seed, groups=len(prompts), group_size=group_size, response=(1, 6))
    for sample in samples:
        common, own = prompts[sample["group_id"]]
        sample["prompt"] = np.concatenate([np.arange(common) % 19 + 2, np.full(own, 2 + common % 19)])
    samples[-1]["prompt"] = samples[-1]["prompt"][::-1].copy()
    assert_row_is_plain(kit, kit.model(), samples)


def test_sliding_window_is_kept_in_packed_rows(kit):
    torch.manual_seed(0)
    sizes = {"vocab_size": kit.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_key_value_heads=2, intermediate_size=48, sliding_window=5, bos_token_id=None)
    assert_row_is_plain(kit, made_ready(MistralForCausalLM(config), LearnerConfig()), kit.samples(groups=2, response=(8, 20)))
