"""Buckets of a version: their fingerprints, in host memory and on a device, and two buffers on a device for transfers.

In host memory a bucket's fingerprint is its xxh3-64. The xxh3-128 of the fingerprints of all buckets names the version. The
learner computes them on the publisher's thread, never on its own. A generator computes the fingerprints of the received bytes
and compares: exactly the verified bytes are used.

xxh3 cannot run on a GPU, and copying everything back to hash it would cost as much as the device media save. So `nccl` and
`cuda_ipc` announce a different fingerprint of the same size: every 8-byte word is mixed with its position by splitmix64, and the
results are added up, all modulo 2**64. Integer arithmetic gives the same number on every device, in any order of additions. One
changed word always changes the number (the mixing is one to one); swapped words or several changed words almost always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import xxhash

from asyncrl.errors import BroadcastError, ConfigError
from asyncrl.models.layout import COPY_THREADS, bucket_ends
from asyncrl.schema.weights import WeightsAvailable

DIGEST_BYTES = 8
NUM_BUFFERS = 2
_PIECE_WORDS = 2 << 20
"""Words mixed at once: enough for a bucket of the usual size (slightly over 8 MiB). Limits the memory for mixing to a few times
16 MiB for a bucket of any size."""
# The 64 bits of splitmix64's constants, as int64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def fingerprints_of(flat: memoryview, ends: Sequence[int], buckets: Iterable[int] | None = None) -> bytes:
    """Hash the buckets in place, several at once.

    Args:
        flat: The version's bytes.
        ends: End of each bucket, bytes.
        buckets: Numbers of the buckets to hash; None: all.
    """

    def digest(number: int) -> bytes:
        start = ends[number - 1] if number else 0
        return xxhash.xxh3_64_intdigest(flat[start : ends[number]]).to_bytes(DIGEST_BYTES, "little")

    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="asyncrl-hash") as pool:
        return b"".join(pool.map(digest, range(len(ends)) if buckets is None else buckets))


def version_fingerprint(bucket_fingerprints: bytes) -> str:
    """Return the version's name: xxh3-128 of its buckets' fingerprints, hex."""
    return str(xxhash.xxh3_128_hexdigest(bucket_fingerprints))


def refuse_damaged(available: WeightsAvailable, found: bytes) -> None:
    """Compare bucket fingerprints with the announced ones.

    Raises:
        BroadcastError: Some differ, or their number is not the announced one.
    """
    announced = available.bucket_fingerprints
    if len(found) != len(announced):
        raise BroadcastError(f"{len(found) // DIGEST_BYTES} buckets arrived, {len(announced) // DIGEST_BYTES} were announced")
    starts = range(0, len(found), DIGEST_BYTES)
    if damaged := [i // DIGEST_BYTES for i in starts if found[i : i + DIGEST_BYTES] != announced[i : i + DIGEST_BYTES]]:
        told = f"{len(damaged)} of its {len(bucket_ends(available.manifest))} buckets differ, the first is bucket {damaged[0]}"
        raise BroadcastError(f"version {available.version} arrived damaged: the fingerprints of {told}")


def device_fingerprint(bucket: torch.Tensor) -> bytes:
    """Return the fingerprint of a bucket, computed on its device; waits for the device.

    Args:
        bucket: uint8 [N], contiguous, N and its start multiples of 8 bytes (the layout's are multiples of 64).

    Returns:
        DIGEST_BYTES, little-endian.

    Source: splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), its output function.
    """
    words = bucket.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=bucket.device)
    for start in range(0, len(words), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        mixed = torch.arange(start + 1, start + 1 + len(piece), dtype=torch.int64, device=bucket.device)
        mixed.mul_(_GOLDEN).bitwise_xor_(piece)
        mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_MIX_1)
        mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_MIX_2)
        total += mixed.bitwise_xor_(_shifted(mixed, 31)).sum()
    return (int(total) % (1 << 64)).to_bytes(DIGEST_BYTES, "little")


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 repeats the sign bit."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def device_fingerprints(flat: torch.Tensor, ends: Sequence[int], device: torch.device) -> bytes:
    """Return the fingerprints of a version's buckets, computed on `device`; bytes elsewhere are copied through two buffers."""
    buffers = None if flat.device == device else BucketBuffers(ends, device)
    digests: list[bytes] = []
    for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        bucket = flat[start:end]
        digests.append(device_fingerprint(bucket if buffers is None else buffers[index].copy_(bucket, non_blocking=True)))
    return b"".join(digests)


class BucketBuffers:
    """Two buffers on a device, used in turn for the buckets of a version."""

    def __init__(self, ends: Sequence[int], device: torch.device) -> None:
        """Allocate the buffers.

        Raises:
            BroadcastError: The device does not have enough memory.
        """
        self._sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        largest = max(self._sizes)
        try:
            self._buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(min(NUM_BUFFERS, len(ends)))]
        except torch.OutOfMemoryError as error:
            raise BroadcastError(
                f"{device} has no room for {NUM_BUFFERS} buckets of {largest >> 20} MiB; set broadcast.bucket_bytes lower"
            ) from error

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the buffer for bucket `index`; it overwrites bucket `index - 2`."""
        return self._buffers[index % NUM_BUFFERS][: self._sizes[index]]


def gpu_for(kind: str, device: torch.device | None = None) -> torch.device:
    """Return the GPU that `kind` uses here: `device`, the model's device; None: this thread's current GPU.

    Raises:
        ConfigError: There is no GPU, the device is not a GPU, or torch has no NCCL for `nccl`.
    """
    instead = "use shared_memory, zeromq or gloo"
    if device is not None and device.type != "cuda":
        needed = f"needs the engine's model on a GPU, not on {device}: set generate.engine.device, or {instead}"
        raise ConfigError(f"broadcast.medium.kind {kind!r} {needed}")
    if not torch.cuda.is_available():
        raise ConfigError(f"broadcast.medium.kind {kind!r} needs a GPU in learner and engine, and there is none here; {instead}")
    if kind == "nccl" and not dist.is_nccl_available():
        raise ConfigError(f"this torch was built without NCCL; install a CUDA build on Linux, or {instead}")
    return device or torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def side_stream(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Compute on this stream (None: on a new one), after the work that the learner has queued on its device so far.

    torch caches freed memory per stream, so use the same stream for repeated work.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
