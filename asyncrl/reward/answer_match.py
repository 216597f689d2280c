"""1 where the completion's answer equals the reference answer, else 0: exact, numeric, regex or mathematical equality.

The answer is the first group of the last match of `extract`, or the whole completion. An answer that names several candidates is
not an answer: `numeric` takes exactly one number (numbers.py), and `math` exactly one expression (math_match.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from asyncrl.config.reward import AnswerMatchReward
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.inputs import (
    Pattern,
    RewardFunction,
    RewardInput,
    compile_extract,
    compile_pattern,
    extract_answer,
    matches_whole,
)
from asyncrl.reward.math_match import Equal, build_math_match
from asyncrl.reward.numbers import same_quantity


def build_answer_match(config: AnswerMatchReward) -> RewardFunction:
    """Build the match of one mode.

    Raises:
        ConfigError: `extract` is not a regular expression with a group.
        RewardError: Mode `math` without math-verify installed.
    """
    extract = compile_extract(config.extract, "reward.functions answer_match extract")
    matchers: dict[str, Callable[[], Equal]] = {
        "exact": lambda: str.__eq__,
        "numeric": lambda: lambda answer, reference: answer == reference or same_quantity(answer, reference, config.tolerance),
        "regex": lambda: lambda answer, reference: matches_whole(answer, _reference_pattern(reference)),
        "math": build_math_match,
    }
    matches = matchers[config.mode]()

    def score(sample: RewardInput) -> float:
        reference = sample.prompt.answer.strip()
        if not reference:
            raise RewardError(f"prompt {sample.prompt.prompt_id!r} has no reference answer")
        answer = extract_answer(sample.text, extract)
        return float(bool(answer) and matches(answer or "", reference))

    return score


@lru_cache(maxsize=1024)
def _reference_pattern(reference: str) -> Pattern:
    try:
        return compile_pattern(reference, "reference")
    except ConfigError as error:
        raise RewardError(str(error)) from error
