"""Memory that is let go of: nobody's once nothing is on it, the system's when it wants it, and had again where it did not."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from asyncrl.residency.arenas import MOST_FREE, Arenas
from asyncrl.residency.components import ModuleComponent
from asyncrl.residency.device import SimulatedDevice

MIB = 1 << 20
PAGE_OUT = 21
"""MADV_PAGEOUT: the kernel takes these pages now, as it does when it has need of them."""
SUMMARY = Path("/proc/self/smaps_rollup")

needs_summary = pytest.mark.skipif(not SUMMARY.exists(), reason="the system does not say which pages are on offer")


def kib_of(kind):
    return next(int(line.split()[1]) for line in SUMMARY.read_text().splitlines() if line.startswith(f"{kind}:"))


def on_offer_mib():
    return kib_of("LazyFree") / 1024


def resident_mib():
    return kib_of("Rss") / 1024


def the_kernel_takes(address, num_bytes):
    """Have the kernel take what it may of these pages; only what is on offer is lost."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), PAGE_OUT):
        pytest.skip("this kernel cannot be told to take pages")


def faults_of(action):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    action()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_piece_is_on_offer_once_no_tensor_is_left_on_it_and_not_before():
    arenas = Arenas()
    piece, (first, second) = arenas.take([100, 200])
    view = first.view(10, 10)[3:]
    del piece, first, second
    assert arenas.num_free == 0
    del view
    assert arenas.num_free == 1


def test_tensors_on_a_piece_do_not_overlap_and_empty_ones_are_on_none():
    _, tensors = Arenas().take([65, 0, 64])
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.tolist() for tensor in tensors] == [[0] * 65, [], [2] * 64]
    assert Arenas().take([0, 0])[0] is None


def test_a_piece_is_had_again_without_a_fault_by_who_takes_as_much():
    arenas = Arenas()
    fill = lambda: arenas.take([MIB])[1][0].fill_(1)  # noqa: E731 - gone again at its end
    assert faults_of(fill) >= MIB // resource.getpagesize()
    held = arenas.take([2 * MIB])
    assert faults_of(fill) < 16
    assert arenas.num_free == 1
    del held
    assert arenas.num_free == 2


def test_two_that_take_as_much_at_once_share_nothing():
    arenas = Arenas()
    pieces = [arenas.take([1000]) for _ in range(2)]
    for number, (_, (tensor,)) in enumerate(pieces):
        tensor.fill_(number)
    assert [int(tensor.sum()) for _, (tensor,) in pieces] == [0, 1000]


def test_only_so_many_pieces_are_kept():
    arenas = Arenas()
    held = [arenas.take([64]) for _ in range(MOST_FREE + 5)]
    del held
    assert arenas.num_free == MOST_FREE


@needs_summary
def test_the_system_takes_what_is_on_offer_when_it_wants_it_and_what_comes_back_works():
    arenas = Arenas()
    piece, (tensor,) = arenas.take([64 * MIB])
    tensor.fill_(1)
    address = tensor.data_ptr()
    held, offered = resident_mib(), on_offer_mib()
    del piece, tensor
    assert on_offer_mib() - offered > 60
    the_kernel_takes(address, 64 * MIB)
    assert held - resident_mib() > 60
    _, (again,) = arenas.take([64 * MIB])
    again.fill_(3)
    assert again.data_ptr() == address
    assert bool((again == 3).all())


@needs_summary
def test_what_is_dropped_the_system_has_at_once():
    arenas = Arenas()
    piece, (tensor,) = arenas.take([64 * MIB])
    tensor.fill_(1)
    held = resident_mib()
    del piece, tensor
    arenas.drop()
    assert held - resident_mib() > 60
    assert arenas.num_free == 0


@needs_summary
def test_a_component_offers_the_memory_that_it_left_on_each_side():
    device = SimulatedDevice()
    component = ModuleComponent("policy", torch.nn.Linear(4096, 4096), device)
    for place in ("host", "device"):
        component.move(place)
    for place, on_the_device in (("host", 0), ("device", component.num_bytes)):
        before, held = on_offer_mib(), resident_mib()
        component.move(place)
        assert device.allocated_bytes == on_the_device
        assert abs(on_offer_mib() - before) < 4, "what it left for what it took"
        assert on_offer_mib() > 60
        assert resident_mib() - held < 4
