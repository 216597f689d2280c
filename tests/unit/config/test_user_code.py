"""Functions that users name in a config."""

from __future__ import annotations

import pytest

from asyncrl.config.user_code import load_function
from asyncrl.errors import ConfigError


def test_a_module_and_a_file_both_work(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def twice(x):\n    return 2 * x\n")
    assert load_function(f"{file}:twice", "reward path")(4) == 8
    assert load_function("math:sqrt", "reward path")(9) == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nocolon", "takes module:function or file.py:function"),
        ("no_such_module_at_all:f", "cannot import"),
        ("missing.py:f", "there is no file"),
        ("math:no_such_function", "has no function 'no_such_function'; it has .*sqrt"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(path, message):
    with pytest.raises(ConfigError, match=message):
        load_function(path, "reward path")
