import asyncio

import pytest

from asyncrl.config.reward import CodeExecReward, PythonReward, RewardConfig
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import NamedReward, build_reward, build_rewards, weighted_sum
from asyncrl.schema.samples import Prompt

SAMPLE = RewardInput(Prompt("p", answer="46"), "46", "stop", 2)


def resolve(pending):
    return asyncio.new_event_loop().run_until_complete(pending)


def of(*values_by_name):
    return tuple(NamedReward(name, weight, function) for name, weight, function in values_by_name)


def test_weighted_sum_of_sync_and_async_parts():
    async def half(_sample):
        await asyncio.sleep(0)
        return 0.5

    rewards = of(("one", 2.0, lambda _: True), ("half", -1.0, half))
    loop = asyncio.new_event_loop()
    try:
        assert weighted_sum(rewards, SAMPLE, loop.run_until_complete) == (1.5, {"one": 1.0, "half": 0.5})
    finally:
        loop.close()


class Several:
    """As a tensor of several elements does."""

    def __float__(self):
        raise RuntimeError("cannot be converted to Scalar")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None, which is not a number"),
        ("1", "not a finite number"),
        (float("nan"), "nan"),
        (10**400, "not a number"),
        (Several(), "not a number"),
    ],
)
def test_what_is_no_finite_number_fails_the_sample(value, said):
    with pytest.raises(RewardError, match=said):
        weighted_sum(of(("bad", 1.0, lambda _: value)), SAMPLE, resolve)


def test_exception_becomes_an_error_with_name_type_and_message():
    with pytest.raises(RewardError, match="bad: ZeroDivisionError: division by zero"):
        weighted_sum(of(("bad", 1.0, lambda _: 1 / 0)), SAMPLE, resolve)


def test_user_function_gets_prompt_and_text():
    reward = build_reward(PythonReward(path="difflib:get_close_matches"))
    with pytest.raises(TypeError):  # (word, possibilities) is called with (Prompt, str)
        reward(SAMPLE)
    reward = build_reward(PythonReward(path="operator:ne"))
    assert reward(SAMPLE) is True


def test_unknown_user_paths_say_what_is_there():
    with pytest.raises(ConfigError, match="takes module:function"):
        build_reward(PythonReward(path="nocolon"))
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        build_reward(PythonReward(path="no_such_module:f"))
    with pytest.raises(ConfigError, match=r"has no function .nope.; it has .*truediv"):
        build_reward(PythonReward(path="operator:nope"))


def test_program_time_must_fit_into_the_sample_time():
    config = RewardConfig(functions=(CodeExecReward(sandbox="none", wall_s=30.0),), timeout_s=30.0)
    with pytest.raises(ConfigError, match=r"wall_s \(30\) must be under timeout_s \(30\)"):
        build_rewards(config)
