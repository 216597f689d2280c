"""The residency manager's moves against bare copies of the same bytes.

Work: a model of SmolLM2-135M's shapes, random, float32 (538 MB). On a GPU, host memory is
pinned; without one the device is the simulated one (residency/device.py), whose memory is really taken and really given back.

- `switch_vs_copy`: seconds of a whole switch by the manager (device to host, and back to the device) over those of plain copies
  of the same tensors there and back between two sets of buffers that stay.

Sides are measured in turns within a round, after warm rounds; figures are medians.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.clock import SystemClock
from asyncrl.config.run import PlacementConfig
from asyncrl.residency.components import ResidencyManager, TensorComponent
from asyncrl.residency.device import CudaDevice, Device, SimulatedDevice
from asyncrl.residency.plan import PhaseNeeds
from benchmarks.harness import BenchResult, ratio, seconds_in_turns
from benchmarks.workload import smollm2_model

DEFAULT_ROUNDS, WARM_ROUNDS = 7, 2
SWITCH_GOAL = 1.5
PHASES = (PhaseNeeds("rollout", gives_back=True), PhaseNeeds("train", now=("policy",)))


def run(rounds: int = 0) -> BenchResult:
    """Run it; 0 rounds: `DEFAULT_ROUNDS`."""
    device = CudaDevice(torch.device("cuda")) if torch.cuda.is_available() else SimulatedDevice()
    model = smollm2_model().to(device.kind)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        policy = TensorComponent.of_module("policy", model, device, Path(folder))
        manager = ResidencyManager(PlacementConfig(), Path(folder), "bench", [policy], PHASES, device, SystemClock())

        def turn() -> None:
            manager.switch("rollout")
            manager.switch("train")

        seconds = seconds_in_turns({"switch": turn, "copy": _copies(model, device)}, rounds or DEFAULT_ROUNDS, WARM_ROUNDS)
        manager.close()
    figures = {"model_mb": sum(parameter.nbytes for parameter in model.parameters()) / 1e6}
    figures |= {f"{name}_ms": side_s * 1e3 for name, side_s in seconds.items()}
    ratios = {"switch_vs_copy": ratio(seconds["switch"] / seconds["copy"], SWITCH_GOAL, at_least=False)}
    return BenchResult("residency", figures, ratios)


def _copies(model: torch.nn.Module, device: Device) -> Callable[[], None]:
    """Return the same bytes off the device and back, by plain copies between two sets of buffers that stay."""
    is_cuda = device.kind.type == "cuda"
    there = [parameter.detach().clone() for parameter in model.parameters()]
    here = [torch.empty(source.shape, dtype=source.dtype, pin_memory=is_cuda) for source in there]

    def copies() -> None:
        for sources, targets in ((there, here), (here, there)):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=is_cuda)
            if is_cuda:
                torch.cuda.synchronize()

    return copies
