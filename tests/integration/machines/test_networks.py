"""Across a network: the controller in one network namespace; generator, learner or a guest in another, at its own address.

Everything between them goes over TCP with CURVE: samples, orders, and the weights by the zeromq medium. The link is a pair of
virtual interfaces that is taken down and up again, for less time than anybody may be silent, and for more. Needs root and
iproute2; the namespaces bear this process's number and are removed whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.run import RunConfig
from asyncrl.observe.steps import read_steps
from tests.integration.conftest import ASYNCRL, NO_EVALUATION, NO_MODEL, NO_MODELS, assert_every_step_once, samples_by, written

NUM_STEPS, MAX_STALENESS = 20, 1
PARTITION_S = 3.0
PATIENCE_S = 300.0


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
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def link() -> Iterator[Link]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    near, far = (f"asyncrl-{end}-{os.getpid()}" for end in ("near", "far"))
    first = subprocess.run(["ip", "netns", "add", near], capture_output=True, text=True, check=False, timeout=20)
    if first.returncode:
        pytest.skip(f"no network namespace can be made here: {first.stderr.strip()}")
    made = Link(near, far, "10.77.0.1", "10.77.0.2")
    try:
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


@contextlib.contextmanager
def started_run(tiny: Callable[..., RunConfig], link: Link, *far_kinds: str, **settings: Any) -> Iterator[Run]:
    """Start a run whose processes of `far_kinds` are at the far end; without any, all are near. It must end well."""
    at = {kind: link.far_address if kind in far_kinds else link.near_address for kind in ("learner", "generator")}
    medium = {"kind": "zeromq", "bind": f"tcp://{at['learner']}:*", "relay_bind": f"tcp://{at['generator']}:*"}
    config = tiny(
        **NO_EVALUATION, checkpoint__every_steps=0, buffer__max_staleness=MAX_STALENESS, transport__kind="tcp",
        transport__host=link.near_address, broadcast__medium=medium, **settings,
    )  # fmt: skip
    assert config.transport.encryption == "curve"
    run_folder = Path(config.folder) / config.name
    (run_folder / "logs").mkdir(parents=True)
    written(config, run_folder / "config.toml")
    host = Path(__file__).with_name("netns_controller.py")
    command = ["ip", "netns", "exec", link.near, sys.executable, str(host), str(run_folder), link.far, *far_kinds]
    with (run_folder / "logs" / "controller.log").open("wb") as log:
        run = Run(run_folder, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log))
    try:
        yield run
    finally:
        run.process.stdin.close()
        code = run.process.wait(60)
    assert code == 0, run.log[-4000:]


@dataclass(frozen=True)
class Run:
    """A run whose owner is this test."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.folder / "logs" / "controller.log").read_text()

    @property
    def num_steps(self) -> int:
        return len(read_steps(self.folder))

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.process.poll() is None, f"the controller ended before {what}:\n{self.log[-4000:]}"
            assert time.monotonic() < deadline_s, f"{what}: not within {PATIENCE_S:.0f} s\n{self.log[-4000:]}"
            time.sleep(0.02)

    def samples_from_afar(self) -> int:
        return samples_by(self.folder, "joined-elsewhere-%")


def test_a_partition_between_the_controller_and_another_machine_heals_and_nothing_is_lost(tiny, link):
    with started_run(tiny, link, "generator", "learner", num_steps=NUM_STEPS, generate__engine=NO_MODEL) as run:
        run.wait_until(lambda: run.num_steps >= 5, "5 steps over the link")
        assert link.near_address in (run.folder / "endpoint").read_text()
        link.set("down")
        before = run.num_steps
        time.sleep(PARTITION_S)  # how long the partition lasts, not a wait for anything
        during = run.num_steps - before
        assert run.num_steps < NUM_STEPS, "the run was over before the link was down"
        link.set("up")
        run.wait_until(lambda: run.num_steps == NUM_STEPS, "all steps")
        run.wait_until(lambda: "run ended" in run.log, "the end")
    # What had arrived before is still trained; then there is nothing to train on, or nobody to train.
    assert during <= MAX_STALENESS + 3
    assert "is gone" not in run.log, "somebody was taken for dead"
    assert_every_step_once(run.folder, NUM_STEPS)


def joining_from_afar(link: Link, run: Run, *options: object) -> tuple[object, ...]:
    """Return `asyncrl join --address` on what is another machine by name and address."""
    elsewhere = ("ip", "netns", "exec", link.far, "unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
    address = (run.folder / "endpoint").read_text().strip()
    return (*elsewhere, *ASYNCRL, "join", "--address", address, *options)


def test_a_guest_that_was_cut_off_for_too_long_is_left_out_and_works_again_when_the_link_is_back(tiny, link, beside, tmp_path):
    """While it is away its groups are made elsewhere; what it finished meanwhile and brings back is not trained again."""
    with started_run(
        tiny, link, num_steps=100_000, placement={"most_joining_generators": 1},
        supervision__heartbeat_s=0.5, supervision__heartbeat_timeout_s=12.0,
        **NO_MODELS | {"generate__engine": NO_MODEL | {"token_latency_s": 0.05}},
    ) as run:  # fmt: skip
        run.wait_until(lambda: run.num_steps >= 2, "2 steps")
        stranger = beside(*joining_from_afar(link, run))
        keys = Path(shutil.copy2(run.folder / "keys" / "client.key", tmp_path / "client.key"))
        guest = beside(*joining_from_afar(link, run, "--keys", keys))
        run.wait_until(lambda: run.samples_from_afar() >= 32, "samples from afar")
        link.set("down")
        run.wait_until(lambda: "its connection is closed" in run.log, "the generator is given up")
        before = run.num_steps
        run.wait_until(lambda: run.num_steps > before + 10, "steps without it")
        theirs = run.samples_from_afar()
        link.set("up")
        run.wait_until(lambda: run.samples_from_afar() >= theirs + 32, "the guest works again")
        assert guest.poll() is None
        ip("netns", "exec", link.near, *ASYNCRL, "drain", str(run.folder))
        run.wait_until(lambda: "run ended" in run.log, "the end")
        assert guest.wait(90) == 0
        assert stranger.wait(60) != 0, "who has no key must not get in"
    assert_every_step_once(run.folder, run.num_steps)
