"""Where a run's processes are: what a placement, a launcher and joining generators ask of the rest of the config.

`node` in place of a host means the address by which other machines reach the one that a process runs on. Whoever starts a run on
several machines writes it into the run's config.toml (`with_launch_choices`); every process puts its own address there when it
reads that (`at_node`). Pure. Every check raises ConfigError with the fields, what they say and what to write instead.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from asyncrl.config.broadcast import (
    AutoMedium,
    CUDAIPCMedium,
    FilesMedium,
    GlooMedium,
    NCCLMedium,
    SharedMemoryMedium,
    SharedStorageMedium,
    ZeroMQMedium,
)
from asyncrl.config.generate import gpu_of
from asyncrl.config.medium_choice import is_loopback, places_of
from asyncrl.config.run import NODE, ProcessNeeds, RayLaunch, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.schema.control import ProcessKind

HOW_TO_REACH = (
    "set broadcast.medium.kind = 'zeromq' and its bind to an address of the run's machine, such as tcp://10.0.0.5:*, or "
    "'files' with a folder that both machines share, and resume the run"
)


# -- one device for several processes ------------------------------------------------------------------------------------


def check_placement(config: RunConfig) -> None:
    """Check that phases which take turns have one device, one machine, and an engine that sleeps."""
    kind, engine, learner, staleness = config.placement.kind, config.generate.engine, config.learner, config.buffer.max_staleness
    if kind != "hybrid" and isinstance(config.broadcast.medium, SharedStorageMedium):
        raise ConfigError(
            f'broadcast.medium.kind "shared_storage" is for only placement.kind "hybrid", and that is {kind!r}: set '
            'broadcast.medium.kind = "shared_memory"'
        )
    if not config.placement.takes_turns:
        return
    where, places = f"placement.kind {kind!r}", places_of(config)
    if kind == "hybrid" and learner.ranks > 1:
        raise ConfigError(f"{where} shares weights, and there is no rank with all of them: set learner.ranks = 1")
    if learner.ranks > 1 and gpu_of(learner.device) is not None:
        raise ConfigError(
            f"{where} takes turns on one device and learner.ranks = {learner.ranks} on {learner.device!r} has {learner.ranks}: "
            'set learner.ranks = 1, or placement.kind = "disaggregated"'
        )
    if learner.kind == "external":
        raise ConfigError(f"{where} takes turns with the learner, and learner.kind 'external' knows none: set 'builtin'")
    if config.generate.num_workers == 0:
        raise ConfigError(f"{where} takes turns with generators and generate.num_workers is 0: set it to at least 1")
    if not config.generate.in_flight_updates:
        raise ConfigError(f"{where} needs generate.in_flight_updates = true: old weights leave the device as training begins")
    if not places.one_machine:
        raise ConfigError(
            f'{where} shares a device, so all of the run is on one machine: set transport.kind = "ipc", launch local'
        )
    if staleness > 1:
        raise ConfigError(f"{where} trains by turns: buffer.max_staleness is {staleness}, set 0 (synchronous, exactly) or 1")
    if engine.is_remote:
        raise ConfigError(f"{where} shares the learner's device with the run's own engine: set generate.engine.kind = 'vllm'")
    if not engine.can_sleep:
        raise ConfigError(f"{where} needs an engine that sleeps: set generate.engine.sleep = true and run on a GPU")
    if engine.has_model and places.engine_gpus != (frozenset() if places.learner_gpu is None else {places.learner_gpu}):
        raise ConfigError(
            f"{where} is for one device: learner.device is {learner.device!r}, generate.engine.device {engine.device_name!r}: "
            "set both to the same"
        )
    if kind == "hybrid":
        _check_shared_weights(config)


def _check_shared_weights(config: RunConfig) -> None:
    engine, learner, broadcast = config.generate.engine, config.learner, config.broadcast
    where, dtype = 'placement.kind "hybrid" lets the engine read the learner\'s own weights', getattr(engine, "dtype", "")
    if not engine.adopts:
        raise ConfigError(
            f'{where}, which generate.engine.kind {engine.kind!r} cannot: set "transformers", or placement.kind = "colocated"'
        )
    if dtype != learner.dtype:
        raise ConfigError(f"{where}: generate.engine.dtype is {dtype!r}, learner.dtype {learner.dtype!r}; set both to the same")
    if learner.lora is not None:
        raise ConfigError(f"{where}, and adapters lie beside them: leave out learner.lora, or take colocated")
    if not isinstance(broadcast.medium, SharedStorageMedium | AutoMedium):
        raise ConfigError(f'{where}: broadcast.medium.kind is {broadcast.medium.kind!r}, set "shared_storage" (or "auto")')
    if broadcast.delta is not None or broadcast.dtype != "model":
        raise ConfigError(f'{where}, so nothing is sent: leave out broadcast.delta, and broadcast.dtype = "model"')


def inference_shares_device(config: RunConfig) -> bool:
    """Return whether inference workers are on the learner's device."""
    same = gpu_of(config.inference.device) == gpu_of(config.learner.device)
    return config.needs_inference and config.learner.kind == "builtin" and same


def inference_takes_turns(config: RunConfig) -> bool:
    """Return whether inference workers have a phase of their own: they are on a device that phases share."""
    return config.placement.takes_turns and inference_shares_device(config)


# -- generators that join ------------------------------------------------------------------------------------------------


def check_joining(config: RunConfig) -> None:
    """Check that generators join only where they can, and that a shared device is one."""
    placement, engine, device = config.placement, config.generate.engine, config.learner.device
    if placement.takes_turns and placement.most_joining_generators:
        raise ConfigError(
            f"placement.kind {placement.kind!r} takes turns on one device, and a generator elsewhere has no turn: set "
            "placement.most_joining_generators = 0, or placement.kind = 'async_hybrid' or 'disaggregated'"
        )
    if placement.kind != "async_hybrid":
        return
    instead = "set placement.kind = 'disaggregated'"
    if engine.is_remote:
        raise ConfigError(f"placement.kind 'async_hybrid' shares the learner's device, and a vLLM server is elsewhere: {instead}")
    on = engine.device_name or "auto"
    if config.learner.kind == "builtin" and on != "auto" and on.partition(":")[0] != device.partition(":")[0]:
        raise ConfigError(
            f"placement.kind 'async_hybrid' is for one device: generate.engine.device is {on!r}, learner.device {device!r}: make "
            f"them the same, or {instead}"
        )


def why_weights_do_not_reach(config: RunConfig, *, shares_folder: bool) -> str:
    """Return why another machine gets no weights of this run, with what to change; empty where it does.

    Args:
        config: Of the run.
        shares_folder: The run's folder is on the other machine, too.
    """
    medium = config.broadcast.medium
    match medium:
        case SharedMemoryMedium() | CUDAIPCMedium():
            return f"broadcast.medium.kind {medium.kind!r} reaches the run's own machine only; {HOW_TO_REACH}"
        case FilesMedium(folder="") if not shares_folder:
            return f"broadcast.medium.kind 'files' writes into the run's folder, which is not here; {HOW_TO_REACH}"
        case ZeroMQMedium(bind=bind) if is_loopback(bind):
            return f"broadcast.medium.bind is {bind}, which only the run's own machine reaches; {HOW_TO_REACH}"
        case GlooMedium(host=host) | NCCLMedium(host=host) if is_loopback(f"tcp://{host}"):
            return f"broadcast.medium.host is {host}, which only the run's own machine reaches; {HOW_TO_REACH}"
        case _:
            return ""


# -- processes on several machines ---------------------------------------------------------------------------------------


def check_launch(config: RunConfig) -> None:
    """Check what the launcher can do with the rest of the config."""
    launch, elastic, engine, workers = config.launch, config.launch.elastic, config.generate.engine, config.generate.num_workers
    if elastic is not None and not elastic.min_generators <= workers <= elastic.max_generators:
        raise ConfigError(
            f"generate.num_workers ({workers}) must lie between launch.elastic.min_generators ({elastic.min_generators}) and "
            f"max_generators ({elastic.max_generators})"
        )
    if elastic is not None and 1 < len(engine.urls) < elastic.max_generators:
        raise ConfigError(
            f"generate.engine.url names {len(engine.urls)} servers, one a generator, and launch.elastic.max_generators is "
            f"{elastic.max_generators}: name as many, or one"
        )
    if not isinstance(launch, RayLaunch):
        return
    if launch.address.startswith("ray://"):
        raise ConfigError(
            f"launch.address {launch.address!r} is Ray's client, which cannot own a run: run on a node of the cluster "
            "(`ray job submit`), with launch.address = 'auto' or HOST:PORT"
        )
    apart = "launch.kind 'ray' gives each process its own device"
    if config.placement.kind != "disaggregated":
        raise ConfigError(
            f"placement.kind {config.placement.kind!r} shares one, and {apart}: take placement.kind = 'disaggregated'"
        )
    if isinstance(config.broadcast.medium, CUDAIPCMedium):
        raise ConfigError(f"broadcast.medium.kind 'cuda_ipc' shares one, and {apart}: take 'auto', 'nccl' or 'zeromq'")
    devices: dict[ProcessKind, str] = {
        "learner": config.learner.device,
        "inference": config.inference.device,
        "generator": engine.device_name,
    }
    for kind, device in devices.items():
        name, _, number = device.partition(":")
        if name == "cuda" and number not in {"", "0"}:
            raise ConfigError(f"{kind}: device {device!r} with launch.kind 'ray': Ray numbers a process's own GPUs from 0")
        if name == "cuda" and not needs_of(config, kind).num_gpus:
            raise ConfigError(f"{kind}: device {device!r} needs a GPU and launch.{kind}.num_gpus is 0")


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
    if transport.kind == "ipc" or is_loopback(f"tcp://{transport.host}"):
        said.append(f"transport.kind is tcp at the node's own address for {transport.kind}: launch.kind ray is on several nodes")
        transport = replace(transport, kind="tcp", host=NODE)
    across = medium
    if isinstance(medium, SharedMemoryMedium):
        across = ZeroMQMedium(bind=f"tcp://{NODE}:*", relay_bind=f"tcp://{NODE}:*")
    elif isinstance(medium, ZeroMQMedium):
        local = re.compile("://(127.0.0.1|localhost):")
        bind, relay = (local.sub(f"://{NODE}:", bind) for bind in (medium.bind, medium.relay_bind))
        across = replace(medium, bind=bind, relay_bind=relay)
    elif isinstance(medium, GlooMedium | NCCLMedium) and is_loopback(f"tcp://{medium.host}"):
        across = replace(medium, host=NODE)
    if across != medium:
        said.append(f"broadcast.medium is {across.kind} at the node's own address for {medium.kind}")
    return replace(config, transport=transport, broadcast=replace(config.broadcast, medium=across)), said


def at_node(config: RunConfig, address: str) -> RunConfig:
    """Return the config as a process reads it that others reach by `address`: that stands wherever a host is `node`."""
    transport, medium = config.transport, config.broadcast.medium
    if transport.host == NODE:
        transport = replace(transport, host=address)
    if isinstance(medium, ZeroMQMedium):
        bind, relay = (bind.replace(f"://{NODE}:", f"://{address}:") for bind in (medium.bind, medium.relay_bind))
        medium = replace(medium, bind=bind, relay_bind=relay)
    elif isinstance(medium, GlooMedium | NCCLMedium) and medium.host == NODE:
        medium = replace(medium, host=address)
    return replace(config, transport=transport, broadcast=replace(config.broadcast, medium=medium))
