"""TRL's GRPO on the model, prompts, samples and schedule of `reward.toml`, vLLM in the same process: the other side.

    python experiments/gpu/trl_grpo.py MODEL SUMS.jsonl OUT.jsonl [--steps 60] [--kind vllm|generate] [--go FILE]

Writes one line a step: seconds since the trainer began to train, and the mean reward. With `--go` it makes itself ready, vLLM
included, and waits until FILE is there, so that another run can be measured meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from asyncrl.config.run import JsonlTask
from asyncrl.tasks.json_lines import build_jsonl

GROUPS, GROUP_SIZE, MICRO_BATCH = 16, 8, 128


class Steps(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    def __init__(self, path: Path) -> None:
        self.path, self.started_s = path, 0.0

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.started_s = time.perf_counter()

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float] | None = None, **_kwargs: Any) -> None:
        if logs and "reward" in logs:
            line = {"step": state.global_step, "time_s": time.perf_counter() - self.started_s, "reward_mean": logs["reward"]}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("sums")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--go", type=Path)
    parser.add_argument("--kind", choices=["vllm", "generate"], default="vllm")
    told = parser.parse_args()
    task = build_jsonl(JsonlTask(path=told.sums, held_out=60), 0)
    rows = [
        {"prompt": [{"role": m.role, "content": m.content} for m in prompt.messages], "answer": prompt.answer}
        for prompt in task.train
    ]
    rows = (rows * (told.steps * GROUPS // len(rows) + 1))[: told.steps * GROUPS]

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        found = [re.findall(r"(-?\d+)", turns[0]["content"]) for turns in completions]
        return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]

    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3} if told.kind == "vllm" else {}
    arguments = GRPOConfig(
        output_dir="/tmp/trl", bf16=True, use_cpu=not torch.cuda.is_available(), report_to="none", learning_rate=2e-5,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=4, adam_beta2=0.99,
        beta=0.0, loss_type="dr_grpo", scale_rewards="none", per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=GROUPS * GROUP_SIZE // MICRO_BATCH, num_generations=GROUP_SIZE, max_completion_length=24,
        max_steps=told.steps, logging_steps=1, save_strategy="no", temperature=1.0, gradient_checkpointing=False, seed=0, **vllm,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(told.model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(told.model), callbacks=[Steps(told.out)],
    )  # fmt: skip
    if told.go is not None:
        told.go.with_suffix(".ready").touch()
    while told.go is not None and not told.go.exists():
        time.sleep(0.2)
    trainer.train()


if __name__ == "__main__":
    main()
