"""Across a network: the controller and the learner in one network namespace, the generator in another, each with its own address.

Everything between them goes over TCP with CURVE: samples, orders, and the weights by the zeromq medium. The link is a pair of
virtual interfaces that is taken down and up again. Needs root and iproute2; the namespaces bear this process's number and are
removed whatever happens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.buffer.ledger_reader import LedgerReader
from asyncrl.config.load import dump_config
from asyncrl.config.run import RunConfig
from asyncrl.observe.steps import read_steps

NUM_STEPS, MAX_STALENESS = 40, 1
PARTITION_S = 3.0
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Link:
    """Two namespaces and the addresses of their ends."""

    near: str
    far: str
    near_address: str
    far_address: str

    def set(self, state: str) -> None:
        ip("-n", self.near, "link", "set", "veth0", state)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def why_not() -> str:
    """Say why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    name = f"asyncrl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False, timeout=20)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    ip("netns", "del", name)
    return ""


@pytest.fixture
def link() -> Iterator[Link]:
    if reason := why_not():
        pytest.skip(reason)
    near, far = (f"asyncrl-{end}-{os.getpid()}" for end in ("near", "far"))
    made = Link(near, far, "10.77.0.1", "10.77.0.2")
    try:
        ip("netns", "add", near)
        ip("netns", "add", far)
        ip("-n", near, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", far)
        for namespace, address in ((near, made.near_address), (far, made.far_address)):
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", "veth0")
            ip("-n", namespace, "link", "set", "veth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for namespace in (near, far):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False, timeout=20)


def start_run(tiny: Callable[..., RunConfig], link: Link) -> tuple[Path, subprocess.Popen[bytes]]:
    config = tiny(
        num_steps=NUM_STEPS,
        eval__at_start=False,
        eval__at_end=False,
        checkpoint__every_steps=0,
        buffer__max_staleness=MAX_STALENESS,
        transport__kind="tcp",
        transport__host=link.near_address,
        broadcast__medium={
            "kind": "zeromq",
            "bind": f"tcp://{link.near_address}:*",
            "relay_bind": f"tcp://{link.far_address}:*",
        },
    )
    run_folder = Path(config.folder) / config.name
    (run_folder / "logs").mkdir(parents=True)
    (run_folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
    host = Path(__file__).with_name("netns_controller.py")
    command = ["ip", "netns", "exec", link.near, sys.executable, str(host), str(run_folder), link.far]
    with (run_folder / "logs" / "controller.log").open("wb") as log:
        return run_folder, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert process.poll() is None, f"the controller ended before {what}"
        assert time.monotonic() < deadline_s, f"{what}: not within {PATIENCE_S:.0f} s"
        time.sleep(0.02)


@pytest.mark.timed
@pytest.mark.timeout(300)
def test_a_partition_between_generator_and_controller_heals_and_nothing_is_lost(tiny, link):
    run_folder, process = start_run(tiny, link)
    try:
        wait_until(lambda: len(read_steps(run_folder)) >= 5, process, "5 steps over the link")
        assert link.near_address in (run_folder / "endpoint").read_text()
        link.set("down")
        before = len(read_steps(run_folder))
        time.sleep(PARTITION_S)  # how long the partition lasts, not a wait for anything
        during = len(read_steps(run_folder)) - before
        link.set("up")
        wait_until(lambda: len(read_steps(run_folder)) == NUM_STEPS, process, "all steps")
        assert process.stdin is not None
        wait_until(lambda: "run ended" in (run_folder / "logs" / "controller.log").read_text(), process, "the end")
    finally:
        process.stdin.close()
        code = process.wait(60)
    log = (run_folder / "logs" / "controller.log").read_text()
    assert code == 0, log
    # What had arrived before is still trained; then there is nothing to train on.
    assert during <= MAX_STALENESS + 3
    assert "is gone" not in log, "somebody was taken for dead"
    assert [report.step for report in read_steps(run_folder)] == list(range(NUM_STEPS))
    with LedgerReader(run_folder / "ledger.sqlite") as ledger:
        groups = {row.state: row.groups for row in ledger.counts()}
    assert groups == {"trained": NUM_STEPS * 4}
