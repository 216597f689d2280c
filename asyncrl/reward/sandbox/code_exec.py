r"""The reward `code_exec`: the share of tests that the completion's Python passes, run in a sandbox and judged outside it.

`prompt.reference_json` is `{"tests": [...]}`; a test is one of
- `{"stdin": "2 3\n", "stdout": "5\n"}`: the program is run as a script; trailing white space does not count;
- `{"function": "add", "args": [2, 3], "kwargs": {}, "expected": 5}`: the function is called and its result compared by type and
  value; `"Solution().add"` calls a method of a new object;
- `{"code": "assert add(2, 3) == 5"}`, or the bare string: test code, which gets the program's objects as handles (guest.py).

Expected values of the first two forms never enter a sandbox, and test code runs in its own sandbox. Invalid data from the
program makes it fail its test: such data is never evaluated, and cannot raise an error here.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
from collections.abc import Sequence
from numbers import Number
from typing import Any

import msgspec

from asyncrl.config.reward import CodeExecReward, RewardConfig
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.inputs import RewardFunction, RewardInput
from asyncrl.reward.sandbox.bubblewrap import Confined, ProgramStopped, Sandbox, open_sandbox
from asyncrl.reward.sandbox.guest_values import decode, only_plain
from asyncrl.reward.sandbox.test_code import UnusableTest, examine
from asyncrl.schema.samples import Prompt

MAX_TEXT_CHARS = 400_000
"""Maximum number of characters of a completion; of a longer one only the end is read."""
_CALLABLE = re.compile(r"\w+(?:\(\)\.\w+)?", re.ASCII)
_MAX_UNORDERED = 2000
_NUMBERS = frozenset({"", "int", "decimal.Decimal", "fractions.Fraction"})
_SHOWN_COMPLAINTS, _CHECKED_OF_COMPUTED = 5, 1000


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
    """Relative to an expected floating-point number, absolute if it is 0. All other values are compared exactly."""
    unordered: bool = False
    """Whether expected lists match in any order; then sets match them too."""


class _Tests(msgspec.Struct, frozen=True):
    tests: list[CodeTest | str]


def build_code_exec(config: CodeExecReward) -> RewardFunction:
    """Open the sandbox and build the reward.

    Raises:
        RewardError: There is no working sandbox, and the config does not have `sandbox = "none"`.
    """
    sandbox = open_sandbox(config)

    def score(sample: RewardInput) -> float:
        tests = parse_tests(sample.prompt.reference_json, sample.prompt.prompt_id)
        code = extract_code(sample.text)
        passed = run_tests(sandbox, code, tests) if code.strip() else 0
        return float(passed == len(tests)) if config.all_or_nothing else passed / len(tests)

    return score


def check_tests(config: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts whose tests `code_exec` cannot judge, before a run starts.

    Args:
        config: Without `code_exec`, nothing is checked.
        prompts: A task's prompts; if they are computed on access, only the first thousand are checked.

    Raises:
        ConfigError: There are such prompts; the message has their number, and the first ones with test and line.
    """
    if not any(isinstance(function, CodeExecReward) for function in config.functions):
        return
    complaints = []
    for prompt in prompts if isinstance(prompts, list | tuple) else prompts[:_CHECKED_OF_COMPUTED]:
        try:
            parse_tests(prompt.reference_json, prompt.prompt_id)
        except RewardError as error:
            complaints.append(str(error))
    if complaints:
        shown = "\n  ".join(complaints[:_SHOWN_COMPLAINTS])
        raise ConfigError(f"code_exec cannot judge {len(complaints)} prompts; take them out or change their tests:\n  {shown}")


def extract_code(text: str) -> str:
    """Return the last fenced block marked as Python, else the last unmarked block, else the whole text."""
    from markdown_it import MarkdownIt  # noqa: PLC0415 - scoring processes alone need it

    reader = MarkdownIt("zero").enable(["fence", "list", "blockquote"])
    reader.core.ruler.enableOnly(["normalize", "block"])
    marked, unmarked, lines, block = [], [], [], ""
    # A fence that closes a block before a tag gets its own line, and so does one after words, unmarked or for Python, that opens
    # a block, or closes one: then the fences that follow are pairs. Elsewhere in a block it is part of the program.
    given = re.sub(r"(?m)^(```+)[ \t]*(</\w+>)", r"\1\n\2", text[-MAX_TEXT_CHARS:]).split("\n")
    fence_line = re.compile(r"[ \t>\-*+.)0-9]*(```+|~~~+)([^`]*)$")
    num_following = sum(fence_line.match(line) is not None for line in given)
    for line in given:
        num_following -= fence_line.match(line) is not None
        before, fence, rest = line.partition("```")
        after_words = re.search("[A-Za-z]", before) and re.fullmatch(r"(?:(?:python|py)[\d.]*)?\s*", rest)
        if fence and after_words and (not block or num_following % 2 == 0):
            lines.append(before)
            line = fence + rest
        lines.append(line)
        found = fence_line.match(line)
        if found and (not block or (found[1].startswith(block) and not found[2].strip())):
            block = "" if block else found[1]
    text = "\n".join(lines)
    for token in reader.parse(text):
        if token.type == "fence":
            words = token.info.strip().strip("{}").split()
            language = words[0].strip("{}.").split(":")[0].casefold() if words else ""
            if re.fullmatch(r"(?:python|py)[\d.]*=?", language):
                marked.append(token.content)
            elif not language:
                unmarked.append(token.content)
    return (marked or unmarked or [text])[-1]


def parse_tests(reference_json: str, prompt_id: str) -> list[CodeTest]:
    """Read and check a prompt's tests.

    Raises:
        RewardError: There are no tests, a test has none or several of the three forms, or its code cannot be judged.
    """
    try:
        tests = msgspec.json.decode(reference_json or "{}", type=_Tests).tests
    except msgspec.MsgspecError as error:
        raise RewardError(f'prompt {prompt_id!r}: reference_json must be {{"tests": [...]}}: {error}') from error
    checked = [CodeTest(code=test) if isinstance(test, str) else test for test in tests]
    if not checked:
        raise RewardError(f"prompt {prompt_id!r} has no tests")
    for number, test in enumerate(checked):
        forms = [bool(test.code), test.stdout is not None, bool(test.function)]
        if sum(forms) != 1 or (test.function and not _CALLABLE.fullmatch(test.function)):
            raise RewardError(
                f"prompt {prompt_id!r}: test {number} must have one of code, stdout (with stdin) or function: {test}"
            )
        if test.code:
            try:
                examine(test.code)
            except UnusableTest as error:
                raise RewardError(f"prompt {prompt_id!r}: test {number}, {error}") from error
    return checked


def run_tests(sandbox: Sandbox, code: str, tests: list[CodeTest]) -> int:
    """Return how many tests the program passes; tests without remaining time or memory fail.

    Raises:
        RewardError: The sandbox itself failed.
    """
    passed, judged = 0, [test for test in tests if test.code]
    with contextlib.closing(sandbox.launch(code)) as candidate, contextlib.suppress(ProgramStopped):
        if judged:
            sandbox.judge()  # If it must be started, both start at the same time.
        candidate.begin()
        for test in tests:
            passed += not test.code and _run_once(candidate, test)
        for test in judged:  # beside the program, connected by a session for this test only
            judge, needs = sandbox.judge(), examine(test.code)
            judge.deadline_s, judge.beside = candidate.deadline_s, candidate
            try:
                end, other_end = socket.socketpair()
                candidate.send({"op": "session", "names": needs.names}, end)
                judge.send({"op": "test", "code": test.code, **needs._asdict()}, other_end)
                is_passed = judge.receive().get("passed") is True
                # A message of the program does not end a session: its processes are killed.
                candidate.send({"op": "end"})
                candidate.receive()
            except ProgramStopped:
                sandbox.end_judge()
                raise
            passed += is_passed
    return passed


def _run_once(candidate: Confined, test: CodeTest) -> bool:
    """Run the program as a script, or call its function, and compare the result."""
    if test.stdout is not None:
        candidate.send({"op": "run", "stdin": test.stdin or ""})
    else:
        name, _, method = test.function.partition("().")
        candidate.send({"op": "run", "function": name, "method": method, "args": test.args, "kwargs": test.kwargs})
    reply = candidate.receive()
    output = reply.get("output")
    if reply.get("status") != 0 or type(output) is not str:
        return False
    if test.stdout is not None:
        told, wanted = ([line.rstrip() for line in each.rstrip().splitlines()] for each in (output, test.stdout))
        return told == wanted
    try:
        return _same(json.loads(output), test.expected, test)
    except Exception:  # noqa: BLE001 - the boundary: what the program's side wrote may be anything, and then is not the same
        return False


# -- values, as guest.py writes them -----------------------------------------------------------------------------------------


def _same(value: Any, expected: Any, test: CodeTest) -> bool:  # noqa: ANN401 - expected values are of any kind
    """Compare a program's result, as JSON, with the expected value. Recursion follows `expected`, which is from the task."""
    tag, inner = ("", value) if type(value) is not dict else (value["t"], value["v"])
    if isinstance(expected, float):
        # Compare as a number of its own type: a Fraction of the Decimal 1E+999999999 would need every digit.
        number: Any = decode(value, only_plain) if tag in _NUMBERS else None
        is_number = isinstance(number, Number) and not isinstance(number, bool)
        return is_number and math.isclose(number, expected, rel_tol=test.tolerance, abs_tol=0 if expected else test.tolerance)
    if isinstance(expected, list):
        is_list = type(inner) is list and (tag in {"", "tuple", "deque"} or (tag in {"set", "frozenset"} and test.unordered))
        if not is_list or len(inner) != len(expected):
            return False
        if test.unordered:
            return _same_in_any_order(inner, expected, test)
        return all(_same(item, want, test) for item, want in zip(inner, expected, strict=True))
    if isinstance(expected, dict):
        if tag != "dict" or len(inner) != len(expected):
            return False
        items = {_key(key): item for key, item in inner}
        return items.keys() == expected.keys() and all(_same(items[key], expected[key], test) for key in expected)
    if type(expected) is int and tag == "int":
        return int(inner, 16) == expected
    return not tag and type(inner) is type(expected) and bool(inner == expected)


def _key(key: Any) -> str:  # noqa: ANN401 - as above
    """Return a dict's key as JSON writes it; the program's side writes a large integer as a tag and digits of base 16."""
    if type(key) is dict and key["t"] == "int":
        return str(int(key["v"], 16))
    return key if isinstance(key, str) else json.dumps(key)


def _same_in_any_order(values: list[Any], expected: list[Any], test: CodeTest) -> bool:
    by_text = zip(*(sorted(each, key=json.dumps) for each in (values, expected)), strict=True)
    if all(_same(value, want, test) for value, want in by_text):
        return True
    left = list(expected) if len(values) <= _MAX_UNORDERED else []
    for value in values:
        index = next((index for index, want in enumerate(left) if _same(value, want, test)), None)
        if index is None:
            return False
        del left[index]
    return True
