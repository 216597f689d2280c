import json

import pytest

from asyncrl.config.reward import CodeExecReward
from asyncrl.errors import RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.sandbox.bubblewrap import probe_sandbox
from asyncrl.reward.sandbox.code_exec import CodeTest, build_code_exec, parse_tests
from asyncrl.schema.samples import Prompt


def test_three_forms_of_tests_and_no_other():
    forms = ["assert f() == 1", {"stdin": "", "stdout": "1"}, {"function": "S().f", "expected": 1}]
    tests = parse_tests(json.dumps({"tests": forms}), "p")
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


SAME = [
    ("(1, 2)", [1, 2]), ("{'a': (1,)}", {"a": [1]}), ("{1: 'x'}", {"1": "x"}), ("0.1 + 0.2", 0.3), ("-1e-10", 0.0),
    ("None", None), ("1e-12 * (1 + 1e-10)", 1e-12), ("2**100", 2**100), ("range(3)", [0, 1, 2]),
    ("fractions.Fraction(1, 2)", 0.5), ("True", True), ("collections.Counter('aa')", {"a": 2}), ("collections.deque([1])", [1]),
    ("map(str, [1])", ["1"]), ("decimal.Decimal('-1.5e3')", -1500.0), ("fractions.Fraction(4, 2)", 2.0), ("3", 3.0),
    ("(n for n in (1, 2))", [1, 2]), ("{'a': 1}.keys()", ["a"]), ("{'a': 1}.items()", [["a", 1]]),
]  # fmt: skip
OTHER = [
    ("1", True), ("[1, 2]", [2, 1]), ("[1]", [1, 2]), ("{1, 2}", [1, 1]), ("object()", None), ("None", 0), ("2**100 + 1", 2**100),
    ("{'a': 1}", {}), ("1/0", 0), ("{1, 2}", [1, 2]), ("itertools.count()", [0]), ("range(10**9)", [0]),
    ("decimal.Decimal('1e999999999')", 1), ("decimal.Decimal('nan')", 0), ("fractions.Fraction(10**999, 3)", 1),
    ("{1: 0, 2: 0}", [1, 2]), ("5000000001.0", 5000000000), ("5.0", 5), ("True", 1), ("'5'", 5), ("5", "5"), ("[1, 2.5]", [1, 2]),
    ("{'a': 1.0}", {"a": 1}), ("b'5'", "5"), ("(1,)", 1), ("frozenset([1])", [1]), ("float('inf')", 1e308), ("0", 1e-12),
    ("0.0", [-5e-324]), ("2e-12", 1e-12), ("1e-8", 0.0), ("float('nan')", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "share"), [(SAME, 1.0), (OTHER, 0.0)])
def test_values_are_compared_as_json_and_strictly(cases, share):
    code = "import collections, fractions, decimal, itertools\ndef f(name):\n    return eval(name)"
    assert run(code, [{"function": "f", "args": [name], "expected": expected} for name, expected in cases]) == share


def test_model_code_is_refused_where_bubblewrap_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    status = probe_sandbox()
    assert not status.works
    assert "apt-get install bubblewrap" in status.reason
    with pytest.raises(RewardError, match=r'not run without a sandbox.*bubblewrap is not installed.*sandbox = "none"'):
        build_code_exec(CodeExecReward())
    assert run("def f(): return 1", ["assert f() == 1"]) == 1.0
