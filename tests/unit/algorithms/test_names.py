import pytest

from asyncrl.algorithms.names import check_names
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError


def test_the_default_names_are_known():
    check_names(AlgorithmConfig())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": "ppo"}, r"algorithm.loss must be one of ppo_clip, decoupled_ppo, got 'ppo'"),
        ({"advantage": "gae"}, r"algorithm.advantage must be one of grpo, dr_grpo, rloo, got 'gae'"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(wrong, message):
    with pytest.raises(ConfigError, match=message):
        check_names(AlgorithmConfig(**wrong))
