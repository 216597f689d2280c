"""How a process begins and ends: it ends with its parent, and tells the controller why it cannot go on."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from asyncrl.control.launch.process_main import EXIT_FAULT, PARENT_GONE_EXIT_CODE, run_to_exit_code
from asyncrl.errors import ConfigError, LearnerError, ResidencyError
from asyncrl.schema.control import PROTOCOL, Fault, Hello
from asyncrl.transport.protocol import Lane
from tests.in_process import InProcessListener

WATCH = "from asyncrl.control.launch.process_main import watch_parent, ignore_interrupts\nimport os, signal, time\n"


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [
        (ConfigError("no such file"), True),
        (LearnerError("the loss is not finite"), True),
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
        ending = group.create_task(run_to_exit_code(work(), "inference-0", connection))
        delivery = await asyncio.wait_for(near.receive(Lane.CONTROL), 30)
        delivery.ack()
    assert ending.result() == EXIT_FAULT
    assert isinstance(delivery.message, Fault)
    assert (delivery.message.name, delivery.message.fatal) == ("inference-0", is_fatal)
    await listener.close()


def test_end_of_stdin_ends_the_process_after_its_last_act() -> None:
    program = WATCH + "watch_parent(lambda: print('tidied', flush=True)); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "up\n"
        child.stdin.write("whatever is said is not the end\n")
        child.stdin.flush()
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(20) == PARENT_GONE_EXIT_CODE
        assert child.stdout.read() == "tidied\n"
