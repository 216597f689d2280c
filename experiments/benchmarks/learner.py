"""The learner's step against TRL's own, and against rows in which no prompt is shared; and memory of the logits.

Work: 64 samples of 16 groups, prompts of 24 tokens, log-normal responses (mean about 100, sigma 1, cut at 488); a Llama of 4
layers, 192 wide, vocabulary 2,048, float32, one thread, AdamW; decoupled PPO without a second forward.

- `vs_trl`: trained tokens per second of `train_step`, over those of TRL's `GRPOTrainer.training_step` (micro-batches of 8 samples
  in order of arrival, each padded to its longest; its own loss and AdamW), generation taken out: it is handed the finished
  completions. Needs the extra `asyncrl[bench]`.
- `shared_prefix_speedup_GROUPSxMEMBERS`: samples per second of `train_step` with groups packed whole and a prompt computed once,
  over those with every sample packed and computed with a prompt of its own; one row each. Llamas of their own.
- `logits_memory`: peak memory of log-probabilities at vocabulary 49,152 for 4,096 tokens, forward and backward, over that of the
  usual way with all [T, V] logits; each in a process of its own.

`asyncrl bench learner --profile` says where a step's time goes instead, for a step of configs/quickstart.toml and for one of the
shape of configs/smollm2.toml (random weights, float32): by torch.profiler, milliseconds of self time by kind of operator, and
`outside_operators_*`, the share in which no torch operator worked (Python, dispatch to it, numpy).

Sides are measured in turns within a round; figures are medians.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model.policy import made_ready
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.step.microbatch import prepare
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.batches import StepBatch
from asyncrl.schema.samples import ScoredGroup
from benchmarks.harness import BenchResult, interleaved, ratio, seconds_of
from benchmarks.workload import llama, scored_group, smollm2_model

DEFAULT_ROUNDS = 5
TRL_GOAL, LOGITS_GOAL = 1.5, 0.25
CONFIGS = Path(__file__).parents[2] / "configs"
KINDS = {
    "matrix_products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "optimizer": ("aten::_fused_adamw", "aten::_foreach"),
    "autograd": ("autograd::", "torch::autograd"),
    "other_operators": ("aten::",),
}
"""Of operators, by how their names begin; the first that fits."""
NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS, MOST_TOKENS = 16, 4, 24, 512
MICRO_BATCH = 8
VOCABULARY = 2048
TOKENS_PER_ROW = 2048
LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups with a common prompt, and the model that trains them."""

    num_groups: int
    size: int
    prompt: int
    response: float
    """Tokens, on average."""
    model: tuple[int, int, int, int, int]
    goal: float

    @property
    def name(self) -> str:
        return f"{self.num_groups}x{self.size}"


SHARED = (
    _Groups(4, 8, 149, 9.0, (192, 4, 4, 768, 2048), 4.0),
    _Groups(64, 4, 6, 3.6, (128, 2, 4, 512, 16), 1.3),
)


def run(rounds: int = 0, profile: str = "") -> BenchResult:
    """Measure all sides, or profile steps; `rounds` 0 means 5."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return (_profiles if profile else _measure)(rounds or DEFAULT_ROUNDS)
    finally:
        torch.set_num_threads(threads)


def _measure(rounds: int) -> BenchResult:
    groups, trl_batch = _make_work()
    batch = pack_step(0, groups, tokens_per_row=TOKENS_PER_ROW, temperature=1.0)
    sides = {"packed": _step(_model(), batch, _config()), "trl": _trl_side(trl_batch)}
    seconds = interleaved({name: partial(seconds_of, side) for name, side in sides.items()}, rounds)
    shared = [(one, interleaved(_shared_sides(one), rounds)) for one in SHARED]
    num_tokens = float(trl_batch["num_items_in_batch"])
    command = [sys.executable, "-m", "benchmarks.logits_memory"]
    ours, whole = (float(subprocess.check_output([*command, way], text=True)) for way in ("chunked", "whole"))
    rates = {f"{name}_tokens_per_s": num_tokens / value for name, value in seconds.items()}
    ratios = {
        "vs_trl": ratio(seconds["trl"] / seconds["packed"], TRL_GOAL),
        **{f"shared_prefix_speedup_{one.name}": ratio(times["own"] / times["shared"], one.goal) for one, times in shared},
        "logits_memory": ratio(ours / whole, LOGITS_GOAL, at_least=False),
    }
    memory = {"logits_chunked_mb": ours / 1e6, "logits_whole_mb": whole / 1e6}
    figures = {"trained_tokens": num_tokens, **rates, **memory}
    return BenchResult(bench="learner", figures=figures, ratios=ratios)


def _profiles(rounds: int) -> BenchResult:
    """Say where the time of a step goes."""
    figures: dict[str, float] = {}
    ratios = {}
    for name, groups, model, goal in (
        ("quickstart", SHARED[1], llama(*SHARED[1].model), 0.15),
        ("smollm2", SHARED[0], smollm2_model(), 0.05),
    ):
        config = load_config(CONFIGS / f"{name}.toml", {"learner.dtype": "float32"})
        batch = pack_step(0, _scored_groups(groups), tokens_per_row=config.packing.tokens_per_row, temperature=1.0)
        step = _step(model, batch, config)
        step()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            started_s = time.perf_counter()
            for _ in range(rounds):
                step()
            seconds = time.perf_counter() - started_s
        spent_ms = dict.fromkeys(KINDS, 0.0)
        for event in trace.key_averages():
            kind = next((kind for kind, starts in KINDS.items() if event.key.startswith(starts)), None)
            if kind is None and event.key.endswith(("Backward0", "Backward1", "AccumulateGrad")):
                kind = "autograd"
            if kind is not None:
                spent_ms[kind] += event.self_cpu_time_total / 1000 / rounds
        outside = 1 - sum(spent_ms.values()) / (1000 * seconds / rounds)
        figures |= {f"{name}_{kind}_ms": value for kind, value in spent_ms.items()}
        figures[f"{name}_step_ms"] = 1000 * seconds / rounds
        ratios[f"outside_operators_{name}"] = ratio(outside, goal, at_least=False)
    return BenchResult(bench="learner", figures=figures, ratios=ratios)


def _scored_groups(groups: _Groups) -> list[ScoredGroup]:
    rng, vocabulary = np.random.default_rng(0), groups.model[-1]
    lengths = rng.uniform(groups.response - 1, groups.response + 1, (groups.num_groups, groups.size)).round().astype(int)
    return [
        scored_group(
            number,
            rng.integers(2, vocabulary, groups.prompt).tolist(),
            [rng.integers(2, vocabulary, length).tolist() for length in row],
            rng.random(groups.size).round().tolist(),
        )
        for number, row in enumerate(lengths)
    ]


def _shared_sides(groups: _Groups) -> dict[str, Callable[[], float]]:
    """Return the same step with prompts shared and not shared."""
    whole, alone = _scored_groups(groups), []
    for number, member in enumerate(member for group in whole for member in group.members):
        sample = msgspec.structs.replace(member.sample, group_id=number)
        alone.append(ScoredGroup(number, whole[0].prompt, (msgspec.structs.replace(member, sample=sample),)))
    one_row = 2 * groups.num_groups * groups.size * (groups.prompt + int(groups.response))

    def side(packed: list[ScoredGroup]) -> Callable[[], float]:
        batch = pack_step(0, packed, tokens_per_row=one_row, temperature=1.0)
        return partial(seconds_of, _step(llama(*groups.model, tie_word_embeddings=False), batch, _config()))

    return {"shared": side(whole), "own": side(alone)}


def _make_work() -> tuple[list[ScoredGroup], dict[str, Any]]:
    """Return one step's groups, and the same as TRL keeps a step: a row for each sample, filled up to the longest response."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, PROMPT_TOKENS).tolist() for _ in range(NUM_GROUPS)]
    drawn = rng.lognormal(np.log(100) - 0.5, 1.0, NUM_GROUPS * GROUP_SIZE)
    lengths = np.clip(drawn, 1, MOST_TOKENS - PROMPT_TOKENS).astype(int)
    responses = [rng.integers(2, VOCABULARY, length).tolist() for length in lengths]
    logprobs = [rng.normal(-np.log(VOCABULARY), 0.1, length).tolist() for length in lengths]
    rewards = rng.random((NUM_GROUPS, GROUP_SIZE)).round()
    of_group = [slice(number * GROUP_SIZE, (number + 1) * GROUP_SIZE) for number in range(NUM_GROUPS)]
    groups = [
        scored_group(number, prompts[number], responses[of], rewards[number].tolist(), logprobs=logprobs[of])
        for number, of in enumerate(of_group)
    ]
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    prompt_ids = torch.tensor(prompts).repeat_interleave(GROUP_SIZE, 0)
    completion_ids = pad_sequence([torch.tensor(one) for one in responses], batch_first=True)
    return groups, {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": (torch.arange(completion_ids.shape[1]) < torch.from_numpy(lengths)[:, None]).long(),
        "advantages": torch.from_numpy((centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)).ravel()).float(),
        "num_items_in_batch": torch.tensor(lengths.sum()),
    }


def _model() -> LlamaForCausalLM:
    return llama(192, 4, 4, 768, VOCABULARY, max_position_embeddings=MOST_TOKENS, tie_word_embeddings=False)


def _config() -> RunConfig:
    learner = LearnerConfig(learning_rate=LEARNING_RATE, warmup_steps=0)
    return RunConfig(algorithm=AlgorithmConfig(groups_per_step=NUM_GROUPS, group_size=GROUP_SIZE), learner=learner)


def _step(model: LlamaForCausalLM, batch: StepBatch, config: RunConfig) -> Callable[[], object]:
    """Return what trains the model on a batch, once a call."""
    ready = made_ready(model, config.learner)
    state = TrainState(ready, PolicyOptimizer(ready.named_parameters(), config.learner, config.num_steps))
    return partial(train_step, state, prepare(batch), config)


def _trl_side(batch: dict[str, Any]) -> Callable[[], object]:
    """TRL's own training steps over one generation batch, then its optimizer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = _trl_trainer(batch)
    except ImportError as error:
        raise ConfigError(f"the learner benchmark measures TRL beside us; pip install 'asyncrl[bench]' ({error})") from error
    num_micro_batches = NUM_GROUPS * GROUP_SIZE // MICRO_BATCH

    def measure() -> None:
        for _ in range(num_micro_batches):
            trainer.training_step(trainer.model, [{}], None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    return measure


def _trl_trainer(batch: dict[str, Any]) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl.learner.model.policy import character_tokenizer

    class HandedOver(GRPOTrainer):  # type: ignore[misc]
        """Finished completions instead of generation."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:  # noqa: ARG002
            return dict(batch)

    tokenizer = character_tokenizer("0123456789")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    num_micro_batches = NUM_GROUPS * GROUP_SIZE // MICRO_BATCH
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", learning_rate=LEARNING_RATE, beta=0.0,
            per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=num_micro_batches, gradient_checkpointing=False,
            steps_per_generation=num_micro_batches, num_generations=GROUP_SIZE, max_completion_length=MOST_TOKENS,
        )  # fmt: skip
        trainer = HandedOver(
            model=_model(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["1"] * 64}),
            processing_class=tokenizer,
        )
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = num_micro_batches
    return trainer
