"""What becomes of greedy baselines, pairs and reference logprobs in a batch; tests/unit/algorithms has who is trained."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.screening import Screen
from asyncrl.config.algorithm import PreferenceConfig
from asyncrl.errors import ConfigError
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample, logprobs_to_bytes
from tests.builders import make_sample

DPO = Screen(preference=PreferenceConfig())
THRESHOLD = Screen(preference=PreferenceConfig(pairs="threshold", max_pairs_per_group=3))


def scored(group_id, index, reward, num_tokens=2, reference=b""):
    return ScoredSample(make_sample(group_id, index, [3] * num_tokens), reward, reference_logprobs=reference)


def group(group_id, rewards, lengths=None, **changes):
    lengths = lengths or [2] * len(rewards)
    members = enumerate(zip(rewards, lengths, strict=True))
    held = tuple(scored(group_id, index, reward, num, **changes) for index, (reward, num) in members if reward is not None)
    return ScoredGroup(group_id, Prompt(f"p{group_id}"), held)


def pack(groups, screen, tokens_per_row=64):
    return pack_step(0, groups, tokens_per_row=tokens_per_row, temperature=1.0, screen=screen)


def masks(batch):
    """The loss mask of each sample, prompt included."""
    rows = [np.frombuffer(row.loss_mask, np.uint8) for row in batch.rows]
    return [rows[s.row][s.start : s.start + s.prompt_tokens + s.response_tokens].tolist() for s in batch.samples]


def test_a_greedy_baseline_is_in_the_batch_with_its_reward_and_is_not_trained():
    batch = pack([group(4, [0.0, 1.0, 0.5])], Screen(greedy_index=2))
    assert [(s.index, s.reward, s.is_greedy) for s in batch.samples] == [(0, 0.0, False), (1, 1.0, False), (2, 0.5, True)]
    assert masks(batch) == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert batch.num_trained_tokens == 4
    assert batch.samples[2].oldest_version == -1


def test_only_paired_samples_are_in_a_batch_of_preferences_and_pairs_are_numbered_over_it():
    batch = pack([group(3, [0.5, 1.0, 0.0]), group(5, [0.0, 0.0]), group(8, [0.25, None, 0.75])], DPO)
    assert [(s.group_id, s.index, s.pair, s.is_chosen) for s in batch.samples] == [
        (3, 1, 0, True), (3, 2, 0, False), (8, 0, 1, False), (8, 2, 1, True),
    ]  # fmt: skip
    assert batch.num_trained_tokens == 8


def test_a_pair_longer_than_a_row_is_refused():
    with pytest.raises(ConfigError, match="12 tokens"):
        pack([group(0, [1.0, 0.0], [5, 5])], DPO, tokens_per_row=11)


MEMBERS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 14)), min_size=2, max_size=5)


@given(st.lists(MEMBERS, min_size=1, max_size=8), st.sampled_from([DPO, THRESHOLD]))
def test_the_two_of_a_pair_share_a_row_and_a_prompt(groups, screen):
    packed = [group(i, [r for r, _ in members], [n for _, n in members]) for i, members in enumerate(groups)]
    batch = pack([*packed, group(99, [1.0, 0.0])], screen, tokens_per_row=32)
    pairs = {}
    for sample in batch.samples:
        pairs.setdefault(sample.pair, []).append(sample)
    assert sorted(pairs) == list(range(len(pairs)))
    for first, second in pairs.values():
        assert (first.row, first.group_id) == (second.row, second.group_id)
        assert {first.is_chosen, second.is_chosen} == {True, False}
    for row in range(len(batch.rows)):
        held = [sample for sample in batch.samples if sample.row == row]
        assert sum(sample.response_tokens for sample in held) + 2 * len({sample.group_id for sample in held}) <= 32
    assert batch.num_trained_tokens == sum(sample.response_tokens for sample in batch.samples)


def test_a_row_with_a_trained_sample_that_brings_no_reference_has_none():
    with_reference, without = group(1, [1.0, 0.0], reference=logprobs_to_bytes([-1.0, -2.0])), group(2, [1.0, 0.0])
    assert pack([with_reference, without], Screen()).rows[0].reference_logprobs == b""
    assert pack([without], Screen()).rows[0].reference_logprobs == b""
