"""What is checked before a learner makes or opens anything."""

import pytest

from asyncrl.config.corrections import PythonCorrection
from asyncrl.errors import ConfigError
from asyncrl.learner.start import prepare_standing, resolve_functions


def refused():
    raise AssertionError("the warm start began")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": "no_such_module:loss"}, "algorithm.loss.*cannot import 'no_such_module'"),
        ({"advantage": "math:no_such_function"}, "algorithm.advantage.*has no function 'no_such_function'"),
        (
            {"corrections": (PythonCorrection(path="nowhere.py:weigh"),)},
            "algorithm.corrections.path.*there is no file nowhere.py",
        ),
    ],
)
def test_a_function_that_is_not_there_is_refused_before_a_model_is_made(kit, tmp_path, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        prepare_standing(kit.config(algorithm), tmp_path, refused, "0123456789")
    assert list(tmp_path.iterdir()) == []


def test_preferences_resolve_no_policy_loss(kit):
    resolve_functions(kit.config({"kind": "dpo"}).algorithm)
