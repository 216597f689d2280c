"""The judges on marked sets (marked/): how often each is wrong, and how many samples a second one scoring process judges.

`NAME_false_positive` is the share of wrong answers that NAME accepts, `NAME_false_negative` that of right ones that it refuses.
Throughput is of a pool of one process, completions of about a thousand characters around the answer; programs have four tests.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

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
    ratios = {}
    judges: tuple[tuple[str, str, RewardFunctionConfig], ...] = (
        ("numbers", "numbers", AnswerMatchReward(mode="numeric")),
        ("code", "programs", CodeExecReward(cpu_s=1.0, all_or_nothing=True)),
        ("math", "math", AnswerMatchReward(mode="math")),
    )
    for name, marked, function in judges:
        cases = [json.loads(line) for line in (MARKED / f"{marked}.jsonl").read_text(encoding="utf-8").splitlines()]
        if marked == "programs":
            requests = [_request(f"```python\n{case['program']}\n```", tests=case["tests"]) for case in cases]
        else:
            requests = [_request(case["answer"], case["reference"]) for case in cases]
        async with _pool(function).open() as pool:
            accepted = [reward > 0 for reward in await _score(pool, requests, len(requests))]
        verdicts = [(bool(case.get("right", case.get("equal"))), got) for case, got in zip(cases, accepted, strict=True)]
        of_wrong, of_right = ([got for is_right, got in verdicts if is_right == kind] for kind in (False, True))
        figures[f"{name}_cases"] = float(len(cases))
        ratios[f"{name}_false_positive"] = ratio(sum(of_wrong) / len(of_wrong), FALSE_POSITIVE_GOAL, at_least=False)
        ratios[f"{name}_false_negative"] = ratio(1 - sum(of_right) / len(of_right), FALSE_NEGATIVE_GOAL, at_least=False)
    for name, function, requests, count in _workloads():
        seconds = []
        async with _pool(function).open() as pool:
            for _ in range(rounds):
                started_s = time.perf_counter()
                await _score(pool, requests, count)
                seconds.append(time.perf_counter() - started_s)
        figures[f"{name}_samples_per_s"] = count / min(seconds)
    return BenchResult("rewards", figures, ratios)


def _workloads() -> list[tuple[str, RewardFunctionConfig, list[ScoreRequest], int]]:
    numbers = [_request(f"{THINKING}<answer>{answer}</answer>", "46") for answer in ("46", "45 km")]
    maths = [_request(f"{THINKING}<answer>{answer}</answer>", r"\frac{1}{2}") for answer in (r"$\frac{2}{4}$", r"\boxed{x+1}")]
    add, script = "def add(a, b):\n    return a + b", "print(sum(map(int, input().split())))"
    by_call = [{"function": "add", "args": [n, 3], "expected": n + 3} for n in range(4)]
    by_code = [f"assert add({n}, 3) == {n + 3}" for n in range(4)]
    by_output = [{"stdin": f"{n} 3", "stdout": str(n + 3)} for n in range(4)]
    return [
        ("exact", AnswerMatchReward(), [_request("46", "46"), _request("45", "46")], NUM_CHEAP),
        ("format", FormatCheckReward(pattern=".*<answer>.*</answer>"), numbers, NUM_CHEAP),
        ("numbers", AnswerMatchReward(mode="numeric", extract=EXTRACT), numbers, NUM_CHEAP),
        ("math", AnswerMatchReward(mode="math", extract=EXTRACT), maths, NUM_MATHS),
        ("code_function", CodeExecReward(), [_request(add, tests=by_call)], NUM_PROGRAMS),
        ("code_assert", CodeExecReward(), [_request(add, tests=by_code)], NUM_PROGRAMS),
        ("code_stdin", CodeExecReward(), [_request(script, tests=by_output)], NUM_PROGRAMS),
    ]


def _pool(function: RewardFunctionConfig) -> RewardPool:
    return RewardPool(RewardConfig(functions=(function,), concurrency=1), SystemClock())


async def _score(pool: RewardPool, requests: list[ScoreRequest], count: int) -> list[float]:
    """Return the rewards of so many requests at once, these in turns."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pool.score(requests[index % len(requests)])) for index in range(count)]
    scores = [score for task in tasks for score in task.result().scores]
    if failed := [score.error for score in scores if score.error]:
        raise RuntimeError(f"{len(failed)} samples were not judged, the first: {failed[0]}")
    return [score.reward for score in scores]


def _request(text: str, answer: str = "", tests: object = None) -> ScoreRequest:
    prompt = Prompt("p", answer=answer, reference_json=json.dumps({"tests": tests}) if tests else "")
    return ScoreRequest(1, 1, prompt, (0,), (text,), ("stop",), (4,))
