"""With `observe.record = "all"` the samples that no step trains are told, once each, with the reason."""

from asyncrl.buffer.buffer import TakenStep, Untrained
from asyncrl.buffer.open import open_buffer
from asyncrl.config.load import parse_config
from asyncrl.observe.decisions import UNTRAINED
from asyncrl.schema.samples import Prompt, SampleFailure, Samples
from tests.builders import make_sample, score_of


def test_a_failed_member_a_dropped_group_and_a_step_set_aside_are_told_and_a_trained_group_is_not(tmp_path):
    config = parse_config({
        "algorithm": {"groups_per_step": 1, "group_size": 2}, "observe": {"record": "all"},
        "buffer": {"max_staleness": 1, "min_group_members": 1, "ledger": "memory"},
    })  # fmt: skip
    told: list[Untrained] = []
    buffer = open_buffer(config, tmp_path, watch=lambda name, event, *_: told.append(event) if name == UNTRAINED else None)
    for group_id in range(4):
        buffer.issue(Prompt("p"), "generator-0", version=0, group_size=2, now=0.0)
        buffer.add_samples([Samples.of([make_sample(group_id, index) for index in range(2)])], 1.0)
        if group_id == 0:
            buffer.add_failure(SampleFailure(0, 1, 0, "reward", "it took too long"), 1.0)
            buffer.add_scores([score_of(0, 0, 1.0)], 2.0)
            assert isinstance(buffer.take(0, 3.0), TakenStep)
            buffer.mark_trained(0, 4.0)
        elif group_id == 1:
            buffer.drop_group(1, "by hand", 3.0)
        elif group_id == 2:
            buffer.add_scores([score_of(2, 0, 1.0), score_of(2, 1, 0.0)], 2.0)
            buffer.take(1, 3.0)
            buffer.set_aside(1, "the learner died over it", 4.0)
    assert [(one.group_id, one.reason, [sample.index for sample in one.samples]) for one in told] == [
        (0, "it took too long", [1]), (1, "by hand", [0, 1]), (2, "the learner died over it", [0, 1]),
    ]  # fmt: skip
    assert told[0].samples[0] == make_sample(0, 1)
    buffer.check()
    buffer.close()
