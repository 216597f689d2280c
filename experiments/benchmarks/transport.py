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
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from asyncrl.transport.protocol import new_hello
from asyncrl.transport.zmq_client import open_connection
from asyncrl.transport.zmq_server import open_listener
from benchmarks.harness import SPAWN, BenchResult, interleaved, ratio
from benchmarks.samples import random_sample

DEFAULT_ROUNDS = 5
NUM_TOKENS, GROUP_SIZE, NUM_SAMPLES, NUM_RAY_SAMPLES = 1024, 8, 8000, 400
VS_PYZMQ_GOAL, VS_RAY_QUEUE_GOAL, DURABLE_GOAL_PER_S = 0.33, 20.0, 3000.0
WINDOW = 256
"""Samples in flight; deep enough that a commit of the ledger never leaves the producer without credit."""
IPC, CURVE = TransportConfig(window=WINDOW), TransportConfig(kind="tcp", window=WINDOW)
SAMPLE = Samples.of([random_sample(NUM_TOKENS, 64)])
"""Each travels alone: what is compared is messages, not groups."""
TIMEOUT_S = 120.0


def run(rounds: int = 0) -> BenchResult:
    """Measure and return medians; `rounds` 0 means 5, after one that warms up."""
    rounds = rounds or DEFAULT_ROUNDS
    sides: dict[str, Callable[[], float]] = {
        "bare": bare_rate,
        "memory": lambda: asyncio.run(channel_rate(IPC, is_durable=False)),
        "durable": lambda: asyncio.run(channel_rate(IPC, is_durable=True)),
        "curve_durable": lambda: asyncio.run(channel_rate(CURVE, is_durable=True)),
    }
    with ray_queue() as ray_side:
        rates = interleaved(sides | ray_side, rounds)
    figures = {"sample_bytes": float(len(encode(SAMPLE))), "rounds": float(rounds)}
    figures |= {f"{name}_samples_per_s": round(rate, 1) for name, rate in rates.items()}
    ratios = {
        "vs_pyzmq": ratio(round(rates["memory"] / rates["bare"], 3), VS_PYZMQ_GOAL),
        "durable_vs_goal": ratio(round(rates["durable"] / DURABLE_GOAL_PER_S, 3), 1.0),
    }
    if ray_side:
        ratios["vs_ray_queue"] = ratio(round(rates["durable"] / rates["ray_queue"], 2), VS_RAY_QUEUE_GOAL)
    return BenchResult("transport", figures, ratios)


def bare_rate() -> float:
    """Return samples per second of a blocking PUSH/PULL pair."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder, zmq.Context() as context, context.socket(zmq.PULL) as socket:
        address = f"ipc://{folder}/bare"
        socket.bind(address)
        with producer(push_all, address):
            return rate_of(socket.recv, NUM_SAMPLES)


def push_all(address: str) -> None:
    """Send every sample; in the producer process."""
    payload = encode(SAMPLE)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        for _ in range(NUM_SAMPLES):
            socket.send(payload)


def rate_of(receive: Callable[[], object], count: int) -> float:
    """Return how many things a second come, from the first to the last of so many."""
    receive()
    started_s = time.perf_counter()
    for _ in range(count - 1):
        receive()
    return (count - 1) / (time.perf_counter() - started_s)


async def channel_rate(config: TransportConfig, *, is_durable: bool) -> float:
    """Return samples per second through channel, buffer and ledger, until the last one is acknowledged."""
    gc.collect()
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as name:
        folder = Path(name)
        ledger = SqliteLedger(folder / "ledger.sqlite", call_soon=loop.call_soon_threadsafe) if is_durable else MemoryLedger()
        buffer = Buffer(BufferState(BufferLimits(groups_per_step=NUM_SAMPLES // GROUP_SIZE, max_staleness=0)), ledger)
        for number in range(NUM_SAMPLES // GROUP_SIZE):
            buffer.issue(Prompt(f"bench/{number}"), "generator-0", version=0, group_size=GROUP_SIZE, now=0.0)
        ledger.sync()
        listener = await open_listener(config, folder)
        committed: asyncio.Future[float] = loop.create_future()
        started_s, number = 0.0, 0
        with producer(send_all, listener.address, folder):
            connection = await asyncio.wait_for(listener.accept(), TIMEOUT_S)
            while number < NUM_SAMPLES:
                arrival = await connection.receive_all()
                started_s, number = started_s or loop.time(), number + len(arrival.messages)
                samples = [message for message in arrival.messages if isinstance(message, Samples)]
                receipts = buffer.add_samples(samples, loop.time())
                assert all(receipt.stored for receipt in receipts), receipts
                buffer.when_committed(arrival.ack)
            buffer.when_committed(lambda: committed.set_result(loop.time()))
            finished_s = await asyncio.wait_for(committed, TIMEOUT_S)
        await listener.close()
        ledger.close()
    counts = buffer.counts()
    assert counts.scoring == counts.issued, f"not every sample is in the buffer: {counts}"
    return (NUM_SAMPLES - 1) / (finished_s - started_s)


def send_all(address: str, folder: Path) -> None:
    """Send every sample over a channel and wait until all are acknowledged; in the producer process."""
    samples = [
        msgspec.structs.replace(SAMPLE, group_id=number // GROUP_SIZE, indices=(number % GROUP_SIZE,))
        for number in range(NUM_SAMPLES)
    ]

    async def send() -> None:
        connection = await open_connection(address, new_hello("generator", "generator-0"), TransportConfig(), folder)
        for sample in samples:
            await connection.send(sample)
        await connection.flush(TIMEOUT_S)
        await connection.close()

    asyncio.run(send())


@contextmanager
def producer(send: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run what sends the samples in a process, which ends by itself once everything is sent and acknowledged."""
    process = SPAWN.Process(target=send, args=arguments, daemon=True)
    process.start()
    yield
    process.join(TIMEOUT_S)


@contextmanager
def ray_queue() -> Iterator[dict[str, Callable[[], float]]]:
    """Yield Ray's queue as a side; none where Ray is not installed."""
    try:
        import ray
        from ray.util.queue import Queue
    except ImportError:
        yield {}
        return
    # A cluster of its own, whatever was left running.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    payload = encode(SAMPLE)

    @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def produce(queue: Queue, count: int) -> None:
        for _ in range(count):
            queue.put(payload)

    def measure() -> float:
        queue = Queue(maxsize=WINDOW, actor_options={"num_cpus": 0})
        done = produce.remote(queue, NUM_RAY_SAMPLES)
        rate = rate_of(queue.get, NUM_RAY_SAMPLES)
        ray.get(done)
        queue.shutdown()
        return rate

    try:
        yield {"ray_queue": measure}
    finally:
        ray.shutdown()
