"""Our `math` judge and math-verify alone on a public set of marked pairs: the cases that math-verify itself is tested by.

    pip download --no-deps --no-binary :all: math-verify==0.9.0 && tar xzf math_verify-0.9.0.tar.gz
    python experiments/reward_pairs/run.py math_verify-0.9.0/tests

A pair is reference, answer and verdict, read from the files' syntax trees; nothing of theirs is run. Our verdict is taken twice:
of the answer as it stands, and of its last formula, as `extract` would hand it over. The pairs are marked as math-verify wants:
several answers in one are a set, and words around them do not count. By our rules an answer is one expression, and most of what
is refused here is not one. Writes RESULTS.md.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from math_verify import parse, verify

from asyncrl.config.reward import AnswerMatchReward
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import build_reward
from asyncrl.schema.samples import Prompt

HERE = Path(__file__).parent
NAMES = ("gold", "pred", "expected")
LAST = re.compile(r"(\\boxed\{.*\}|\$[^$]+\$)", re.DOTALL)
SHOWN = 12


def main() -> None:
    """Judge all pairs and write the table."""
    pairs = sorted({pair for path in sorted(Path(sys.argv[1]).glob("test_*.py")) for pair in pairs_of(path)})
    judge = build_reward(AnswerMatchReward(mode="math"))

    def ours(reference: str, answer: str) -> bool:
        return float(judge(RewardInput(Prompt("", answer=reference), answer, "stop", 1, 0))) > 0  # type: ignore[arg-type]

    def theirs(reference: str, answer: str) -> bool:
        return bool(verify(parse(reference), parse(answer)))

    def extracted(answer: str) -> str:
        found = LAST.findall(answer)
        return found[-1] if found else answer

    sides = {
        "ours": [ours(reference, answer) for reference, answer, _ in pairs],
        "ours, of the last formula": [ours(reference, extracted(answer)) for reference, answer, _ in pairs],
        "math-verify": [theirs(reference, answer) for reference, answer, _ in pairs],
    }
    right = [bool(expected) for *_, expected in pairs]
    lines = [
        "# The `math` judge on public pairs",
        "",
        "`python experiments/reward_pairs/run.py math_verify-0.9.0/tests`, the folder unpacked as [run.py](run.py) says:",
        f"{len(pairs)} pairs ({sum(right)} equal) of math-verify 0.9.0's own tests.",
        "",
        "| judge | wrong answers accepted | right answers refused |",
        "|---|---|---|",
    ]
    for name, verdicts in sides.items():
        accepted = sum(got and not wanted for got, wanted in zip(verdicts, right, strict=True))
        refused = sum(wanted and not got for got, wanted in zip(verdicts, right, strict=True))
        lines.append(f"| {name} | {accepted} of {right.count(False)} | {refused} of {sum(right)} |")
    accepted_pairs = [pair for pair, got, wanted in zip(pairs, sides["ours"], right, strict=True) if got and not wanted]
    lines += ["", "Accepted by ours, marked as different:", ""]
    lines += [f"- `{reference}` and `{answer}`" for reference, answer, _ in accepted_pairs[:SHOWN]] or ["- none"]
    (HERE / "RESULTS.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))


def pairs_of(path: Path) -> Iterator[tuple[str, str, int]]:
    """Reference, answer and verdict of each case in a file's `parametrize` marks."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "parametrize":
            continue
        with contextlib.suppress(ValueError):  # what is not plain data
            names, cases = (ast.literal_eval(argument) for argument in call.args[:2])
            order = tuple(name.strip() for name in names.split(","))
            if order == NAMES:
                yield from ((gold, pred, int(expected)) for gold, pred, expected in cases if isinstance(gold, str))


if __name__ == "__main__":
    main()
