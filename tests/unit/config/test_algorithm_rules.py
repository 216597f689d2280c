"""Which parts of an algorithm count an importance weight twice, or name a function that cannot be one."""

import pytest

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError

VTRACE = {"advantage": "vtrace", "critic": {}, "corrections": []}


@pytest.mark.parametrize("proximal", ["behaviour", "loglinear"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "sapo"])
def test_vtrace_and_a_ratio_to_an_older_policy_would_count_a_weight_twice(loss, proximal):
    with pytest.raises(
        ConfigError, match=f"'vtrace' carries.*'{proximal}' the ratio of.*set algorithm.proximal"
    ):
        parse_config({"algorithm": VTRACE | {"loss": loss, "proximal": proximal}})


@pytest.mark.parametrize("algorithm", [{"loss": "ppo_clip"}, {"loss": "reinforce", "proximal": "behaviour"}])
def test_vtrace_goes_with_a_ratio_that_starts_at_1_or_with_none(algorithm):
    assert parse_config({"algorithm": VTRACE | algorithm}).algorithm.loss == algorithm["loss"]


def test_vtrace_refuses_decoupled_ppo_under_any_proximal_policy():
    for proximal in ("recompute", "behaviour", "loglinear"):
        with pytest.raises(ConfigError, match="would count it twice"):
            parse_config({"algorithm": VTRACE | {"loss": "decoupled_ppo", "proximal": proximal}})
