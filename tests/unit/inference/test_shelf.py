"""Models by name."""

import pytest
import torch

from asyncrl.inference.shelf import ModelShelf


class _Held:
    def __init__(self, width):
        self.model = torch.nn.Sequential(torch.nn.Linear(width, 3), torch.nn.BatchNorm1d(3))


def test_a_model_is_opened_when_it_is_first_wanted_and_once():
    opened = []

    def open_judge():
        opened.append("judge")
        return _Held(4)

    shelf = ModelShelf({"judge": open_judge, "other": lambda: _Held(1)})
    assert shelf.names == ("judge", "other")
    assert (shelf.loaded, shelf.num_bytes) == ((), 0)
    assert shelf.load("judge") is shelf.load("judge")
    assert shelf.loaded == ("judge",)
    assert opened == ["judge"]


def test_bytes_are_those_of_weights_and_buffers_with_tied_ones_once():
    held = _Held(4)
    held.model.append(torch.nn.Linear(4, 3, bias=False))
    held.model[2].weight = held.model[0].weight
    shelf = ModelShelf({"judge": lambda: held})
    shelf.load("judge")
    floats = 4 * 3 + 3 + 3 * 4
    assert shelf.bytes_of("judge") == shelf.num_bytes == floats * 4 + 8
    assert shelf.bytes_of("nobody") == 0


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(KeyError, match="nobody"):
        ModelShelf({}).load("nobody")
