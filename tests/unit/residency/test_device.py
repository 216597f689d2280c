"""The count of a simulated device, and when memory is given back."""

import pytest
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.run import PlacementConfig
from asyncrl.errors import ResidencyError
from asyncrl.residency.components import ResidencyManager, TensorComponent
from asyncrl.residency.device import SimulatedDevice
from asyncrl.residency.plan import PhaseNeeds


def test_what_has_passed_the_budget_can_still_leave_the_device(tmp_path):
    layer, device = torch.nn.Linear(300, 1, bias=False), SimulatedDevice(budget_bytes=1000)
    component = TensorComponent.of_module("policy", layer, device, tmp_path)
    assert device.allocated_bytes == 1200
    component.move("host")
    assert (component.residence, device.allocated_bytes) == ("host", 0)


def test_host_memory_that_is_full_is_said_and_the_component_stays(tmp_path, monkeypatch):
    device = SimulatedDevice()
    component = TensorComponent.of_module("policy", torch.nn.Linear(3, 1), device, tmp_path)
    # More than any machine has: torch raises an error of its own.
    monkeypatch.setattr(device, "take", lambda sizes, on_host: [torch.empty(1 << 60, dtype=torch.uint8) for _ in sizes])
    with pytest.raises(ResidencyError, match="no room for policy"):
        component.move("host")
    assert component.residence == "device"


def test_a_switch_that_moves_nothing_gives_back_what_is_no_component(tmp_path, monkeypatch):
    """As in hybrid with the optimizer in host memory: the policy stays, and gradients and activations were there."""
    device, times = SimulatedDevice(), []
    monkeypatch.setattr(device, "give_back", lambda: times.append(len(times)))
    phases = [PhaseNeeds("rollout", now=("policy",), gives_back=True), PhaseNeeds("train", now=("policy",))]
    policy = TensorComponent.of_module("policy", torch.nn.Linear(3, 1), device, tmp_path)
    manager = ResidencyManager(PlacementConfig(), tmp_path, "learner", [policy], phases, device, SystemClock())
    assert manager.switch("rollout", 0).moves == ()
    assert len(times) == 1
    manager.switch("train", 1)
    manager.switch("rollout")  # the learner's own, within a step
    assert len(times) == 1
    manager.close()
