"""What a stage that cannot go on tells the controller."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.control.stage_end import EXIT_FAULT, to_its_end
from asyncrl.errors import ConfigError, LearnerError, ModelChangedError, ResidencyError
from asyncrl.schema.control import PROTOCOL, Fault, Hello
from asyncrl.transport.channel import Lane
from asyncrl.transport.inprocess import InProcessListener


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [
        (ConfigError("no such file"), True),
        (LearnerError("the loss is not finite"), True),
        (ModelChangedError("written during the run"), True),
        (ResidencyError("no room"), False),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [ResidencyError("no room"), ConfigError("no such file")])]), True),
    ],
)
async def test_a_fault_is_fatal_where_a_new_start_would_not_help(error, is_fatal):
    async def work() -> None:
        raise error

    listener = InProcessListener(Hello(PROTOCOL, "controller", "controller", "1", 1))
    connection = await listener.connect(Hello(PROTOCOL, "inference", "inference-0", "1", 2))
    near = await listener.accept()
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(to_its_end(work(), "inference-0", connection))
        delivery = await asyncio.wait_for(near.receive(Lane.CONTROL), 30)
        delivery.ack()
    assert ending.result() == EXIT_FAULT
    assert isinstance(delivery.message, Fault)
    assert (delivery.message.name, delivery.message.fatal) == ("inference-0", is_fatal)
    await listener.close()
