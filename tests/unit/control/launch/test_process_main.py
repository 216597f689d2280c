"""How a process ends: it tells the controller why it cannot go on."""

import asyncio
import sys

import psutil
import pytest
import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.control.launch.process_main import EXIT_FAULT, run_to_exit_code
from asyncrl.errors import ConfigError, EngineConfigError, GenerationError, LearnerError, ResidencyError
from asyncrl.learner.optim.optimizer import build_lowbit
from asyncrl.schema.control import Fault
from tests.builders import channel_of, receive


async def test_a_process_that_one_of_ours_has_spawned_ends_with_it_however_it_ends() -> None:
    """As vLLM's engine core, which waits for five minutes if its generator is killed during the start."""
    script = """
import multiprocessing, sys, time, asyncrl.pipeline
sys.modules["__main__"] = asyncrl.pipeline  # as in a process of a run
spawned = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
spawned.start()
print(spawned.pid, flush=True)
spawned.join()
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(child.wait, 20)


def no_such_device() -> None:
    torch.zeros(1, device="cuda:55")


def a_missing_package() -> None:
    build_lowbit([], LearnerConfig(optimizer="adamw_8bit"))


@pytest.mark.parametrize(("error", "is_fatal", "said"), [
    (ConfigError("no such file"), True, "no such file"), (LearnerError("the loss is not finite"), True, "not finite"),
    (EngineConfigError("too many positions"), True, "positions"), (GenerationError("no answer"), False, "no answer"),
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
