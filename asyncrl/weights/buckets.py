"""Buckets of a version: their fingerprints, in host memory and on a device, and two buffers on a device that they pass through.

In host memory a bucket has xxh3-64; xxh3-128 of those of all buckets is the version's name. The learner makes them on the
publisher's thread, never on its own. A generator makes its own of what arrived and compares: what is verified is what goes live.

xxh3 cannot run on a GPU, and copying everything back to hash it would cost what the media on devices save. So `nccl` and
`cuda_ipc` announce fingerprints of their own, of the same size: every 8-byte word is mixed with its place by splitmix64, and the
results are added up, all modulo 2**64. Integer arithmetic alone: the same number on every device, whatever the order of the
additions. A changed word always changes it (the mixing is one to one); words that changed places, or several, all but surely.
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
"""Mixed at once: a bucket of the usual size, which is little over 8 MiB; and bounds the memory that mixing takes to a few times
16 MiB, whatever the bucket."""
# As int64: the 64 bits of splitmix64's constants.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def fingerprints_of(flat: memoryview, ends: Sequence[int], buckets: Iterable[int] | None = None) -> bytes:
    """Hash bytes where they lie, several buckets at once.

    Args:
        flat: The version's bytes.
        ends: Of the buckets.
        buckets: Numbers of those to hash; None: all.
    """

    def digest(number: int) -> bytes:
        start = ends[number - 1] if number else 0
        return xxhash.xxh3_64_intdigest(flat[start : ends[number]]).to_bytes(DIGEST_BYTES, "little")

    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="asyncrl-hash") as pool:
        return b"".join(pool.map(digest, range(len(ends)) if buckets is None else buckets))


def version_fingerprint(bucket_fingerprints: bytes) -> str:
    """Return the version's name: xxh3-128 of its buckets' fingerprints, hex; empty where there are none."""
    return str(xxhash.xxh3_128_hexdigest(bucket_fingerprints)) if bucket_fingerprints else ""


def refuse_damaged(available: WeightsAvailable, found: bytes) -> None:
    """Compare bucket fingerprints with the announced ones.

    Raises:
        BroadcastError: Some differ, or there are not as many as announced.
    """
    announced = available.bucket_fingerprints
    if len(found) != len(announced):
        raise BroadcastError(f"{len(found) // DIGEST_BYTES} buckets arrived, {len(announced) // DIGEST_BYTES} were announced")
    starts = range(0, len(found), DIGEST_BYTES)
    if damaged := [i // DIGEST_BYTES for i in starts if found[i : i + DIGEST_BYTES] != announced[i : i + DIGEST_BYTES]]:
        told = f"{len(damaged)} of its {len(bucket_ends(available.manifest))} buckets differ, the first is bucket {damaged[0]}"
        raise BroadcastError(f"version {available.version} arrived damaged: the fingerprints of {told}")


def device_fingerprint(bucket: torch.Tensor) -> bytes:
    """Return the fingerprint of a bucket where it lies; waits for the device.

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
    """Shift right, zeros from the left; torch's own shift of int64 repeats the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def device_fingerprints(flat: torch.Tensor, ends: Sequence[int], device: torch.device) -> bytes:
    """Return the fingerprints of a version's buckets, computed on `device`, by way of two buffers where it lies elsewhere."""
    buffers = None if flat.device == device else BucketBuffers(ends, device)
    digests: list[bytes] = []
    for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        bucket = flat[start:end]
        digests.append(device_fingerprint(bucket if buffers is None else buffers[index].copy_(bucket, non_blocking=True)))
    return b"".join(digests)


class BucketBuffers:
    """Two buffers on a device that the buckets of a version pass through by turns."""

    def __init__(self, ends: Sequence[int], device: torch.device) -> None:
        """Allocate them.

        Raises:
            BroadcastError: The device has no room.
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
        """Return where bucket `index` goes, over bucket `index - 2`."""
        return self._buffers[index % NUM_BUFFERS][: self._sizes[index]]


def gpu_for(kind: str, device: torch.device | None = None) -> torch.device:
    """Return the GPU that `kind` uses here: `device`, where a model is; None: the one that new tensors of this thread go to.

    Raises:
        ConfigError: There is no GPU, the device is none, or torch has no NCCL for `nccl`.
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
    """Compute on this stream, None: on a new one, behind what the learner has asked of its device so far.

    torch caches freed memory by stream: work that comes again goes to the same one.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
