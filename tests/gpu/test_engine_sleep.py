"""Sleep on a device: its memory is free meanwhile, and what wakes is what fell asleep."""

from pathlib import Path

import pytest
import torch

from tests.contract.engine_cases import (
    PROMPT,
    collect,
    make_model,
    make_request,
    reference_logprobs,
    tensors_of,
    transformers_engine,
)

SHAPE = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.02,
}  # fmt: skip
PROBE = list(range(2, 60))


@pytest.mark.parametrize("level", [1, 2])
async def test_device_memory_is_free_asleep_and_the_request_goes_on_after(tmp_path: Path, level) -> None:
    model = make_model(0, **SHAPE)
    model.save_pretrained(tmp_path)
    async with transformers_engine(tmp_path, 8, max_sequence_tokens=512, device="cuda") as engine:
        await engine.load_weights(0, tensors_of(model), "keep")
        before = await engine.score(PROBE)
        stream = engine.submit(make_request("r", 7, max_new_tokens=400))
        first = await anext(stream)
        awake_bytes = torch.cuda.memory_allocated()
        await engine.sleep(level)
        assert torch.cuda.memory_allocated() < 0.1 * awake_bytes
        await engine.wake()
        if level == 2:
            await engine.load_weights(1, tensors_of(model), "keep")
        assert await engine.score(PROBE) == before
        whole = await collect(stream, first)
    assert whole.logprobs == pytest.approx(reference_logprobs(model, PROMPT, whole.token_ids), abs=1e-2)
