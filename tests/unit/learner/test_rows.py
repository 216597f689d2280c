"""How a batch becomes rows: its division over updates and ranks, and what a row knows of its tokens."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import LearnerError
from asyncrl.learner.ranks import OneRank
from asyncrl.learner.rows import Division, prepare

BATCHES = st.fixed_dictionaries({
    "seed": st.integers(0, 50),
    "groups": st.integers(1, 5),
    "group_size": st.integers(1, 4),
    "tokens_per_row": st.sampled_from([1, 30, 60, 10_000]),
    "num_ranks": st.integers(1, 4),
    "minibatches": st.integers(1, 4),
})


def prepared_of_all_ranks(kit, case):
    samples = kit.samples(seed=case["seed"], groups=case["groups"], group_size=case["group_size"])
    batch = kit.batch(samples, case["tokens_per_row"], num_ranks=case["num_ranks"])
    divisions = [Division(case["minibatches"], rank, case["num_ranks"]) for rank in range(case["num_ranks"])]
    return batch, samples, [prepare(batch, division) for division in divisions]


def targets_of(rows):
    return [
        (int(sample), int(offset))
        for row in rows
        if not row.is_filler
        for sample, offset in zip(row.targets.samples, row.targets.offsets, strict=True)
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=BATCHES)
def test_every_trained_token_is_in_one_row_of_one_rank_and_one_update(kit, case):
    _, samples, ranks = prepared_of_all_ranks(kit, case)
    placed = [target for prepared in ranks for target in targets_of(prepared.rows)]
    wanted = [(number, offset) for number, sample in enumerate(samples) for offset in np.flatnonzero(sample["mask"]).tolist()]
    assert sorted(placed) == wanted
    assert ranks[0].table.mask.sum() == len(wanted)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=BATCHES)
def test_ranks_have_equally_many_rows_in_each_update(kit, case):
    _, _, ranks = prepared_of_all_ranks(kit, case)
    assert len({tuple(map(len, prepared.updates)) for prepared in ranks}) == 1
    for update in zip(*(prepared.updates for prepared in ranks), strict=True):
        assert any(not any(row.is_filler for row in rows) for rows in update), "one rank needs no filler"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=BATCHES)
def test_updates_hold_whole_groups_whatever_the_packing(kit, case):
    batch, _, ranks = prepared_of_all_ranks(kit, case)
    one_row = prepare(kit.batch(kit.samples(**{name: case[name] for name in ("seed", "groups", "group_size")})),
                      Division(case["minibatches"]))  # fmt: skip
    update_of = ranks[0].update_of_sample
    assert (update_of == one_row.update_of_sample).all()
    groups = {}
    for sample, update in zip(batch.samples, update_of, strict=True):
        groups.setdefault(sample.group_id, set()).add(int(update))
    assert all(len(updates) == 1 for updates in groups.values())
    sizes = np.bincount([min(updates) for updates in groups.values()])
    assert len(sizes) == min(case["minibatches"], case["groups"])
    assert sizes.max() - sizes.min() <= 1


def test_an_update_never_holds_only_groups_that_are_masked(kit):
    samples = kit.samples(groups=4, group_size=2)
    for sample in samples[:4]:
        sample["mask"][:] = 0
    prepared = prepare(kit.batch(samples, 30), Division(minibatches=2))
    assert prepared.update_of_sample.tolist() == [-1, -1, -1, -1, 0, 0, 1, 1]
    assert all(update for update in prepared.updates)


def test_a_row_knows_versions_and_reference_logprobs_of_its_targets(kit):
    samples = kit.samples(groups=2, group_size=2)
    for number, sample in enumerate(samples):
        sample["versions"] = 10 * number + np.arange(len(sample["response"]))
        sample["reference"] = -0.5 * sample["versions"]
    for row in prepare(kit.batch(samples, 30)).rows:
        expected = 10 * row.targets.samples + row.targets.offsets
        assert row.versions.tolist() == expected.tolist()
        assert row.reference_logprobs.tolist() == (-0.5 * expected).tolist()
        assert row.behaviour_logprobs.tolist() == [
            float(samples[sample]["logprobs"][offset])
            for sample, offset in zip(row.targets.samples, row.targets.offsets, strict=True)
        ]


def test_without_versions_or_reference_they_are_unknown(kit):
    batch = kit.batch(kit.samples())
    bare = msgspec.structs.replace(batch, rows=tuple(msgspec.structs.replace(row, versions=b"") for row in batch.rows))
    (row,) = prepare(bare).rows
    assert set(row.versions.tolist()) == {-1}
    assert row.reference_logprobs is None


def test_a_table_gives_every_row_back_what_was_collected(kit):
    prepared = prepare(kit.batch(kit.samples(), 30))
    values = [torch.arange(row.num_targets) + 100.0 * number for number, row in enumerate(prepared.rows)]
    table = prepared.table.collect(prepared.rows, values, OneRank())
    assert (table[~prepared.table.mask] == 0).all()
    for row, own in zip(prepared.rows, values, strict=True):
        assert torch.equal(prepared.table.of_row(table, row).float(), own)


class RecordedRank:
    """One rank of two, whose `gather` is given what the other one sends."""

    size = 2

    def __init__(self, rank, exchange):
        self.rank = rank
        self.exchange = exchange

    def gather(self, values):
        self.exchange[self.rank] = values
        return torch.cat([self.exchange[rank] for rank in sorted(self.exchange)])


def test_a_table_collected_over_ranks_is_the_same_as_of_one_rank(kit):
    samples = kit.samples(groups=3)
    whole = prepare(kit.batch(samples, 30))
    expected = whole.table.collect(whole.rows, [row.behaviour_logprobs for row in whole.rows], OneRank())
    exchange = {}
    for _ in range(2):
        for rank in range(2):
            own = prepare(kit.batch(samples, 30, num_ranks=2), Division(rank=rank, num_ranks=2))
            table = own.table.collect(own.rows, [row.behaviour_logprobs for row in own.rows], RecordedRank(rank, exchange))
    assert (table == expected).all()


def test_a_rank_without_a_row_runs_a_filler_of_another_s(kit):
    batch = kit.batch(kit.samples(), num_ranks=2)
    (filler,) = prepare(batch, Division(rank=1, num_ranks=2)).rows
    (row,) = prepare(batch, Division(rank=0, num_ranks=2)).rows
    assert filler.is_filler
    assert not row.is_filler
    assert torch.equal(filler.input_ids, row.input_ids)


def test_a_trained_prompt_token_is_refused(kit):
    batch = kit.batch(kit.samples(groups=1, group_size=1))
    row = batch.rows[0]
    masked = msgspec.structs.replace(row, loss_mask=bytes([0, 1, *row.loss_mask[2:]]))
    with pytest.raises(LearnerError, match=r"g0\.0: token 1 is to be trained, and is part of the prompt"):
        prepare(msgspec.structs.replace(batch, rows=(masked,)))


def test_arrays_of_different_length_are_refused(kit):
    batch = kit.batch(kit.samples())
    short = msgspec.structs.replace(batch.rows[0], loss_mask=batch.rows[0].loss_mask[:-1])
    with pytest.raises(LearnerError, match="arrays of a row differ in length"):
        prepare(msgspec.structs.replace(batch, rows=(short,)))
