"""The simulated device: bytes really allocated and really freed."""

import gc

import psutil
import torch

from asyncrl.residency.components import TensorComponent
from asyncrl.residency.device import SimulatedDevice

MIB = 1 << 20


def test_memory_counts_from_take_until_its_last_tensor_is_gone():
    device = SimulatedDevice()
    first, second = device.take([100, 200])
    assert device.allocated_bytes == 300
    view = first[10:]
    del first, second
    assert device.allocated_bytes == 100
    del view
    assert (device.allocated_bytes, device.peak_bytes) == (0, 300)


def test_foreign_tensors_count_once_until_they_are_gone():
    device, tensor = SimulatedDevice(), torch.zeros(25)
    device.hold([tensor, tensor.view(5, 5)])
    device.hold([tensor])
    assert device.allocated_bytes == 100
    del tensor
    assert device.allocated_bytes == 0
    (taken,) = device.take([100])
    device.hold([taken])
    assert device.allocated_bytes == 100


def test_the_operating_system_has_a_component_s_memory_back_once_it_is_on_disk(tmp_path):
    device, process = SimulatedDevice(), psutil.Process()
    module = torch.nn.Linear(4096, 4096)
    component = TensorComponent.of_module("policy", module, device, tmp_path)
    for place in ("host", "device"):
        component.move(place)
    gc.collect()
    before = process.memory_info().rss
    component.move("disk")
    freed = before - process.memory_info().rss
    assert freed > 0.8 * 64 * MIB, "what it had on the device"
    component.move("device")
    assert device.allocated_bytes == component.num_bytes
