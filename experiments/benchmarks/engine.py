"""Engines against their plain counterparts: `transformers` (the default) and `vllm`.

The requests: 160 prompts of 8 to 32 tokens, each alone in its group, for a Llama of 4 layers, 128 wide, random weights. Lengths
are log-normal (mean about 60, sigma 1, cut at 200), as reasoning outputs are. Sides are interleaved within a round; figures are
medians over rounds.

- `vs_hf_generate`: tokens a second of the embedded engine over those of `model.generate`, both with 32 slots and one thread.
  `generate` takes the prompts 32 at a time, in order, left-padded, and runs each batch to the longest output in it, end tokens
  ignored: what a trainer without continuous batching does. Only asked-for tokens count.
- `auto_slots_vs_best_MIX`: tokens a second with the slots that `num_slots = "auto"` takes for a step of 256 samples and one
  generator (control/tools/choices.py), over those with the best of 32, 64, 128 and 256 slots. All 256 requests come at once, with
  prompts of 5 to 8 tokens. Mixes: `short` (4 tokens each, as in the quickstart), `mixed` (4 to 28) and `long_tail` (log-normal,
  mean about 12, sigma 1, cut at 120).
- `vs_bare_vllm`: tokens a second through `VLLMEngine.submit` over those of bare `AsyncLLM.generate` of the very same engine: same
  prompts, lengths, seeds, temperature, logprobs, prefix cache. A round is ours, bare, bare, ours. Bare runs 34 requests at once
  where ours runs 33: it has the seat that ours keeps for a score. Bare streams deltas, as ours must.
- `pause_overhead_ms`: vLLM's `load_weights` of 135M parameters (SmolLM2's shape, random) that lie in a file in memory, as the
  shared-memory medium hands them over, minus one warm copy of the same bytes; in turns, with nothing in flight.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.generate import GenerateConfig, TransformersEngineConfig, VLLMEngineConfig
from asyncrl.config.run import RunConfig
from asyncrl.control.tools.choices import with_choices
from asyncrl.errors import ConfigError
from asyncrl.generate.engine import Engine, EngineRequest
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.generate.vllm.embedded import EmbeddedVLLM
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.schema.samples import SamplingParams
from asyncrl.weights.tensors import MappedTensors
from benchmarks.harness import BenchResult, medians, ratio, seconds_of
from benchmarks.workload import llama, smollm2_model

VS_HF_GENERATE_GOAL, AUTO_SLOTS_GOAL, VS_BARE_GOAL, PAUSE_OVERHEAD_MS_GOAL = 1.5, 0.9, 0.95, 50.0
NUM_SLOTS, NUM_REQUESTS, STEP_REQUESTS, VOCABULARY, MAX_TOKENS = 32, 160, 256, 256, 256
SLOTS = (NUM_SLOTS, 64, 128, 256)
DEFAULT_ROUNDS, NUM_LOADS, WARM_LOADS = 5, 9, 2
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Workload(NamedTuple):
    """Prompts and how many tokens each is to get."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


def run(rounds: int = 0, engine: str = "transformers") -> BenchResult:
    """Measure both sides of an engine; `rounds` 0 means 5, and 9 of vLLM's pause.

    Raises:
        ConfigError: No engine of that name is measured.
    """
    if engine not in {"transformers", "vllm"}:
        raise ConfigError(f"bench engine measures 'transformers' and 'vllm', not {engine!r}")
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    return asyncio.run(_transformers(rounds or DEFAULT_ROUNDS) if engine == "transformers" else _vllm(rounds))


async def _transformers(rounds: int) -> BenchResult:
    model, measured, auto, engines, requests = engine_model(), [], _auto_slots(), {}, workloads()
    plain = requests.pop("plain")
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model.save_pretrained(folder)
        for slots in sorted({*SLOTS, auto}):
            config = TransformersEngineConfig(num_slots=slots, max_sequence_tokens=MAX_TOKENS, num_threads=1)
            engines[slots] = TransformersEngine(config, Path(folder))
            await engines[slots].start()
        for _ in range(rounds + 1):
            ours, theirs = await engine_rate(engines[NUM_SLOTS], plain), _generate_rate(model, plain)
            figures = {"engine_tokens_per_s": ours, "hf_generate_tokens_per_s": theirs, "ratio": ours / theirs}
            for mix, workload in requests.items():
                for slots, engine in engines.items():
                    figures[f"slots_{slots}_{mix}_tokens_per_s"] = await engine_rate(engine, workload)
            measured.append(figures)
        for engine in engines.values():
            await engine.close()
    middle = medians(measured[1:])
    ratios = {"vs_hf_generate": ratio(middle.pop("ratio"), VS_HF_GENERATE_GOAL)}
    for mix in requests:
        of_auto, *others = (middle[f"slots_{slots}_{mix}_tokens_per_s"] for slots in (auto, *SLOTS))
        ratios[f"auto_slots_vs_best_{mix}"] = ratio(of_auto / max(others), AUTO_SLOTS_GOAL)
    return BenchResult("engine", middle | {"auto_slots": float(auto)}, ratios)


def _auto_slots() -> int:
    engine = TransformersEngineConfig(max_sequence_tokens=MAX_TOKENS)
    algorithm = AlgorithmConfig(groups_per_step=STEP_REQUESTS // 4, group_size=4)
    config, _ = with_choices(RunConfig(algorithm=algorithm, generate=GenerateConfig(num_workers=1, engine=engine)))
    return config.generate.engine.slots


def _generate_rate(model: LlamaForCausalLM, workload: Workload) -> float:
    started_s = time.perf_counter()
    for start in range(0, len(workload.prompts), NUM_SLOTS):
        prompts = workload.prompts[start : start + NUM_SLOTS]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        longest = max(workload.lengths[start : start + NUM_SLOTS])
        model.generate(ids, attention_mask=(ids != 0).long(), do_sample=True, top_k=0, max_new_tokens=longest)
    return sum(workload.lengths) / (time.perf_counter() - started_s)


async def _vllm(rounds: int) -> BenchResult:
    # Standard output is for the result.
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "ERROR"}
    measured, workload = [], workloads()["plain"]
    async with _vllm_engine(engine_model(), "float32") as engine:
        for _ in range((rounds or DEFAULT_ROUNDS) + 1):
            # Ours, bare, bare, ours: a machine that gets slower or faster meanwhile does so to both sides.
            first = await engine_rate(engine, workload)
            bare = harmonic_mean([await _bare_rate(engine, workload) for _ in range(2)])
            ours = harmonic_mean([first, await engine_rate(engine, workload)])
            measured.append({"engine_tokens_per_s": ours, "bare_tokens_per_s": bare, "ratio": ours / bare})
    rates = medians(measured[1:])
    model = smollm2_model(torch.bfloat16, max_position_embeddings=2048, eos_token_id=None, pad_token_id=None).eval()
    async with _vllm_engine(model, "bfloat16") as engine:
        pauses = await load_pauses(engine, model, rounds or NUM_LOADS)
    ratios = {
        "vs_bare_vllm": ratio(rates.pop("ratio"), VS_BARE_GOAL),
        "pause_overhead_ms": ratio(pauses.pop("overhead_ms"), PAUSE_OVERHEAD_MS_GOAL, at_least=False),
    }
    return BenchResult(bench="engine", figures=rates | pauses, ratios=ratios)


@asynccontextmanager
async def _vllm_engine(model: LlamaForCausalLM, dtype: str) -> AsyncIterator[VLLMEngine]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model.save_pretrained(folder)
        config = VLLMEngineConfig(max_sequence_tokens=MAX_TOKENS, num_slots=NUM_SLOTS, dtype=dtype)  # type: ignore[arg-type]
        engine = VLLMEngine(EmbeddedVLLM(config), Path(folder))
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


async def _bare_rate(engine: VLLMEngine, workload: Workload) -> float:
    llm: Any = getattr(engine.backend, "llm")  # noqa: B009 - the other side is what ours stands on
    params = import_module("vllm.sampling_params")

    async def consume(index: int) -> int:
        sampling = params.SamplingParams(
            max_tokens=workload.lengths[index], temperature=1.0, seed=index, ignore_eos=True, logprobs=0, flat_logprobs=True,
            detokenize=False, output_kind=params.RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = {"prompt_token_ids": list(workload.prompts[index]), "cache_salt": "bare"}
        outputs = llm.generate(prompt, sampling, f"bare-{index}")
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    return await rate_of(consume, workload)


# -- requests ----------------------------------------------------------------------------------------------------------


def workloads() -> dict[str, Workload]:
    """Return the requests by name: those of the comparison with a plain counterpart, and a step's 256 in each mix of lengths."""
    rng = np.random.default_rng(0)
    prompts = _prompts(rng, rng.integers(8, 33, NUM_REQUESTS))
    made = {"plain": Workload(prompts, _lengths(rng.lognormal(np.log(60) - 0.5, 1, NUM_REQUESTS), 200))}
    rng = np.random.default_rng(0)
    prompts = _prompts(rng, rng.integers(5, 9, STEP_REQUESTS))
    made["short"] = Workload(prompts, (4,) * STEP_REQUESTS)
    made["mixed"] = Workload(prompts, _lengths(rng.integers(4, 29, STEP_REQUESTS), 28))
    made["long_tail"] = Workload(prompts, _lengths(rng.lognormal(np.log(12) - 0.5, 1, STEP_REQUESTS), 120))
    return made


def _prompts(rng: np.random.Generator, sizes: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rng.integers(2, VOCABULARY, size).tolist()) for size in sizes)


def _lengths(drawn: NDArray[Any], longest: int) -> tuple[int, ...]:
    return tuple(np.clip(drawn, 1, longest).astype(int).tolist())


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


async def load_pauses(engine: Engine, model: LlamaForCausalLM, rounds: int) -> dict[str, float]:
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
        for version in range(rounds + WARM_LOADS):
            pause_ms = await engine.load_weights(version, tensors, "keep")
            copy_ms = seconds_of(lambda: target.copy_(flat)) * 1000
            loads.append({"pause_ms": pause_ms, "copy_ms": copy_ms, "overhead_ms": pause_ms - copy_ms})
    return medians(loads[WARM_LOADS:]) | {"pause_bytes": float(manifest.total_bytes)}
