"""The residency manager's moves against bare copies of the same bytes.

Work: a model of SmolLM2-135M's shapes, random, float32 (538 MB), and the optimizer state of twice that. On a GPU, host memory is
pinned; without one the device is the simulated one (residency/device.py), whose memory is really taken and really given back.

- `switch_vs_copy`: seconds of a whole switch by the manager (device to host, and back to the device) over those of plain copies
  of the same tensors there and back between two sets of buffers that stay.
- `switch_vs_fresh_copy` (a figure): the same over copies that take their memory each time and let go of the old.

Sides are measured in turns within a round, after warm rounds; figures are medians.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from asyncrl.clock import SystemClock
from asyncrl.residency.components import ModuleComponent, TensorComponent
from asyncrl.residency.device import CudaDevice, Device, SimulatedDevice
from asyncrl.residency.manager import ResidencyManager
from asyncrl.residency.plan import PhaseNeeds
from benchmarks.harness import BenchResult, interleaved, ratio, seconds_of
from benchmarks.workload import smollm2_model

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
            "copy": _copies(model, device, fresh=False),
            "fresh": _copies(model, device, fresh=True),
        }
        seconds = interleaved({name: partial(seconds_of, side) for name, side in sides.items()}, rounds, WARM_ROUNDS)
        del sides
        to_disk, from_disk = partial(policy.move, "disk"), partial(policy.move, "device")
        disk_sides = {"write": partial(seconds_of, to_disk), "reload": partial(seconds_of, from_disk)}
        disk = interleaved(disk_sides, max(1, rounds // 2), 1)
        optimizer = _optimizer_turn(model, device)
    return BenchResult(
        "residency",
        {
            "model_mb": num_bytes / MEGA,
            "switch_ms": seconds["switch"] * 1e3,
            "copy_ms": seconds["copy"] * 1e3,
            "fresh_copy_ms": seconds["fresh"] * 1e3,
            "switch_mb_per_s": 2 * num_bytes / MEGA / seconds["switch"],
            "switch_vs_fresh_copy": seconds["switch"] / seconds["fresh"],
            "disk_write_ms": disk["write"] * 1e3,
            "disk_reload_ms": disk["reload"] * 1e3,
            "disk_write_mb_per_s": num_bytes / MEGA / disk["write"],
            "disk_reload_mb_per_s": num_bytes / MEGA / disk["reload"],
            **optimizer,
        },
        {"switch_vs_copy": ratio(seconds["switch"] / seconds["copy"], SWITCH_GOAL, at_least=False)},
    )


def _turn(manager: ResidencyManager) -> Callable[[], None]:
    """Return a whole switch by the manager: everything off the device, and back."""

    def turn() -> None:
        manager.switch("rollout")
        manager.switch("train")

    return turn


def _copies(model: torch.nn.Module, device: Device, *, fresh: bool) -> Callable[[], None]:
    """Return the same bytes off the device and back, by plain copies.

    Between two sets of buffers that stay, or (`fresh`) into memory that is taken for it and let go of.
    """
    is_cuda = device.kind.type == "cuda"
    there = [parameter.detach().clone() for parameter in model.parameters()]

    def taken(source: torch.Tensor, place: torch.device | str) -> torch.Tensor:
        return torch.empty(source.shape, dtype=source.dtype, device=place, pin_memory=is_cuda and place == "cpu")

    here = [] if fresh else [taken(source, "cpu") for source in there]

    def copies() -> None:
        for place, sources, targets in (("cpu", there, here), (device.kind, here or there, there)):
            for index, source in enumerate(sources):
                target = taken(source, place) if fresh else targets[index]
                target.copy_(source, non_blocking=is_cuda)
                if fresh:
                    there[index] = target
            if is_cuda:
                torch.cuda.synchronize()

    return copies


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
