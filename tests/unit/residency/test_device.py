"""The count of a simulated device."""

import torch

from asyncrl.residency.components import TensorComponent
from asyncrl.residency.device import SimulatedDevice


def test_what_has_passed_the_budget_can_still_leave_the_device(tmp_path):
    layer, device = torch.nn.Linear(300, 1, bias=False), SimulatedDevice(budget_bytes=1000)
    component = TensorComponent.of_module("policy", layer, device, tmp_path)
    assert device.allocated_bytes == 1200
    component.move("host")
    assert (component.residence, device.allocated_bytes) == ("host", 0)
