"""What the tests of engines share: small models of one shape, engines, requests, completions, logprobs of a plain forward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from asyncrl.clock import SystemClock
from asyncrl.config.generate import FakeEngineConfig, TransformersEngineConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.generate.engine import Engine, EngineRequest, KVPolicy
from asyncrl.generate.fake import FakeEngine
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.schema.samples import SamplingParams

VOCABULARY = 64
END = 1
PROMPT = (5, 6, 7)
SLOTS = 4
MAX_TOKENS = 256


def config_of(num_slots: int = SLOTS, **config) -> TransformersEngineConfig:
    return TransformersEngineConfig(**{"num_slots": num_slots, "max_sequence_tokens": MAX_TOKENS, **config})


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[Engine]:
    """Start it, and close it in the end."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def transformers_engine(folder: Path, num_slots: int = SLOTS, *, fp32_head=False, lora: LoRAConfig | None = None, **config):
    """Return a `started` engine over a folder; `config` is more of its config."""
    return started(TransformersEngine(config_of(num_slots, **config), folder, fp32_head=fp32_head, lora=lora))


def fake_engine():
    """Return a `started` engine without a model."""
    limits = {"num_slots": SLOTS, "max_sequence_tokens": MAX_TOKENS, "vocabulary_size": VOCABULARY}
    config = FakeEngineConfig(**limits, token_latency_s=0.0005, length_distribution="uniform", mean_tokens=30)
    return started(FakeEngine(config, SystemClock()))


def make_model(seed: int, **shape) -> LlamaForCausalLM:
    """Make a model of 2 layers over `VOCABULARY` tokens; `shape` changes any field of its config."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 2 * shape.get("hidden_size", 32),
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2,
        "max_position_embeddings": MAX_TOKENS, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": END,
        "pad_token_id": None, **shape,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the model's tensors but its head's, as a learner sends those of a tied one."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def reference_logits(model, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    """Logits that each token after the prompt was drawn from, by one forward over the whole sequence."""
    with torch.inference_mode():
        return model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]


def reference_logprobs(model, prompt: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Logprob of each token after the prompt."""
    logits = reference_logits(model, prompt, token_ids) / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None]).squeeze(1).tolist()


def reference_score(model, token_ids: Sequence[int]) -> list[float]:
    """Logprob of each token after the first, as `Engine.score` returns them."""
    return reference_logprobs(model, token_ids[:1], token_ids[1:])


async def assert_holds(engine: Engine, model, abs_error: float = 1e-5) -> None:
    """Every tensor of the model is the engine's: a forward agrees, and so does a generated sequence."""
    probe = list(range(2, 40))
    assert await engine.score(probe) == pytest.approx(reference_score(model, probe), abs=abs_error)
    held = await collect(engine.submit(make_request("holds", prompt=tuple(probe))))
    assert held.logprobs == pytest.approx(reference_logprobs(model, tuple(probe), held.token_ids), abs=abs_error)


def kept_logprobs(old, new, prompt: tuple[int, ...], token_ids: list[int], first: int) -> list[float]:
    """Logprob of each token from `first` on, under `new`, over keys and values that `old` left of what came before."""
    ids = [*prompt, *token_ids]
    boundary = len(prompt) + first - 1
    with torch.inference_mode():
        cache = DynamicCache(config=old.config)
        old(torch.tensor([ids[:boundary]]), past_key_values=cache, use_cache=True)
        logits = new(torch.tensor([ids[boundary:-1]]), past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[boundary + 1 :])[:, None]).squeeze(1).tolist()


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def make_request(name: str, seed: int = 0, prompt: tuple[int, ...] = PROMPT, group_key: str = "", **sampling) -> EngineRequest:
    sampling = {"max_new_tokens": 20, "ignore_eos": True, **sampling}
    return EngineRequest(name, prompt, SamplingParams(**sampling), seed, group_key)


async def collect(stream, *taken) -> Completion:
    """Take the rest of a stream whose first chunks were `taken`; nothing may follow the last chunk."""
    completion = Completion()

    def add(chunk) -> None:
        assert completion.finish_reason is None
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
        completion.token_ids += chunk.token_ids
        completion.logprobs += chunk.logprobs
        completion.versions += chunk.versions
        completion.finish_reason = chunk.finish_reason

    for chunk in taken:
        add(chunk)
    async for chunk in stream:
        add(chunk)
    return completion


async def collect_all(engine: Engine, requests: list[EngineRequest]) -> list[Completion]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(collect(engine.submit(request))) for request in requests]
    return [task.result() for task in running]


async def update_in_flight(engine: Engine, kv: KVPolicy, num: int = 4):
    """Load version 0, let some requests run, load version 1 once each running one has tokens."""
    old, new = make_model(0), make_model(1)
    requests = [make_request(f"r{i}", seed=i, prompt=tuple(range(2, 12 + i)), max_new_tokens=230) for i in range(num)]
    for _ in range(20):  # where this process stands still and the engine does not, they are done before version 1 comes
        await engine.load_weights(0, tensors_of(old), kv)
        streams = [engine.submit(request) for request in requests]
        first_chunks = [await anext(stream) for stream in streams]
        await engine.load_weights(1, tensors_of(new), kv)
        completions = [await collect(stream, first) for stream, first in zip(streams, first_chunks, strict=True)]
        if all(set(completion.versions) == {0, 1} for completion in completions):
            return list(zip(requests, completions, strict=True)), new
    raise AssertionError([sorted(set(completion.versions)) for completion in completions])
