"""The models of an inference worker, by name, opened when first wanted.

Where their weights are is not said here: on a device of their own they stay, on a shared one a manager moves them by the same
names (inference/residents.py). Invariant: a name is opened at most once. Used on one thread at a time. Called by
inference/judge.py and inference/residents.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import torch

log = logging.getLogger(__name__)


class Holder(Protocol):
    """Something that holds a torch module."""

    @property
    def model(self) -> torch.nn.Module:
        """The module, with all its weights."""
        ...


H = TypeVar("H", bound=Holder)


class ModelShelf(Generic[H]):
    """Models by name.

    Args:
        openers: What opens each model.

    Example:
        >>> class Linear:
        ...     model = torch.nn.Linear(2, 1)
        >>> shelf = ModelShelf({"judge": Linear})
        >>> shelf.load("judge").model.out_features, shelf.loaded, shelf.num_bytes
        (1, ('judge',), 12)
    """

    def __init__(self, openers: Mapping[str, Callable[[], H]]) -> None:
        self._openers = dict(openers)
        self._held: dict[str, H] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return every model there is, loaded or not."""
        return tuple(self._openers)

    @property
    def loaded(self) -> tuple[str, ...]:
        """Return the models that were opened, in that order."""
        return tuple(self._held)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all loaded weights, tied ones once."""
        return sum(self.bytes_of(name) for name in self._held)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a loaded model's weights and buffers; 0 where it is not loaded."""
        if name not in self._held:
            return 0
        module = self._held[name].model
        return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))

    def load(self, name: str) -> H:
        """Return a model, opening it where it is not loaded.

        Raises:
            KeyError: There is no model of that name.
            ConfigError: It cannot be opened.
        """
        if name not in self._held:
            started_s = time.perf_counter()
            self._held[name] = self._openers[name]()
            seconds, mib = time.perf_counter() - started_s, self.bytes_of(name) / 2**20
            log.info("loaded %s: %.1f MiB in %.1f s", name, mib, seconds)
        return self._held[name]
