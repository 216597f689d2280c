"""What every kind of component keeps (asyncrl/residency/component.py), over each kind there is."""

import pytest
import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ResidencyError
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.residency.components import TensorComponent
from asyncrl.residency.device import SimulatedDevice

KINDS = ["module", "optimizer", "frozen"]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 16)
        self.body = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight


class Case:
    """One component with what it is made of."""

    def __init__(self, kind, tmp_path, device):
        self.module, self.device = Tied(), device
        self.objects = list(self.module.state_dict(keep_vars=True).values())
        if kind == "module":
            self.component = TensorComponent.of_module("policy", self.module, device, tmp_path / "swap")
        elif kind == "frozen":
            self.component = TensorComponent.of_module("reference", self.module, device, tmp_path / "swap", is_frozen=True)
        else:
            optimizer = self._trained()
            self.component = TensorComponent("policy optimizer", device, optimizer.state_tensors, tmp_path / "swap")
            self.objects = [tensor for _, tensor in optimizer.state_tensors()]

    def _trained(self):
        self.keep = torch.nn.Linear(32, 8, dtype=torch.bfloat16)
        config = LearnerConfig(learning_rate=1e-2, warmup_steps=0, dtype="bfloat16")
        optimizer = PolicyOptimizer(self.keep.named_parameters(), config, 10)
        optimizer.backward(self.keep(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().sum())
        optimizer.clip()
        optimizer.step(0)
        return optimizer

    def values(self):
        return [(tensor.dtype, tensor.stride(), tensor.detach().clone()) for tensor in self.objects]


@pytest.fixture(params=KINDS)
def case(request, tmp_path):
    return Case(request.param, tmp_path, SimulatedDevice())


def test_every_way_and_back_keeps_every_bit_in_the_same_objects_and_meanwhile_no_device_memory(case):
    before, addresses, num_bytes = case.values(), [id(tensor) for tensor in case.objects], case.component.num_bytes
    assert case.device.allocated_bytes == num_bytes > 0
    for place in ("host", "disk"):
        case.component.move(place)
        assert (case.component.residence, case.component.num_bytes) == (place, num_bytes)
        with case.component.readable():
            assert all(torch.equal(old, new) for (*_, old), (*_, new) in zip(before, case.values(), strict=True))
            assert case.device.allocated_bytes == 0
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in case.objects)
        case.component.move("device")
        assert (case.component.residence, case.device.allocated_bytes) == ("device", num_bytes)
        after = case.values()
        assert [id(tensor) for tensor in case.objects] == addresses
        for (dtype, stride, values), (own_dtype, own_stride, own) in zip(before, after, strict=True):
            assert (dtype, stride) == (own_dtype, own_stride)
            assert torch.equal(values, own)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_the_disk_or_a_full_device_does_not_take_stays_whole_where_it_was(kind, tmp_path):
    device, in_the_way = SimulatedDevice(budget_bytes=40_000), tmp_path / "swap"
    case = Case(kind, tmp_path, device)
    before = case.values()
    in_the_way.write_text("a file where the folder should be")
    for place in ("device", "host"):
        case.component.move(place)
        with pytest.raises(ResidencyError, match="make room there"):
            case.component.move("disk")
        assert case.component.residence == place
    in_the_way.unlink()
    for place in ("host", "disk"):
        case.component.move(place)
        filler = device.take([device.budget_bytes - case.component.num_bytes + 1])
        with pytest.raises(ResidencyError, match="no room for"):
            case.component.move("device")
        assert case.component.residence == place
        del filler
        case.component.move("device")
        assert all(torch.equal(old, new) for (*_, old), (*_, new) in zip(before, case.values(), strict=True))


def test_a_frozen_model_is_written_once(tmp_path):
    case = Case("frozen", tmp_path, SimulatedDevice())
    before, path = case.values(), tmp_path / "swap" / "reference.bin"
    case.component.move("disk")
    written = path.stat().st_mtime_ns
    for place in ("device", "disk", "host", "disk", "device"):
        case.component.move(place)
    assert path.stat().st_mtime_ns == written
    assert all(torch.equal(old, new) for (*_, old), (*_, new) in zip(before, case.values(), strict=True))
