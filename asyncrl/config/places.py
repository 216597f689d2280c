"""Where a run's processes are, and what follows: how weights are sent, which processes share a device, what a process needs.

`places_of` returns where the processes are; from that alone `choose_medium` decides what `broadcast.medium.kind = "auto"` means.
The program that starts the run chooses it once, before config.toml is written. `node` as a host name means the address at which
other machines reach a process's machine. The program that starts a run on several machines writes `node` into config.toml
(`with_launch_choices`), and every process replaces it by its own address when it reads the file (`at_node`). Pure.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from msgspec.structs import replace

from asyncrl.config import broadcast as media
from asyncrl.config.generate import gpu_of
from asyncrl.config.run import NODE, ProcessNeeds, RayLaunch, RunConfig
from asyncrl.schema.control import ProcessKind

HOW_TO_REACH = (
    "set broadcast.medium.kind = 'zeromq' and its bind to an address of the run's machine, such as tcp://10.0.0.5:*, or "
    "'files' with a folder that both machines share, and resume the run"
)


class Places(NamedTuple):
    """Places of the two ends of the broadcast."""

    one_machine: bool
    """Whether the learner and all generators are on one machine."""
    learner_gpu: int | None
    """GPU of the rank that publishes; None: its weights are in host memory, or the place is unknown."""
    engine_gpus: frozenset[int]
    """GPUs of the engines' models; empty: host memory, or the place is unknown."""


def places_of(config: RunConfig) -> Places:
    """Return where a run's processes are: on one machine, unless Ray places them or the run is open to a network."""
    follows = gpu_of(config.learner.device)
    one_machine = config.transport.kind == "ipc" or is_loopback(config.transport.host)
    return Places(
        one_machine and not isinstance(config.launch, RayLaunch),
        follows if config.learner.kind == "builtin" else None,
        frozenset(config.generate.engine.gpus(follows)),
    )


_BY_PLACEMENT: dict[str, tuple[media.MediumConfig, str]] = {
    "hybrid": (media.SharedStorageMedium(), "placement hybrid: the engine reads the learner's own weights"),
    "colocated": (media.SharedMemoryMedium(), "placement colocated: versions wait in host memory while the device changes hands"),
}


def generators_share_gpus(config: RunConfig) -> bool:
    """Return whether there are several generators on the same GPUs: only Ray gives each generator its own."""
    return not isinstance(config.launch, RayLaunch) and (config.generate.num_workers > 1 or config.launch.elastic is not None)


def choose_medium(config: RunConfig) -> tuple[media.MediumConfig, str]:
    """Return the best medium for a run's weights, and the reason; `broadcast.medium` itself is not read."""
    if config.placement.kind in _BY_PLACEMENT:
        return _BY_PLACEMENT[config.placement.kind]
    places, host, engine = places_of(config), config.transport.host, config.generate.engine
    gpu, on_ray, engine_gpus = places.learner_gpu, isinstance(config.launch, RayLaunch), shown(places.engine_gpus)
    on_gpus = gpu is not None and bool(places.engine_gpus) and engine.receives
    is_apart = gpu not in places.engine_gpus or not config.generate.num_workers  # NCCL takes one member a GPU
    parts_gpu = on_ray and (needs_of(config, "generator").num_gpus or 1) < 1
    if on_gpus and config.broadcast.delta is None and places.one_machine and places.engine_gpus == {gpu}:
        return media.CUDAIPCMedium(), f"learner and engine share GPU {gpu}: handles travel, bytes do not"
    if on_gpus and config.broadcast.delta is None and not generators_share_gpus(config) and not parts_gpu:
        if on_ray:
            return media.NCCLMedium(host=NODE), "learner and engines are on GPUs, and Ray may put them on any node"
        if is_apart and not places.one_machine and not is_every_interface(host):
            why = f"learner and engines are on GPUs, and transport.host {host!r} is open to other machines"
            return media.NCCLMedium(host=host), why
        if places.one_machine and gpu not in places.engine_gpus:
            return media.NCCLMedium(), f"learner on GPU {gpu}, engine on {engine_gpus} of the same machine"
    if on_ray:
        anywhere = f"tcp://{NODE}:*"
        return media.ZeroMQMedium(bind=anywhere, relay_bind=anywhere), "Ray may put learner and generators on any node"
    if not places.one_machine:
        why = f"transport.host {host!r} opens the run to other machines; the learner feeds every generator itself (fanout 0)"
        return media.ZeroMQMedium(bind=f"tcp://{host}:*", fanout=0), why
    why = "learner and generators are on this machine"
    if on_gpus and config.broadcast.delta is not None:
        why += ", and broadcast.delta needs the version before in host memory"
    elif on_gpus and gpu not in places.engine_gpus:
        why += f"; several generators share {engine_gpus}, and nccl takes one member a GPU"
    elif on_gpus:
        why += f"; the engine is on {engine_gpus}, the learner's among them, so cuda_ipc and nccl reach only a part of it"
    elif engine.is_remote:
        why += "; each hands its vLLM server the bytes (generate.engine.shared_folder, where that is elsewhere)"
    return media.SharedMemoryMedium(), why


def with_chosen_medium(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the config with medium `auto` replaced by the chosen one, and a log line about it; empty if it was not `auto`."""
    if not isinstance(config.broadcast.medium, media.AutoMedium):
        return config, ""
    medium, reason = choose_medium(config)
    chosen = replace(config, broadcast=replace(config.broadcast, medium=medium))
    return chosen, f"broadcast.medium auto is {medium.kind}: {reason}"


def is_loopback(url: str) -> bool:
    """Return whether an address, with or without a scheme, can be reached only from this machine."""
    name = urlsplit(url if "://" in url else f"tcp://{url}").hostname or url.rpartition("://")[2]
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def is_every_interface(host: str) -> bool:
    """Return whether an address stands for all addresses of a machine, as 0.0.0.0 does."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def shown(gpus: frozenset[int]) -> str:
    """Return the GPUs as text."""
    return "GPU " + ", ".join(map(str, sorted(gpus))) if gpus else "no GPU"


def inference_shares_device(config: RunConfig) -> bool:
    """Return whether inference workers are on the learner's device."""
    same = gpu_of(config.inference.device) == gpu_of(config.learner.device)
    return config.needs_inference and config.learner.kind == "builtin" and same


def inference_takes_turns(config: RunConfig) -> bool:
    """Return whether inference workers have their own phase, because they are on a device that phases share."""
    return config.placement.takes_turns and inference_shares_device(config)


def why_weights_do_not_reach(config: RunConfig, *, shares_folder: bool) -> str:
    """Return why another machine cannot get this run's weights, and what to change; empty if it can.

    Args:
        config: The run's config.
        shares_folder: Whether the run's folder is visible on the other machine too.
    """
    medium = config.broadcast.medium
    if medium.one_machine:
        return f"broadcast.medium.kind {medium.kind!r} reaches the run's own machine only; {HOW_TO_REACH}"
    if isinstance(medium, media.FilesMedium) and not medium.folder and not shares_folder:
        return f"broadcast.medium.kind 'files' writes into the run's folder, which is not here; {HOW_TO_REACH}"
    for field in medium.addresses[:1]:
        if is_loopback(address := getattr(medium, field)):
            return f"broadcast.medium.{field} is {address}, which only the run's own machine reaches; {HOW_TO_REACH}"
    return ""


def needs_of(config: RunConfig, kind: ProcessKind) -> ProcessNeeds:
    """Return what a process of this kind needs from a node; the number of GPUs follows its device if the config gives none."""
    launch, learner = config.launch, config.learner
    assert isinstance(launch, RayLaunch), launch
    needs: ProcessNeeds = getattr(launch, kind)
    if needs.num_gpus is not None:
        return needs
    num_gpus = {
        "learner": learner.ranks * learner.device.startswith("cuda"),
        "inference": int(config.inference.device.startswith("cuda")),
        "generator": len(config.generate.engine.gpus(gpu_of(learner.device))),
    }
    return replace(needs, num_gpus=float(num_gpus.get(kind, 0)))


def with_launch_choices(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the config with one-machine transport and medium replaced, if processes are on several machines; a line for each."""
    if not isinstance(config.launch, RayLaunch):
        return config, []
    said: list[str] = []
    transport, medium = config.transport, config.broadcast.medium
    if transport.kind == "ipc" or is_loopback(transport.host):
        said.append(f"transport.kind is tcp at the node's address instead of {transport.kind}: launch.kind is ray")
        transport = replace(transport, kind="tcp", host=NODE)
    across = _moved(
        media.ZeroMQMedium() if isinstance(medium, media.SharedMemoryMedium) else medium, r"127\.[\d.]+|localhost", NODE
    )
    if across != medium:
        said.append(f"broadcast.medium is {across.kind} at the node's address instead of {medium.kind}")
    return replace(config, transport=transport, broadcast=replace(config.broadcast, medium=across)), said


def at_node(config: RunConfig, address: str) -> RunConfig:
    """Return the config for a process that others reach at `address`, which replaces the host `node` everywhere."""
    transport, broadcast = config.transport, config.broadcast
    transport = replace(transport, host=address) if transport.host == NODE else transport
    return replace(config, transport=transport, broadcast=replace(broadcast, medium=_moved(broadcast.medium, NODE, address)))


def _moved(medium: media.MediumConfig, hosts: str, to: str) -> media.MediumConfig:
    """Return the medium with every host in its addresses that matches `hosts` replaced by `to`."""
    pattern = re.compile(rf"(^|://)({hosts})(?=:|$)")
    return replace(medium, **{field: pattern.sub(rf"\g<1>{to}", getattr(medium, field)) for field in medium.addresses})
