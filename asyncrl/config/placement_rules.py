"""Where a run's processes are: what a placement, a launcher and joining generators ask of the rest of the config.

`node` in place of a host means the address by which other machines reach the one that a process runs on. Whoever starts a run on
several machines writes it into the run's config.toml (`with_launch_choices`); every process puts its own address there when it
reads that (`at_node`). Pure.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from msgspec.structs import replace

from asyncrl.config.broadcast import (
    AutoMedium,
    CUDAIPCMedium,
    FilesMedium,
    GlooMedium,
    MediumConfig,
    NCCLMedium,
    SharedMemoryMedium,
    SharedStorageMedium,
    ZeroMQMedium,
)
from asyncrl.config.generate import gpu_of
from asyncrl.config.medium_choice import places_of
from asyncrl.config.run import NODE, ProcessNeeds, RayLaunch, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.schema.control import ProcessKind

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HOW_TO_REACH = (
    "set broadcast.medium.kind = 'zeromq' and its bind to an address of the run's machine, such as tcp://10.0.0.5:*, or "
    "'files' with a folder that both machines share, and resume the run"
)


# -- one device for several processes ------------------------------------------------------------------------------------


def check_placement(config: RunConfig) -> None:
    """Refuse placements that the rest of the run does not go with.

    Raises:
        ConfigError: Names the fields, what they say, and what to write instead.
    """
    _check_ranks(config)
    if config.placement.takes_turns:
        _check_who_takes_turns(config)
        _check_engine(config)
        _check_device(config)
    if config.placement.kind == "hybrid":
        _check_shared_weights(config)
    elif isinstance(config.broadcast.medium, SharedStorageMedium):
        raise ConfigError(
            f'broadcast.medium.kind "shared_storage" lets the engine read weights that the learner changes, and only '
            f'placement.kind "hybrid" keeps sampling and training apart; it is {config.placement.kind!r}: set that, or '
            'broadcast.medium.kind = "shared_memory"'
        )


def inference_shares_device(config: RunConfig) -> bool:
    """Return whether inference workers are on the learner's device."""
    return (
        config.needs_inference
        and config.learner.kind == "builtin"
        and gpu_of(config.inference.device) == gpu_of(config.learner.device)
    )


def inference_takes_turns(config: RunConfig) -> bool:
    """Return whether inference workers have a phase of their own: they are on a device that phases share."""
    return config.placement.takes_turns and inference_shares_device(config)


def _check_ranks(config: RunConfig) -> None:
    """Refuse several ranks where somebody else would need a place on each rank's device (docs/placement.md, "Limits")."""
    kind, learner = config.placement.kind, config.learner
    if learner.ranks == 1 or not config.placement.takes_turns:
        return
    if kind == "hybrid":
        raise ConfigError(
            f"placement.kind 'hybrid' lets the engine read the learner's weights, and learner.ranks = {learner.ranks} leaves no "
            'rank with all of them: set learner.ranks = 1, or placement.kind = "colocated"'
        )
    if gpu_of(learner.device) is not None:
        raise ConfigError(
            f"placement.kind {kind!r} takes turns on one device and learner.ranks = {learner.ranks} on {learner.device!r} has "
            f'{learner.ranks}, of which engines use one: set learner.ranks = 1, or placement.kind = "disaggregated"'
        )


def _check_who_takes_turns(config: RunConfig) -> None:
    kind, where = config.placement.kind, f"placement.kind {config.placement.kind!r}"
    if config.learner.kind == "external":
        raise ConfigError(f"{where} takes turns with the learner, and learner.kind 'external' is outside code that knows none")
    if config.generate.num_workers == 0:
        raise ConfigError(f"{where} takes turns with generators and generate.num_workers is 0: set it to at least 1")
    if not config.generate.in_flight_updates:
        raise ConfigError(
            f"{where} needs generate.in_flight_updates = true: requests that live through a training phase go on with the new "
            "weights, for the old ones have left the device"
        )
    if not places_of(config).one_machine:
        raise ConfigError(
            f'{where} shares a device, so all of the run is on one machine: set transport.kind = "ipc", launch local'
        )
    if kind == "colocated" and config.buffer.max_staleness > 1:
        raise ConfigError(
            f"{where} trains on what the phase before generated: buffer.max_staleness is {config.buffer.max_staleness}, set 0 "
            "(synchronous, exactly) or 1 (requests in flight live through the switch)"
        )


def _check_engine(config: RunConfig) -> None:
    engine, where = config.generate.engine, f"placement.kind {config.placement.kind!r}"
    if not (engine.can_sleep or engine.is_remote):
        raise ConfigError(
            f"{where} needs an engine that sleeps: set generate.engine.sleep = true and run on a GPU (vLLM cannot sleep on a CPU)"
        )
    if engine.is_remote:
        raise ConfigError(
            f"{where} shares the learner's device, and a vLLM server is a process that the run does not start: "
            "set generate.engine.kind to transformers or vllm"
        )


def _check_device(config: RunConfig) -> None:
    """Refuse a learner and engines that are not on the same device."""
    engine, learner = config.generate.engine, config.learner.device
    if not engine.has_model:
        return
    places = places_of(config)
    shared = places.engine_gpus == (frozenset() if places.learner_gpu is None else {places.learner_gpu})
    if not shared:
        raise ConfigError(
            f"placement.kind {config.placement.kind!r} is for one device: learner.device is {learner!r}, generate.engine.device "
            f"{engine.device_name!r}: set both to the same"
        )


def _check_shared_weights(config: RunConfig) -> None:
    engine, learner, broadcast = config.generate.engine, config.learner, config.broadcast
    where = 'placement.kind "hybrid" lets the engine read the learner\'s own weights'
    if not engine.adopts:
        raise ConfigError(
            f"{where}, which generate.engine.kind {engine.kind!r} cannot (it fuses or has none): set "
            '"transformers", or placement.kind = "colocated"'
        )
    dtype = getattr(engine, "dtype", "")
    if dtype != learner.dtype:
        raise ConfigError(
            f"{where}: generate.engine.dtype is {dtype!r} and learner.dtype {learner.dtype!r}; set both to the same"
        )
    if learner.lora is not None:
        raise ConfigError(
            f"{where}, and with learner.lora it trains others beside them: leave out learner.lora or take colocated"
        )
    if not isinstance(broadcast.medium, SharedStorageMedium | AutoMedium):
        raise ConfigError(
            f'{where}: broadcast.medium.kind is {broadcast.medium.__struct_config__.tag!r}, set "shared_storage" (or "auto")'
        )
    if broadcast.delta is not None or broadcast.dtype != "model":
        raise ConfigError(f'{where}, so nothing is sent: leave out broadcast.delta, and broadcast.dtype = "model"')
    if config.buffer.max_staleness > 1:
        raise ConfigError(f"{where} and trains by turns: buffer.max_staleness is {config.buffer.max_staleness}, set 0 or 1")


# -- generators that join ------------------------------------------------------------------------------------------------


def check_joining(config: RunConfig) -> None:
    """Refuse generators that join where none can, and a shared device that is none.

    Raises:
        ConfigError: Names the fields.
    """
    placement, engine = config.placement, config.generate.engine
    if placement.takes_turns and placement.most_joining_generators:
        raise ConfigError(
            f"placement.kind {placement.kind!r} lets rollout and training take turns on one device, and a generator elsewhere "
            "has no turn: set placement.most_joining_generators = 0, or placement.kind = 'async_hybrid' or 'disaggregated'"
        )
    if placement.kind != "async_hybrid":
        return
    if engine.is_remote:
        raise ConfigError(
            "placement.kind 'async_hybrid' bounds the engine's share of the learner's device, and generate.engine.kind "
            "'vllm_server' runs elsewhere, in a process that is not the run's: set placement.kind = 'disaggregated'"
        )
    on_gpu = getattr(engine, "device", "auto")
    on_one_device = on_gpu == "auto" or on_gpu.partition(":")[0] == config.learner.device.partition(":")[0]
    if config.learner.kind == "builtin" and not on_one_device:
        raise ConfigError(
            f"placement.kind 'async_hybrid' puts generation beside training on one device, and generate.engine.device is "
            f"{on_gpu!r}, learner.device {config.learner.device!r}: make them the same, or set placement.kind = 'disaggregated'"
        )


def why_weights_do_not_reach(config: RunConfig, *, shares_folder: bool) -> str:
    """Return why another machine gets no weights of this run, with what to change; empty where it does.

    Args:
        config: Of the run.
        shares_folder: The run's folder is on the other machine, too.
    """
    medium = config.broadcast.medium
    kind = str(medium.__struct_config__.tag)
    match medium:
        case SharedMemoryMedium() | CUDAIPCMedium():
            return f"broadcast.medium.kind {kind!r} reaches the run's own machine only; {HOW_TO_REACH}"
        case FilesMedium(folder="") if not shares_folder:
            return f"broadcast.medium.kind 'files' writes into the run's folder, which is not here; {HOW_TO_REACH}"
        case ZeroMQMedium(bind=bind) if _is_loopback(bind):
            return f"broadcast.medium.bind is {bind}, which only the run's own machine reaches; {HOW_TO_REACH}"
        case GlooMedium(host=host) | NCCLMedium(host=host) if _is_loopback(f"tcp://{host}"):
            return f"broadcast.medium.host is {host}, which only the run's own machine reaches; {HOW_TO_REACH}"
        case _:
            return ""


def _is_loopback(address: str) -> bool:
    name = urlsplit(address.replace(":*", "")).hostname or ""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


# -- processes on several machines ---------------------------------------------------------------------------------------


def check_launch(config: RunConfig) -> None:
    """Refuse what the launcher cannot do with the rest of the config.

    Raises:
        ConfigError: Names the fields, what they say, and what to write instead.
    """
    _check_elastic(config)
    if not isinstance(config.launch, RayLaunch):
        return
    if config.launch.address.startswith("ray://"):
        raise ConfigError(
            f"launch.address {config.launch.address!r} is Ray's client, which cannot own a run: run on a node of the cluster "
            "(`ray job submit`), with launch.address = 'auto' or HOST:PORT"
        )
    if config.placement.kind != "disaggregated":
        raise ConfigError(
            f"placement.kind {config.placement.kind!r} has processes share one device and launch.kind 'ray' gives each its own: "
            "take placement.kind = 'disaggregated', or launch.kind = 'local'"
        )
    if isinstance(config.broadcast.medium, CUDAIPCMedium):
        raise ConfigError(
            "broadcast.medium.kind 'cuda_ipc' needs learner and engine on one GPU, and launch.kind 'ray' gives each its own: "
            "take 'auto', 'nccl' or 'zeromq'"
        )
    _check_devices(config)


def _check_elastic(config: RunConfig) -> None:
    elastic, engine, workers = config.launch.elastic, config.generate.engine, config.generate.num_workers
    if elastic is None:
        return
    if not elastic.min_generators <= workers <= elastic.max_generators:
        raise ConfigError(
            f"generate.num_workers ({workers}) is what a run begins with and must lie between launch.elastic.min_generators "
            f"({elastic.min_generators}) and max_generators ({elastic.max_generators})"
        )
    if 1 < len(engine.urls) < elastic.max_generators:
        raise ConfigError(
            f"generate.engine.url names {len(engine.urls)} servers, one a generator, and launch.elastic.max_generators is "
            f"{elastic.max_generators}: name as many, or one"
        )


def _check_devices(config: RunConfig) -> None:
    """Ray shows a process its own GPUs only, numbered from 0."""
    engine = config.generate.engine
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


# -- what each kind needs ------------------------------------------------------------------------------------------------


def needs_of(config: RunConfig, kind: ProcessKind) -> ProcessNeeds:
    """Return what a process of this kind asks of a node, its number of GPUs said."""
    launch = config.launch
    assert isinstance(launch, RayLaunch), launch
    by_kind: dict[str, ProcessNeeds] = {
        "learner": launch.learner,
        "generator": launch.generator,
        "reward": launch.reward,
        "inference": launch.inference,
    }
    needs = by_kind[kind]
    return replace(needs, num_gpus=_gpus(config, kind)) if needs.num_gpus is None else needs


def _gpus(config: RunConfig, kind: ProcessKind) -> float:
    """Return as many GPUs as the kind's device says."""
    engine = config.generate.engine
    if kind == "learner":
        return config.learner.ranks * _on_gpu(config.learner.device)
    if kind == "inference":
        return _on_gpu(config.inference.device)
    if kind == "generator":
        return float(len(engine.gpus(gpu_of(config.learner.device))))
    return 0.0


def _on_gpu(device: str) -> float:
    return float(device.partition(":")[0] == "cuda")


# -- hosts ---------------------------------------------------------------------------------------------------------------


def with_launch_choices(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the config with what ends at one machine's edge replaced where processes are on several, and a line for each."""
    if not isinstance(config.launch, RayLaunch):
        return config, []
    said: list[str] = []
    transport, medium = config.transport, config.broadcast.medium
    if transport.kind == "ipc" or transport.host in _LOOPBACK:
        said.append(f"transport.kind is tcp at the node's own address for {transport.kind}: launch.kind ray is on several nodes")
        transport = replace(transport, kind="tcp", host=NODE)
    across = _across_machines(medium)
    if across != medium:
        tag = str(medium.__struct_config__.tag)
        said.append(f"broadcast.medium is {across.__struct_config__.tag} at the node's own address for {tag}")
    return replace(config, transport=transport, broadcast=replace(config.broadcast, medium=across)), said


def _across_machines(medium: MediumConfig) -> MediumConfig:
    anywhere = f"tcp://{NODE}:*"
    if isinstance(medium, SharedMemoryMedium):
        return ZeroMQMedium(bind=anywhere, relay_bind=anywhere)
    if isinstance(medium, ZeroMQMedium):
        return replace(medium, bind=_opened(medium.bind), relay_bind=_opened(medium.relay_bind))
    if isinstance(medium, GlooMedium | NCCLMedium) and medium.host in _LOOPBACK:
        return replace(medium, host=NODE)
    return medium


def _opened(bind: str) -> str:
    return bind.replace("://127.0.0.1:", f"://{NODE}:").replace("://localhost:", f"://{NODE}:")


def at_node(config: RunConfig, address: str) -> RunConfig:
    """Return the config as a process reads it that others reach by `address`: that stands wherever a host is `node`."""
    transport, medium = config.transport, config.broadcast.medium
    if transport.host == NODE:
        transport = replace(transport, host=address)
    if isinstance(medium, ZeroMQMedium):
        medium = replace(
            medium,
            bind=medium.bind.replace(f"://{NODE}:", f"://{address}:"),
            relay_bind=medium.relay_bind.replace(f"://{NODE}:", f"://{address}:"),
        )
    elif isinstance(medium, GlooMedium | NCCLMedium) and medium.host == NODE:
        medium = replace(medium, host=address)
    return replace(config, transport=transport, broadcast=replace(config.broadcast, medium=medium))
