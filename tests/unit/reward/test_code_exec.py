import json

import pytest

from asyncrl.config.reward import CodeExecReward
from asyncrl.errors import RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.sandbox.code_exec import CodeTest, build_code_exec, extract_code, parse_tests
from asyncrl.schema.samples import Prompt


def test_code_is_the_last_block_marked_python():
    text = "First\n```python\na = 1\n```\nbetter\n```py\nb = 2\n```\noutput\n```\n3\n```\n"
    assert extract_code(text) == "b = 2\n"


def test_code_falls_back_to_an_unmarked_block_then_to_the_whole_text():
    assert extract_code("x\n```\nc = 3\n```") == "c = 3\n"
    assert extract_code("d = 4") == "d = 4"


def test_a_block_cut_off_by_the_token_limit_still_counts():
    assert extract_code("```python\ndef f():\n    return 1") == "def f():\n    return 1"


def test_three_forms_of_tests_and_no_other():
    tests = parse_tests(
        json.dumps({"tests": ["assert f() == 1", {"stdin": "", "stdout": "1"}, {"function": "S().f", "expected": 1}]}), "p"
    )
    assert tests[0] == CodeTest(code="assert f() == 1")
    for wrong in ([], [{}], [{"stdin": "1"}], [{"code": "x", "stdout": "y"}], [{"function": "a.b.c"}], [{"unknown": 1}]):
        with pytest.raises(RewardError, match="'p'"):
            parse_tests(json.dumps({"tests": wrong}), "p")
    with pytest.raises(RewardError, match="'p'"):
        parse_tests("", "p")


def run(code, tests, **options):
    reward = build_code_exec(CodeExecReward(sandbox="none", **options))
    return reward(RewardInput(Prompt("p", reference_json=json.dumps({"tests": tests})), code, "stop", 1))


def test_share_of_tests_passed_or_all_or_nothing_without_a_sandbox_where_the_config_says_so():
    tests = [{"function": "f", "args": [2], "expected": 4}, {"function": "f", "args": [3], "expected": 9}]
    code = "```python\ndef f(x):\n    return 2 * x\n```"
    assert run(code, tests) == 0.5
    assert run(code, tests, all_or_nothing=True) == 0.0


def test_no_code_passes_nothing():
    assert run("   ", ["assert f() is None"]) == 0.0


def test_values_are_compared_as_json_and_strictly():
    code = "import collections, fractions, decimal, itertools\ndef f(name):\n    return eval(name)"
    same = [
        ("(1, 2)", [1, 2]),
        ("{'a': (1,)}", {"a": [1]}),
        ("{1: 'x'}", {"1": "x"}),
        ("0.1 + 0.2", 0.3),
        ("1e-12 * (1 + 1e-10)", 1e-12),
        ("-1e-10", 0.0),
        ("2**100", 2**100),
        ("range(3)", [0, 1, 2]),
        ("fractions.Fraction(1, 2)", 0.5),
        ("None", None),
        ("True", True),
        ("collections.Counter('aa')", {"a": 2}),
        ("collections.deque([1])", [1]),
        ("decimal.Decimal('-1.5e3')", -1500.0),
        ("fractions.Fraction(4, 2)", 2.0),
        ("3", 3.0),
        ("(n for n in (1, 2))", [1, 2]),
        ("map(str, [1])", ["1"]),
        ("{'a': 1}.keys()", ["a"]),
        ("{'a': 1}.items()", [["a", 1]]),
    ]
    other = [
        ("True", 1),
        ("1", True),
        ("'1'", 1),
        ("[1, 2]", [2, 1]),
        ("[1]", [1, 2]),
        ("{1, 2}", [1, 1]),
        ("float('nan')", 0.0),
        ("object()", None),
        ("None", 0),
        ("2**100 + 1", 2**100),
        ("b'a'", "a"),
        ("{'a': 1}", {}),
        ("1/0", 0),
        ("3.0", 3),
        ("5000000001.0", 5000000000),
        ("{1, 2}", [1, 2]),
        ("itertools.count()", [0]),
        ("range(10**9)", [0]),
        ("decimal.Decimal('1e999999999')", 1),
        ("decimal.Decimal('nan')", 0),
        ("fractions.Fraction(10**999, 3)", 1),
    ]
    tests = [{"function": "f", "args": [name], "expected": expected} for name, expected in same]
    assert run(code, tests) == 1.0
    tests = [{"function": "f", "args": [name], "expected": expected} for name, expected in other]
    assert run(code, tests) == 0.0


@pytest.mark.timeout(15)
@pytest.mark.parametrize(
    "frame",
    ["{}", '{"value": {"t": "decimal", "v": "1E+999999999"}}', '{"value": {"t": "fraction", "v": "1E+999999999"}}', "{", "[]"],
)
def test_a_program_that_writes_into_the_pipe_itself_passes_nothing_and_holds_nobody_up(frame):
    code = f"""
import os
FRAME = {frame!r}.encode()
def f():
    while True:
        for fd in range(3, 64):
            try:
                os.write(fd, (len(FRAME).to_bytes(4, "little") + FRAME) * 2000)
            except OSError:
                pass
"""
    assert run(code, [{"function": "f", "expected": 1}], wall_s=1.0) == 0.0
