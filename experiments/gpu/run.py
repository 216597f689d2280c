"""One GPU: tokens a second of both engines, the learner's FLOPs utilisation and peak memory, weights beside bare copies.

    python experiments/gpu/run.py SECTION [--out FILE] [--tiny]      SECTION: engine, vllm, learner, weights

A model of SmolLM2-135M's shape with random weights, bfloat16. Prints one JSON object a line for each figure.
`--tiny` takes a small model and a CPU: it shows that the script runs, its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.broadcast import BroadcastConfig, CUDAIPCMedium, MediumConfig, SharedMemoryMedium, ZeroMQMedium
from asyncrl.config.generate import TransformersEngineConfig, VLLMEngineConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.generate.vllm.embedded import EmbeddedVLLM
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.learner.model.policy import made_ready
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.step.microbatch import PreparedBatch, prepare
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.models.memory import ModelShape
from asyncrl.packing.pack import pack_step
from asyncrl.plan.planner import activations, training_state
from asyncrl.plan.spec import Question, parse_cluster
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample, ids_to_bytes, logprobs_to_bytes
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.registry import receiver_of
from asyncrl.weights.subscriber import Subscriber
from asyncrl.weights.tensors import DeferredTensors

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.engine import Workload, engine_rate, rate_of
from benchmarks.workload import smollm2_model

PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H100 or H200 (SXM), by the vendor's datasheet."""
PROMPT_TOKENS = 64
Logprobs = Literal["chunked", "fused"]


class Setting:
    """What is measured with: the real sizes on a GPU, or small ones on a CPU."""

    def __init__(self, *, tiny: bool) -> None:
        self.tiny, self.device = tiny, "cpu" if tiny else "cuda"
        self.dtype: Literal["float32", "bfloat16"] = "float32" if tiny else "bfloat16"
        self.num_requests, self.longest, self.mean = (12, 96, 12) if tiny else (1024, 448, 160)
        self.slots = (8,) if tiny else (256, 512)
        self.vocabulary = 256 if tiny else 49152

    def model(self) -> LlamaForCausalLM:
        if not self.tiny:
            return smollm2_model(torch.bfloat16)
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=256, **sizes, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
                        eos_token_id=1, pad_token_id=0)
        )  # fmt: skip

    def workload(self) -> Workload:
        rng = np.random.default_rng(0)
        prompts = rng.integers(2, self.vocabulary, (self.num_requests, PROMPT_TOKENS)).tolist()
        lengths = np.clip(rng.lognormal(np.log(self.mean) - 0.5, 1.0, self.num_requests), 1, self.longest - PROMPT_TOKENS)
        return Workload(tuple(map(tuple, prompts)), tuple(lengths.astype(int).tolist()))


def emit(name: str, value: float) -> None:
    """Print a figure at once: a later one may fail or take too long."""
    line = json.dumps({"figure": name, "value": round(value, 4)})
    print(line, flush=True)
    if OUT is not None:
        with OUT.open("a") as file:
            file.write(line + "\n")


def saved_model(setting: Setting, folder: str) -> Path:
    setting.model().save_pretrained(folder)
    return Path(folder)


async def embedded_engine(setting: Setting) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-") as folder:
        path = saved_model(setting, folder)
        for num_slots in setting.slots:
            config = TransformersEngineConfig(
                num_slots=num_slots, max_sequence_tokens=setting.longest, device=setting.device, dtype=setting.dtype
            )
            engine = TransformersEngine(config, path)
            await engine.start()
            whole = setting.workload()
            short = Workload(whole.prompts[:num_slots], tuple(min(16, length) for length in whole.lengths[:num_slots]))
            await engine_rate(engine, short)
            emit(f"transformers_{num_slots}_slots_tokens_per_s", await engine_rate(engine, whole))
            await engine.close()
    return {}


async def vllm_engine(setting: Setting) -> dict[str, float]:
    """Ours and bare `AsyncLLM.generate` of the same engine, in turns: ours, bare, bare, ours."""
    params = import_module("vllm.sampling_params")
    workload, figures = setting.workload(), {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-") as folder:
        config = VLLMEngineConfig(
            num_slots=setting.slots[-1], max_sequence_tokens=setting.longest, gpu_memory_share=0.4, dtype=setting.dtype,
            arguments={} if setting.tiny else {"attention_backend": "FLASH_ATTN"},
        )  # fmt: skip
        backend = EmbeddedVLLM(config)
        engine = VLLMEngine(backend, saved_model(setting, folder))
        started_s = time.perf_counter()
        await engine.start()
        figures["vllm_start_s"] = time.perf_counter() - started_s
        llm: Any = backend.llm  # the other side is what ours stands on

        async def bare(index: int) -> int:
            sampling = params.SamplingParams(
                max_tokens=workload.lengths[index], temperature=1.0, seed=index, ignore_eos=True, logprobs=0, flat_logprobs=True,
                detokenize=False, output_kind=params.RequestOutputKind.DELTA,
            )  # fmt: skip
            prompt = {"prompt_token_ids": list(workload.prompts[index]), "cache_salt": "bare"}
            outputs = llm.generate(prompt, sampling, f"bare-{time.monotonic_ns()}-{index}")
            return sum([len(output.outputs[0].token_ids) async for output in outputs])

        await engine_rate(engine, Workload(workload.prompts[:256], tuple(min(16, n) for n in workload.lengths[:256])))
        rates: dict[str, list[float]] = {"vllm": [], "bare": []}
        for side in ("vllm", "bare", "bare", "vllm"):
            rates[side].append(await (engine_rate(engine, workload) if side == "vllm" else rate_of(bare, workload)))
        await engine.close()
    figures["vllm_tokens_per_s"] = statistics.harmonic_mean(rates["vllm"])
    figures["bare_vllm_tokens_per_s"] = statistics.harmonic_mean(rates["bare"])
    figures["vs_bare_vllm"] = figures["vllm_tokens_per_s"] / figures["bare_vllm_tokens_per_s"]
    return figures


def step_batch(setting: Setting, num_groups: int, lengths: list[int], tokens_per_row: int) -> Any:
    rng, size = np.random.default_rng(0), len(lengths) // num_groups
    groups = []
    for number in range(num_groups):
        prompt = ids_to_bytes(rng.integers(2, setting.vocabulary, PROMPT_TOKENS, dtype=np.int32))
        members = []
        for index in range(size):
            length = lengths[number * size + index]
            sample = Sample(
                group_id=number, index=index, attempt=0, prompt_ids=prompt,
                token_ids=ids_to_bytes(rng.integers(2, setting.vocabulary, length, dtype=np.int32)),
                logprobs=logprobs_to_bytes(np.full(length, -float(np.log(setting.vocabulary)), np.float32)),
                versions=ids_to_bytes(np.zeros(length, np.int32)), finish_reason="stop", text="", generator="bench",
                started_s=0.0, finished_s=0.0,
            )  # fmt: skip
            members.append(ScoredSample(sample, float(rng.random() > 0.5)))
        groups.append(ScoredGroup(number, Prompt(f"bench/{number}"), tuple(members)))
    return pack_step(0, groups, tokens_per_row=tokens_per_row, temperature=1.0)


def large_model() -> LlamaForCausalLM:
    """SmolLM2-1.7B's shape, random."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
                        max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0)
        )  # fmt: skip


def flops_of(model: Any, prepared: PreparedBatch) -> tuple[float, int]:
    """Return the FLOPs of a forward and a backward that the maths asks for (nothing recomputed), and the tokens that are run.

    Tokens of shared prompts are run once. Matrix products: 6 a parameter and token; the output layer sees targets alone.
    Attention: causal, so half of the square of a sequence's tokens, without that of the tokens that an earlier one has run.
    """
    config = model.config
    body = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name and "lm_head" not in name)
    run_tokens = sum(len(row.input_ids) for row in prepared.rows)
    total = 6.0 * body * run_tokens + 6.0 * config.vocab_size * config.hidden_size * prepared.batch.num_trained_tokens
    for row in prepared.rows:
        assert row.layout.runs is not None
        own, every = (ends.diff().double() for ends in (row.layout.runs.query_ends, row.layout.runs.key_ends))
        total += 6.0 * config.num_hidden_layers * config.hidden_size * float((every**2 - (every - own) ** 2).sum())
    return total, run_tokens


def learner_step(
    setting: Setting,
    *,
    logprobs: Logprobs,
    tokens_per_row: int,
    profile: str = "",
    size: str = "",
    small: bool = False,
    **extra: Any,
) -> dict[str, float]:
    cuda = setting.device == "cuda"
    learner = LearnerConfig(
        learning_rate=1e-6, warmup_steps=0, device=setting.device, dtype=setting.dtype, logprobs=logprobs,
        logprob_chunk_tokens=4096, **extra,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    drawn = rng.lognormal(np.log(setting.mean * 3), 0.6, 16 if setting.tiny else 64 if size else 256)
    long = np.clip(drawn, 8, 160 if setting.tiny else 4000).astype(int)
    lengths: list[int] = (rng.integers(8, 16, 128) if small else long).tolist()
    config = RunConfig(algorithm=AlgorithmConfig(groups_per_step=len(lengths) // 8, group_size=8), learner=learner)
    batch = step_batch(setting, len(lengths) // 8, lengths, tokens_per_row)
    model = made_ready(large_model() if size else setting.model().float(), learner)
    trainee, prepared = TrainState(model, PolicyOptimizer(model.named_parameters(), learner, 100)), prepare(batch)
    seconds = []
    for number in range(3 if setting.tiny else 6):
        if number == 1 and cuda:
            torch.cuda.reset_peak_memory_stats()
        started_s = time.perf_counter()
        train_step(trainee, prepared, config)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    flops, run_tokens = flops_of(model, prepared)
    row_tokens = sum(len(row.token_ids) // 4 for row in batch.rows)
    step_s = statistics.median(seconds[2:])
    figures = {
        "step_s": step_s, "first_step_s": seconds[0], "row_tokens": float(row_tokens), "rows": float(len(batch.rows)),
        "trained_tokens_per_s": batch.num_trained_tokens / step_s, "row_tokens_per_s": row_tokens / step_s,
        "run_tokens": float(run_tokens), "tflops": flops / step_s / 1e12, "model_flops_utilisation": flops / step_s / PEAK_FLOPS,
    }  # fmt: skip
    if cuda:
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        sizes = model.config
        shape = ModelShape(
            hidden=sizes.hidden_size, layers=sizes.num_hidden_layers, heads=sizes.num_attention_heads,
            kv_heads=sizes.num_key_value_heads, head_size=sizes.hidden_size // sizes.num_attention_heads,
            intermediate=sizes.intermediate_size, vocabulary=sizes.vocab_size, is_tied=True,
        )  # fmt: skip
        question = Question(
            model=shape, cluster=parse_cluster("2xH100"), dtype=setting.dtype, tokens_per_row=tokens_per_row,
            gradient_checkpointing=False, max_sequence_tokens=tokens_per_row,
            prompt_tokens=PROMPT_TOKENS, response_tokens=tokens_per_row // 8,
        )  # fmt: skip
        state, _ = training_state(question, shape, 1, is_policy=True)
        figures["planned_gib"] = (sum(state.values()) + activations(question, shape)) / 2**30
    if profile:
        with torch.profiler.profile() as trace:
            train_step(trainee, prepared, config)
        key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        Path(profile).write_text(trace.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=60))
    return figures


def learner(setting: Setting) -> dict[str, float]:
    """Each way in turn, then a model of 1.7 B parameters, then a step of 128 answers of about 12 tokens."""
    ways: list[tuple[Logprobs, int, dict[str, Any]]] = [("chunked", 512, {}), ("chunked", 512, {"small": True})]
    if not setting.tiny:
        ways = [
            ("chunked", 16384, {}),
            ("fused", 16384, {}),
            ("fused", 65536, {}),
            ("fused", 65536, {"compile": True}),
            ("fused", 16384, {"size": "1.7b"}),
            ("fused", 8192, {"compile": True, "size": "1.7b"}),
            ("fused", 16384, {"small": True}),
            ("fused", 16384, {"small": True, "compile": True}),
        ]
    for logprobs, row, extra in ways:
        if ONLY and ONLY not in extra:
            continue
        label = "_".join([logprobs, str(row), *(f"{key}" if value is True else str(value) for key, value in extra.items())])
        try:
            profile = f"profile-{label}.txt" if PROFILE else ""
            found = learner_step(setting, logprobs=logprobs, tokens_per_row=row, profile=profile, **extra)
        except Exception as error:  # noqa: BLE001 - the other ways are still to be measured
            print(f"{label}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            continue
        for name, value in found.items():
            emit(f"learner_{label}_{name}", value)
        if setting.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return {}


LEARNER = """
import queue, sys, time
from pathlib import Path
import msgspec, torch
from asyncrl.weights.publisher import Publisher
from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig
from transformers import AutoModelForCausalLM

config, folder, model_folder, device = msgspec.json.decode(sys.argv[1], type=BroadcastConfig), Path(sys.argv[2]), *sys.argv[3:]
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).to(device)
announced = queue.SimpleQueue()
publisher = Publisher(config, folder, announced.put, SystemClock())
for version, line in enumerate(sys.stdin, start=1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.001)
    if device != "cpu":
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    publisher.publish(version, dict(model.named_parameters()))
    blocked_s = time.perf_counter() - started_s
    available = announced.get(timeout=60)
    offered_s = time.perf_counter() - started_s
    print(msgspec.json.encode([available, blocked_s, offered_s]).decode(), flush=True)
publisher.close()
"""
"""A learner's process: a line in, a version published."""


def synchronize(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


async def take_up(engine: TransformersEngine, subscriber: Subscriber | None, available: WeightsAvailable, receiver: Any) -> float:
    """Return the milliseconds for which the engine stood still."""
    if subscriber is None:
        return await engine.load_weights(available.version, DeferredTensors(available, *receiver), "keep")
    tensors = await subscriber.fetch(available)
    pause_ms = await engine.load_weights(available.version, tensors, "keep")
    tensors.release()
    return pause_ms


async def weights(setting: Setting) -> dict[str, float]:
    """From publish to live in an embedded engine of another process on the same device, beside bare copies of the same bytes."""
    figures: dict[str, float] = {}
    media: dict[str, MediumConfig] = {"shared_memory": SharedMemoryMedium(), "zeromq": ZeroMQMedium()}
    if not setting.tiny:
        media["cuda_ipc"] = CUDAIPCMedium()
        figures |= bare_copies(setting)
    for name, medium in media.items():
        with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-") as folder:
            path = saved_model(setting, folder + "/model")
            config = BroadcastConfig(medium=medium)
            command = [sys.executable, "-c", LEARNER, msgspec.json.encode(config).decode(), folder, str(path), setting.device]
            process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert process.stdin is not None
            assert process.stdout is not None
            engine = TransformersEngine(
                TransformersEngineConfig(num_slots=8, max_sequence_tokens=256, device=setting.device, dtype="bfloat16"), path
            )
            subscriber = None if name == "cuda_ipc" else Subscriber(config, Path(folder))
            rows = []
            try:
                await engine.start()
                for _ in range(9):
                    process.stdin.write(b"next\n")
                    process.stdin.flush()
                    line = await asyncio.to_thread(process.stdout.readline)
                    available, blocked_s, offered_s = msgspec.json.decode(line, type=tuple[WeightsAvailable, float, float])
                    arrived_s = time.perf_counter()
                    pause_ms = await take_up(engine, subscriber, available, receiver_of(medium, Path(folder)))
                    synchronize(setting)
                    live_s = offered_s + time.perf_counter() - arrived_s
                    rows.append((live_s * 1e3, blocked_s * 1e3, pause_ms))
            finally:
                await engine.close()
                if subscriber is not None:
                    subscriber.close()
                process.stdin.close()
                process.wait(60)
            for label, values in zip(("live_ms", "blocked_ms", "pause_ms"), zip(*rows[2:], strict=True), strict=True):
                emit(f"{name}_{label}", statistics.median(values))
    return figures


def bare_copies(setting: Setting) -> dict[str, float]:
    num_bytes = sum(p.numel() for p in setting.model().parameters()) * 2
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    other, pinned = torch.empty_like(device), torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(num_bytes, dtype=torch.uint8).fill_(1)
    pairs = {"d2d": (other, device), "d2h_pinned": (pinned, device), "h2d_pinned": (device, pinned),
             "d2h_pageable": (pageable, device), "h2d_pageable": (device, pageable)}  # fmt: skip
    found = {"model_mb": num_bytes / 1e6}
    for name, (target, source) in pairs.items():
        seconds = []
        for _ in range(7):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_s)
        found[f"copy_{name}_ms"] = statistics.median(seconds[2:]) * 1e3
    return found


PROFILE = False
ONLY = ""
OUT: Path | None = None


def main() -> None:
    global PROFILE, OUT, ONLY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["engine", "vllm", "learner", "weights"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", default="", help="of the learner's ways, those with this option")
    told = parser.parse_args()
    PROFILE, OUT, ONLY = told.profile, told.out, told.only
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # scripts/gpu_bundle.py leaves flashinfer out
    transformers_logging.disable_progress_bar()
    setting = Setting(tiny=told.tiny)
    if told.section == "learner":
        figures = learner(setting)
    else:
        figures = asyncio.run({"engine": embedded_engine, "vllm": vllm_engine, "weights": weights}[told.section](setting))
    for name, value in figures.items():
        emit(name, value)


if __name__ == "__main__":
    main()
