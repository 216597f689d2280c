"""Samples, and what a process says and hears, that many tests begin with."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from asyncrl.buffer.buffer import Receipt
from asyncrl.errors import AsyncRLError
from asyncrl.observe.steps import JsonLines
from asyncrl.schema.codec import Message
from asyncrl.schema.control import PROTOCOL, Hello, Shutdown
from asyncrl.schema.samples import GroupWork, Sample, Samples, Score, Scores, ids_to_bytes, logprobs_to_bytes
from asyncrl.transport.protocol import Connection, Lane
from tests.in_process import InProcessListener

T = TypeVar("T", bound=Message)


def make_sample(
    group_id: int = 0,
    index: int = 0,
    tokens: Sequence[int] = (3, 4),
    prompt: Sequence[int] = (1, 2),
    logprobs: Sequence[float] | float = -0.5,
    versions: Sequence[int] | int = 0,
    **more: Any,
) -> Sample:
    """Return a finished sample; one number of `logprobs` or `versions` is that of every token, `more` are further fields."""
    arrays = logprobs_to_bytes(np.broadcast_to(logprobs, len(tokens))), ids_to_bytes(np.broadcast_to(versions, len(tokens)))
    made = Sample(group_id, index, 0, ids_to_bytes(prompt), ids_to_bytes(tokens), *arrays, "stop", "text", "g0", 0.0, 1.0)
    return msgspec.structs.replace(made, **more)


def answer_to(
    work: GroupWork, index: int = 0, generator: str = "generator-0", versions: Sequence[int] | int = 0, **more: Any
) -> Samples:
    """Return what a generator answers to a member of a group."""
    fields = {"attempt": work.attempt, "purpose": work.purpose, "text": "46", "generator": generator} | more
    return Samples.of([make_sample(work.group_id, index, versions=versions, **fields)])


def score_of(group_id: int, index: int, reward: float = 1.0, parts: dict[str, float] | None = None, **more: Any) -> Scores:
    """Return the score of one member; `more` are further fields of it and of the message."""
    about = {name: more.pop(name) for name in tuple(more) if name in Scores.__struct_fields__}
    made = Scores(group_id, 0, (Score(index, reward, parts or {}, **more),), started_s=1.0, finished_s=2.0)
    return msgspec.structs.replace(made, **about)


def outcome(receipt: Receipt) -> str:
    """Return what became of what came in, in one word."""
    return "stored" if receipt.stored else "refused" if receipt.refused else "duplicate"


def hello(kind: str, name: str) -> Hello:
    """Return how a process introduces itself."""
    return Hello(PROTOCOL, kind, name, f"{name}-1", 0)  # type: ignore[arg-type]


async def receive(connection: Connection, kind: type[T], lane: Lane = Lane.CONTROL) -> T:
    """Return the next message of this kind, and drop those before it."""
    async with asyncio.timeout(120):
        while True:
            delivery = await connection.receive(lane)
            delivery.ack()
            if isinstance(delivery.message, kind):
                return delivery.message


class Controller:
    """The controller's end of a worker under test."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def order(self, message: Message) -> None:
        """Say it on the lane of orders."""
        await self.connection.send(message, Lane.CONTROL)

    async def report(self, kind: type[T], is_it: Callable[[T], bool] = lambda message: True) -> T:
        """Return the worker's next report of this kind that `is_it`."""
        while not is_it(message := await receive(self.connection, kind)):
            pass
        return message

    async def answers(self, num: int) -> list[Any]:
        """Return the next so many results, each sample by itself."""
        found: list[Any] = []
        async with asyncio.timeout(120):
            while len(found) < num:
                delivery = await self.connection.receive(Lane.DATA)
                delivery.ack()
                found += delivery.message.members() if isinstance(delivery.message, Samples) else [delivery.message]
        return found


@asynccontextmanager
async def channel_of(kind: str, name: str) -> AsyncIterator[tuple[Connection, Connection]]:
    """Yield both ends of a worker's channel: its own and the controller's."""
    listener = InProcessListener(hello("controller", "controller"))
    near = await listener.connect(hello(kind, name))
    yield near, await listener.accept()
    await listener.close()


async def outcome_of(running: Awaitable[object]) -> AsyncRLError | None:
    """Return what ended it: an error, or None."""
    try:
        await running
    except AsyncRLError as error:
        return error
    return None


@asynccontextmanager
async def working(
    kind: str, name: str, work: Callable[[Connection, Any], Awaitable[object]], end: type[Any] = Controller
) -> AsyncIterator[Any]:
    """Yield the controller's end of a worker, its outcome as `task`; unless that is there already, it is told to shut down."""
    async with channel_of(kind, name) as (near, far), asyncio.TaskGroup() as group:
        controller = end(far)
        controller.task = group.create_task(outcome_of(work(near, controller)))
        yield controller
        if not controller.task.done():
            await controller.order(Shutdown())
            assert await asyncio.wait_for(controller.task, 30) is None


def write_rows(path: Path, *rows: msgspec.Struct) -> None:
    """Append rows to a file of JSON lines, as a run does."""
    file: JsonLines[msgspec.Struct] = JsonLines(path)
    file.write(*rows)
    file.close()


def bytes_read() -> int:
    """Return the bytes that this process has read from files so far, cached ones too."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def write_jsonl(path: Path, records: Sequence[object]) -> str:
    """Write a record a line; return the path, as a config has it."""
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return str(path)


def laid_over(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with `{"buffer__max_staleness": 0}` laid over them, in place."""
    for path, value in changes.items():
        table = settings
        *parents, last = path.split("__")
        for key in parents:
            table = table.setdefault(key, {})
        table[last] = value
    return settings


async def cancelled_after(turns: int, work: Callable[[], Awaitable[object]]) -> None:
    """Begin something and cancel it after so many turns of the event loop, the later ones longer: wherever it stands then."""

    async def done() -> None:
        await work()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(done())
        for turn in range(turns):
            await asyncio.sleep(0 if turn < 30 else 0.005)
        task.cancel()


async def until(is_so: Callable[[], object]) -> None:
    """Wait for what no event tells of."""
    async with asyncio.timeout(120):
        while not is_so():
            await asyncio.sleep(0.005)
