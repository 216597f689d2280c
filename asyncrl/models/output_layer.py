"""The output layer, hidden states to logits, in float32 where it is asked for: the same module in learner, inference and engine.

Invariants: the weights stay the model's own parameter, in the model's dtype and tied as they were, so names, checkpoints and
broadcasts do not change; a float32 or float64 model gives the very same numbers with and without. Called by learner/model.py,
generate/slot_model.py and models/logprobs.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError

Head = Callable[[torch.Tensor], torch.Tensor]
"""[C, D] to logits [C, V]."""


class Float32Head(torch.nn.Module):
    """A linear output layer whose product is taken in float32 (float64 where the weights are), whatever the weights' dtype.

    Source: MiniMax-M1 (arXiv 2506.13585), section 3.2: the correlation of training and sampling probabilities rises from .987
    to .997. One side alone is worse than none.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits."""
        return self.cast()(hidden)

    def cast(self) -> Head:
        """Return the layer over one float32 copy of its weights, for several calls.

        Their gradients then add up in float32 before they become the weights' dtype.
        """
        weight, bias = _promoted(self.weight), None if self.bias is None else _promoted(self.bias)
        return lambda hidden: linear(_promoted(hidden), weight, bias)


def use_float32_head(model: PreTrainedModel) -> None:
    """Make the output layer of a model run in float32, in place.

    Raises:
        ConfigError: The output layer is not a plain linear layer.
    """
    layer = model.get_output_embeddings()
    if isinstance(layer, Float32Head):
        return
    if not isinstance(layer, torch.nn.Linear):
        raise ConfigError(
            f"model.fp32_head: the output layer of {type(model).__name__} is a {type(layer).__name__}, not a plain linear layer; "
            "set model.fp32_head = false"
        )
    model.set_output_embeddings(Float32Head(layer))


def for_several_calls(head: Head) -> Head:
    """Return the head with what its calls have in common done once."""
    return head.cast() if isinstance(head, Float32Head) else head


def _promoted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
