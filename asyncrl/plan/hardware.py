"""Accelerators by name and clusters of them. Figures are the vendors' data sheets', dense, per device; link speeds one way.

Called by plan/question.py and plan/speed.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from asyncrl.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device."""

    name: str
    memory_bytes: float
    bf16_flops: float
    """Floating-point operations a second, dense, bf16 with float32 sums."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To another device of the same machine (NVLink; PCIe where there is none), one way."""
    network_bytes_per_s: float
    """To another machine, this device's share."""
    host_bytes_per_s: float
    """To the memory of its own machine (PCIe), one way."""
    dollars_per_hour: float
    """A usual price of renting one; to be replaced by your own (`--price`)."""


def _gpu(
    name: str,
    memory_gb: float,
    tflops: float,
    bandwidth_tb: float,
    link_gb: float,
    network_gb: float,
    host_gb: float,
    price: float,
) -> Accelerator:
    return Accelerator(
        name, memory_gb * 1e9, tflops * 1e12, bandwidth_tb * 1e12, link_gb * 1e9, network_gb * 1e9, host_gb * 1e9, price
    )


ACCELERATORS = {
    item.name: item
    for item in (
        _gpu("B200", 180, 2250, 8.0, 900, 50, 64, 5.0),
        _gpu("H200", 141, 989, 4.8, 450, 50, 64, 3.5),
        _gpu("H100", 80, 989, 3.35, 450, 50, 64, 2.8),
        _gpu("A100", 80, 312, 2.04, 300, 25, 32, 1.7),
        _gpu("A100-40", 40, 312, 1.56, 300, 25, 32, 1.3),
        _gpu("L40S", 48, 362, 0.864, 32, 12.5, 32, 1.0),
        _gpu("RTX4090", 24, 165, 1.01, 32, 1.25, 32, 0.5),
    )
}
"""Sources: NVIDIA data sheets of each product. Network: 400 Gbit/s a device for Hopper and later, 200 for Ampere."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of equal devices."""

    accelerator: Accelerator
    num_gpus: int
    gpus_per_node: int = 8

    @property
    def num_nodes(self) -> int:
        """Return the number of machines."""
        return -(-self.num_gpus // self.gpus_per_node)


def parse_cluster(text: str, gpus_per_node: int = 8) -> Cluster:
    """Return the cluster that `64xH100` (or `H100`) names.

    Raises:
        ConfigError: No such device, or no number.
    """
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z0-9-]+)", text)
    known = {name.lower(): item for name, item in ACCELERATORS.items()}
    if match is None or match[2].lower() not in known or match[1] == "0":
        raise ConfigError(f"hardware must be NUMBERxDEVICE, as 64xH100, with one of {', '.join(ACCELERATORS)}; got {text!r}")
    return Cluster(known[match[2].lower()], int(match[1] or 1), gpus_per_node)
