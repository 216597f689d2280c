"""Where a run's processes are: who shares a device, what a process asks of a node, whether another machine gets the weights.

`node` in place of a host means the address by which other machines reach the one that a process runs on. Whoever starts a run on
several machines writes it into the run's config.toml (`with_launch_choices`); every process puts its own address there when it
reads that (`at_node`). Pure.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from asyncrl.config.broadcast import FilesMedium, MediumConfig, SharedMemoryMedium, ZeroMQMedium
from asyncrl.config.generate import gpu_of
from asyncrl.config.medium_choice import is_loopback
from asyncrl.config.run import NODE, ProcessNeeds, RayLaunch, RunConfig
from asyncrl.schema.control import ProcessKind

HOW_TO_REACH = (
    "set broadcast.medium.kind = 'zeromq' and its bind to an address of the run's machine, such as tcp://10.0.0.5:*, or "
    "'files' with a folder that both machines share, and resume the run"
)


def inference_shares_device(config: RunConfig) -> bool:
    """Return whether inference workers are on the learner's device."""
    same = gpu_of(config.inference.device) == gpu_of(config.learner.device)
    return config.needs_inference and config.learner.kind == "builtin" and same


def inference_takes_turns(config: RunConfig) -> bool:
    """Return whether inference workers have a phase of their own: they are on a device that phases share."""
    return config.placement.takes_turns and inference_shares_device(config)


def why_weights_do_not_reach(config: RunConfig, *, shares_folder: bool) -> str:
    """Return why another machine gets no weights of this run, with what to change; empty where it does.

    Args:
        config: Of the run.
        shares_folder: The run's folder is on the other machine, too.
    """
    medium = config.broadcast.medium
    if medium.one_machine:
        return f"broadcast.medium.kind {medium.kind!r} reaches the run's own machine only; {HOW_TO_REACH}"
    if isinstance(medium, FilesMedium) and not medium.folder and not shares_folder:
        return f"broadcast.medium.kind 'files' writes into the run's folder, which is not here; {HOW_TO_REACH}"
    for field in medium.addresses[:1]:
        if is_loopback(address := getattr(medium, field)):
            return f"broadcast.medium.{field} is {address}, which only the run's own machine reaches; {HOW_TO_REACH}"
    return ""


def needs_of(config: RunConfig, kind: ProcessKind) -> ProcessNeeds:
    """Return what a process of this kind asks of a node: as many GPUs as its device says, where the config says none."""
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
    """Return the config with what ends at one machine's edge replaced where processes are on several, and a line for each."""
    if not isinstance(config.launch, RayLaunch):
        return config, []
    said: list[str] = []
    transport, medium = config.transport, config.broadcast.medium
    if transport.kind == "ipc" or is_loopback(transport.host):
        said.append(f"transport.kind is tcp at the node's own address for {transport.kind}: launch.kind ray is on several nodes")
        transport = replace(transport, kind="tcp", host=NODE)
    across = _moved(ZeroMQMedium() if isinstance(medium, SharedMemoryMedium) else medium, r"127\.[\d.]+|localhost", NODE)
    if across != medium:
        said.append(f"broadcast.medium is {across.kind} at the node's own address for {medium.kind}")
    return replace(config, transport=transport, broadcast=replace(config.broadcast, medium=across)), said


def at_node(config: RunConfig, address: str) -> RunConfig:
    """Return the config as a process reads it that others reach by `address`: that stands wherever a host is `node`."""
    transport, broadcast = config.transport, config.broadcast
    transport = replace(transport, host=address) if transport.host == NODE else transport
    return replace(config, transport=transport, broadcast=replace(broadcast, medium=_moved(broadcast.medium, NODE, address)))


def _moved(medium: MediumConfig, hosts: str, to: str) -> MediumConfig:
    """Return the medium with `to` for every host of its addresses that `hosts` matches."""
    pattern = re.compile(rf"(^|://)({hosts})(?=:|$)")
    return replace(medium, **{field: pattern.sub(rf"\g<1>{to}", getattr(medium, field)) for field in medium.addresses})
