"""What a process imports before its work begins: a million objects come, and none of them goes.

Called by pipeline.py, learner_rank.py and, while they are collected, by the tests.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_looking_for_garbage() -> Iterator[None]:
    """Import with the garbage collector off, a sixth of the time, and have it pass over what came, which would hold a loop up."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
