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
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from asyncrl.config.learner import LearnerConfig
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.step.microbatch import prepare
from asyncrl.learner.step.train_step import train_step
from asyncrl.models.logprobs import token_logprobs
from asyncrl.packing.pack import pack_step
from asyncrl.plan.validate import resident_bytes, train_state
from asyncrl.schema.samples import ScoredGroup, ids_from_bytes
from benchmarks.harness import BenchResult, in_process, ratio, seconds_in_turns
from benchmarks.workload import llama, random_groups, smollm2_model, train_config

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
VOCABULARY, TOKENS_PER_ROW, LEARNING_RATE = 2048, 2048, 1e-5
MICRO_BATCH = 8
NUM_MICRO_BATCHES = NUM_GROUPS * GROUP_SIZE // MICRO_BATCH
LOGITS_VOCABULARY, LOGITS_TOKENS, LOGITS_HIDDEN = 49_152, 4_096, 64


class _Shape(NamedTuple):
    """Groups with a common prompt, and the model that trains them."""

    num_groups: int
    size: int
    prompt_tokens: int
    response_tokens: float
    """On average."""
    model: tuple[int, int, int, int, int]
    goal: float

    def groups(self) -> list[ScoredGroup]:
        mean, size = self.response_tokens, (self.num_groups, self.size)
        lengths_GN = np.random.default_rng(0).uniform(mean - 1, mean + 1, size).round().astype(int)
        return random_groups(self.prompt_tokens, lengths_GN, self.model[-1])


SHARED = (_Shape(4, 8, 149, 9.0, (192, 4, 4, 768, 2048), 4.0), _Shape(64, 4, 6, 3.6, (128, 2, 4, 512, 16), 1.3))


def run(rounds: int = 0, profile: str = "") -> BenchResult:
    """Measure all sides, or profile steps; `rounds` 0 means 5."""
    torch.set_num_threads(1)
    return (_profiles if profile else _measure)(rounds or DEFAULT_ROUNDS)


def _measure(rounds: int) -> BenchResult:
    rng = np.random.default_rng(0)
    rng.integers(2, VOCABULARY, (NUM_GROUPS, PROMPT_TOKENS))  # for the lengths of the figures that are published
    drawn = rng.lognormal(np.log(100) - 0.5, 1.0, (NUM_GROUPS, GROUP_SIZE))
    lengths_GN = np.clip(drawn, 1, MOST_TOKENS - PROMPT_TOKENS).astype(int)
    groups, num_tokens = random_groups(PROMPT_TOKENS, lengths_GN, VOCABULARY), float(lengths_GN.sum())
    config = train_config(LEARNING_RATE)
    seconds = seconds_in_turns({"packed": _step(_model(), groups, TOKENS_PER_ROW, config), "trl": _trl_step(groups)}, rounds)
    ratios = {"vs_trl": ratio(seconds["trl"] / seconds["packed"], TRL_GOAL)}
    for shape in SHARED:
        whole, alone = shape.groups(), []
        for number, member in enumerate(member for group in whole for member in group.members):
            sample = msgspec.structs.replace(member.sample, group_id=number)
            alone.append(ScoredGroup(number, whole[0].prompt, (msgspec.structs.replace(member, sample=sample),)))
        one_row = 2 * shape.num_groups * shape.size * (shape.prompt_tokens + int(shape.response_tokens))
        sides = {
            name: _step(llama(*shape.model, tie_word_embeddings=False), packed, one_row, config)
            for name, packed in (("shared", whole), ("own", alone))
        }
        times = seconds_in_turns(sides, rounds)
        ratios[f"shared_prefix_speedup_{shape.num_groups}x{shape.size}"] = ratio(times["own"] / times["shared"], shape.goal)
    memory_mb = {way: in_process(_logprobs_mb, way) for way in ("chunked", "whole")}
    ratios["logits_memory"] = ratio(memory_mb["chunked"] / memory_mb["whole"], LOGITS_GOAL, at_least=False)
    figures = {"trained_tokens": num_tokens}
    figures |= {f"{name}_tokens_per_s": num_tokens / value for name, value in seconds.items()}
    figures |= {f"logits_{way}_mb": value for way, value in memory_mb.items()}
    return BenchResult("learner", figures, ratios)


def _model() -> LlamaForCausalLM:
    return llama(192, 4, 4, 768, VOCABULARY, max_position_embeddings=MOST_TOKENS, tie_word_embeddings=False)


def _step(model: LlamaForCausalLM, groups: list[ScoredGroup], tokens_per_row: int, config: RunConfig) -> Callable[[], object]:
    """Return what trains the model on the groups, once a call."""
    batch = prepare(pack_step(0, groups, tokens_per_row=tokens_per_row, temperature=1.0))
    return partial(train_step, train_state(model, config), batch, config)


def _logprobs_mb(way: str) -> float:
    """Return the peak memory that log-probabilities of T tokens add: ours in chunks, or all [T, V] logits at once. Linux only."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    head = torch.nn.Linear(LOGITS_HIDDEN, LOGITS_VOCABULARY, bias=False)
    hidden = torch.randn(LOGITS_TOKENS, LOGITS_HIDDEN, requires_grad=True)
    targets = torch.randint(LOGITS_VOCABULARY, (LOGITS_TOKENS,))

    def forward_and_backward(count: int) -> None:
        if way == "chunked":
            chunk_tokens = LearnerConfig().logprob_chunk_tokens
            logprobs = token_logprobs(hidden[:count], targets[:count], head, temperature=1.0, chunk_tokens=chunk_tokens)[0]
        else:
            logprobs = head(hidden[:count]).float().log_softmax(-1).gather(-1, targets[:count].unsqueeze(-1))
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    forward_and_backward(8)
    before = resident_bytes("VmRSS")
    forward_and_backward(LOGITS_TOKENS)
    return (resident_bytes("VmHWM") - before) / 1e6


def _profiles(rounds: int) -> BenchResult:
    """Say where the time of a step goes."""
    figures: dict[str, float] = {}
    ratios = {}
    for name, shape, model, goal in (
        ("quickstart", SHARED[1], llama(*SHARED[1].model), 0.15),
        ("smollm2", SHARED[0], smollm2_model(), 0.05),
    ):
        config = load_config(CONFIGS / f"{name}.toml", {"learner.dtype": "float32"})
        step = _step(model, shape.groups(), config.packing.tokens_per_row, config)
        step()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            started_s = time.perf_counter()
            for _ in range(rounds):
                step()
            step_ms = 1000 * (time.perf_counter() - started_s) / rounds
        spent_ms = dict.fromkeys(KINDS, 0.0)
        for event in trace.key_averages():
            kind = next((kind for kind, starts in KINDS.items() if event.key.startswith(starts)), None)
            if kind is None and event.key.endswith(("Backward0", "Backward1", "AccumulateGrad")):
                kind = "autograd"
            if kind is not None:
                spent_ms[kind] += event.self_cpu_time_total / 1000 / rounds
        figures |= {f"{name}_{kind}_ms": value for kind, value in spent_ms.items()}
        figures[f"{name}_step_ms"] = step_ms
        ratios[f"outside_operators_{name}"] = ratio(1 - sum(spent_ms.values()) / step_ms, goal, at_least=False)
    return BenchResult("learner", figures, ratios)


# -- TRL's side --------------------------------------------------------------------------------------------------------


def _trl_step(groups: list[ScoredGroup]) -> Callable[[], object]:
    """Return TRL's own training steps over one generation batch, then its optimizer's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = _trl_trainer(_trl_batch(groups))
    except ImportError as error:
        raise ConfigError(f"the learner benchmark measures TRL beside us; pip install 'asyncrl[bench]' ({error})") from error

    def step() -> None:
        for _ in range(NUM_MICRO_BATCHES):
            trainer.training_step(trainer.model, [{}], None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    return step


def _trl_batch(groups: list[ScoredGroup]) -> dict[str, Any]:
    """Return the groups as TRL keeps a step: a row for each sample, filled up to the longest response."""
    samples = [member.sample for group in groups for member in group.members]
    prompt_ids = torch.tensor(np.stack([ids_from_bytes(sample.prompt_ids) for sample in samples])).long()
    responses = [torch.tensor(ids_from_bytes(sample.token_ids)).long() for sample in samples]
    rewards = torch.tensor([[member.reward for member in group.members] for group in groups])
    centred = rewards - rewards.mean(1, keepdim=True)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": pad_sequence(responses, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(response) for response in responses], batch_first=True),
        "advantages": (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten(),
        "num_items_in_batch": torch.tensor(sum(map(len, responses))),
    }


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
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", learning_rate=LEARNING_RATE, beta=0.0,
            per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=NUM_MICRO_BATCHES, gradient_checkpointing=False,
            steps_per_generation=NUM_MICRO_BATCHES, num_generations=GROUP_SIZE, max_completion_length=MOST_TOKENS,
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
    trainer.current_gradient_accumulation_steps = NUM_MICRO_BATCHES
    return trainer
