"""The judges on marked sets (marked/): how often each is wrong, and how many samples a second one scoring process judges.

`NAME_false_positive` is the share of wrong answers that NAME accepts, `NAME_false_negative` that of right ones that it refuses.
Throughput is of a pool of one process, completions of about a thousand characters around the answer; programs have four tests.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.clock import SystemClock
from asyncrl.config.reward import AnswerMatchReward, CodeExecReward, FormatCheckReward, RewardConfig, RewardFunctionConfig
from asyncrl.reward.worker import RewardPool
from asyncrl.schema.samples import Prompt, ScoreRequest
from benchmarks.harness import BenchResult, ratio

DEFAULT_ROUNDS = 3
MARKED = Path(__file__).with_name("marked")
FALSE_POSITIVE_GOAL, FALSE_NEGATIVE_GOAL = 0.0, 0.02
EXTRACT = r"<answer>(.*?)</answer>"
THINKING = "Some thinking that goes on for a while. " * 25
NUM_CHEAP, NUM_MATHS, NUM_PROGRAMS = 4000, 400, 20


def run(rounds: int = 0) -> BenchResult:
    """Judge the marked sets once and measure throughput `rounds` (0: 3) times, the best of which counts."""
    return asyncio.run(_run(rounds or DEFAULT_ROUNDS))


async def _run(rounds: int) -> BenchResult:
    figures: dict[str, float] = {}
    judges: tuple[tuple[str, RewardFunctionConfig, list[dict[str, Any]]], ...] = (
        ("numbers", AnswerMatchReward(mode="numeric"), _cases("numbers")),
        ("math", AnswerMatchReward(mode="math"), _cases("math")),
        ("code", CodeExecReward(cpu_s=1.0, all_or_nothing=True), _cases("programs")),
    )
    for name, function, cases in judges:
        figures |= {f"{name}_{kind}": value for kind, value in (await _errors(function, cases)).items()}
    for name, function, requests, count in _workloads():
        figures[f"{name}_samples_per_s"] = await _rate(function, requests, count, rounds)
    ratios = {}
    for name in ("numbers", "code", "math"):
        ratios[f"{name}_false_positive"] = ratio(figures[f"{name}_false_positive"], FALSE_POSITIVE_GOAL, at_least=False)
        ratios[f"{name}_false_negative"] = ratio(figures[f"{name}_false_negative"], FALSE_NEGATIVE_GOAL, at_least=False)
    return BenchResult("rewards", figures, ratios)


def _cases(name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (MARKED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    if name != "programs":
        return [{"answer": line["reference"], "text": line["answer"], "right": line["equal"]} for line in lines]
    return [
        {"tests": {"tests": line["tests"]}, "text": f"```python\n{line['program']}\n```", "right": line["right"]}
        for line in lines
    ]


async def _errors(function: RewardFunctionConfig, cases: list[dict[str, Any]]) -> dict[str, float]:
    requests = [_request(case["text"], case.get("answer", ""), case.get("tests")) for case in cases]
    async with _pool(function) as pool:
        scores = await _score(pool, requests, len(requests))
    accepted = [score > 0 for score in scores]
    wrong = [case["right"] for case in cases].count(False)
    false_positives = sum(got and not case["right"] for got, case in zip(accepted, cases, strict=True))
    false_negatives = sum(case["right"] and not got for got, case in zip(accepted, cases, strict=True))
    return {
        "cases": float(len(cases)),
        "false_positive": false_positives / wrong,
        "false_negative": false_negatives / (len(cases) - wrong),
    }


def _workloads() -> list[tuple[str, RewardFunctionConfig, list[ScoreRequest], int]]:
    numbers = [_request(f"{THINKING}<answer>{answer}</answer>", "46") for answer in ("46", "45 km")]
    maths = [_request(f"{THINKING}<answer>{answer}</answer>", r"\frac{1}{2}") for answer in (r"$\frac{2}{4}$", r"\boxed{x+1}")]
    add, script = "def add(a, b):\n    return a + b", "print(sum(map(int, input().split())))"
    by_call = [{"function": "add", "args": [n, 3], "expected": n + 3} for n in range(4)]
    by_code = [f"assert add({n}, 3) == {n + 3}" for n in range(4)]
    by_output = [{"stdin": f"{n} 3", "stdout": str(n + 3)} for n in range(4)]
    code = CodeExecReward()
    return [
        ("exact", AnswerMatchReward(), [_request("46", "46"), _request("45", "46")], NUM_CHEAP),
        ("format", FormatCheckReward(pattern=".*<answer>.*</answer>"), numbers, NUM_CHEAP),
        ("numbers", AnswerMatchReward(mode="numeric", extract=EXTRACT), numbers, NUM_CHEAP),
        ("math", AnswerMatchReward(mode="math", extract=EXTRACT), maths, NUM_MATHS),
        ("code_function", code, [_request(add, tests={"tests": by_call})], NUM_PROGRAMS),
        ("code_assert", code, [_request(add, tests={"tests": by_code})], NUM_PROGRAMS),
        ("code_stdin", code, [_request(script, tests={"tests": by_output})], NUM_PROGRAMS),
    ]


async def _rate(function: RewardFunctionConfig, requests: list[ScoreRequest], count: int, rounds: int) -> float:
    best = 0.0
    async with _pool(function) as pool:
        for _ in range(rounds):
            started_s = time.perf_counter()
            await _score(pool, requests, count)
            best = max(best, count / (time.perf_counter() - started_s))
    return best


def _pool(function: RewardFunctionConfig) -> RewardPool:
    return RewardPool(RewardConfig(functions=(function,), concurrency=1), SystemClock())


async def _score(pool: RewardPool, requests: Sequence[ScoreRequest], count: int) -> list[float]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pool.score(requests[index % len(requests)])) for index in range(count)]
    scores = [score for task in tasks for score in task.result().scores]
    failed = [score.error for score in scores if score.error]
    if failed:
        raise RuntimeError(f"{len(failed)} samples were not judged, the first: {failed[0]}")
    return [score.reward for score in scores]


def _request(text: str, answer: str = "", tests: object = None) -> ScoreRequest:
    prompt = Prompt("p", answer=answer, reference_json=json.dumps(tests) if tests else "")
    return ScoreRequest(1, 1, prompt, (0,), (text,), ("stop",), (4,))
