"""What whoever passes a version's tensors on has to know of them. No torch: a generator without a model imports none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LentTensors(dict[str, Any]):
    """Tensors by name that lie in somebody else's memory."""

    check: Callable[[], None]
    """Call after the last byte was read, before anything samples with it. Raises BroadcastError: it may be a mixture."""
    release: Callable[[], None]
    """Call once nobody reads them any more. Safe to repeat."""
    learner_changes_them = False
    """They are the learner's own parameters, and become its later versions by themselves."""
