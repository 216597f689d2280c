"""What the engine tells vLLM's workers about new weights, and what they answer: JSON text, since no tensor travels by their RPC.

Called by generate/vllm_weights.py (writes orders) and generate/vllm_worker.py (reads them, in vLLM's processes). Imports neither
vllm nor torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncrl.schema.weights import WeightsAvailable, WeightsManifest


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


class LoadOrder(msgspec.Struct, frozen=True):
    """Replace the weights."""

    source: FileOrder | ReceiverOrder
    also_as: dict[str, str] = {}
    """Name in the layout to another name that the same tensor is loaded under too (tied embeddings)."""
    zero_kv: bool = False
    """The KV cache may hold what is not finite, and no request needs it any more."""


class LoadReply(msgspec.Struct, frozen=True):
    """How it went in one worker."""

    fault: Literal["", "broadcast", "generation"] = ""
    """`broadcast`: the bytes were gone or damaged. Either way the weights may be half of one version, half of another."""
    message: str = ""
    is_touched: bool = True
    """False: it went wrong before anything was changed."""
