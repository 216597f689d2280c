"""What follows from where processes are launched: what does not go together, what each kind needs, which hosts are meant.

`node` in place of a host means the address by which other machines reach the one that a process runs on. Whoever starts a run on
several machines writes it into the run's config.toml (`with_launch_choices`); every process puts its own address there when it
reads that (`at_node`). Pure. Called by load.py, client.py (chooses), and control/launch_ray.py (asks what a kind needs).
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncrl.config.broadcast import CUDAIPCMedium, GlooMedium, MediumConfig, NCCLMedium, SharedMemoryMedium, ZeroMQMedium
from asyncrl.config.generate import TransformersEngineConfig, VLLMEngineConfig, VLLMServerEngineConfig
from asyncrl.config.launch import ProcessNeeds, RayLaunch
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.schema.control import ProcessKind

NODE = "node"
"""In place of a host."""
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


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
    if isinstance(engine, VLLMServerEngineConfig) and 1 < len(engine.urls) < elastic.max_generators:
        raise ConfigError(
            f"generate.engine.url names {len(engine.urls)} servers, one a generator, and launch.elastic.max_generators is "
            f"{elastic.max_generators}: name as many, or one"
        )


def _check_devices(config: RunConfig) -> None:
    """Ray shows a process its own GPUs only, numbered from 0."""
    engine = config.generate.engine
    devices: dict[ProcessKind, str] = {"learner": config.learner.device, "inference": config.inference.device}
    if isinstance(engine, TransformersEngineConfig):
        devices["generator"] = engine.device
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
    if kind == "generator" and isinstance(engine, TransformersEngineConfig):
        return _on_gpu(engine.device)
    if kind == "generator" and isinstance(engine, VLLMEngineConfig):
        on_gpu = engine.device == "cuda" or (engine.device == "auto" and _on_gpu(config.learner.device) > 0)
        return float(engine.tensor_parallel * engine.data_parallel * on_gpu)
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
