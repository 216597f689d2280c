"""Functions that users name in a config."""

import pytest

from asyncrl.errors import ConfigError, LearnerError
from asyncrl.user_code import load_function, load_own


def test_a_module_and_a_file_both_work(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def twice(x):\n    return 2 * x\n")
    assert load_function(f"{file}:twice", "reward path")(4) == 8
    assert load_function("math:sqrt", "reward path")(9) == 3


@pytest.mark.parametrize(("path", "message"), [
    ("nocolon", "takes module:function or file.py:function"), ("no_such_module_at_all:f", "cannot be imported: .*looked for in"),
    ("missing.py:f", "there is no file"), ("math:no_such_function", "has no function 'no_such_function'; it has .*sqrt"),
])  # fmt: skip
def test_a_wrong_name_says_what_is_wrong(path, message):
    with pytest.raises(ConfigError, match=message):
        load_function(path, "reward path")


def test_what_a_decorator_takes_counts_and_not_what_it_wraps(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import functools\n"
        "def on_text(f):\n    @functools.wraps(f)\n    def call(prompt, text):\n        return f(text)\n    return call\n"
        "def for_all(f):\n    @functools.wraps(f)\n    def call():\n        return f(1, 2)\n    return call\n"
        "@on_text\ndef fits(text):\n    return text\n"
        "@for_all\ndef fits_not(prompt, text):\n    return text\n"
    )
    assert load_function(f"{file}:fits", "reward path", ("prompt", "text"))("p", "t") == "t"
    with pytest.raises(ConfigError, match=r"is called with \(prompt, text\) and takes \(\)"):
        load_function(f"{file}:fits_not", "reward path", ("prompt", "text"))


def test_an_error_in_a_function_of_a_users_own_is_told_with_its_line_and_keeps_its_traceback(tmp_path):
    (tmp_path / "my_maths.py").write_text("def raises(inputs, config):\n    raise ValueError('my bug')\n")
    path = f"{tmp_path}/my_maths.py:raises"
    with pytest.raises(LearnerError) as failed:
        load_own(path, "algorithm.loss", float, lambda *_: "")(None, None)
    assert str(failed.value) == f"algorithm.loss {path!r} raised ValueError at my_maths.py:2: my bug"
    assert isinstance(failed.value.__cause__, ValueError)
