"""The simulated device: bytes really allocated and really freed."""

import gc

import psutil
import pytest
import torch

from asyncrl.residency.components import ModuleComponent
from asyncrl.residency.device import SimulatedDevice, SimulatedOutOfMemoryError

MIB = 1 << 20


def test_memory_counts_from_take_until_its_last_tensor_is_gone():
    device = SimulatedDevice()
    first, second = device.take([100, 200])
    assert device.allocated_bytes == 300
    view = first[10:]
    del first, second
    assert device.allocated_bytes == 300
    del view
    assert (device.allocated_bytes, device.peak_bytes) == (0, 300)


def test_a_full_device_raises_what_a_gpu_raises_and_takes_nothing():
    device = SimulatedDevice(budget_bytes=100)
    kept = device.take([60])
    with pytest.raises(torch.OutOfMemoryError, match="60 of 100 taken") as raised:
        device.take([41])
    assert isinstance(raised.value, SimulatedOutOfMemoryError)
    assert device.allocated_bytes == kept[0].nbytes


def test_tensors_taken_together_have_storages_of_their_own():
    first, second = SimulatedDevice().take([64, 64])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == 64


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
    component = ModuleComponent("policy", module, device, tmp_path)
    for place in ("host", "device"):
        component.move(place)
    gc.collect()
    before = process.memory_info().rss
    component.move("disk")
    freed = before - process.memory_info().rss
    assert freed > 0.8 * 128 * MIB, "on the device, and host memory kept for the next time"
    component.move("device")
    assert device.allocated_bytes == component.num_bytes


def test_what_autograd_keeps_counts_while_it_is_kept():
    device, weight = SimulatedDevice(), torch.nn.Parameter(torch.randn(50, 50))
    device.hold([weight])
    with device.counting_activations():
        loss = (torch.randn(20, 50) @ weight).exp().sum()
    assert device.allocated_bytes == weight.nbytes + 2 * 20 * 50 * 4
    loss.backward()
    assert device.allocated_bytes == weight.nbytes


def test_activations_beyond_the_budget_raise():
    device, weight = SimulatedDevice(budget_bytes=14_000), torch.nn.Parameter(torch.randn(50, 50))
    device.hold([weight])
    with device.counting_activations(), pytest.raises(SimulatedOutOfMemoryError):
        ((torch.randn(10, 50) @ weight).tanh() @ weight).exp().sum()
    gc.collect()
    assert device.allocated_bytes == weight.nbytes
