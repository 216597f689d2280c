"""How weights reach the generators: the media (variants by the tag `kind`) and what is sent over them."""

from __future__ import annotations

from typing import ClassVar, Literal

from asyncrl.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Processes, _Stage, _Variant


class _Medium(_Variant, frozen=True):
    """Properties that every medium's config declares; other code reads these properties and never asks for the kind."""

    one_machine: ClassVar[bool] = False
    """Learner and generators must be on one machine."""
    on_gpu: ClassVar[bool] = False
    """The data starts and ends in GPU memory, in the processes that hold the models."""
    carries_deltas: ClassVar[bool] = False
    addresses: ClassVar[tuple[str, ...]] = ()
    """Fields that hold an address; the learner's machine comes first."""


class SharedMemoryMedium(_Medium, frozen=True, tag="shared_memory"):
    """Double-buffered, one copy out, one copy in; same machine."""

    one_machine: ClassVar[bool] = True
    carries_deltas: ClassVar[bool] = True


class FilesMedium(_Medium, frozen=True, tag="files"):
    """Safetensors in a folder; any shared storage."""

    carries_deltas: ClassVar[bool] = True

    folder: str = ""
    """Empty: `weights/` in the run folder. Otherwise each run makes its own folder inside this one."""
    keep_last: PositiveInt = 2
    shard_bytes: PositiveInt = 1 << 30
    """Maximum bytes of one safetensors file, except for a larger single tensor; shards are written and read in parallel."""
    num_threads: Processes = 4
    """Number of shards written or read at once."""


class ZeroMQMedium(_Medium, frozen=True, tag="zeromq"):
    """Chunks from the learner over TCP; any number of machines."""

    carries_deltas: ClassVar[bool] = True
    addresses: ClassVar[tuple[str, ...]] = ("bind", "relay_bind")

    bind: str = "tcp://127.0.0.1:*"
    chunk_bytes: PositiveInt = 1 << 20
    fanout: NonNegativeInt = 2
    """Number of generators to which the learner sends; each passes chunks on to as many others. 0: the learner sends to all."""
    relay_bind: str = "tcp://127.0.0.1:*"
    """Address where a generator listens for the generators to which it sends."""


class _Collective(_Medium, frozen=True):
    """Broadcast with torch.distributed, bucket by bucket: one sender, all subscribers at once."""

    addresses: ClassVar[tuple[str, ...]] = ("host",)

    host: str = "127.0.0.1"
    """Address of the learner where the group is formed; the generators must be able to reach it."""
    timeout_s: PositiveFloat = 30.0
    """A generator that does not take part for this long is left out, and the others continue."""
    gather_s: PositiveFloat = 1.0
    """How long a version waits for generators to be ready before it is sent to those that are."""


class GlooMedium(_Collective, frozen=True, tag="gloo"):
    """Over TCP."""


class NCCLMedium(_Collective, frozen=True, tag="nccl"):
    """From GPU to GPU."""

    on_gpu: ClassVar[bool] = True


class CUDAIPCMedium(_Medium, frozen=True, tag="cuda_ipc"):
    """Learner and engine on the same GPU: the engine opens the learner's tensors; only handles are sent."""

    one_machine: ClassVar[bool] = True
    on_gpu: ClassVar[bool] = True


class SharedStorageMedium(_Medium, frozen=True, tag="shared_storage"):
    """Nothing is sent: the engine reads the learner's parameters in place. Only for `placement.kind = "hybrid"`."""

    carries_deltas: ClassVar[bool] = True


class AutoMedium(_Medium, frozen=True, tag="auto"):
    """Chosen when the run starts, by where its processes are; the log gives the choice and the reason."""

    carries_deltas: ClassVar[bool] = True


MediumConfig = (
    SharedMemoryMedium | FilesMedium | ZeroMQMedium | GlooMedium | NCCLMedium | CUDAIPCMedium | SharedStorageMedium | AutoMedium
)


class DeltaConfig(_Stage, frozen=True):
    """Send only the values that changed (the values themselves, not differences); lossless. Useful with `dtype = "bfloat16"`."""

    full_every: PositiveInt = 20
    """Every n-th version is also published complete, unless the medium always keeps the newest version complete."""
    max_share: Fraction = 0.5
    """If a delta is larger than this share of the complete version, the complete version is sent instead."""


class BroadcastConfig(_Stage, frozen=True):
    """How new weights reach the generators."""

    medium: MediumConfig = SharedMemoryMedium()
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Dtype of the weights that are sent; `model`: the learner's own dtype."""
    bucket_bytes: PositiveInt = 8 << 20
    """Bytes that are fingerprinted, gathered and applied at once."""
    delta: DeltaConfig | None = None
    """None: every version is sent complete."""
    verify: bool = False
    """Compare fingerprints with `shared_memory` too, although on x86 that medium proves a complete version without them."""
    probe_tolerance: NonNegativeFloat | None = None
    """Warn if the generator's and the learner's log-probabilities of a probe differ by more than this. None: 0.05 if both compute
    in float32, else 1 (with correct weights they differed by up to 0.43 in bfloat16 on an H200)."""
