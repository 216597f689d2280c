"""How weights reach the generators: media, variants by the tag `kind`, and what travels over them."""

from __future__ import annotations

from typing import ClassVar, Literal

from asyncrl.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Processes, _Stage, _Variant


class _Medium(_Variant, frozen=True):
    """What every medium's config says about its kind; the rest of the config asks this and not which kind it is."""

    one_machine: ClassVar[bool] = False
    """Learner and generators have to be on one machine."""
    on_gpu: ClassVar[bool] = False
    """It begins and ends in GPU memory, in the processes that hold the models."""
    carries_deltas: ClassVar[bool] = False
    addresses: ClassVar[tuple[str, ...]] = ()
    """Fields with an address, that of the learner's machine first."""


class SharedMemoryMedium(_Medium, frozen=True, tag="shared_memory"):
    """Double-buffered, one copy out, one copy in; same machine."""

    one_machine: ClassVar[bool] = True
    carries_deltas: ClassVar[bool] = True


class FilesMedium(_Medium, frozen=True, tag="files"):
    """Safetensors in a folder; any shared storage."""

    carries_deltas: ClassVar[bool] = True

    folder: str = ""
    """Empty: `weights/` in the run folder. Else each run has a folder of its own in it."""
    keep_last: PositiveInt = 2
    shard_bytes: PositiveInt = 1 << 30
    """Most bytes of one safetensors file, a larger tensor apart; shards are written and read side by side."""
    num_threads: Processes = 4
    """Shards that are written or read at once."""


class ZeroMQMedium(_Medium, frozen=True, tag="zeromq"):
    """Chunks from the learner over TCP; any number of machines."""

    carries_deltas: ClassVar[bool] = True
    addresses: ClassVar[tuple[str, ...]] = ("bind", "relay_bind")

    bind: str = "tcp://127.0.0.1:*"
    chunk_bytes: PositiveInt = 1 << 20
    fanout: NonNegativeInt = 2
    """Generators that the learner feeds itself; each feeds as many others with what it has already. 0: the learner feeds all."""
    relay_bind: str = "tcp://127.0.0.1:*"
    """Where a generator listens for those it feeds."""


class _Collective(_Medium, frozen=True):
    """Broadcast by torch.distributed, buckets at a time: one sender, all subscribers at once."""

    addresses: ClassVar[tuple[str, ...]] = ("host",)

    host: str = "127.0.0.1"
    """Where the learner lets the others meet; they must reach it."""
    timeout_s: PositiveFloat = 30.0
    """A generator that does not take part for this long is left out, and the rest go on."""
    gather_s: PositiveFloat = 1.0
    """How long a version waits for members to be ready before it goes out to those that are."""


class GlooMedium(_Collective, frozen=True, tag="gloo"):
    """Over TCP."""


class NCCLMedium(_Collective, frozen=True, tag="nccl"):
    """From GPU to GPU."""

    on_gpu: ClassVar[bool] = True


class CUDAIPCMedium(_Medium, frozen=True, tag="cuda_ipc"):
    """Learner and engine on the same GPU: the engine opens the learner's own tensors; handles travel, bytes do not."""

    one_machine: ClassVar[bool] = True
    on_gpu: ClassVar[bool] = True


class SharedStorageMedium(_Medium, frozen=True, tag="shared_storage"):
    """Nothing travels: the engine reads the learner's own parameters where they lie. For `placement.kind = "hybrid"` alone."""

    carries_deltas: ClassVar[bool] = True


class AutoMedium(_Medium, frozen=True, tag="auto"):
    """Chosen when the run starts, from where its processes are; the log says what and why."""

    carries_deltas: ClassVar[bool] = True


MediumConfig = (
    SharedMemoryMedium | FilesMedium | ZeroMQMedium | GlooMedium | NCCLMedium | CUDAIPCMedium | SharedStorageMedium | AutoMedium
)


class DeltaConfig(_Stage, frozen=True):
    """Send only what changed in the bytes sent: values, not differences; lossless. Worth it with `dtype = "bfloat16"`."""

    full_every: PositiveInt = 20
    """Every n-th version is also made fetchable whole, where the medium does not hold the newest one whole anyway."""
    max_share: Fraction = 0.5
    """A delta larger than this share of the whole is not sent; the whole is."""


class BroadcastConfig(_Stage, frozen=True):
    """How new weights reach the generators."""

    medium: MediumConfig = SharedMemoryMedium()
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Of the bytes sent; `model`: as the learner holds them."""
    bucket_bytes: PositiveInt = 8 << 20
    """What is fingerprinted, gathered and applied at once."""
    delta: DeltaConfig | None = None
    """None: every version travels whole."""
    verify: bool = False
    """Compare fingerprints over `shared_memory` too, where the medium proves a whole version without them (on x86)."""
    probe_tolerance: NonNegativeFloat | None = None
    """Probe logprobs further apart than this, generator against learner, are warned of. None: 0.05 where both compute in float32,
    else 1 (right weights were up to 0.43 apart in bfloat16 on an H200)."""
