"""What every kind of component keeps (asyncrl/residency/component.py), over each kind there is."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ModelChangedError, ResidencyError
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.residency.components import CallbackComponent, FrozenModelComponent, ModuleComponent, TensorComponent
from asyncrl.residency.device import SimulatedDevice

KINDS = ["module", "optimizer", "frozen", "callback"]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 16)
        self.body = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight


class Engine:
    """Something that sleeps: its bytes are its own business."""

    def __init__(self) -> None:
        self.held = torch.arange(100.0)
        self.kept = None

    def sleep(self) -> None:
        self.kept, self.held = self.held.clone(), None

    def wake(self) -> None:
        self.held, self.kept = self.kept, None


class Case:
    """One component with what it is made of."""

    def __init__(self, kind, tmp_path, device):
        self.module, self.device = Tied(), device
        self.objects = list(self.module.state_dict(keep_vars=True).values())
        if kind == "module":
            self.component = ModuleComponent("policy", self.module, device, tmp_path / "swap")
        elif kind == "frozen":
            save_file(
                {n: t.clone() for n, t in self.module.state_dict().items() if n != "head.weight"}, tmp_path / "model.safetensors"
            )
            self.component = FrozenModelComponent("reference", self.module, device, tmp_path, tmp_path / "swap")
        elif kind == "optimizer":
            optimizer = self._trained()
            self.component = TensorComponent("policy optimizer", device, optimizer.state_tensors, tmp_path / "swap")
            self.objects = [tensor for _, tensor in optimizer.state_tensors()]
        else:
            self.engine = Engine()
            moves = {("device", "host"): self.engine.sleep, ("host", "device"): self.engine.wake}
            self.component, self.objects = CallbackComponent("engine weights", lambda: 400, moves), []

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


def test_every_way_and_back_keeps_every_bit_in_the_same_objects(case):
    before, addresses = case.values(), [id(tensor) for tensor in case.objects]
    for place in sorted(case.component.places - {"device"}):
        case.component.move(place)
        assert case.component.residence == place
        case.component.move("device")
        assert case.component.residence == "device"
        after = case.values()
        assert [id(tensor) for tensor in case.objects] == addresses
        for (dtype, stride, values), (own_dtype, own_stride, own) in zip(before, after, strict=True):
            assert (dtype, stride) == (own_dtype, own_stride)
            assert torch.equal(values, own)


@pytest.mark.parametrize("kind", ["module", "optimizer", "frozen"])
def test_off_the_device_it_holds_no_device_memory(kind, tmp_path):
    case = Case(kind, tmp_path, SimulatedDevice())
    num_bytes = case.component.num_bytes
    assert case.device.allocated_bytes == num_bytes > 0
    for place in sorted(case.component.places - {"device"}):
        case.component.move(place)
        assert case.device.allocated_bytes == 0
        assert case.component.num_bytes == num_bytes
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in case.objects)
        case.component.move("device")
        assert case.device.allocated_bytes == num_bytes


@pytest.mark.parametrize("kind", ["module", "optimizer", "frozen"])
def test_one_that_comes_back_to_a_full_device_stays_whole_where_it_was(kind, tmp_path):
    device = SimulatedDevice(budget_bytes=40_000)
    case = Case(kind, tmp_path, device)
    before = case.values()
    for place in sorted(case.component.places - {"device"}):
        case.component.move(place)
        filler = device.take([device.budget_bytes - case.component.num_bytes + 1])
        with pytest.raises(ResidencyError, match="no room for"):
            case.component.move("device")
        assert case.component.residence == place
        del filler
        case.component.move("device")
        assert all(torch.equal(old, new) for (*_, old), (*_, new) in zip(before, case.values(), strict=True))


@pytest.mark.parametrize("kind", ["module", "optimizer", "frozen"])
def test_one_that_the_disk_does_not_take_stays_whole_where_it_was(kind, tmp_path):
    case = Case(kind, tmp_path, SimulatedDevice())
    before = case.values()
    (tmp_path / "swap").write_text("a file where the folder should be")
    for start in ("device", "host"):
        case.component.move(start)
        with pytest.raises(ResidencyError, match="make room there"):
            case.component.move("disk")
        assert case.component.residence == start
    case.component.move("device")
    assert all(torch.equal(old, new) for (*_, old), (*_, new) in zip(before, case.values(), strict=True))


@pytest.mark.parametrize("kind", ["module", "optimizer", "frozen"])
def test_it_can_be_read_where_it_is_without_a_byte_on_the_device(kind, tmp_path):
    case = Case(kind, tmp_path, SimulatedDevice())
    before = case.values()
    for place in ("host", "disk"):
        case.component.move(place)
        with case.component.readable():
            assert all(torch.equal(old, new) for (*_, old), (*_, new) in zip(before, case.values(), strict=True))
            assert case.device.allocated_bytes == 0
        assert all(tensor.numel() == 0 for tensor in case.objects)


def test_a_frozen_model_whose_folder_has_not_all_of_it_is_moved_and_never_destroyed(tmp_path):
    module, folder = Tied(), tmp_path / "other"
    folder.mkdir()
    save_file({"body.weight": module.body.weight.detach()}, folder / "model.safetensors")
    component = FrozenModelComponent("reference", module, SimulatedDevice(), folder, tmp_path / "swap")
    assert component.places == {"device", "host", "disk"}


def test_a_frozen_model_whose_tensors_are_laid_out_otherwise_than_its_files_is_never_destroyed(tmp_path):
    case = Case("frozen", tmp_path, SimulatedDevice())
    case.module.body.weight.data = case.module.body.weight.data.t().contiguous().t()
    component = FrozenModelComponent("reference", case.module, SimulatedDevice(), tmp_path, tmp_path / "swap")
    before = case.module.body.weight.detach().clone()
    assert "absent" not in component.places
    component.move("host")
    component.move("device")
    assert torch.equal(case.module.body.weight, before)


@pytest.mark.parametrize("change", ["gone", "damaged", "another", "another shape"])
def test_a_frozen_model_whose_folder_changed_says_so_and_comes_once_it_is_as_it_was(tmp_path, change):
    case = Case("frozen", tmp_path, SimulatedDevice())
    before, path = case.values(), tmp_path / "model.safetensors"
    case.component.move("absent")
    was = path.read_bytes()
    if change == "another":
        save_file({"body.weight": torch.zeros(16, 16)}, path)
    elif change == "another shape":
        save_file({name: tensor.repeat(2) if tensor.dim() == 1 else tensor for name, tensor in load_file(path).items()}, path)
    else:
        path.unlink() if change == "gone" else path.write_bytes(was[:100])
    with pytest.raises(ModelChangedError, match=rf"{path}.*has to stay as it is.*resume the run"):
        case.component.move("device")
    assert (case.component.residence, case.device.allocated_bytes) == ("absent", 0)
    path.write_bytes(was)
    case.component.move("device")
    assert all(torch.equal(old, new) for (*_, old), (*_, new) in zip(before, case.values(), strict=True))


@pytest.mark.parametrize("written", ["before it went", "before", "while"])
def test_a_frozen_model_whose_files_were_rewritten_does_not_come_back_with_other_values(tmp_path, written, monkeypatch):
    case = Case("frozen", tmp_path, SimulatedDevice())
    path = tmp_path / "model.safetensors"
    others, when = {name: tensor + 1 for name, tensor in load_file(path).items()}, path.stat().st_mtime_ns

    def rewrite() -> None:
        save_file(others, path)
        os.utime(path, ns=(when, when))  # as `cp -p` and `rsync -t` leave it

    if written == "before it went":
        rewrite()
    case.component.move("absent")
    if written == "before":
        rewrite()
    elif written == "while":
        copy = case.device.copy
        monkeypatch.setattr(case.device, "copy", lambda pairs: (rewrite(), copy(pairs)))
    with pytest.raises(ModelChangedError, match=r"model\.safetensors is not what it was.*resume the run"):
        case.component.move("device")
    assert (case.component.residence, case.device.allocated_bytes) == ("absent", 0)


def test_a_frozen_model_whose_files_were_touched_and_have_the_same_values_comes_back(tmp_path):
    case = Case("frozen", tmp_path, SimulatedDevice())
    before, path = case.values(), tmp_path / "model.safetensors"
    case.component.move("absent")
    save_file({name: tensor.float() for name, tensor in load_file(path).items()}, path)
    case.component.move("device")
    assert all(torch.equal(old, new) for (*_, old), (*_, new) in zip(before, case.values(), strict=True))
