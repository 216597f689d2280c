"""`broadcast.medium.kind = "auto"`: how weights travel, from where the run's processes are; and what no run can do.

`places_of` says where the processes are, `choose_medium` decides from that alone: a launcher that puts them elsewhere (a cluster)
needs another `places_of` and nothing here. Chosen once, by whoever starts the run, before its config.toml is written: every
process reads the outcome. Pure.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from msgspec.structs import replace

from asyncrl.config.broadcast import (
    AutoMedium,
    CUDAIPCMedium,
    MediumConfig,
    NCCLMedium,
    SharedMemoryMedium,
    SharedStorageMedium,
    ZeroMQMedium,
)
from asyncrl.config.generate import gpu_of
from asyncrl.config.run import NODE, RayLaunch, RunConfig


class Places(NamedTuple):
    """Where the two ends of the broadcast are."""

    one_machine: bool
    """Learner and all generators."""
    learner_gpu: int | None
    """Of the rank that publishes; None: its weights are in host memory, or nobody knows."""
    engine_gpus: frozenset[int]
    """Those the engines' models are on; empty: host memory, or nobody knows."""


def places_of(config: RunConfig) -> Places:
    """Return where a run's processes are: on one machine, unless Ray places them or the run is open to a network."""
    follows = gpu_of(config.learner.device)
    one_machine = config.transport.kind == "ipc" or is_loopback(config.transport.host)
    return Places(
        one_machine and not isinstance(config.launch, RayLaunch),
        follows if config.learner.kind == "builtin" else None,
        frozenset(config.generate.engine.gpus(follows)),
    )


_BY_PLACEMENT: dict[str, tuple[MediumConfig, str]] = {
    "hybrid": (SharedStorageMedium(), "placement hybrid: the engine reads the learner's own weights"),
    "colocated": (SharedMemoryMedium(), "placement colocated: versions wait in host memory while the device changes hands"),
}


def choose_medium(config: RunConfig) -> tuple[MediumConfig, str]:
    """Return how a run's weights best travel, and why; `broadcast.medium` itself is not looked at."""
    if config.placement.kind in _BY_PLACEMENT:
        return _BY_PLACEMENT[config.placement.kind]
    places, host, engine = places_of(config), config.transport.host, config.generate.engine
    gpu, on_ray, engine_gpus = places.learner_gpu, isinstance(config.launch, RayLaunch), shown(places.engine_gpus)
    on_gpus = gpu is not None and bool(places.engine_gpus) and engine.receives
    if on_gpus and config.broadcast.delta is None:
        if places.one_machine and places.engine_gpus == {gpu}:
            return CUDAIPCMedium(), f"learner and engine share GPU {gpu}: handles travel, bytes do not"
        if on_ray:
            return NCCLMedium(host=NODE), "learner and engines are on GPUs, and Ray may put them on any node"
        if not places.one_machine and not is_every_interface(host):
            why = f"learner and engines are on GPUs, and transport.host {host!r} is open to other machines"
            return NCCLMedium(host=host), why
        if places.one_machine and gpu not in places.engine_gpus:
            return NCCLMedium(), f"learner on GPU {gpu}, engine on {engine_gpus} of the same machine"
    if on_ray:
        anywhere = f"tcp://{NODE}:*"
        return ZeroMQMedium(bind=anywhere, relay_bind=anywhere), "Ray may put learner and generators on any node"
    if not places.one_machine:
        why = f"transport.host {host!r} opens the run to other machines; the learner feeds every generator itself (fanout 0)"
        return ZeroMQMedium(bind=f"tcp://{host}:*", fanout=0), why
    why = "learner and generators are on this machine"
    if on_gpus and config.broadcast.delta is not None:
        why += ", and broadcast.delta needs the version before in host memory"
    elif on_gpus:
        why += f"; the engine is on {engine_gpus}, the learner's among them, so cuda_ipc and nccl reach only a part of it"
    elif engine.is_remote:
        why += "; each hands its vLLM server the bytes (generate.engine.shared_folder, where that is elsewhere)"
    return SharedMemoryMedium(), why


def with_chosen_medium(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the config with `auto` replaced by what it means, and a line that says so; empty where nothing was to be chosen."""
    if not isinstance(config.broadcast.medium, AutoMedium):
        return config, ""
    medium, reason = choose_medium(config)
    chosen = replace(config, broadcast=replace(config.broadcast, medium=medium))
    return chosen, f"broadcast.medium auto is {medium.kind}: {reason}"


def doubts_about_medium(config: RunConfig) -> list[str]:
    """Return what works but is hardly meant, each with what to do."""
    broadcast, dtype = config.broadcast, config.learner.dtype
    if broadcast.delta is not None and "float32" in {broadcast.dtype, dtype} and broadcast.dtype != "bfloat16":
        return [
            f"broadcast.delta with broadcast.dtype {broadcast.dtype!r} and learner.dtype {dtype!r} sends nearly everything: an "
            'optimizer step changes almost every float32; set broadcast.dtype = "bfloat16"'
        ]
    return []


def is_loopback(url: str) -> bool:
    """Return whether an address, with or without its scheme, is this machine's alone."""
    name = urlsplit(url if "://" in url else f"tcp://{url}").hostname or url.rpartition("://")[2]
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def is_every_interface(host: str) -> bool:
    """Return whether an address stands for all of a machine's, as 0.0.0.0 does."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def shown(gpus: frozenset[int]) -> str:
    """Return the GPUs in words."""
    return "GPU " + ", ".join(map(str, sorted(gpus))) if gpus else "no GPU"
