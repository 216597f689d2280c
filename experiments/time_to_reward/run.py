"""Seconds to a reward: asyncrl as configured, the same with `max_staleness = 0`, and TRL's GRPOTrainer, in turns.

    python experiments/time_to_reward/run.py [--work quickstart long_tail smollm2] [--seeds 5] [--sides ours eta0 trl]

For each work and seed, version 0 is made once. Every side starts from it with the same prompts, number of samples, rewards,
sampling and schedule. Seconds are counted from when version 0 stands ready and the first samples are asked for; starting
processes and imports are in them on no side. The bar is passed at the first step at which the mean reward of the last WINDOW
steps reaches it. Held-out accuracy is measured alike for all sides: the trained model, sampled by transformers. Results go to
results.jsonl, a line a run; `--report` writes RESULTS.md from them. Measure on a machine that does nothing else: TRL's two
threads wait actively, and other work slows them far more than ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncrl
from asyncrl.config.learner import PretrainedModel
from asyncrl.tasks.registry import build_task

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.jsonl"
WINDOW = 10
SIDES = ("ours", "eta0", "trl")
PATIENCE = 1.5
"""Times our seconds to the highest bar after which TRL is ended, with --until-bar."""
UNTIL_BAR = f"every side ends at the highest bar, TRL at {PATIENCE:g} times our seconds to it at the latest; held out is of then"


@dataclass(frozen=True)
class Work:
    """One comparison."""

    config: Path
    bar: float
    bars: tuple[float, ...]
    goal: float
    """Seconds to the bar, ours over TRL's, at most."""
    eta0_goal: float
    trl_micro_batches: int = 1
    """TRL holds the logits of a whole micro-batch."""


WORKS = {
    "quickstart": Work(ROOT / "configs" / "quickstart.toml", 0.80, (0.75, 0.80, 0.85), 0.65, 0.75),
    "long_tail": Work(HERE / "long_tail.toml", 0.80, (0.60, 0.70, 0.80), 0.40, 0.50),
    "smollm2": Work(ROOT / "configs" / "smollm2.toml", 0.50, (0.30, 0.40, 0.50), 0.25, 0.75, 6),
}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["quickstart"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--until-bar", action="store_true", help=UNTIL_BAR)
    parser.add_argument("--report", action="store_true", help="only write RESULTS.md from results.jsonl")
    told = parser.parse_args()
    if not told.report:
        for name in told.work:
            for seed in range(told.first_seed, told.first_seed + told.seeds):
                compare(name, seed, told.sides, told.overrides, until_bar=told.until_bar)
    (HERE / "RESULTS.md").write_text(report(), encoding="utf-8")


def compare(name: str, seed: int, sides: list[str], overrides: list[str], *, until_bar: bool) -> None:
    """All sides of one seed, one after the other; which begins changes with the seed."""
    work = WORKS[name]
    with tempfile.TemporaryDirectory(prefix="asyncrl-time-to-reward-") as scratch:
        folder = Path(scratch)
        told = [*overrides, f"seed={seed}"]
        config = asyncrl.load_config(work.config, told)
        version_0 = make_version_0(config, folder)
        bar = max(work.bars) if until_bar else math.inf
        turn = 0 if until_bar else seed % len(sides)  # TRL's limit is known once ours has ended
        for side in sides[turn:] + sides[:turn]:
            started_s = time.monotonic()
            if side == "trl":
                mine_s = newest_rows().get((name, seed, "ours"), {}).get("seconds_to", {}).get(str(bar)) or math.inf
                steps, model = trl(work, told, version_0, folder, bar, PATIENCE * mine_s)
            else:
                steps, model = ours(config, side, version_0, folder, bar)
            row = {
                "work": name,
                "seed": seed,
                "side": side,
                "overrides": overrides,
                "until_bar": until_bar,
                "date": time.strftime("%Y-%m-%d"),
                "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
                "wall_s": time.monotonic() - started_s,
                "train_s": steps[-1][0],
                "steps": len(steps),
                "seconds_to": {str(one): seconds_to(steps, one) for one in work.bars},
                "accuracy": [held_out_accuracy(config, version_0), held_out_accuracy(config, model)],
                "curve": [[round(second, 2), round(reward, 4)] for second, reward in steps],
            }  # fmt: skip
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            shown = {key: value for key, value in row.items() if key not in {"curve", "overrides"}}
            print(json.dumps(shown), flush=True)


def make_version_0(config: asyncrl.RunConfig, folder: Path) -> Path:
    """The model that every side starts from: warm-started by a run of one step, or the folder that the config names."""
    if isinstance(config.model, PretrainedModel):
        return Path(config.model.path)
    run_once(msgspec.structs.replace(config, name="version-0", folder=str(folder), num_steps=1))
    return folder / "version-0" / "model"


def ours(
    config: asyncrl.RunConfig, side: str, version_0: Path, folder: Path, bar: float
) -> tuple[list[tuple[float, float]], Path]:
    """asyncrl from version 0, until its rewards reach the bar; `eta0`: the same, synchronous."""
    buffer = msgspec.structs.replace(config.buffer, max_staleness=0) if side == "eta0" else config.buffer
    model = PretrainedModel(path=str(version_0))
    run_once(msgspec.structs.replace(config, name=side, folder=str(folder), model=model, buffer=buffer), bar)
    path = folder / side
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    # What is trained is generated from when version 0 has been evaluated.
    began_s = next(line["time_s"] for line in metrics if "eval/accuracy" in line["metrics"])
    return [(line["time_s"] - began_s, line["reward_mean"]) for line in lines], max((path / "checkpoints").glob("step-*"))


def run_once(config: asyncrl.RunConfig, bar: float = math.inf) -> None:
    """One run in processes of its own, as `asyncrl run` does it; drained once its rewards reach the bar."""

    async def run() -> None:
        async with asyncrl.Run(config) as running:
            rewards = deque[float](maxlen=WINDOW)
            async for report in running.steps():
                rewards.append(report.reward_mean)
                if len(rewards) == WINDOW and sum(rewards) / WINDOW >= bar:
                    await running.drain()
                    break
            status = await running.wait()
        if status.phase != "stopped":
            raise SystemExit(f"{config.name}: {status.phase}: {status.reason}")

    asyncio.run(run())


def trl(
    work: Work, overrides: list[str], version_0: Path, folder: Path, bar: float = math.inf, limit_s: float = math.inf
) -> tuple[list[tuple[float, float]], Path]:
    """TRL, in a process of its own that has all cores and waits actively, which is faster there."""
    out = folder / "trl"
    shutil.rmtree(out, ignore_errors=True)
    environment = {key: value for key, value in os.environ.items() if key not in {"OMP_WAIT_POLICY", "OMP_NUM_THREADS"}}
    told = [argument for override in overrides for argument in ("--set", override)]
    command = [sys.executable, str(HERE / "trl_grpo.py"), str(work.config), str(version_0), str(out), *told]
    command += ["--micro-batches", str(work.trl_micro_batches), "--until", str(bar), "--limit-s", str(limit_s)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["seconds"], line["reward"]) for line in lines], out / "model"


def seconds_to(steps: list[tuple[float, float]], bar: float) -> float | None:
    """Seconds after which the mean reward of the last WINDOW steps reached the bar; None where it never did."""
    for last in range(WINDOW, len(steps) + 1):
        if sum(reward for _, reward in steps[last - WINDOW : last]) / WINDOW >= bar:
            return round(steps[last - 1][0], 2)
    return None


def held_out_accuracy(config: asyncrl.RunConfig, folder: Path) -> float:
    """Share of held-out prompts whose sampled answer (temperature as configured) is exactly right; 4 samples a prompt."""
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = build_task(config.task, config.seed).held_out[: config.eval.num_prompts]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in prompt.messages], tokenize=False, add_generation_prompt=True
        )
        if prompt.messages
        else prompt.text
        for prompt in prompts
        for _ in range(4)
    ]
    answers = [prompt.answer for prompt in prompts for _ in range(4)]
    num_right = 0
    for start in range(0, len(texts), 256):
        tokens = tokenizer(texts[start : start + 256], return_tensors="pt", padding=True, add_special_tokens=False)
        sampling: dict[str, Any] = {"do_sample": True, "temperature": config.generate.sampling.temperature, "top_k": 0}
        found = model.generate(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            max_new_tokens=config.generate.sampling.max_new_tokens,
            **sampling,
        )
        said = tokenizer.batch_decode(found[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        for text, answer in zip(said, answers[start : start + 256], strict=True):
            _, marked, rest = text.rpartition("<answer>")
            num_right += (rest.partition("</answer>")[0] if marked else text).strip() == answer
    return num_right / len(texts)


def newest_rows() -> dict[tuple[str, int, str], Any]:
    """results.jsonl by work, seed and side; of several runs of a side and seed the newest counts."""
    rows = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return {(row["work"], row["seed"], row["side"]): row for row in rows}


def report() -> str:
    """RESULTS.md from results.jsonl."""
    rows = newest_rows()
    lines = [
        "# Seconds to a reward",
        "",
        "On 2 cores, by `python experiments/time_to_reward/run.py --work quickstart long_tail`, and for smollm2 by",
        "`run.py --work smollm2 --until-bar --set num_steps=40 --set eval.every_steps=0`. [run.py](run.py) says what counts.",
        "In long_tail, before 2026-11-29 held-out problems were trained on too; the bars are of the training reward.",
        "",
        "| work | seed | side | steps/s | seconds to the bars | held out | date, commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, seed, side), row in sorted(rows.items()):
        bars = ", ".join(f"{bar}: {'not reached' if took is None else f'{took:.0f}'}" for bar, took in row["seconds_to"].items())
        rate, (before, after) = row["steps"] / row["train_s"], row["accuracy"]
        held_out = f"{before:.3f} to {after:.3f}" + " (ended early)" * row.get("until_bar", False)
        lines.append(f"| {name} | {seed} | {side} | {rate:.2g} | {bars} | {held_out} | {row['date']}, {row['commit']} |")
    lines += [
        "",
        "| work | bar | ours over TRL, median (goal) | the same, seconds of a step | ours over eta = 0, median (goal) | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, work in WORKS.items():
        seeds = sorted({seed for found, seed, _ in rows if found == name})
        if seeds:
            over_trl, over_eta0 = ratios(rows, name, seeds, work.bar, "trl"), ratios(rows, name, seeds, work.bar, "eta0")
            by_trl, by_eta0 = f"{shown(over_trl)} ({work.goal})", f"{shown(over_eta0)} ({work.eta0_goal})"
            lines.append(
                f"| {name} | {work.bar} | {by_trl} | {shown(step_ratios(rows, name, seeds))} | {by_eta0} | {len(seeds)} |"
            )
    early = (
        f"A side that was ended before the bar counts with the seconds it had run, or with {WINDOW} of its steps, before which "
        "nothing passes: the ratio is at most the one told."
    )
    return "\n".join([*lines, "", early, ""])


def ratios(rows: dict[tuple[str, int, str], Any], name: str, seeds: list[int], bar: float, other: str) -> list[float]:
    """Our seconds to the bar over the other side's; of one that was ended before it, the fewest it can take."""
    told = []
    for seed in seeds:
        ours, theirs = (rows.get((name, seed, side)) for side in ("ours", other))
        if ours and theirs:
            mine_s, theirs_s = (row["seconds_to"][str(bar)] for row in (ours, theirs))
            if theirs_s is None and theirs.get("until_bar"):
                theirs_s = theirs["train_s"] * max(1.0, WINDOW / theirs["steps"])
            told += [mine_s / theirs_s] if mine_s and theirs_s else []
    return told


def step_ratios(rows: dict[tuple[str, int, str], Any], name: str, seeds: list[int]) -> list[float]:
    """Our seconds of a step, all of the same number of samples, over TRL's."""
    pairs = [[rows.get((name, seed, side)) for side in ("ours", "trl")] for seed in seeds]
    paces = [[row["train_s"] / row["steps"] for row in pair if row] for pair in pairs]
    return [pace[0] / pace[1] for pace in paces if len(pace) == 2]


def shown(values: list[float]) -> str:
    """Median with its range."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "not run"


if __name__ == "__main__":
    main()
