"""The residency manager: plans carried out, and what it says of them."""

import logging

import pytest
import torch

from asyncrl.clock import SystemClock
from asyncrl.errors import ResidencyError
from asyncrl.observe.memory import open_memory, read_memory
from asyncrl.residency.components import TensorComponent
from asyncrl.residency.device import SimulatedDevice
from asyncrl.residency.manager import ResidencyManager
from asyncrl.residency.plan import PhaseNeeds

SIZE = 16 * 16 * 4


@pytest.fixture
def kit(tmp_path):
    """Make a manager of two models, its device, and the models."""
    file = open_memory(tmp_path, "learner")

    def make(second, needed, budget_bytes=None, **rest):
        device = SimulatedDevice(budget_bytes)
        modules = {name: torch.nn.Linear(16, 16, bias=False) for name in ("policy", second)}
        components = [TensorComponent.of_module(name, module, device, tmp_path / "swap") for name, module in modules.items()]
        phases = [PhaseNeeds("rollout", gives_back=True), PhaseNeeds("train", now=needed)]
        manager = ResidencyManager("learner", components, phases, device, SystemClock(), record=file.write, **rest)
        return manager, device, modules

    yield make
    file.close()


def test_every_switch_is_one_line_of_the_timeline_and_of_the_log(kit, tmp_path, caplog):
    manager, _, _ = kit("reference", ("policy",))
    with caplog.at_level(logging.INFO):
        for number, phase in enumerate(("rollout", "train", "rollout")):
            manager.switch(phase, number)
    lines = read_memory(tmp_path)
    assert [(line.process, line.phase, line.number, line.ended_phase) for line in lines] == [
        ("learner", "rollout", 0, ""), ("learner", "train", 1, "rollout"), ("learner", "rollout", 2, "train"),
    ]  # fmt: skip
    assert [line.peak_bytes for line in lines] == [2 * SIZE, 0, SIZE]
    assert [sum(line.resident.values()) for line in lines] == [0, SIZE, 0]
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    assert "policy host to device" in caplog.messages[1]


def test_a_move_that_fails_leaves_the_phase_unreached_and_the_next_switch_goes_on(kit):
    manager, device, _ = kit("critic", ("policy", "critic"), 2 * SIZE)
    manager.switch("rollout", 0)
    others = device.take([SIZE])
    with pytest.raises(ResidencyError, match=r"(?s)'train' was not reached: no room for critic .*policy"):
        manager.switch("train", 1)
    assert (manager.phase, manager.resident) == ("rollout", {"policy": SIZE})
    del others
    moves = [(move.component, move.before, move.after) for move in manager.switch("train", 2).moves]
    assert moves == [("policy", "host", "device"), ("critic", "host", "device")]
