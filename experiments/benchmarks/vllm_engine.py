"""`asyncrl bench engine --engine vllm`: what our engine costs on top of the vLLM inside it, and what new weights cost.

Tokens per second: the requests of engine.py (160 prompts, log-normal and uniform lengths) through `VLLMEngine.submit`, and
the very same through bare `AsyncLLM.generate` of the very same engine: same prompts, lengths, seeds, temperature, logprobs,
prefix cache. A round is ours, bare, bare, ours; the ratio is the median of the rounds'. Bare runs 34 requests at once where ours
runs 33: it has the seat that ours keeps for a score. Bare streams deltas, as ours must; what it does when only the whole
completion is asked for is a figure beside it. The model is small, so that what is not the model weighs most.

Pause: `load_weights` of 135M parameters (SmolLM2's shape, random) that lie in a file in memory, as the shared-memory medium hands
them over, against one warm copy of the same bytes; in turns. Nothing is in flight: `load_weights` counts from its call, and a
forward that is under way then still gives its tokens.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.generate.vllm.embedded import EmbeddedVLLM
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.weights.tensors import MappedTensors
from benchmarks.harness import BenchResult, medians, ratio, seconds_of
from benchmarks.workload import MAX_TOKENS, NUM_SLOTS, Workload, engine_model, engine_rate, rate_of, smollm2_model, workloads

VS_BARE_GOAL = 0.95
PAUSE_OVERHEAD_MS_GOAL = 50.0
DEFAULT_ROUNDS = 5
NUM_LOADS = 9
NUM_WARMUP = 2
_SYSTEMS = Path("/dev/shm")
_MEMORY = _SYSTEMS if _SYSTEMS.is_dir() else None


def run(rounds: int = 0) -> BenchResult:
    """Measure both; `rounds` 0 means 5 of the throughput and 9 of the pause."""
    return asyncio.run(_measure(rounds))


async def _measure(rounds: int) -> BenchResult:
    transformers_logging.disable_progress_bar()
    # Standard output is for the result.
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    rates = await _throughput(rounds or DEFAULT_ROUNDS)
    pauses = await _pauses(rounds or NUM_LOADS)
    ratios = {
        "vs_bare_vllm": ratio(rates.pop("lognormal_ratio"), VS_BARE_GOAL),
        "pause_overhead_ms": ratio(pauses.pop("overhead_ms"), PAUSE_OVERHEAD_MS_GOAL, at_least=False),
    }
    return BenchResult(bench="engine", figures=rates | pauses, ratios=ratios)


@asynccontextmanager
async def _engine(model: LlamaForCausalLM, dtype: str) -> AsyncIterator[VLLMEngine]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model.save_pretrained(folder)
        config = VLLMEngineConfig(max_sequence_tokens=MAX_TOKENS, num_slots=NUM_SLOTS, dtype=dtype)  # type: ignore[arg-type]
        engine = VLLMEngine(EmbeddedVLLM(config), Path(folder))
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


async def _throughput(rounds: int) -> dict[str, float]:
    """Return medians over rounds of both sides' tokens/s, and of each round's ratio; the first round warms up."""
    async with _engine(engine_model(), "float32") as engine:
        measured = [await _throughput_once(engine) for _ in range(rounds + 1)]
    return medians(measured[1:])


async def _throughput_once(engine: VLLMEngine) -> dict[str, float]:
    """Ours, bare, bare, ours: a machine that gets slower or faster meanwhile does so to both sides."""
    measured = {}
    for name, workload in workloads().items():
        first = await engine_rate(engine, workload)
        deltas = harmonic_mean([await _bare_rate(engine, workload, "DELTA") for _ in range(2)])
        ours = harmonic_mean([first, await engine_rate(engine, workload)])
        measured[f"engine_{name}_tokens_per_s"] = ours
        measured[f"bare_{name}_tokens_per_s"] = deltas
        measured[f"bare_final_only_{name}_tokens_per_s"] = await _bare_rate(engine, workload, "FINAL_ONLY")
        measured[f"{name}_ratio"] = ours / deltas
    return measured


async def _bare_rate(engine: VLLMEngine, workload: Workload, output_kind: str) -> float:
    llm: Any = getattr(engine.backend, "llm")  # noqa: B009 - the other side is what ours stands on
    params = import_module("vllm.sampling_params")
    kind = params.RequestOutputKind[output_kind]

    async def consume(index: int) -> int:
        sampling = params.SamplingParams(
            max_tokens=workload.lengths[index], temperature=1.0, seed=index, ignore_eos=True, logprobs=0, flat_logprobs=True,
            detokenize=False, output_kind=kind,
        )  # fmt: skip
        prompt = {"prompt_token_ids": list(workload.prompts[index]), "cache_salt": "bare"}
        outputs = llm.generate(prompt, sampling, f"bare-{index}")
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    return await rate_of(consume, workload)


async def _pauses(rounds: int) -> dict[str, float]:
    """Return medians of a load, of a bare copy, and of what the one takes beyond the other."""
    model = smollm2_model(torch.bfloat16, max_position_embeddings=2048, eos_token_id=None, pad_token_id=None).eval()
    with tempfile.NamedTemporaryFile(prefix="asyncrl-bench-", dir=_MEMORY) as file:
        tensors = _mapped(model, file.name)
        target = torch.empty_like(tensors.flat)
        async with _engine(model, "bfloat16") as engine:
            measured = [await _pause_once(engine, number, tensors, target) for number in range(rounds + NUM_WARMUP)]
    return medians(measured[NUM_WARMUP:]) | {"pause_bytes": float(tensors.flat.numel())}


async def _pause_once(engine: VLLMEngine, version: int, tensors: MappedTensors, target: torch.Tensor) -> dict[str, float]:
    load_ms = await engine.load_weights(version, tensors, "keep")
    copy_ms = seconds_of(lambda: target.copy_(tensors.flat)) * 1000
    return {"pause_ms": load_ms, "copy_ms": copy_ms, "overhead_ms": load_ms - copy_ms}


def _mapped(model: LlamaForCausalLM, path: str) -> MappedTensors:
    """Lay a model's tensors into a file, as a medium would have."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    manifest = make_manifest(tensors)
    with Path(path).open("r+b") as file:
        file.truncate(manifest.total_bytes)
    flat = torch.from_file(path, shared=True, size=manifest.total_bytes, dtype=torch.uint8)
    copy_out(tensors, view_tensors(flat, manifest))
    return MappedTensors(manifest, flat, path)
