"""The frozen reference policy on the learner's devices: a model of its own, or the policy with its adapter off.

Called by learner/start.py (which one, and only where something needs it) and learner/passes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from asyncrl.learner.model import row_logprobs
from asyncrl.learner.rows import Row


class FrozenReference:
    """A second model that never changes."""

    def __init__(self, model: PreTrainedModel, chunk_tokens: int) -> None:
        """Freeze `model`; `chunk_tokens` is `learner.logprob_chunk_tokens`."""
        self._model = model.requires_grad_(False)
        self._chunk_tokens = chunk_tokens

    @property
    def model(self) -> PreTrainedModel:
        """Return the model."""
        return self._model

    @torch.no_grad()
    def logprobs(self, row: Row, temperature: float) -> torch.Tensor:
        """Return float32 [M], log-probability of each target of the row."""
        return row_logprobs(self._model, row, temperature=temperature, chunk_tokens=self._chunk_tokens)[0]


class AdapterOffReference:
    """The policy without its adapters, which is the model that it began as: no second copy."""

    def __init__(
        self, model: PreTrainedModel, adapter_off: Callable[[], AbstractContextManager[None]], chunk_tokens: int
    ) -> None:
        """Refer to the policy; `adapter_off` switches its adapters off for as long as its context lasts."""
        self._model = model
        self._adapter_off = adapter_off
        self._chunk_tokens = chunk_tokens

    @torch.no_grad()
    def logprobs(self, row: Row, temperature: float) -> torch.Tensor:
        """Return float32 [M], log-probability of each target of the row."""
        with self._adapter_off():
            return row_logprobs(self._model, row, temperature=temperature, chunk_tokens=self._chunk_tokens)[0]
