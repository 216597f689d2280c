import pytest

from asyncrl.config.load import parse_config
from asyncrl.config.reward import AnswerMatchReward, FormatCheckReward, RewardConfig, reward_names
from asyncrl.errors import ConfigError


def test_names_default_to_the_kind_with_a_number_where_it_repeats():
    functions = (AnswerMatchReward(), FormatCheckReward(pattern=".*"), AnswerMatchReward(), AnswerMatchReward(name="mine"))
    assert reward_names(RewardConfig(functions=functions)) == ("answer_match", "format_check", "answer_match_2", "mine")


def test_default_name_steps_aside_for_a_given_one():
    functions = (AnswerMatchReward(), AnswerMatchReward(name="answer_match"))
    assert reward_names(RewardConfig(functions=functions)) == ("answer_match_2", "answer_match")


def test_a_reward_model_may_not_take_the_name_that_a_repeated_rule_is_given():
    raw = {
        "reward": {"functions": [{"kind": "answer_match"}, {"kind": "answer_match", "mode": "numeric"}]},
        "inference": {"reward_models": [{"name": "answer_match_2", "path": "m"}]},
    }
    with pytest.raises(ConfigError, match=r"the name 'answer_match_2' is that of one of reward.functions"):
        parse_config(raw)
    raw["inference"]["reward_models"][0]["name"] = "answer_match_3"
    assert parse_config(raw).inference.reward_models[0].name == "answer_match_3"
