"""Engines against their plain counterparts: `transformers` here, `vllm` in bench/vllm_engine.py.

The embedded engine against `model.generate`: the same model, prompts and output lengths, one thread, tokens per second.

Model: a Llama of 4 layers, 128 wide, random weights. Requests: 160 prompts of 8 to 32 tokens, each alone in its group; output
lengths mixed. Both sides have 32 slots. `generate` takes the prompts 32 at a time, in order, left-padded, and runs each batch to
the longest output in it, end tokens ignored: what a trainer without continuous batching does. Only asked-for tokens count.

Two mixes of lengths: log-normal (mean about 60, sigma 1, cut at 200), as reasoning outputs are, is the ratio with the goal;
uniform (8 to 112, the same mean) is a figure beside it. Sides are interleaved within a round; figures are medians over rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.bench.result import BenchResult, ratio
from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.generate.engine import Engine, EngineRequest
from asyncrl.generate.transformers_engine import TransformersEngine
from asyncrl.schema.samples import SamplingParams

VS_HF_GENERATE_GOAL = 1.5
DEFAULT_ROUNDS = 5
NUM_SLOTS = 32
NUM_REQUESTS = 160
VOCABULARY = 256
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and how many tokens each is to get."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


def run(rounds: int = 0, engine: str = "transformers") -> BenchResult:
    """Measure both sides of an engine; `rounds` 0 means 5.

    Raises:
        ConfigError: No engine of that name is measured.
    """
    if engine == "vllm":
        result: BenchResult = import_module("asyncrl.bench.vllm_engine").run(rounds)
        return result
    if engine != "transformers":
        raise ConfigError(f"bench engine measures 'transformers' and 'vllm', not {engine!r}")
    return asyncio.run(_measure(rounds or DEFAULT_ROUNDS))


async def _measure(rounds: int) -> BenchResult:
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = make_model()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model.save_pretrained(folder)
        config = TransformersEngineConfig(num_slots=NUM_SLOTS, max_sequence_tokens=MAX_TOKENS, num_threads=1)
        engine = TransformersEngine(config, Path(folder))
        await engine.start()
        rates: dict[str, list[float]] = {}
        for number, (name, workload) in itertools.product(range(rounds + 1), workloads().items()):
            ours, theirs = await engine_rate(engine, workload), _generate_rate(model, workload)
            if number == 0:
                continue
            rates.setdefault(f"engine_{name}_tokens_per_s", []).append(ours)
            rates.setdefault(f"hf_generate_{name}_tokens_per_s", []).append(theirs)
            rates.setdefault(f"{name}_ratio", []).append(ours / theirs)
        await engine.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return BenchResult(
        bench="engine",
        figures={name: value for name, value in medians.items() if name != "lognormal_ratio"},
        ratios={"vs_hf_generate": ratio(medians["lognormal_ratio"], VS_HF_GENERATE_GOAL)},
    )


def workloads() -> dict[str, Workload]:
    """Return the two mixes of lengths, by name."""
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(2, VOCABULARY, size).tolist()) for size in rng.integers(8, 33, NUM_REQUESTS))
    lognormal = np.clip(rng.lognormal(np.log(60) - 0.5, 1, NUM_REQUESTS), 1, 200).astype(int)
    uniform = rng.integers(8, 113, NUM_REQUESTS)
    return {"lognormal": Workload(prompts, tuple(lognormal.tolist())), "uniform": Workload(prompts, tuple(uniform.tolist()))}


def make_model() -> LlamaForCausalLM:
    """Return the small model, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


async def engine_rate(engine: Engine, workload: Workload) -> float:
    """Return tokens per second of all requests at once through `submit`."""

    async def consume(index: int) -> None:
        sampling = SamplingParams(max_new_tokens=workload.lengths[index], ignore_eos=True)
        num_tokens = 0
        async for chunk in engine.submit(EngineRequest(f"bench-{index}", workload.prompts[index], sampling, seed=index)):
            num_tokens += len(chunk.token_ids)
        assert num_tokens == workload.lengths[index]

    return await rate_of(consume, workload)


async def rate_of(consume: Callable[[int], Coroutine[None, None, None]], workload: Workload) -> float:
    """Return tokens per second of all requests at once, each taken to its end by `consume`."""
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index in range(len(workload.prompts)):
            tasks.create_task(consume(index))
    return sum(workload.lengths) / (time.perf_counter() - started_s)


def _generate_rate(model: LlamaForCausalLM, workload: Workload) -> float:
    started_s = time.perf_counter()
    for start in range(0, len(workload.prompts), NUM_SLOTS):
        prompts = workload.prompts[start : start + NUM_SLOTS]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        longest = max(workload.lengths[start : start + NUM_SLOTS])
        model.generate(
            ids,
            attention_mask=(ids != 0).long(),
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
        )
    return sum(workload.lengths) / (time.perf_counter() - started_s)
