"""The simulated device: bytes really allocated and really freed."""

import torch

from asyncrl.residency.device import SimulatedDevice


def test_memory_counts_once_from_when_it_is_taken_or_held_until_its_last_tensor_is_gone():
    device, foreign = SimulatedDevice(), torch.zeros(25)
    first, second = device.take([100, 200])
    device.hold([first])
    assert device.allocated_bytes == 300
    view = first[10:]
    del first, second
    assert device.allocated_bytes == 100
    del view
    assert (device.allocated_bytes, device.peak_bytes) == (0, 300)
    for _ in range(2):
        device.hold([foreign, foreign.view(5, 5)])
    assert device.allocated_bytes == 100
    del foreign
    assert device.allocated_bytes == 0
