"""The learner's step: packed against padded, against TRL's own, against a bare forward and backward; and memory of the logits.

Work: 64 samples of 16 groups, prompts of 24 tokens, log-normal responses (mean about 100, sigma 1, cut at 488); a Llama of 4
layers, 192 wide, vocabulary 2,048, float32, one thread, AdamW; decoupled PPO without a second forward.

- `packed_vs_padded`: trained tokens per second of `train_step`, over those of the same loss, model and optimizer on micro-batches
  of 8 samples in order of arrival, each padded to its longest.
- `vs_trl`: the same over TRL's `GRPOTrainer.training_step` (micro-batches of 8, its own loss and AdamW), generation taken out: it
  is handed the finished completions. Needs the extra `asyncrl[bench]`.
- `share_of_bare`: seconds of the same packed rows through forward, output layer and backward of a plain sum, over those of the
  whole step.
- `shared_prefix_speedup_GROUPSxMEMBERS`: samples per second of `train_step` with groups packed whole and a prompt computed once,
  over those with every sample packed and computed with a prompt of its own; one row each. `before_GROUPSxMEMBERS_speedup` is the
  same over rows filled sample by sample, in which members share a prompt where they happen to lie in one row (the rows of
  configs/smollm2.toml and configs/quickstart.toml before groups were packed whole: 1,024 and 512 tokens). Llamas of their own.
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

from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.types import Denominators, LossConfig, LossInputs
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model.policy import made_ready
from asyncrl.learner.optim.optimizer import build_optimizer
from asyncrl.learner.step.microbatch import PreparedBatch, prepare
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.batches import StepBatch
from asyncrl.schema.samples import ScoredGroup
from benchmarks.harness import BenchResult, interleaved, ratio, seconds_of
from benchmarks.workload import llama, scored_group, smollm2_model

DEFAULT_ROUNDS = 5
PACKED_GOAL, TRL_GOAL, BARE_GOAL, LOGITS_GOAL = 2.0, 1.5, 0.85, 0.25
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
    row_before: int
    model: tuple[int, int, int, int, int]
    goal: float

    @property
    def name(self) -> str:
        return f"{self.num_groups}x{self.size}"


SHARED = (
    _Groups(4, 8, 149, 9.0, 1024, (192, 4, 4, 768, 2048), 4.0),
    _Groups(64, 4, 6, 3.6, 512, (128, 2, 4, 512, 16), 1.3),
)


@dataclass(frozen=True, slots=True)
class _Work:
    """One step's samples, group after group, and the same as tensors with a row for each, filled up to the longest response."""

    groups: list[ScoredGroup]
    prompts: torch.Tensor
    responses: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())


def run(rounds: int = 0, profile: str = "") -> BenchResult:
    """Measure all sides, or profile steps; `rounds` 0 means 5."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return (_profiles if profile else _measure)(rounds or DEFAULT_ROUNDS)
    finally:
        torch.set_num_threads(threads)


def _measure(rounds: int) -> BenchResult:
    work = _make_work()
    sides = {"packed": _packed_side(work), "padded": _padded_side(work), "bare": _bare_side(work), "trl": _trl_side(work)}
    seconds = interleaved({name: partial(seconds_of, side) for name, side in sides.items()}, rounds)
    shared = [(groups, interleaved(_shared_sides(groups), rounds)) for groups in SHARED]
    command = [sys.executable, "-m", "benchmarks.logits_memory"]
    ours, whole = (float(subprocess.check_output([*command, way], text=True)) for way in ("chunked", "whole"))
    rates = {f"{name}_tokens_per_s": work.num_tokens / value for name, value in seconds.items()}
    ratios = {
        "packed_vs_padded": ratio(seconds["padded"] / seconds["packed"], PACKED_GOAL),
        "vs_trl": ratio(seconds["trl"] / seconds["packed"], TRL_GOAL),
        "share_of_bare": ratio(seconds["bare"] / seconds["packed"], BARE_GOAL),
        **{f"shared_prefix_speedup_{one.name}": ratio(times["own"] / times["shared"], one.goal) for one, times in shared},
        "logits_memory": ratio(ours / whole, LOGITS_GOAL, at_least=False),
    }
    memory = {"logits_chunked_mb": ours / 1e6, "logits_whole_mb": whole / 1e6}
    before = {f"before_{one.name}_speedup": times["before"] / times["shared"] for one, times in shared}
    figures = {"trained_tokens": float(work.num_tokens), **rates, **before, **memory}
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
        state = TrainState(made_ready(model, config.learner), build_optimizer(model, config.learner, config.num_steps))
        packed = pack_step(0, _scored_groups(groups), tokens_per_row=config.packing.tokens_per_row, temperature=1.0)
        step = partial(train_step, state, prepare(packed), config)
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
    """Return the same step with prompts shared, by chance shared, and not shared."""
    whole, alone = _scored_groups(groups), []
    for number, member in enumerate(member for group in whole for member in group.members):
        sample = msgspec.structs.replace(member.sample, group_id=number)
        alone.append(ScoredGroup(number, whole[0].prompt, (msgspec.structs.replace(member, sample=sample),)))
    pack = partial(pack_step, 0, temperature=1.0)
    by_sample = pack(alone, tokens_per_row=groups.row_before)
    named = tuple(msgspec.structs.replace(one, group_id=one.group_id // groups.size) for one in by_sample.samples)
    one_row = 2 * groups.num_groups * groups.size * (groups.prompt + int(groups.response))
    batches = {
        "shared": pack(whole, tokens_per_row=one_row),
        "before": msgspec.structs.replace(by_sample, samples=named),
        "own": pack(alone, tokens_per_row=one_row),
    }
    config = _config()

    def side(batch: StepBatch) -> Callable[[], float]:
        model = made_ready(llama(*groups.model, tie_word_embeddings=False), config.learner)
        state, prepared = TrainState(model, build_optimizer(model, config.learner, config.num_steps)), prepare(batch)
        return partial(seconds_of, lambda: train_step(state, prepared, config))

    return {name: side(batch) for name, batch in batches.items()}


def _make_work() -> _Work:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, PROMPT_TOKENS).tolist() for _ in range(NUM_GROUPS)]
    drawn = rng.lognormal(np.log(100) - 0.5, 1.0, NUM_GROUPS * GROUP_SIZE)
    lengths = np.clip(drawn, 1, MOST_TOKENS - PROMPT_TOKENS).astype(int)
    responses = [rng.integers(2, VOCABULARY, length).tolist() for length in lengths]
    logprobs = [rng.normal(-np.log(VOCABULARY), 0.1, length).tolist() for length in lengths]
    rewards = rng.random((NUM_GROUPS, GROUP_SIZE)).round()
    of_group = [slice(number * GROUP_SIZE, (number + 1) * GROUP_SIZE) for number in range(NUM_GROUPS)]
    filled = [pad_sequence([torch.tensor(one) for one in rows], batch_first=True) for rows in (responses, logprobs)]
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return _Work(
        [
            scored_group(number, prompts[number], responses[of], rewards[number].tolist(), logprobs=logprobs[of])
            for number, of in enumerate(of_group)
        ],
        torch.tensor(prompts).repeat_interleave(GROUP_SIZE, 0),
        filled[0],
        torch.arange(filled[0].shape[1]) < torch.from_numpy(lengths)[:, None],
        filled[1],
        torch.from_numpy((centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)).ravel()).float(),
    )


def _model() -> LlamaForCausalLM:
    return llama(192, 4, 4, 768, VOCABULARY, max_position_embeddings=MOST_TOKENS, tie_word_embeddings=False)


def _config() -> RunConfig:
    learner = LearnerConfig(learning_rate=LEARNING_RATE, warmup_steps=0)
    return RunConfig(algorithm=AlgorithmConfig(groups_per_step=NUM_GROUPS, group_size=GROUP_SIZE), learner=learner)


def _prepared(work: _Work) -> PreparedBatch:
    return prepare(pack_step(0, work.groups, tokens_per_row=TOKENS_PER_ROW, temperature=1.0))


def _packed_side(work: _Work) -> Callable[[], object]:
    config, prepared = _config(), _prepared(work)
    model = made_ready(_model(), config.learner)
    trainee = TrainState(model, build_optimizer(model, config.learner, config.num_steps))
    return lambda: train_step(trainee, prepared, config)


def _bare_side(work: _Work) -> Callable[[], object]:
    config, prepared = _config(), _prepared(work)
    model = made_ready(_model(), config.learner)

    def measure() -> None:
        for row in prepared.rows:
            output = model.base_model(
                input_ids=row.input_ids.unsqueeze(0),
                position_ids=row.position_ids.unsqueeze(0),
                use_cache=False,
                packed_layout=row.layout,
            )
            hidden = output.last_hidden_state[0].index_select(0, row.hidden_index)
            model.get_output_embeddings()(hidden).sum().backward()
        model.zero_grad(set_to_none=True)

    return measure


def _padded_side(work: _Work) -> Callable[[], object]:
    """The usual way: right-padded micro-batches with an attention mask, the same loss and optimizer."""
    config, model = _config(), _model().train()
    optimizer = build_optimizer(model, config.learner, config.num_steps)
    denominators = Denominators(work.num_tokens, len(work.mask))

    def inputs_of(members: slice) -> LossInputs:
        width = int(work.mask[members].sum(1).max())
        prompts, responses, mask = work.prompts[members], work.responses[members, :width], work.mask[members, :width]
        ids, attention = torch.cat([prompts, responses], 1), torch.cat([torch.ones_like(prompts), mask.long()], 1)
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
        flat = logits.log_softmax(-1).gather(-1, responses[..., None]).reshape(-1)
        return LossInputs(
            logprobs=flat,
            proximal_logprobs=flat.detach(),
            behaviour_logprobs=work.logprobs[members, :width].reshape(-1),
            advantages=work.advantages[members].repeat_interleave(width),
            mask=mask.reshape(-1),
            sequence_ids=torch.arange(len(mask)).repeat_interleave(width),
            num_sequences=len(mask),
            denominators=denominators,
        )

    def measure() -> None:
        for start in range(0, len(work.mask), MICRO_BATCH):
            inputs = inputs_of(slice(start, start + MICRO_BATCH))
            LOSSES["decoupled_ppo"](inputs, LossConfig.of(config.algorithm)).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.clip()
        optimizer.step(0)

    return measure


def _trl_side(work: _Work) -> Callable[[], object]:
    """TRL's own training steps over one generation batch, then its optimizer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = _trl_trainer(work)
    except ImportError as error:
        raise ConfigError(f"the learner benchmark measures TRL beside us; pip install 'asyncrl[bench]' ({error})") from error
    num_micro_batches = len(work.mask) // MICRO_BATCH

    def measure() -> None:
        for _ in range(num_micro_batches):
            trainer.training_step(trainer.model, [{}], None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    return measure


def _trl_trainer(work: _Work) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl.learner.model.policy import character_tokenizer

    batch = {
        "prompt_ids": work.prompts,
        "prompt_mask": torch.ones_like(work.prompts),
        "completion_ids": work.responses,
        "completion_mask": work.mask.long(),
        "advantages": work.advantages,
        "num_items_in_batch": torch.tensor(work.num_tokens),
    }

    class HandedOver(GRPOTrainer):  # type: ignore[misc]
        """Finished completions instead of generation."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:  # noqa: ARG002
            return dict(batch)

    tokenizer = character_tokenizer("0123456789")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    num_micro_batches = len(work.mask) // MICRO_BATCH
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
