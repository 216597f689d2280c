"""The residency manager's moves against bare copies of the same bytes.

Work: a model of SmolLM2-135M's shapes, random, float32 (538 MB), and the optimizer state of twice that. On a GPU, host memory is
pinned; without one the device is the simulated one (residency/device.py), whose memory is really taken and really given back.

- `switch_vs_copy`: seconds of a whole turn by the manager (device to host, and back to the device) over those of bare copies of
  the same tensors there and back between two sets of buffers that stay. What the policy left is on offer to others meanwhile, and
  nobody takes it.
- `taken_switch_vs_copy` (a figure): the same where all that was on offer is taken before the policy comes back (a GPU's memory
  is with the driver in either case).
- `switch_vs_fresh_copy` (a figure): the first over copies that take memory where they go and let go of the old.

Sides are measured in turns within a round, after warm rounds; figures are medians.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.bench.result import BenchResult, interleaved, ratio, seconds_of
from asyncrl.bench.smollm2 import smollm2_model
from asyncrl.clock import SystemClock
from asyncrl.residency.components import ModuleComponent
from asyncrl.residency.cuda import CudaDevice
from asyncrl.residency.device import Device, SimulatedDevice
from asyncrl.residency.manager import ResidencyManager
from asyncrl.residency.plan import PhaseNeeds
from asyncrl.residency.tensors import TensorComponent

DEFAULT_ROUNDS = 7
WARM_ROUNDS = 2
SWITCH_GOAL = 1.5
MEGA = 1e6
PHASES = (PhaseNeeds("rollout", gives_back=True), PhaseNeeds("train", now=("policy", "policy optimizer")))


def run(rounds: int = 0) -> BenchResult:
    """Run it; 0 rounds: `DEFAULT_ROUNDS`."""
    rounds = rounds or DEFAULT_ROUNDS
    device = CudaDevice(torch.device("cuda")) if torch.cuda.is_available() else SimulatedDevice()
    model = smollm2_model().to(device.kind)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        policy = ModuleComponent("policy", model, device, Path(folder))
        manager = ResidencyManager("bench", [policy], PHASES, device, SystemClock())
        sides = {
            "switch": _turn(manager),
            "taken": _turn(manager, lambda: device.give_back(at_once=True)),
            "copy": _bare_copies(model, device),
            "fresh": _fresh_copies(model, device),
        }
        seconds = interleaved({name: _timed(side) for name, side in sides.items()}, rounds, WARM_ROUNDS)
        del sides
        disk = interleaved(_disk_sides(policy), max(1, rounds // 2), 1)
        optimizer = _optimizer_turn(model, device)
    return BenchResult(
        "residency",
        {
            "model_mb": num_bytes / MEGA,
            "switch_ms": seconds["switch"] * 1e3,
            "taken_switch_ms": seconds["taken"] * 1e3,
            "copy_ms": seconds["copy"] * 1e3,
            "fresh_copy_ms": seconds["fresh"] * 1e3,
            "switch_mb_per_s": 2 * num_bytes / MEGA / seconds["switch"],
            "taken_switch_vs_copy": seconds["taken"] / seconds["copy"],
            "switch_vs_fresh_copy": seconds["switch"] / seconds["fresh"],
            "disk_write_ms": disk["write"] * 1e3,
            "disk_reload_ms": disk["reload"] * 1e3,
            "disk_write_mb_per_s": num_bytes / MEGA / disk["write"],
            "disk_reload_mb_per_s": num_bytes / MEGA / disk["reload"],
            **optimizer,
        },
        {"switch_vs_copy": ratio(seconds["switch"] / seconds["copy"], SWITCH_GOAL, at_least=False)},
    )


def _timed(action: Callable[[], object]) -> Callable[[], float]:
    return lambda: seconds_of(action)


def _turn(manager: ResidencyManager, meanwhile: Callable[[], None] | None = None) -> Callable[[], None]:
    """Return a whole turn by the manager: everything off the device, what happens meanwhile, and back."""

    def turn() -> None:
        manager.switch("rollout")
        if meanwhile is not None:
            meanwhile()
        manager.switch("train")

    return turn


def _fresh_copies(model: torch.nn.Module, device: Device) -> Callable[[], None]:
    """Return the same bytes off the device and back, by plain copies into memory that is taken for it and let go of."""
    tensors = [parameter.detach().clone() for parameter in model.parameters()]
    is_cuda = device.kind.type == "cuda"

    def copies() -> None:
        for place, pinned in (("cpu", is_cuda), (device.kind, False)):
            for index, source in enumerate(tensors):
                target = torch.empty(source.shape, dtype=source.dtype, device=place, pin_memory=pinned)
                tensors[index] = target.copy_(source, non_blocking=is_cuda)
            if is_cuda:
                torch.cuda.synchronize()

    return copies


def _bare_copies(model: torch.nn.Module, device: Device) -> Callable[[], None]:
    """Return the same bytes there and back between two sets of buffers that stay."""
    is_cuda = device.kind.type == "cuda"
    there = [parameter.detach().clone() for parameter in model.parameters()]
    here = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda) for tensor in there]

    def copies() -> None:
        for sources, targets in ((there, here), (here, there)):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=is_cuda)
            if is_cuda:
                torch.cuda.synchronize()

    return copies


def _disk_sides(component: TensorComponent) -> dict[str, Callable[[], float]]:
    """Return one move to disk and the one back, in this order."""
    return {
        "write": lambda: seconds_of(lambda: component.move("disk")),
        "reload": lambda: seconds_of(lambda: component.move("device")),
    }


def _optimizer_turn(model: torch.nn.Module, device: Device) -> dict[str, float]:
    """Return what a turn of AdamW's moments takes."""
    moments = [
        (f"{kind}/{name}", torch.zeros_like(p)) for name, p in model.named_parameters() for kind in ("exp_avg", "exp_avg_sq")
    ]
    component = TensorComponent("policy optimizer", device, lambda: moments)
    turn = _turn(ResidencyManager("bench", [component], PHASES, device, SystemClock()))
    turn()
    seconds, num_bytes = seconds_of(turn), sum(tensor.nbytes for _, tensor in moments)
    return {
        "optimizer_mb": num_bytes / MEGA,
        "optimizer_switch_ms": seconds * 1e3,
        "optimizer_switch_mb_per_s": 2 * num_bytes / MEGA / seconds,
    }
