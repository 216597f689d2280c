"""Which parts of an algorithm count an importance weight twice, or name a function that cannot be one."""

import pytest

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError

VTRACE = {"advantage": "vtrace", "critic": {}, "corrections": []}


@pytest.mark.parametrize("proximal", ["behaviour", "loglinear"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "sapo"])
def test_vtrace_and_a_ratio_to_an_older_policy_would_count_a_weight_twice(loss, proximal):
    with pytest.raises(ConfigError, match=f"'vtrace' carries.*'{proximal}' the ratio of.*set algorithm.proximal"):
        parse_config({"algorithm": VTRACE | {"loss": loss, "proximal": proximal}})


@pytest.mark.parametrize("path", [":own", "own:", "own.py", "my.module:my-function", "grop"])
@pytest.mark.parametrize("field", ["advantage", "loss"])
def test_a_path_that_can_name_no_function_is_refused(field, path):
    with pytest.raises(ConfigError, match=f"algorithm.{field} must be one of .* as module:function, got '{path}'"):
        parse_config({"algorithm": {field: path}})


def test_a_correction_s_path_that_can_name_no_function_is_refused():
    with pytest.raises(ConfigError, match=r"module:function or file\.py:function, got 'own'"):
        parse_config({"algorithm": {"corrections": [{"kind": "python", "path": "own"}]}})
    own = parse_config({"algorithm": {"corrections": [{"kind": "python", "path": "own.py:weigh"}]}})
    assert own.algorithm.corrections[0].path == "own.py:weigh"


@pytest.mark.parametrize(
    ("correction", "bounds"),
    [
        ({"kind": "icepop", "low": 1.5, "high": 5.0}, r"\[1.5, 5\]"),
        ({"kind": "masked_sequence", "low": 0.1, "high": 0.5}, r"\[0.1, 0.5\]"),
        ({"kind": "masked_geometric", "low": 1.001, "high": 1.01}, r"\[1.001, 1.01\]"),
        ({"kind": "tis_token", "cap": 0.28}, r"\[0, 0.28\]"),
        ({"kind": "tis_sequence", "floor": 1.2, "cap": 2.0}, r"\[1.2, 2\]"),
        ({"kind": "veto", "threshold": 2.0}, r"\[2, inf\]"),
    ],
)
def test_a_correction_that_drops_or_fades_fresh_data_is_refused(correction, bounds):
    with pytest.raises(
        ConfigError, match=f"{correction['kind']} lets rho be in {bounds}, and the rho of data that is not stale is 1"
    ):
        parse_config({"algorithm": {"corrections": [correction]}})


@pytest.mark.parametrize("correction", [{"kind": "tis_token", "cap": 1.0}, {"kind": "icepop", "low": 1.0, "high": 2.0}])
def test_a_bound_of_exactly_1_lets_fresh_data_through(correction):
    assert (
        parse_config({"algorithm": {"corrections": [correction]}}).algorithm.corrections[0].__struct_config__.tag
        == correction["kind"]
    )


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"corrections": [{"kind": "rejection"}]}, "drops nothing without bounds: set low, high or both"),
        ({"corrections": [{"kind": "rejection", "level": "geometric", "measure": "k3", "high": 1.0}]}, "set measure = 'ratio'"),
        ({"corrections": [{"kind": "rejection", "measure": "k3", "low": 0.1}]}, r"lets k3 be in \[0.1, inf\].* is 0"),
        ({"corrections": [{"kind": "tis_geometric"}, {"kind": "rejection", "high": 2.0, "weight": "token"}]}, "keep one"),
        ({"loss": "vespo", "corrections": [{"kind": "tis_geometric"}]}, "'vespo' has its importance weight inside"),
        ({"loss": "dro"}, "needs algorithm.log_ratio_penalty over 0: half the method's beta"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "'seq-mean-token-sum-norm' divides by algorithm.aggregation_constant"),
        ({"kind": "dpo", "preference": {"loss": "hinge", "label_smoothing": 0.1}}, "hinge has none"),
        ({"kind": "dpo", "log_ratio_penalty": 0.1}, "makes no use of algorithm.log_ratio_penalty"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write_instead(algorithm, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"algorithm": algorithm})


@pytest.mark.parametrize("loss", ["rloo_product", "gmpo", "dppo_tv", "dppo_kl", "vespo", "dro"])
def test_every_loss_of_other_projects_is_had_by_its_name(loss):
    corrections = [{"kind": "rejection", "level": "max", "measure": "binary_kl", "high": 0.05}]
    algorithm = {
        "loss": loss,
        "corrections": corrections,
        "log_ratio_penalty": 0.01,
        "whiten": "samples",
        "aggregation": "token-sum",
    }
    assert parse_config({"algorithm": algorithm}).algorithm.loss == loss
