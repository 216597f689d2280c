"""CUDA graphs of decoding: they give what the forward gives, share their memory, and are given up where there is no room."""

import logging

import numpy as np
import pytest
import torch

from asyncrl.generate.transformers.model import SlotModel
from tests.contract.engine_cases import config_of, make_model

MAX_TOKENS = 1024
SECOND = pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: there is one GPU"))


@pytest.fixture(params=["cuda", SECOND])
def model(request, tmp_path) -> SlotModel:
    make_model(0, max_position_embeddings=MAX_TOKENS).save_pretrained(tmp_path)
    loaded = SlotModel.load(tmp_path, config_of(device=request.param, max_sequence_tokens=MAX_TOKENS))
    loaded._graphs.clear()
    return loaded


def decode(model: SlotModel, position: int) -> torch.Tensor:
    rows = np.arange(model.num_rows)
    return model.decode(rows + 2, np.full(model.num_rows, position)).clone()


def eagerly(model: SlotModel, position: int) -> torch.Tensor:
    graphs, model._graphs = model._graphs, None
    logits_RV = decode(model, position)
    model._graphs = graphs
    return logits_RV


def test_recordings_that_are_replayed_in_any_order_give_what_the_forward_gives(model):
    for position in (900, 10, 300, 70, 10, 900, 70, 300, 10):
        torch.testing.assert_close(decode(model, position), eagerly(model, position))
    assert len(model._graphs._recorded) == 4


def test_more_recordings_take_no_more_memory(model):
    reserved = []
    for position in range(0, MAX_TOKENS, model.cache.block_tokens):
        decode(model, position)
        reserved.append(torch.cuda.memory_reserved(model.device))
    assert len(model._graphs._recorded) == len(reserved) == 16
    assert reserved[-1] - reserved[0] < len(reserved) << 20  # a pool of its own has 2 MiB at least


def test_without_room_for_recordings_decoding_goes_on_and_says_so_once(model, caplog):
    decode(model, 0)

    def refuse(*_):
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("no room")

    model._model.register_forward_pre_hook(refuse)
    stream = torch.cuda.current_stream(model.device)
    with caplog.at_level(logging.WARNING):
        for position in (300, 500, 0):
            torch.testing.assert_close(decode(model, position), eagerly(model, position))
    assert [record.getMessage() for record in caplog.records if "no room" in record.getMessage()] == [
        "decoding goes on without CUDA graphs: no room; where memory is short, set generate.engine.num_slots lower"
    ]
    assert torch.cuda.current_stream(model.device) == stream
    assert not model._graphs._recorded
