"""Units as rows over ranks.

Groups as rows: every token's arrays, what becomes of greedy baselines, pairs and reference logprobs, and a step's updates.

tests/unit/algorithms has who is trained.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.screening import Screen
from asyncrl.config.algorithm import PreferenceConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.step.microbatch import Division, prepare
from asyncrl.packing.pack import CostModel, RankPlan, Unit, idle_share, pack_lengths, pack_step, pack_units
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample, ids_from_bytes, logprobs_from_bytes, logprobs_to_bytes
from tests.builders import make_sample


def _scored(group_id, index, prompt, tokens, versions, reward=0.0, loss_mask=b""):
    logprobs = [-0.1 * (t + 1) for t in range(len(tokens))]
    return ScoredSample(make_sample(group_id, index, tokens, prompt, logprobs, versions, loss_mask=loss_mask), reward)


GROUPS = [
    ScoredGroup(4, Prompt("a"), (_scored(4, 0, [1, 2], [10, 11, 12], [3, 3, 4], 1.0), _scored(4, 1, [1, 2], [13, 14], [4, 4]))),
    ScoredGroup(7, Prompt("b"), (_scored(7, 2, [5], [20, 21], [2, 5], 0.5, bytes([0, 1])),)),
]


def test_rows_hold_whole_samples_with_everything_aligned_to_its_token():
    batch = pack_step(5, GROUPS, tokens_per_row=10, temperature=0.7)

    assert [(s.group_id, s.index, s.row, s.start, s.prompt_tokens, s.response_tokens) for s in batch.samples] == [
        (4, 0, 0, 0, 2, 3),
        (4, 1, 0, 5, 2, 2),
        (7, 2, 0, 9, 1, 2),
    ]
    row = batch.rows[0]
    assert ids_from_bytes(row.token_ids).tolist() == [1, 2, 10, 11, 12, 1, 2, 13, 14, 5, 20, 21]
    assert ids_from_bytes(row.versions).tolist() == [-1, -1, 3, 3, 4, -1, -1, 4, 4, -1, 2, 5]
    assert list(row.loss_mask) == [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    logprobs = [0, 0, -0.1, -0.2, -0.3, 0, 0, -0.1, -0.2, 0, -0.1, -0.2]
    np.testing.assert_allclose(logprobs_from_bytes(row.behaviour_logprobs), logprobs, rtol=1e-6)
    assert (batch.step, batch.temperature, batch.num_trained_tokens) == (5, 0.7, 6)
    assert [s.reward for s in batch.samples] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("mask_below", "oldest", "num_trained"), [({}, [3, 4, 5], 6), ({"mask_below": 5}, [-1, -1, 5], 1)], ids=["all", "masked"]
)
def test_oldest_version_is_that_of_trained_tokens_and_a_sample_too_old_to_train_stays(mask_below, oldest, num_trained):
    batch = pack_step(9, GROUPS, tokens_per_row=100, temperature=1.0, **mask_below)
    assert [s.oldest_version for s in batch.samples] == oldest
    assert (batch.num_trained_tokens, len(batch.rows)) == (num_trained, 1)


DPO = Screen(preference=PreferenceConfig())
THRESHOLD = Screen(preference=PreferenceConfig(pairs="threshold", max_pairs_per_group=3))


def group(group_id, rewards, lengths=None, reference=b"", is_trained=True):
    held = []
    for index, (reward, num) in enumerate(zip(rewards, lengths or [2] * len(rewards), strict=True)):
        sample = make_sample(group_id, index, [3] * num, loss_mask=b"" if is_trained else bytes(num))
        held.append(ScoredSample(sample, reward, reference_logprobs=reference))
    return ScoredGroup(group_id, Prompt(f"p{group_id}"), tuple(held))


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


@pytest.mark.parametrize(("minibatches", "num_ranks"), [(2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("masked", [set(), {1}, {0, 4, 7}])
def test_every_row_with_something_to_train_is_one_micro_batch(minibatches, num_ranks, masked):
    lengths = np.random.default_rng(0).integers(1, 40, (8, 4)).tolist()
    groups = [group(number, range(4), of_group, is_trained=number not in masked) for number, of_group in enumerate(lengths)]
    batch = pack_step(0, groups, tokens_per_row=90, temperature=1.0, ranks=RankPlan(num_ranks, minibatches=minibatches))
    prepared = [prepare(batch, Division(minibatches, rank, num_ranks)) for rank in range(num_ranks)]
    trained = {sample.row for sample, number in zip(batch.samples, prepared[0].update_of_sample, strict=True) if number >= 0}
    assert sum(not row.is_filler for part in prepared for row in part.rows) == len(trained)
    in_order = [(each.group_id, scored.sample.index) for each in groups for scored in each.members]
    assert [(sample.group_id, sample.index) for sample in batch.samples] == in_order


COST = CostModel.of_model(64)


def unit_of(prefix, tails, cost=COST):
    return Unit(prefix, tuple(tails), cost.of(prefix), tuple(cost.of(tail, prefix) for tail in tails))


def parts_of(units):
    """(unit, tail) of every part, in their numbers' order."""
    return [(unit, tail) for unit in units for tail in unit.tails]


def row_size(row, units):
    parts = [parts_of(units)[i] for i in row.members]
    return sum(tail for _, tail in parts) + sum({id(unit): unit.prefix for unit, _ in parts}.values())


UNITS = st.lists(st.builds(unit_of, st.integers(0, 30), st.lists(st.integers(1, 30), min_size=1, max_size=9)), max_size=12)


@given(UNITS, st.integers(60, 200), st.integers(1, 4))
def test_every_part_is_in_one_row_of_distinct_tokens_within_the_budget(units, capacity, num_ranks):
    rows = pack_units(units, capacity, num_ranks)

    assert sorted(i for row in rows for i in row.members) == list(range(len(parts_of(units))))
    assert all(row.members == tuple(sorted(row.members)) for row in rows)
    assert all(row_size(row, units) <= capacity for row in rows)
    if num_ranks == 1:
        cut = [unit for unit in units if unit.prefix + sum(unit.tails) > capacity]
        copies_of_prefixes = sum(len({id(parts_of(units)[i][0]) for i in row.members}) for row in rows)
        assert copies_of_prefixes <= len(units) + sum(len(unit.tails) for unit in cut)


def test_whole_groups_fill_rows_by_their_distinct_tokens():
    units = [unit_of(149, [9] * 8) for _ in range(4)]
    assert [row.members for row in pack_units(units, 884)] == [tuple(range(32))]
    assert [row.members for row in pack_units(units, 442)] == [tuple(range(16)), tuple(range(16, 32))]


def rows_of_lengths(lengths, capacity, num_ranks, cost=COST):
    return pack_units([unit_of(0, [length], cost) for length in lengths], capacity, num_ranks)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(40, 100), st.integers(2, 5))
def test_ranks_have_equally_many_rows_within_the_budget(lengths, capacity, num_ranks):
    rows = rows_of_lengths(lengths, capacity, num_ranks)
    counts = [sum(row.rank == rank for row in rows) for rank in range(num_ranks)]

    assert all(row.members for row in rows)
    assert max(counts) == -(-len(pack_lengths(lengths, capacity)) // num_ranks)
    if len(lengths) >= max(counts) * num_ranks:
        assert min(counts) == max(counts)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_log_normal_lengths_keep_all_ranks_busy(num_ranks):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7.5, 0.85, 1_024), 16, 16_384).astype(int).tolist()

    rows = rows_of_lengths(lengths, 16_384, num_ranks, CostModel.of_model(896))
    loads = [sum(row.cost for row in rows if row.rank == rank) for rank in range(num_ranks)]

    assert len(rows) - len(pack_lengths(lengths, 16_384)) < num_ranks
    assert max(loads) * num_ranks / sum(loads) < 1.01
    assert idle_share([row.cost for row in rows], num_ranks) < 0.005 * num_ranks
