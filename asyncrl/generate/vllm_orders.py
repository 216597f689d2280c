"""What the engine tells vLLM's workers about new weights, and what they answer: JSON text, since no tensor travels by their RPC.

Called by generate/vllm_weights.py (writes orders) and generate/vllm_worker.py (reads them, in vLLM's processes). Imports neither
vllm nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

HEAD = "lm_head.weight"
"""transformers' name of a head that may be tied to the embedding."""


class Base(msgspec.Struct, frozen=True):
    """What adapters are added to."""

    folder: str
    """The model's."""
    scale: float
    """Of the adapters' product: alpha / rank."""
    is_input_first: bool = False
    """Linear layers are stored as [in, out]."""


class FileOrder(msgspec.Struct, frozen=True, tag="file"):
    """Load what lies in a file of this machine."""

    path: str
    offset: int
    """Bytes, of the layout in the file."""
    manifest: WeightsManifest


class ReceiverOrder(msgspec.Struct, frozen=True, tag="receiver"):
    """Fetch it yourself; see models/deferred.py."""

    receiver: str
    arguments: str
    available: WeightsAvailable


class Part(msgspec.Struct, frozen=True):
    """A checkpoint's tensor inside one of the model's; all numbers count elements."""

    name: str
    """In the checkpoint."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the start of the model's tensor, which is contiguous."""


class FixedTensor(msgspec.Struct, frozen=True):
    """A small tensor that no version changes (a buffer of the model), which vLLM wants with every load of its layer."""

    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]
    data: bytes


class LoadOrder(msgspec.Struct, frozen=True):
    """Replace the weights."""

    source: FileOrder | ReceiverOrder
    also_as: dict[str, str] = {}
    """Name in the layout to another name that the same tensor is loaded under too (tied embeddings)."""
    parts: dict[str, tuple[Part, ...]] = {}
    """Name in the layout to what the checkpoint has instead, under other names or cut up; others are alike in both."""
    fixed: dict[str, FixedTensor] = {}
    """Loaded with the rest, by the checkpoint's names."""
    base: Base | None = None
    """Given where the tensors are adapters, which are added to it."""
    zero_kv: bool = False
    """The KV cache may hold what is not finite, and no request needs it any more."""


class LoadReply(msgspec.Struct, frozen=True):
    """How it went in one worker."""

    fault: Literal["", "broadcast", "generation"] = ""
    """`broadcast`: the bytes were gone or damaged. Either way the weights may be half of one version, half of another."""
    message: str = ""
    is_touched: bool = True
    """False: it went wrong before anything was changed."""


def fault_of(replies: Sequence[LoadReply]) -> LoadReply | None:
    """Return the first worker's that failed, or None; the model is untouched only if it is in every worker."""
    fault = next((reply for reply in replies if reply.fault), None)
    is_touched = any(reply.is_touched or not reply.fault for reply in replies)
    return None if fault is None else msgspec.structs.replace(fault, is_touched=is_touched)
