"""`asyncrl bench broadcast`: publish to live on one subscriber process, against one warm memory copy of the same bytes.

135M parameters in bf16, shaped like SmolLM2-135M, held by this process (the learner). The subscriber is a second process that
does what a generator does: fetch with fingerprint check, then copy every tensor into the weights it already holds (the engine's
in-place load). `live_ms` runs from the call of `publish` until the subscriber's word that it did arrives here. Every round
measures the bare copy and each medium, in turns, so that all see the same machine; ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import torch
import zmq

from asyncrl.bench.result import BenchResult, ratio, seconds_of
from asyncrl.broadcast.publisher import Publisher
from asyncrl.broadcast.subscriber import Subscriber
from asyncrl.broadcast.zeromq import CurveKeys
from asyncrl.clock import SystemClock
from asyncrl.config.stages import BroadcastConfig, FilesMedium, MediumConfig, SharedMemoryMedium, ZeroMQMedium
from asyncrl.models.layout import view_tensors
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

SHM_VS_COPY_GOAL = 4.0
BLOCKED_COPIES_GOAL = 1.5
DEFAULT_ROUNDS = 9
NUM_WARMUP_ROUNDS = 2
LIVE_TIMEOUT_S = 120.0

Message = TypeVar("Message", bound=msgspec.Struct)


class _Role(msgspec.Struct, frozen=True):
    """What the subscriber process is told first."""

    config: BroadcastConfig
    run_folder: str
    public: str = ""
    secret: str = ""
    learner: str = ""


class _Live(msgspec.Struct, frozen=True):
    """The subscriber's word that a version is live."""

    version: int
    fetch_ms: float
    load_ms: float


def run(rounds: int = 0) -> BenchResult:
    """Measure and return medians.

    Args:
        rounds: Measured rounds, after the warm-up; 0: 9.
    """
    rounds = rounds or DEFAULT_ROUNDS
    weights = _smollm2_weights(torch.bfloat16)
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in weights.values())
    samples = _measure(weights, num_bytes, rounds)
    figures = {name: round(statistics.median(values), 3) for name, values in samples.items()}
    live = _median_ratio(samples["shared_memory_live_ms"], samples["copy_ms"])
    blocked = _median_ratio(samples["shared_memory_blocked_ms"], samples["copy_ms"])
    return BenchResult(
        "broadcast",
        {"model_bytes": num_bytes, "rounds": rounds, **figures},
        {
            "shm_vs_copy": ratio(live, SHM_VS_COPY_GOAL, at_least=False),
            "learner_blocked_copies": ratio(blocked, BLOCKED_COPIES_GOAL, at_least=False),
        },
    )


def _measure(weights: dict[str, torch.Tensor], num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return what every measured round gave, by figure."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    samples: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-bench-")))
        pairs = _open_pairs(folder)
        for pair in pairs.values():
            opened.callback(pair.close)
        for version in range(1, NUM_WARMUP_ROUNDS + rounds + 1):
            measured = {"copy_ms": seconds_of(lambda: target.copy_(source)) * 1e3}
            for name, pair in pairs.items():
                measured |= pair.measure(name, version, weights)
            for figure, value in measured.items() if version > NUM_WARMUP_ROUNDS else ():
                samples[figure].append(value)
    return samples


class _Pair:
    """A publisher here and a subscriber process."""

    def __init__(self, role: _Role, learner_keys: CurveKeys | None) -> None:
        self._announced: queue.SimpleQueue[WeightsAvailable] = queue.SimpleQueue()
        self._publisher = Publisher(role.config, Path(role.run_folder), self._announced.put, SystemClock(), learner_keys)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.bench.broadcast"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to_peer, self._from_peer = self._process.stdin, self._process.stdout
        _send(self._to_peer, role)

    def measure(self, name: str, version: int, weights: dict[str, torch.Tensor]) -> dict[str, float]:
        """Publish `version`; return how long what took, in milliseconds."""
        started_s = time.perf_counter()
        blocked_ms = self._publisher.publish(version, weights)
        available = self._announced.get(timeout=LIVE_TIMEOUT_S)
        announced_s = time.perf_counter()
        _send(self._to_peer, available)
        live = _receive(self._from_peer, _Live)
        live_ms = (time.perf_counter() - started_s) * 1e3
        assert live is not None, f"the {name} subscriber broke off"
        assert live.version == version
        return {
            f"{name}_live_ms": live_ms,
            f"{name}_blocked_ms": blocked_ms,
            f"{name}_announced_ms": (announced_s - started_s) * 1e3,
            f"{name}_fetch_ms": live.fetch_ms,
            f"{name}_load_ms": live.load_ms,
        }

    def close(self) -> None:
        """End the subscriber process, then the publisher."""
        self._to_peer.close()
        self._process.wait(timeout=LIVE_TIMEOUT_S)
        self._from_peer.close()
        self._publisher.close()


def _open_pairs(folder: Path) -> dict[str, _Pair]:
    learner, generator = zmq.curve_keypair(), zmq.curve_keypair()
    learner_keys = CurveKeys(*learner, peers=(generator[0],))
    media: dict[str, MediumConfig] = {
        "shared_memory": SharedMemoryMedium(),
        "files": FilesMedium(),
        "zeromq": ZeroMQMedium(),
        "zeromq_curve": ZeroMQMedium(),
    }
    pairs = {}
    for name, medium in media.items():
        run_folder = folder / name
        run_folder.mkdir()
        role = _Role(BroadcastConfig(medium=medium), str(run_folder))
        if name == "zeromq_curve":
            public, secret = generator
            role = msgspec.structs.replace(role, public=public.decode(), secret=secret.decode(), learner=learner[0].decode())
        pairs[name] = _Pair(role, learner_keys if name == "zeromq_curve" else None)
    return pairs


def _median_ratio(values: list[float], bases: list[float]) -> float:
    return round(statistics.median(value / base for value, base in zip(values, bases, strict=True)), 3)


def _smollm2_weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors with the names and shapes of SmolLM2-135M (tied embeddings), random."""
    hidden, kv, inner, vocabulary = 576, 192, 1536, 49152
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    shapes |= {f"model.layers.{index}.{name}.weight": shape for index in range(30) for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def _send(stream: IO[bytes], message: msgspec.Struct) -> None:
    frame = msgspec.msgpack.encode(message)
    stream.write(len(frame).to_bytes(4, "little") + frame)
    stream.flush()


def _receive(stream: IO[bytes], kind: type[Message]) -> Message | None:
    """Return the next message, None at the end of the stream."""
    size = stream.read(4)
    return msgspec.msgpack.decode(stream.read(int.from_bytes(size, "little")), type=kind) if size else None


async def _subscribe(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Be the subscriber process: take announcements, fetch, load in place, say so."""
    role = _receive(stdin, _Role)
    assert role is not None
    keys = CurveKeys(role.public.encode(), role.secret.encode(), (role.learner.encode(),)) if role.public else None
    subscriber = Subscriber(role.config, Path(role.run_folder), curve_keys=keys)
    held: dict[str, torch.Tensor] = {}
    while (available := await asyncio.to_thread(_receive, stdin, WeightsAvailable)) is not None:
        held = held or _empty_weights(available.manifest)
        started_s = time.perf_counter()
        tensors = await subscriber.fetch(available)
        fetched_s = time.perf_counter()
        for name, tensor in tensors.items():
            held[name].copy_(tensor)
        live_s = time.perf_counter()
        _send(stdout, _Live(available.version, (fetched_s - started_s) * 1e3, (live_s - fetched_s) * 1e3))
    subscriber.close()


def _empty_weights(manifest: WeightsManifest) -> dict[str, torch.Tensor]:
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    return {name: tensor.clone() for name, tensor in view_tensors(flat, manifest).items()}


if __name__ == "__main__":
    asyncio.run(_subscribe(sys.stdin.buffer, sys.stdout.buffer))
