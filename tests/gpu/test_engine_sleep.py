"""Sleep on a device: its memory is free meanwhile, and what wakes is what fell asleep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.schema.samples import SamplingParams


@pytest.fixture
def model(tmp_path: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    made.save_pretrained(tmp_path)
    return made


@pytest.mark.parametrize("level", [1, 2])
async def test_device_memory_is_free_asleep_and_the_request_goes_on_after(model, tmp_path: Path, level) -> None:
    engine = TransformersEngine(TransformersEngineConfig(num_slots=8, max_sequence_tokens=512, device="cuda"), tmp_path)
    await engine.start()
    try:
        await engine.load_weights(0, model.state_dict(), "keep")
        before = await engine.score(list(range(2, 60)))
        stream = engine.submit(EngineRequest("r", (5, 6, 7), SamplingParams(max_new_tokens=400, ignore_eos=True), 7))
        chunks = [await anext(stream)]
        awake_bytes = torch.cuda.memory_allocated()
        await engine.sleep(level)
        assert torch.cuda.memory_allocated() < 0.1 * awake_bytes
        await engine.wake()
        if level == 2:
            await engine.load_weights(1, model.state_dict(), "keep")
        assert await engine.score(list(range(2, 60))) == before
        chunks += [chunk async for chunk in stream]
    finally:
        await engine.close()
    ids = [token for chunk in chunks for token in chunk.token_ids]
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1).tolist()
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == pytest.approx(expected, abs=1e-2)
