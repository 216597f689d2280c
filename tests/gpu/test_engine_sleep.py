"""Sleep on a device: its memory is free meanwhile, and what wakes is what fell asleep."""

from pathlib import Path

import pytest
import torch

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.weights.tensors import SharedTensors
from tests.contract import engine_cases as cases

SHAPE = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.02,
}  # fmt: skip
PROBE = list(range(2, 60))


async def test_device_memory_is_free_asleep_and_the_request_goes_on_after(tmp_path: Path) -> None:
    model = cases.make_model(0, **SHAPE)
    model.save_pretrained(tmp_path)
    async with cases.transformers_engine(tmp_path, 8, max_sequence_tokens=512, device="cuda") as engine:
        await engine.load_weights(0, cases.tensors_of(model), "keep")
        before = await engine.score(PROBE)
        stream = engine.submit(cases.make_request("r", 7, max_new_tokens=400))
        first = await anext(stream)
        awake_bytes = torch.cuda.memory_allocated()
        await engine.sleep()
        assert torch.cuda.memory_allocated() < 0.1 * awake_bytes
        await engine.wake()
        await engine.load_weights(1, cases.tensors_of(model), "keep")
        assert await engine.score(PROBE) == before
        whole = await cases.collect(stream, first)
    assert whole.logprobs == pytest.approx(cases.reference_logprobs(model, cases.PROMPT, whole.token_ids), abs=1e-2)


def test_memory_goes_to_the_driver_also_where_the_weights_are_the_learners(tmp_path: Path) -> None:
    """As in hybrid; what torch has reserved is what the driver lacks."""
    learner = cases.make_model(0, **SHAPE)
    learner.save_pretrained(tmp_path)
    named = {name: parameter.detach().cuda() for name, parameter in learner.named_parameters()}
    manifest = make_manifest(named, "model", 8 << 20)
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8, device="cuda")
    copy_out(named, view_tensors(flat, manifest))
    config = TransformersEngineConfig(num_slots=16, max_sequence_tokens=512, dtype="float32", device="cuda")
    engine = SlotModel.load(tmp_path, config)
    engine._graphs.clear()  # cuBLAS has memory that goes with them
    torch.cuda.empty_cache()
    before, weights_bytes = torch.cuda.memory_reserved(), engine.weights.num_bytes
    engine.load_weights(SharedTensors(manifest, flat))
    after, cache_bytes = torch.cuda.memory_reserved(), engine.cache.num_bytes
    assert before - after > 0.3 * weights_bytes
    engine.sleep()
    assert after - torch.cuda.memory_reserved() > 0.6 * cache_bytes
