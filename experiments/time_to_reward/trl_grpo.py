"""TRL's GRPOTrainer on the version 0, prompts, samples, rewards and schedule of a run of ours, in one process with all cores.

    python experiments/time_to_reward/trl_grpo.py CONFIG.toml VERSION_0 OUT [--set a.b=c] [--until REWARD] [--limit-s SECONDS]

Writes OUT/steps.jsonl, a line a step: seconds since training began, and mean reward. Writes the trained model to OUT/model.
CONFIG.toml is the file that asyncrl runs: nothing of the work is written down twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import asyncrl
from asyncrl.models.number_format import hardware_format
from asyncrl.schema.samples import Prompt
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import PromptSequence
from asyncrl.user_code import load_function

WINDOW = 10
"""Steps whose mean reward is compared with a bar; as in run.py."""


class Steps(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Writes one line a step; ends the training when the mean reward of the last WINDOW reaches `until`, or after `limit_s`."""

    def __init__(self, path: Path, until: float, limit_s: float) -> None:
        self.path, self.until, self.limit_s, self.started_s = path, until, limit_s, 0.0
        self.rewards: list[float] = []

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self.started_s = time.perf_counter()

    def on_log(self, _args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_kwargs: Any) -> None:
        if logs and "reward" in logs:
            line = {"step": state.global_step, "seconds": time.perf_counter() - self.started_s, "reward": logs["reward"]}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.rewards.append(logs["reward"])
            control.should_training_stop |= len(self.rewards) >= WINDOW and sum(self.rewards[-WINDOW:]) / WINDOW >= self.until
            control.should_training_stop |= line["seconds"] >= self.limit_s


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("version_0", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--until", type=float, default=math.inf)
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="parts of a step, where all of its logits do not fit the memory"
    )
    told = parser.parse_args()
    config = asyncrl.load_config(told.config, told.overrides)
    told.out.mkdir(parents=True, exist_ok=True)
    algorithm, learner = config.algorithm, config.learner
    num_samples = algorithm.groups_per_step * algorithm.group_size
    prompts = PromptSequence(build_task(config.task, config.seed).train, config.seed)
    chosen = [prompts[index] for index in range(config.num_steps * algorithm.groups_per_step)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(told.version_0, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(told.version_0, padding_side="left"),
        reward_funcs=reward_function(config),
        train_dataset=Dataset.from_list([as_row(prompt) for prompt in chosen]),
        callbacks=[Steps(told.out / "steps.jsonl", told.until, told.limit_s)],
        args=GRPOConfig(
            output_dir=str(told.out / "trainer"),
            max_steps=config.num_steps,
            shuffle_dataset=False,
            per_device_train_batch_size=num_samples // told.micro_batches,
            gradient_accumulation_steps=told.micro_batches,
            num_generations=algorithm.group_size,
            max_completion_length=config.generate.sampling.max_new_tokens,
            temperature=config.generate.sampling.temperature,
            learning_rate=learner.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": learner.min_learning_rate_ratio},
            warmup_steps=learner.warmup_steps,
            adam_beta1=learner.betas[0],
            adam_beta2=learner.betas[1],
            adam_epsilon=learner.epsilon,
            weight_decay=learner.weight_decay,
            max_grad_norm=learner.max_grad_norm,
            gradient_checkpointing=False,
            loss_type="dr_grpo" if algorithm.advantage == "dr_grpo" else "dapo",
            scale_rewards="none" if algorithm.advantage == "dr_grpo" else "group",
            beta=0.0,
            bf16=(hardware_format("cpu")[0] if learner.dtype == "auto" else learner.dtype) == "bfloat16",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=config.seed,
        ),
    )
    trainer.train()
    trainer.save_model(str(told.out / "model"))


def as_row(prompt: Prompt) -> dict[str, Any]:
    """The prompt as TRL takes it: a text, or chat messages."""
    text: Any = [{"role": m.role, "content": m.content} for m in prompt.messages] if prompt.messages else prompt.text
    return {"prompt": text, "answer": prompt.answer}


def reward_function(config: asyncrl.RunConfig) -> Any:
    """The run's one reward as a function of TRL's; a function of the user's is asked for all samples at once."""
    wanted = config.reward.functions[0]
    path = getattr(wanted, "path", "")

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [float(extracted(text).strip() == expected) for text, expected in zip(texts, answer, strict=True)]

    def extracted(text: str) -> str:
        _, found, rest = text.rpartition("<answer>")
        return rest.partition("</answer>")[0] if found else text

    if not path:
        return right
    own = load_function(path, "reward.functions[0].path")

    async def scored(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        async with asyncio.TaskGroup() as group:
            pairs = zip(completions, answer, strict=True)
            asked = [group.create_task(own(Prompt(prompt_id="", answer=expected), text)) for text, expected in pairs]
        return [task.result() for task in asked]

    return scored


if __name__ == "__main__":
    main()
