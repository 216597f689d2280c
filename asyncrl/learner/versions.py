"""RUN/record/versions.jsonl: a fingerprint of the weights of every version that a recorded run trained."""

from __future__ import annotations

import msgspec
import torch
import xxhash
from transformers import PreTrainedModel

from asyncrl.learner.model.lora import publishable_tensors
from asyncrl.models.layout import bytes_of

VERSIONS_FILE = "versions.jsonl"


class VersionRecord(msgspec.Struct, frozen=True):
    """One version; a learner that repeats a step makes another line of it."""

    version: int
    fingerprint: str


def record_of(version: int, model: PreTrainedModel) -> VersionRecord:
    """Return a version's record: xxh3-128 over names and bytes of everything that is trained."""
    whole = xxhash.xxh3_128()
    with torch.no_grad():
        for name, tensor in publishable_tensors(model).items():
            whole.update(name.encode())
            whole.update(bytes_of(tensor.cpu().contiguous()).data)
    return VersionRecord(version, whole.hexdigest())
