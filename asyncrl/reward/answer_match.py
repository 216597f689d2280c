"""1 where the completion's answer equals the reference answer, else 0: exact, numeric, regex or mathematical equality.

The answer is the first group of the last match of `extract`, or the whole completion. An answer that names several candidates is
not an answer: `numeric` takes exactly one number, and `math` is handed only what was extracted.

math-verify guards itself with signal.alarm; its timeouts are switched off here, because the pool (reward/pool.py) kills a scoring
process that takes too long. So these functions belong in scoring processes only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from asyncrl.config.reward import AnswerMatchReward
from asyncrl.errors import RewardError
from asyncrl.reward.inputs import RewardFunction, RewardInput, compile_extract, extract_answer, import_optional
from asyncrl.reward.numbers import same_quantity

Matcher = Callable[[str, str], bool]
"""(answer, reference) -> equal; both stripped and not empty."""

_DELIMITER = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)(?![A-Za-z]))[A-Za-z]{2,}")


def build_answer_match(config: AnswerMatchReward) -> RewardFunction:
    """Build the match of one mode.

    Raises:
        ConfigError: `extract` is not a regular expression with a group.
        RewardError: Mode `math` without math-verify installed.
    """
    extract = compile_extract(config.extract, "reward.functions answer_match extract")
    matches = _build_matcher(config)

    def score(sample: RewardInput) -> float:
        reference = sample.prompt.answer.strip()
        if not reference:
            raise RewardError(f"prompt {sample.prompt.prompt_id!r} has no reference answer")
        answer = extract_answer(sample.text, extract)
        return float(bool(answer) and matches(answer or "", reference))

    return score


def _build_matcher(config: AnswerMatchReward) -> Matcher:
    if config.mode == "exact":
        return str.__eq__
    if config.mode == "numeric":
        return lambda answer, reference: same_quantity(answer, reference, config.tolerance)
    if config.mode == "regex":
        return _regex_match
    return _build_math_match()


def _regex_match(answer: str, reference: str) -> bool:
    try:
        return re.fullmatch(reference, answer, re.DOTALL) is not None
    except re.error as error:
        raise RewardError(f"reference {reference!r} is not a regular expression: {error}") from error


def _build_math_match() -> Matcher:
    math_verify = import_optional("math_verify", "answer_match")
    # Both warn at every call that their own timeouts are off.
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def parse(text: str) -> list[object]:
        # Outside dollars only numbers are read, and of `1 + x` only the 1.
        bare = _DELIMITER.search(text) is None and _WORD.search(text) is None
        readings = (f"${text}$", text) if bare else (text,)
        return next((found for reading in readings if (found := math_verify.parse(reading, parsing_timeout=None))), [])

    def matches(answer: str, reference: str) -> bool:
        gold = parse(reference)
        if not gold:
            raise RewardError(f"math-verify cannot read the reference answer {reference!r}")
        return bool(math_verify.verify(gold, parse(answer), timeout_seconds=None))

    return matches
