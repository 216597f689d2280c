"""What several benchmarks work with: models of random weights, groups of samples, and requests of an engine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.generate.engine import Engine, EngineRequest
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.schema.samples import Prompt, SamplingParams, ScoredGroup, ScoredSample
from asyncrl.weights.tensors import MappedTensors
from benchmarks.harness import medians, seconds_of
from benchmarks.samples import make_sample

PRETRAINED = Path("models/SmolLM2-135M-Instruct")
"""Where docs/models.md has `asyncrl model import` put the real one, from the working directory."""
NUM_SLOTS, NUM_REQUESTS, STEP_REQUESTS, VOCABULARY, MAX_TOKENS = 32, 160, 256, 256, 256
"""Of the engine benchmarks."""
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def llama(hidden: int, layers: int, heads: int, inner: int, vocabulary: int, **more: Any) -> LlamaForCausalLM:
    """Return a Llama with random weights, always the same."""
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0} | more
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                    num_attention_heads=heads, **settings)
    )  # fmt: skip


def smollm2_model(dtype: torch.dtype = torch.float32, **more: Any) -> LlamaForCausalLM:
    """Return a model of SmolLM2-135M's shape with random weights."""
    model: LlamaForCausalLM = llama(576, 30, 9, 1536, 49152, num_key_value_heads=3, tie_word_embeddings=True, **more).to(dtype)
    return model


def scored_group(
    number: int, prompt_ids: list[int], responses: list[list[int]], rewards: list[float], **more: Any
) -> ScoredGroup:
    """Return a group of scored samples; `more` are further fields of every sample, or lists with one for each."""
    members = tuple(
        ScoredSample(
            make_sample(number, index, prompt_ids, response, **{name: value[index] for name, value in more.items()}),
            rewards[index],
        )
        for index, response in enumerate(responses)
    )
    return ScoredGroup(number, Prompt(f"bench/{number}"), members)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and how many tokens each is to get."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


def long_tailed() -> Workload:
    """Return the requests of the engine benchmarks."""
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(2, VOCABULARY, size).tolist()) for size in rng.integers(8, 33, NUM_REQUESTS))
    lengths = np.clip(rng.lognormal(np.log(60) - 0.5, 1, NUM_REQUESTS), 1, 200).astype(int)
    return Workload(prompts, tuple(lengths.tolist()))


def step_workloads() -> dict[str, Workload]:
    """Return a step's 256 requests in three mixes of lengths, by name."""
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(2, VOCABULARY, size).tolist()) for size in rng.integers(5, 9, STEP_REQUESTS))
    mixes = {
        "short": np.full(STEP_REQUESTS, 4),
        "mixed": rng.integers(4, 29, STEP_REQUESTS),
        "long_tail": np.clip(rng.lognormal(np.log(12) - 0.5, 1, STEP_REQUESTS), 1, 120).astype(int),
    }
    return {name: Workload(prompts, tuple(lengths.tolist())) for name, lengths in mixes.items()}


def engine_model() -> LlamaForCausalLM:
    """Return the small model of the engine benchmarks, which never ends by itself."""
    return llama(128, 4, 4, 512, VOCABULARY, eos_token_id=None).eval()


async def engine_rate(engine: Engine, workload: Workload) -> float:
    """Return tokens per second of all requests at once through `submit`."""

    async def consume(index: int) -> int:
        sampling = SamplingParams(max_new_tokens=workload.lengths[index], ignore_eos=True)
        request = EngineRequest(f"bench-{index}", workload.prompts[index], sampling, seed=index)
        return sum([len(chunk.token_ids) async for chunk in engine.submit(request)])

    return await rate_of(consume, workload)


async def rate_of(consume: Callable[[int], Coroutine[None, None, int]], workload: Workload) -> float:
    """Return tokens per second of all requests at once, each taken to its end by `consume`, which counts its tokens."""
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(consume(index)) for index in range(len(workload.prompts))]
    rate = sum(workload.lengths) / (time.perf_counter() - started_s)
    assert [task.result() for task in made] == list(workload.lengths)
    return rate


async def load_pauses(engine: Engine, model: LlamaForCausalLM, rounds: int, warmup: int = 2) -> dict[str, float]:
    """Return medians of loading the model's weights from a file in memory, as the shared-memory medium hands them over.

    `pause_ms` is that of `load_weights`, with nothing in flight; `copy_ms` of a warm copy of the same bytes in turns with it;
    `overhead_ms` one less the other.
    """
    loads: list[dict[str, float]] = []
    with tempfile.NamedTemporaryFile(prefix="asyncrl-bench-", dir=MEMORY) as file:
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        manifest = make_manifest(weights)
        file.truncate(manifest.total_bytes)
        flat = torch.from_file(file.name, shared=True, size=manifest.total_bytes, dtype=torch.uint8)
        copy_out(weights, view_tensors(flat, manifest))
        tensors, target = MappedTensors(manifest, flat, file.name), torch.empty_like(flat)
        for version in range(rounds + warmup):
            pause_ms = await engine.load_weights(version, tensors, "keep")
            copy_ms = seconds_of(lambda: target.copy_(flat)) * 1000
            loads.append({"pause_ms": pause_ms, "copy_ms": copy_ms, "overhead_ms": pause_ms - copy_ms})
    return medians(loads[warmup:]) | {"pause_bytes": float(manifest.total_bytes)}
