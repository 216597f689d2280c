from asyncrl.config.reward import AnswerMatchReward, FormatCheckReward, RewardConfig, reward_names


def test_names_default_to_the_kind_with_a_number_where_it_repeats_or_is_given():
    own, other = AnswerMatchReward(name="mine"), FormatCheckReward(pattern=".*")
    functions = (AnswerMatchReward(), other, AnswerMatchReward(), own)
    assert reward_names(RewardConfig(functions=functions)) == ("answer_match", "format_check", "answer_match_2", "mine")
    functions = (AnswerMatchReward(), AnswerMatchReward(name="answer_match"))
    assert reward_names(RewardConfig(functions=functions)) == ("answer_match_2", "answer_match")
