"""What the packer makes of a step of several updates, as the learner takes it apart again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.step.microbatch import Division, prepare
from asyncrl.packing.pack import RankPlan
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample
from tests.builders import make_sample


def group_of(group_id, lengths, is_trained=True):
    members = []
    for index, length in enumerate(lengths):
        sample = make_sample(group_id, index, range(length), loss_mask=b"" if is_trained else bytes(length))
        members.append(ScoredSample(sample, float(index)))
    return ScoredGroup(group_id, Prompt("p"), tuple(members))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 99),
    num_groups=st.integers(1, 12),
    minibatches=st.integers(1, 6),
    num_ranks=st.integers(1, 3),
    masked=st.sets(st.integers(0, 11)),
)
def test_every_row_with_something_to_train_is_one_micro_batch(seed, num_groups, minibatches, num_ranks, masked):
    lengths = np.random.default_rng(seed).integers(1, 40, (num_groups, 4)).tolist()
    groups = [group_of(number, of_group, is_trained=number not in masked) for number, of_group in enumerate(lengths)]
    batch = pack_step(0, groups, tokens_per_row=90, temperature=1.0, ranks=RankPlan(num_ranks, minibatches=minibatches))
    prepared = [prepare(batch, Division(minibatches, rank, num_ranks)) for rank in range(num_ranks)]
    own = sum(not row.is_filler for part in prepared for row in part.rows)
    trained = {sample.row for sample, number in zip(batch.samples, prepared[0].update_of_sample, strict=True) if number >= 0}
    if minibatches > 1:
        assert own == len(trained)
    assert [(sample.group_id, sample.index) for sample in batch.samples] == [
        (group.group_id, scored.sample.index) for group in groups for scored in group.members
    ]


def test_with_one_update_a_group_that_trains_nothing_shares_rows():
    groups = [group_of(1, [3, 3]), group_of(9, [3, 3], is_trained=False)]
    assert len(pack_step(0, groups, tokens_per_row=90, temperature=1.0).rows) == 1
    assert len(pack_step(0, groups, tokens_per_row=90, temperature=1.0, ranks=RankPlan(minibatches=2)).rows) == 2
