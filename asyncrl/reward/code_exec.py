r"""The share of a task's tests that the completion's Python passes, run in a sandbox and judged outside it.

`prompt.reference_json` is `{"tests": [...]}`; a test is one of
- `{"stdin": "2 3\n", "stdout": "5\n"}`: the program is run as a script; trailing white space does not count;
- `{"function": "add", "args": [2, 3], "kwargs": {}, "expected": 5, "tolerance": 1e-9}`: the function is called and what
  it returns compared as JSON (a tuple equals a list, `True` is not 1); `"Solution().add"` calls a method of a fresh object;
- `{"code": "assert add(2, 3) == 5"}`, or the bare string: test code, which sees the program's names as remote objects.

Expected values of the first two never enter a sandbox, and test code runs in a sandbox of its own: see inside/.
"""
# ruff: noqa: ANN401 - expected values are of any kind

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

import msgspec

from asyncrl.config.reward import CodeExecReward
from asyncrl.errors import RewardError
from asyncrl.reward.inputs import RewardFunction, RewardInput
from asyncrl.reward.sandbox import Sandbox, SandboxLimits, open_sandbox
from asyncrl.reward.sandbox_process import Confined, Frame, ProgramStopped

_FENCE = re.compile(r"^[ \t]*```[ \t]*(python3?|py)?[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_CALLABLE = re.compile(r"(\w+)(?:\(\)\.(\w+))?")
_SAFE_INT = 1 << 53
_MAX_UNORDERED = 2000
_SEQUENCES = frozenset({"tuple", "deque", "set", "frozenset"})


class CodeTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One test, in exactly one of its three forms."""

    code: str = ""
    stdin: str | None = None
    stdout: str | None = None
    function: str = ""
    args: list[object] = []
    kwargs: dict[str, object] = {}
    expected: object = None
    tolerance: float = 1e-9
    """Of floating-point results, relative and absolute."""


class _Tests(msgspec.Struct, frozen=True):
    tests: list[CodeTest | str]


def build_code_exec(config: CodeExecReward) -> RewardFunction:
    """Open the sandbox and build the reward.

    Raises:
        RewardError: There is no working sandbox and the config does not say to do without.
    """
    limits = SandboxLimits(config.cpu_s, config.wall_s, config.memory_bytes, config.output_bytes)
    sandbox = open_sandbox(config.sandbox, limits)

    def score(sample: RewardInput) -> float:
        tests = parse_tests(sample.prompt.reference_json, sample.prompt.prompt_id)
        code = extract_code(sample.text)
        passed = run_tests(sandbox, code, tests) if code.strip() else 0
        return float(passed == len(tests)) if config.all_or_nothing else passed / len(tests)

    return score


def extract_code(text: str) -> str:
    """Return the last fenced block marked as Python, else the last unmarked one, else the whole text."""
    blocks = [(bool(match[1]), match[2]) for match in _FENCE.finditer(text)]
    marked = [code for is_marked, code in blocks if is_marked]
    return (marked or [code for _, code in blocks] or [text])[-1]


def parse_tests(reference_json: str, prompt_id: str) -> list[CodeTest]:
    """Read and check a prompt's tests.

    Raises:
        RewardError: There are none, or one of them is in none or in several of the three forms.
    """
    try:
        tests = msgspec.json.decode(reference_json or "{}", type=_Tests).tests
    except msgspec.MsgspecError as error:
        raise RewardError(f'prompt {prompt_id!r}: reference_json must be {{"tests": [...]}}: {error}') from error
    checked = [CodeTest(code=test) if isinstance(test, str) else test for test in tests]
    for number, test in enumerate(checked):
        forms = [bool(test.code), test.stdout is not None, bool(test.function)]
        if sum(forms) != 1 or (test.function and not _CALLABLE.fullmatch(test.function)):
            raise RewardError(
                f"prompt {prompt_id!r}: test {number} must have one of code, stdout (with stdin) or function: {test}"
            )
    if not checked:
        raise RewardError(f"prompt {prompt_id!r} has no tests")
    return checked


def run_tests(sandbox: Sandbox, code: str, tests: list[CodeTest]) -> int:
    """Return how many tests the program passes; those it leaves no time or memory for are failed.

    Raises:
        RewardError: The sandbox itself failed.
    """
    passed = 0
    candidate = sandbox.launch({"role": "candidate", "code": code})
    try:
        for test in tests:
            if not test.code:
                passed += _run_once(candidate, test) if test.stdout is not None else _call_once(candidate, test)
        judged = [test for test in tests if test.code]
        if judged:
            passed += _judge(sandbox, candidate, judged)
    except ProgramStopped:
        pass
    finally:
        candidate.close()
    return passed


def _run_once(candidate: Confined, test: CodeTest) -> bool:
    candidate.send({"op": "run", "stdin": test.stdin or ""})
    reply = candidate.receive()
    return reply.get("status") == 0 and _lines(str(reply.get("stdout"))) == _lines(test.stdout or "")


def _call_once(candidate: Confined, test: CodeTest) -> bool:
    candidate.send({"op": "session"})
    reply = candidate.receive()
    passed = False
    names = reply.get("names")
    if isinstance(names, dict):
        reply = _call(candidate, names, test)
        passed = "value" in reply and _same_reply(reply["value"], test)
        if "ended" not in reply:
            candidate.send({"op": "end"})
    while "ended" not in reply:
        reply = candidate.receive()
    return passed


def _call(candidate: Confined, names: dict[str, object], test: CodeTest) -> Frame:
    match = _CALLABLE.fullmatch(test.function)
    assert match is not None, "parse_tests checked it"
    target, method = names.get(match[1]), match[2]
    for operation in (("call", []), ("getattr", [method])) if method else ():
        reply = _ask(candidate, operation[0], target, operation[1], {})
        if "value" not in reply:
            return reply
        target = reply["value"]
    kwargs = {name: _encoded(value) for name, value in test.kwargs.items()}
    return _ask(candidate, "call", target, [_encoded(value) for value in test.args], kwargs)


def _ask(candidate: Confined, operation: str, target: object, args: list[object], kwargs: dict[str, object]) -> Frame:
    candidate.send({"op": operation, "target": _returned(target), "args": args, "kwargs": kwargs})
    return candidate.receive()


def _returned(target: object) -> object:
    """An object of the program's, as it is named when it travels back."""
    return {"t": "yours", "v": target["v"]} if isinstance(target, dict) and target.get("t") == "theirs" else target


def _judge(sandbox: Sandbox, candidate: Confined, tests: list[CodeTest]) -> int:
    """Hand the candidate's pipes to a judge in a sandbox of its own, and count what it passes."""
    candidate.flush()
    setup = {"role": "judge", "candidate_in": candidate.read_fd, "candidate_out": candidate.write_fd}
    judge = sandbox.launch(setup, beside=candidate)
    passed = 0
    try:
        for test in tests:
            judge.send({"op": "test", "code": test.code})
            passed += judge.receive().get("passed") is True
    except ProgramStopped:
        pass
    finally:
        judge.close()
    return passed


# -- values, as inside/ sends them -------------------------------------------------------------------------------------


def _encoded(value: object) -> object:
    if isinstance(value, dict):
        return {"t": "dict", "v": [[key, _encoded(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _SAFE_INT:
        return {"t": "int", "v": hex(value)}
    return value


def _same_reply(value: object, test: CodeTest) -> bool:
    """Compare what came out of the sandbox; whatever does not decode is not the same."""
    try:
        return _same(value, test.expected, test.tolerance)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return False


def _same(value: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(value, dict):
        return _same_tagged(str(value["t"]), value["v"], expected, tolerance)
    if isinstance(value, list):
        return isinstance(expected, list) and _same_items(value, expected, tolerance)
    if isinstance(value, bool) or isinstance(expected, bool) or value is None or isinstance(value, str):
        return type(value) is type(expected) and value == expected
    return isinstance(expected, (int, float)) and _same_number(value, expected, tolerance)


def _same_tagged(tag: str, inner: Any, expected: Any, tolerance: float) -> bool:
    if tag == "int":
        return type(expected) is int and int(inner, 16) == expected
    if tag in {"fraction", "decimal"}:
        # Never a Fraction of the text: of 1E+999999999 it would write out every digit, here, outside the sandbox.
        numerator, _, denominator = inner.partition("/")
        number = float(Decimal(inner)) if tag == "decimal" else int(numerator) / int(denominator or 1)
        return _same_number(number, expected, tolerance)
    if tag == "dict":
        items = {_json_key(key): value for key, value in inner}
        same_keys = isinstance(expected, dict) and items.keys() == expected.keys()
        return same_keys and all(_same(items[key], expected[key], tolerance) for key in items)
    if not isinstance(expected, list):
        return False
    if tag == "range":
        span = range(*inner)
        return len(span) == len(expected) and list(span) == expected
    same_items = _same_unordered if tag in {"set", "frozenset"} else _same_items
    return tag in _SEQUENCES and same_items(inner, expected, tolerance)


def _same_number(value: float, expected: float, tolerance: float) -> bool:
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)


def _same_items(values: list[object], expected: list[object], tolerance: float) -> bool:
    return len(values) == len(expected) and all(
        _same(value, want, tolerance) for value, want in zip(values, expected, strict=True)
    )


def _same_unordered(values: list[object], expected: list[object], tolerance: float) -> bool:
    if len(values) != len(expected) or len(values) > _MAX_UNORDERED:
        return False
    left = list(expected)
    for value in values:
        index = next((index for index, want in enumerate(left) if _same(value, want, tolerance)), None)
        if index is None:
            return False
        del left[index]
    return True


def _json_key(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
