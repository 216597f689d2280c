"""How a process begins, logs and ends: it ends with its parent, and tells the controller why it cannot go on."""

import asyncio
import subprocess
import sys

import pytest
import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.control.launch.process_main import EXIT_FAULT, PARENT_GONE_EXIT_CODE, run_to_exit_code
from asyncrl.errors import ConfigError, LearnerError, ResidencyError
from asyncrl.learner.optim.optimizer import build_lowbit
from asyncrl.schema.control import Fault
from tests.builders import channel_of, receive

WATCH = "from asyncrl.control.launch.process_main import watch_parent, ignore_interrupts\nimport os, signal, time\n"


def no_such_device() -> None:
    torch.zeros(1, device="cuda:55")


def a_missing_package() -> None:
    build_lowbit([], LearnerConfig(optimizer="adamw_8bit"))


@pytest.mark.parametrize(("error", "is_fatal", "said"), [
    (ConfigError("no such file"), True, "no such file"), (LearnerError("the loss is not finite"), True, "not finite"),
    (ResidencyError("no room"), False, "no room"), (no_such_device, True, "CUDA"), (a_missing_package, True, "pip install"),
    (ExceptionGroup("tasks", [ExceptionGroup("more", [ResidencyError("no room"), ConfigError("no such file")])]), True, "; "),
])  # fmt: skip
async def test_a_fault_is_fatal_where_a_new_start_would_not_help(error, is_fatal, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)

    async def work() -> None:
        if isinstance(error, Exception):
            raise error
        error()

    async with channel_of("inference", "inference-0") as (near, far), asyncio.TaskGroup() as group:
        ending = group.create_task(run_to_exit_code(work(), "inference-0", near))
        fault = await receive(far, Fault)
    assert ending.result() == EXIT_FAULT
    assert (fault.name, fault.fatal) == ("inference-0", is_fatal)
    assert said in fault.reason


def test_end_of_stdin_ends_the_process_after_its_last_act() -> None:
    program = WATCH + "watch_parent(lambda: print('tidied', flush=True)); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert child.communicate(timeout=20)[0] == "tidied\n"
    assert child.returncode == PARENT_GONE_EXIT_CODE


def test_lines_name_process_and_module_and_debug_stays_out() -> None:
    program = (
        "import logging\n"
        "from asyncrl.control.launch.process_main import set_up_logging\n"
        "set_up_logging('generator-0')\n"
        "log = logging.getLogger('asyncrl.generate')\n"
        "log.info('up'); log.debug('detail')\n"
        "logging.getLogger('other').info('chatter'); logging.getLogger('other').warning('ours too')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("INFO    generator-0 asyncrl.generate | up")
    assert lines[1].endswith("WARNING generator-0 other | ours too")
    assert not done.stdout
