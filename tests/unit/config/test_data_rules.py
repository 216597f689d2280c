from __future__ import annotations

import copy

import pytest

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError
from tests.builders import laid_over

REPLAY = {
    "task": {"kind": "preferences", "path": "p.jsonl"},
    "model": {"kind": "scratch", "max_positions": 64},
    "generate": {"engine": {"kind": "replay", "max_sequence_tokens": 64}, "sampling": {"max_new_tokens": 8}},
    "reward": {"functions": [{"kind": "preference"}]},
    "algorithm": {"kind": "dpo", "group_size": 2},
    "packing": {"tokens_per_row": 128},
    "eval": {"at_start": False, "at_end": False},
}


def settings(**changes):
    return laid_over(copy.deepcopy(REPLAY), changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packing__tokens_per_row": 127}, r"packing.tokens_per_row \(127\) must be at least 128"),
        ({"buffer__policy": "mask"}, "buffer.policy = 'mask' cuts old tokens"),
        ({"task": {"kind": "addition"}}, "go together"),
        ({"generate__engine": {"kind": "fake", "max_sequence_tokens": 64}}, "go together"),
        ({"algorithm__kind": "policy"}, "set algorithm.kind = 'dpo'"),
        ({"algorithm__group_size": 4}, r"algorithm.group_size = 2 \(is 4\)"),
        ({"eval__at_end": True}, "eval.at_end = false"),
        ({"eval__every_steps": 5}, "eval.every_steps = 0"),
        ({"generate__sampling__temperature": 0.7}, "must be 1 with generate.engine.kind = 'replay'"),
        ({"model__max_positions": 32}, r"must be at most model.max_positions \(32\)"),
    ],
)
def test_what_does_not_go_with_offline_preferences_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_config(settings(**changes))


def test_the_preference_reward_needs_a_preferences_task():
    with pytest.raises(ConfigError, match=r"'preference' judges the answers of task.kind = 'preferences'"):
        parse_config({"reward": {"functions": [{"kind": "preference"}]}})


def test_a_buffer_longer_than_the_answer_is_refused():
    overlong = {"kind": "overlong", "max_tokens": 10, "buffer_tokens": 11}
    with pytest.raises(ConfigError, match=r"buffer_tokens \(11\) must be at most max_tokens \(10\)"):
        parse_config({"reward": {"functions": [{"kind": "answer_match"}, overlong]}})


def test_a_penalty_that_no_answer_could_reach_is_refused():
    overlong = {"kind": "overlong", "max_tokens": 65, "buffer_tokens": 8}
    raw = {"reward": {"functions": [{"kind": "answer_match"}, overlong]}, "generate": {"sampling": {"max_new_tokens": 64}}}
    with pytest.raises(ConfigError, match=r"max_tokens \(65\) must be at most generate.sampling.max_new_tokens \(64\)"):
        parse_config(raw)
    overlong["max_tokens"] = 64
    assert parse_config(raw).reward.functions[1].max_tokens == 64
