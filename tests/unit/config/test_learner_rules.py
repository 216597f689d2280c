"""What several learner ranks do not go with."""

import pytest

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"device": "cuda:0"}, "'cuda:0'.*set 'cuda'"),
        ({"optimizer": "adamw_8bit"}, r"learner.optimizer = 'adamw' \(is 'adamw_8bit'\)"),
        ({"offload_optimizer": True}, r"offload_optimizer = false \(is true\)"),
    ],
)
def test_ranks_are_refused_with(learner, said):
    parse_config({"learner": learner})
    with pytest.raises(ConfigError, match=said):
        parse_config({"learner": {"ranks": 2} | learner})


def test_ranks_on_a_cpu_are_allowed():
    assert parse_config({"learner": {"ranks": 2}}).learner.ranks == 2
