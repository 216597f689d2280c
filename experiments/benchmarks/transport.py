"""`asyncrl bench transport`: samples of 1,024 tokens from a producer process into the buffer, acknowledged once in the ledger.

Sides, one after another in every round, each with a producer process of its own:
- `bare`: the same encoded bytes through a plain, blocking pyzmq PUSH/PULL pair over ipc; nothing is decoded or kept.
- `memory`: our channel over ipc, decode, buffer, ledger in memory, acknowledgement.
- `durable`: the same with the ledger on disk, as a run has it by default. Nothing is encrypted over ipc.
- `curve_durable`: as `durable`, but over TCP with CURVE, as between machines; here both ends are on the loopback address.
- `ray_queue`: the same encoded bytes through `ray.util.queue.Queue`, `put` in a Ray task and `get` here; left out without Ray.

`vs_ray_queue` compares `durable` with Ray's queue; neither encrypts. A side's time runs from its first sample here to its last
one committed and acknowledged (bare, Ray: received). Where the processes have to share their cores with something else, the
ratios suffer as well.
"""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import zmq

from asyncrl.buffer.buffer import Buffer
from asyncrl.buffer.group import BufferLimits
from asyncrl.buffer.ledger.store import MemoryLedger, SqliteLedger
from asyncrl.buffer.state import BufferState
from asyncrl.config.run import TransportConfig
from asyncrl.schema.codec import encode
from asyncrl.schema.samples import Prompt, Samples
from asyncrl.transport.protocol import Delivery, new_hello
from asyncrl.transport.zmq_client import open_connection
from asyncrl.transport.zmq_server import open_listener
from benchmarks.harness import BenchResult, interleaved, ratio
from benchmarks.samples import local_ray, random_sample

DEFAULT_ROUNDS = 5
NUM_TOKENS = 1024
GROUP_SIZE = 8
NUM_SAMPLES = 8000
NUM_RAY_SAMPLES = 400
VS_PYZMQ_GOAL = 0.33
VS_RAY_QUEUE_GOAL = 20.0
DURABLE_GOAL_PER_S = 3000.0
WINDOW = 256
"""Samples in flight; deep enough that a commit of the ledger never leaves the producer without credit."""
IPC, CURVE = TransportConfig(window=WINDOW), TransportConfig(kind="tcp", window=WINDOW)

SAMPLE = Samples.of([random_sample(NUM_TOKENS, 64)])
"""Each travels alone: what is compared is messages, not groups."""
_TIMEOUT_S = 120.0


def run(rounds: int = 0) -> BenchResult:
    """Measure and return medians.

    Args:
        rounds: Measured rounds, after one that warms up; 0: 5.
    """
    rounds = rounds or DEFAULT_ROUNDS
    sides: dict[str, Callable[[], float]] = {
        "bare": _bare_rate,
        "memory": lambda: _channel_rate(IPC, is_durable=False),
        "durable": lambda: _channel_rate(IPC, is_durable=True),
        "curve_durable": lambda: _channel_rate(CURVE, is_durable=True),
    }
    with _ray_queue() as ray_rate:
        if ray_rate is not None:
            sides["ray_queue"] = ray_rate
        rates = interleaved(sides, rounds)
    figures = {"sample_bytes": float(len(encode(SAMPLE))), "rounds": float(rounds)}
    figures |= {f"{name}_samples_per_s": round(rate, 1) for name, rate in rates.items()}
    ray = rates.get("ray_queue", math.inf)  # without Ray the ratio is 0 and does not hold: it was not shown
    ratios = {
        "vs_pyzmq": ratio(round(rates["memory"] / rates["bare"], 3), VS_PYZMQ_GOAL),
        "vs_ray_queue": ratio(round(rates["durable"] / ray, 2), VS_RAY_QUEUE_GOAL),
        "durable_vs_goal": ratio(round(rates["durable"] / DURABLE_GOAL_PER_S, 3), 1.0),
    }
    return BenchResult("transport", figures, ratios)


def _bare_rate() -> float:
    """Return samples per second of a blocking PUSH/PULL pair."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder, zmq.Context() as context, context.socket(zmq.PULL) as socket:
        address = f"ipc://{folder}/bare"
        socket.bind(address)
        with _producer("bare", address, folder):
            socket.recv()
            started_s = time.perf_counter()
            for _ in range(NUM_SAMPLES - 1):
                socket.recv()
            return (NUM_SAMPLES - 1) / (time.perf_counter() - started_s)


def _channel_rate(config: TransportConfig, *, is_durable: bool) -> float:
    """Return samples per second through channel, buffer and ledger."""
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder:
        return asyncio.run(_receive_all(config, Path(folder), is_durable))


async def _receive_all(config: TransportConfig, folder: Path, is_durable: bool) -> float:
    """Take every sample in, as the controller does; return the rate until the last one is acknowledged."""
    loop = asyncio.get_running_loop()
    ledger = SqliteLedger(folder / "ledger.sqlite", call_soon=loop.call_soon_threadsafe) if is_durable else MemoryLedger()
    buffer = Buffer(BufferState(BufferLimits(groups_per_step=NUM_SAMPLES // GROUP_SIZE, max_staleness=0)), ledger)
    for number in range(NUM_SAMPLES // GROUP_SIZE):
        buffer.issue(Prompt(f"bench/{number}"), "generator-0", version=0, group_size=GROUP_SIZE, now=0.0)
    ledger.sync()
    listener = await open_listener(config, folder)
    committed: asyncio.Future[float] = loop.create_future()
    started_s = 0.0
    try:
        with _producer("channel", listener.address, str(folder)):
            connection = await asyncio.wait_for(listener.accept(), _TIMEOUT_S)
            number = 0
            while number < NUM_SAMPLES:
                arrival = await connection.receive_all()
                started_s, number = started_s or loop.time(), number + len(arrival.messages)
                samples = [message for message in arrival.messages if isinstance(message, Samples)]
                receipts = buffer.add_samples(samples, loop.time())
                assert all(receipt.stored for receipt in receipts), receipts
                buffer.when_committed(partial(_finish, arrival, committed if number == NUM_SAMPLES else None))
            finished_s = await asyncio.wait_for(committed, _TIMEOUT_S)
    finally:
        await listener.close()
        ledger.close()
    counts = buffer.counts()
    assert counts.scoring == counts.issued, f"not every sample is in the buffer: {counts}"
    return (NUM_SAMPLES - 1) / (finished_s - started_s)


def _finish(arrival: Delivery, last_committed: asyncio.Future[float] | None) -> None:
    """Acknowledge samples, and stop the clock with the last."""
    arrival.ack()
    if last_committed is not None:
        last_committed.set_result(last_committed.get_loop().time())


@contextmanager
def _producer(kind: str, address: str, folder: str) -> Iterator[None]:
    """Run this module as the producer process; it ends by itself once everything is sent and acknowledged."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.transport", kind, address, folder])
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait(_TIMEOUT_S)


async def _produce_samples(address: str, folder: Path) -> None:
    samples = [
        msgspec.structs.replace(SAMPLE, group_id=number // GROUP_SIZE, indices=(number % GROUP_SIZE,))
        for number in range(NUM_SAMPLES)
    ]
    connection = await open_connection(address, new_hello("generator", "generator-0"), TransportConfig(), folder)
    for sample in samples:
        await connection.send(sample)
    await connection.flush(_TIMEOUT_S)
    await connection.close()


@contextmanager
def _ray_queue() -> Iterator[Callable[[], float] | None]:
    """Yield a function that measures Ray's queue; None where Ray is not installed."""
    with local_ray() as ray:
        if ray is None:
            yield None
            return
        from ray.util.queue import Queue

        payload = encode(SAMPLE)

        @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
        def produce(queue: Queue, count: int) -> None:
            for _ in range(count):
                queue.put(payload)

        def measure() -> float:
            queue = Queue(maxsize=WINDOW, actor_options={"num_cpus": 0})
            done = produce.remote(queue, NUM_RAY_SAMPLES)
            queue.get()
            started_s = time.perf_counter()
            for _ in range(NUM_RAY_SAMPLES - 1):
                queue.get()
            rate = (NUM_RAY_SAMPLES - 1) / (time.perf_counter() - started_s)
            ray.get(done)
            queue.shutdown()
            return rate

        yield measure


if __name__ == "__main__":  # the producer process
    kind, address, folder = sys.argv[1:]
    if kind == "bare":
        payload = encode(SAMPLE)
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(address)
            for _ in range(NUM_SAMPLES):
                socket.send(payload)
    else:
        asyncio.run(_produce_samples(address, Path(folder)))
