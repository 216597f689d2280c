"""A step is packed again with what it was packed with first."""

import msgspec

from asyncrl.buffer.ledger.records import StepParams
from asyncrl.buffer.open import open_buffer
from asyncrl.config.load import parse_config
from asyncrl.schema.samples import Prompt, Sample, Score, ids_to_bytes, logprobs_to_bytes


def config(minibatches):
    return parse_config({
        "algorithm": {"groups_per_step": 1, "group_size": 2},
        "buffer": {"max_staleness": 1, "min_group_members": 1},
        "learner": {"minibatches": minibatches},
    })


def sample(group_id, index):
    tokens, logprobs, versions = ids_to_bytes([3, 4]), logprobs_to_bytes([-0.5, -0.5]), ids_to_bytes([0, 0])
    return Sample(group_id, index, 0, ids_to_bytes([1, 2]), tokens, logprobs, versions, "stop", "", "g0", 0.0, 1.0)


def fill(buffer):
    group_id = buffer.issue(Prompt("p"), "g0", version=0, group_size=2, now=0.0, cursor=buffer.cursor + 1).group_id
    for index in range(2):
        buffer.add_sample(sample(group_id, index), 1.0)
        buffer.add_score(Score(group_id, index, 0, float(index), {}), 2.0)


def test_a_step_taken_again_keeps_the_number_of_updates_that_a_resume_changed(tmp_path):
    buffer = open_buffer(config(4), tmp_path)
    fill(buffer)
    assert buffer.take(0, 3.0).params.minibatches == 4
    buffer.close()
    again = open_buffer(config(1), tmp_path)
    again.learner_restarted(0, 4.0)
    assert again.take(0, 5.0).params.minibatches == 4
    fill(again)
    assert again.take(1, 6.0).params.minibatches == 1
    again.close()


def test_a_step_of_a_ledger_that_did_not_say_was_packed_for_one_update():
    params = msgspec.json.decode(b'{"mask_below":0,"tokens_per_row":64,"temperature":1.0}', type=StepParams)
    assert params.minibatches == 1
