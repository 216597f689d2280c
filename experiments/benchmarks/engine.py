"""Engines against their plain counterparts: `transformers` here, `vllm` in vllm_engine.py.

The embedded engine against `model.generate`: the same model, prompts and output lengths, one thread, tokens per second.

Model: a Llama of 4 layers, 128 wide, random weights. Requests: 160 prompts of 8 to 32 tokens, each alone in its group; output
lengths mixed. Both sides have 32 slots. `generate` takes the prompts 32 at a time, in order, left-padded, and runs each batch to
the longest output in it, end tokens ignored: what a trainer without continuous batching does. Only asked-for tokens count.

Two mixes of lengths: log-normal (mean about 60, sigma 1, cut at 200), as reasoning outputs are, is the ratio with the goal;
uniform (8 to 112, the same mean) is a figure beside it. Sides are interleaved within a round; figures are medians over rounds.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.generate.transformers.engine import TransformersEngine
from benchmarks import vllm_engine
from benchmarks.harness import BenchResult, medians, ratio
from benchmarks.workload import MAX_TOKENS, NUM_SLOTS, Workload, engine_model, engine_rate, workloads

VS_HF_GENERATE_GOAL = 1.5
DEFAULT_ROUNDS = 5


def run(rounds: int = 0, engine: str = "transformers") -> BenchResult:
    """Measure both sides of an engine; `rounds` 0 means 5.

    Raises:
        ConfigError: No engine of that name is measured.
    """
    if engine == "vllm":
        return vllm_engine.run(rounds)
    if engine != "transformers":
        raise ConfigError(f"bench engine measures 'transformers' and 'vllm', not {engine!r}")
    return asyncio.run(_measure(rounds or DEFAULT_ROUNDS))


async def _measure(rounds: int) -> BenchResult:
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    model, measured = engine_model(), []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model.save_pretrained(folder)
        config = TransformersEngineConfig(num_slots=NUM_SLOTS, max_sequence_tokens=MAX_TOKENS, num_threads=1)
        engine = TransformersEngine(config, Path(folder))
        await engine.start()
        for _ in range(rounds + 1):
            figures: dict[str, float] = {}
            for name, workload in workloads().items():
                ours, theirs = await engine_rate(engine, workload), _generate_rate(model, workload)
                figures |= {f"engine_{name}_tokens_per_s": ours, f"hf_generate_{name}_tokens_per_s": theirs}
                figures[f"{name}_ratio"] = ours / theirs
            measured.append(figures)
        await engine.close()
    middle = medians(measured[1:])
    ratios = {"vs_hf_generate": ratio(middle.pop("lognormal_ratio"), VS_HF_GENERATE_GOAL)}
    return BenchResult("engine", middle, ratios)


def _generate_rate(model: LlamaForCausalLM, workload: Workload) -> float:
    started_s = time.perf_counter()
    for start in range(0, len(workload.prompts), NUM_SLOTS):
        prompts = workload.prompts[start : start + NUM_SLOTS]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        longest = max(workload.lengths[start : start + NUM_SLOTS])
        model.generate(ids, attention_mask=(ids != 0).long(), do_sample=True, top_k=0, max_new_tokens=longest)
    return sum(workload.lengths) / (time.perf_counter() - started_s)
