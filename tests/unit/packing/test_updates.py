"""What the packer makes of a step of several updates, as the learner takes it apart again."""

import numpy as np
import pytest

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


@pytest.mark.parametrize(("minibatches", "num_ranks"), [(2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("masked", [set(), {1}, {0, 4, 7}])
def test_every_row_with_something_to_train_is_one_micro_batch(minibatches, num_ranks, masked):
    lengths = np.random.default_rng(0).integers(1, 40, (8, 4)).tolist()
    groups = [group_of(number, of_group, is_trained=number not in masked) for number, of_group in enumerate(lengths)]
    batch = pack_step(0, groups, tokens_per_row=90, temperature=1.0, ranks=RankPlan(num_ranks, minibatches=minibatches))
    prepared = [prepare(batch, Division(minibatches, rank, num_ranks)) for rank in range(num_ranks)]
    trained = {sample.row for sample, number in zip(batch.samples, prepared[0].update_of_sample, strict=True) if number >= 0}
    assert sum(not row.is_filler for part in prepared for row in part.rows) == len(trained)
    in_order = [(group.group_id, scored.sample.index) for group in groups for scored in group.members]
    assert [(sample.group_id, sample.index) for sample in batch.samples] == in_order


def test_with_one_update_a_group_that_trains_nothing_shares_rows():
    groups = [group_of(1, [3, 3]), group_of(9, [3, 3], is_trained=False)]
    assert len(pack_step(0, groups, tokens_per_row=90, temperature=1.0).rows) == 1
    assert len(pack_step(0, groups, tokens_per_row=90, temperature=1.0, ranks=RankPlan(minibatches=2)).rows) == 2
