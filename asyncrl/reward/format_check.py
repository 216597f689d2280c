"""1 where the whole completion has the shape asked for, else 0."""

from __future__ import annotations

from asyncrl.config.reward import FormatCheckReward
from asyncrl.reward.inputs import RewardFunction, RewardInput, compile_pattern


def build_format_check(config: FormatCheckReward) -> RewardFunction:
    """Build the check; the pattern must match from the first to the last character, `.` matching newlines.

    Raises:
        ConfigError: The pattern is not a regular expression.
    """
    pattern = compile_pattern(config.pattern, "reward.functions format_check pattern")

    def score(sample: RewardInput) -> float:
        return float(pattern.fullmatch(sample.text) is not None)

    return score
