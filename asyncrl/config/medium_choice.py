"""`broadcast.medium.kind = "auto"`: how weights travel, from where the run's processes are; and what no run can do.

`places_of` says where the processes are, `choose_medium` decides from that alone: a launcher that puts them elsewhere (a cluster)
needs another `places_of` and nothing here. Chosen once, by whoever starts the run, before its config.toml is written: every
process reads the outcome. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from msgspec.structs import replace

from asyncrl.config.broadcast import (
    AutoMedium,
    CUDAIPCMedium,
    GlooMedium,
    MediumConfig,
    NCCLMedium,
    SharedMemoryMedium,
    SharedStorageMedium,
    ZeroMQMedium,
)
from asyncrl.config.generate import gpu_of
from asyncrl.config.run import NODE, RayLaunch, RunConfig
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Places:
    """Where the two ends of the broadcast are."""

    one_machine: bool
    """Learner and all generators."""
    learner_gpu: int | None
    """Of the rank that publishes; None: its weights are in host memory, or nobody knows."""
    engine_gpus: frozenset[int] = frozenset()
    """Those the engines' models are on; empty: host memory, or nobody knows."""
    engine_receives: bool = False
    """Whether whoever holds an engine's model can receive from a GPU itself."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A medium, and why."""

    medium: MediumConfig
    reason: str

    @property
    def kind(self) -> str:
        """Return the medium's name."""
        return str(self.medium.__struct_config__.tag)


def places_of(config: RunConfig) -> Places:
    """Return where a run's processes are: on one machine, unless Ray places them or the run is open to a network."""
    engine = config.generate.engine
    learner_gpu = gpu_of(config.learner.device) if config.learner.kind == "builtin" else None
    engine_gpus = frozenset(engine.gpus(gpu_of(config.learner.device)))
    one_machine = config.transport.kind == "ipc" or _is_this_machine(config.transport.host)
    one_machine = one_machine and not isinstance(config.launch, RayLaunch)
    return Places(one_machine, learner_gpu, engine_gpus, engine_receives=engine.receives)


def choose_medium(config: RunConfig) -> Choice:
    """Return how a run's weights best travel, and why; `broadcast.medium` itself is not looked at."""
    if config.placement.kind == "hybrid":
        return Choice(SharedStorageMedium(), "placement hybrid: the engine reads the learner's own weights")
    if config.placement.kind == "colocated":
        return Choice(SharedMemoryMedium(), "placement colocated: versions wait in host memory while the device changes hands")
    places, host = places_of(config), config.transport.host
    on_gpus = places.learner_gpu is not None and bool(places.engine_gpus) and places.engine_receives
    if on_gpus and config.broadcast.delta is None and (choice := _between_gpus(config, places)) is not None:
        return choice
    if not places.one_machine and isinstance(config.launch, RayLaunch):
        anywhere = f"tcp://{NODE}:*"
        return Choice(ZeroMQMedium(bind=anywhere, relay_bind=anywhere), "Ray may put learner and generators on any node")
    if not places.one_machine:
        why = f"transport.host {host!r} opens the run to other machines; the learner feeds every generator itself (fanout 0)"
        return Choice(ZeroMQMedium(bind=f"tcp://{host}:*", fanout=0), why)
    return Choice(SharedMemoryMedium(), _why_shared_memory(config, places, on_gpus=on_gpus))


def with_chosen_medium(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the config with `auto` replaced by what it means, and a line that says so; empty where nothing was to be chosen."""
    if not isinstance(config.broadcast.medium, AutoMedium):
        return config, ""
    choice = choose_medium(config)
    chosen = replace(config, broadcast=replace(config.broadcast, medium=choice.medium))
    return chosen, f"broadcast.medium auto is {choice.kind}: {choice.reason}"


def _between_gpus(config: RunConfig, places: Places) -> Choice | None:
    """Choose between the two media that end in a GPU; None where neither reaches every engine."""
    gpu, host = places.learner_gpu, config.transport.host
    if places.one_machine and places.engine_gpus == {gpu}:
        return Choice(CUDAIPCMedium(), f"learner and engine share GPU {gpu}: handles travel, bytes do not")
    if isinstance(config.launch, RayLaunch):
        return Choice(NCCLMedium(host=NODE), "learner and engines are on GPUs, and Ray may put them on any node")
    if not places.one_machine:
        why = f"learner and engines are on GPUs, and transport.host {host!r} is open to other machines"
        return None if _is_every_interface(host) else Choice(NCCLMedium(host=host), why)
    if gpu not in places.engine_gpus:
        return Choice(NCCLMedium(), f"learner on GPU {gpu}, engine on {_shown(places.engine_gpus)} of the same machine")
    return None


def _why_shared_memory(config: RunConfig, places: Places, *, on_gpus: bool) -> str:
    here = "learner and generators are on this machine"
    if on_gpus and config.broadcast.delta is not None:
        return f"{here}, and broadcast.delta needs the version before in host memory"
    if on_gpus:
        gpus = _shown(places.engine_gpus)
        return f"{here}; the engine is on {gpus}, the learner's among them, so cuda_ipc and nccl reach only a part of it"
    if config.generate.engine.is_remote:
        return f"{here}; each hands its vLLM server the bytes (generate.engine.shared_folder, where that is elsewhere)"
    return here


# -- what no run can do ----------------------------------------------------------------------------------------------------


def check_medium(config: RunConfig) -> None:
    """Refuse a medium that ends where the learner or the engine is not.

    Raises:
        ConfigError: Names the fields, what they say, and what to write instead.
    """
    medium, engine = config.broadcast.medium, config.generate.engine
    if isinstance(medium, GlooMedium | NCCLMedium) and _is_every_interface(medium.host):
        raise ConfigError(
            f"broadcast.medium.host {medium.host!r} is told to every generator and names no machine: set the address of the "
            "learner's machine that they reach"
        )
    if not isinstance(medium, CUDAIPCMedium | NCCLMedium):
        return
    kind = str(medium.__struct_config__.tag)
    instead = 'set broadcast.medium.kind = "shared_memory", or "auto"'
    if config.learner.kind == "builtin" and gpu_of(config.learner.device) is None:
        raise ConfigError(
            f"broadcast.medium.kind {kind!r} begins in a GPU and learner.device is {config.learner.device!r}: {instead}"
        )
    if not engine.has_model:
        raise ConfigError(
            f"broadcast.medium.kind {kind!r} ends in an engine's GPU and generate.engine.kind {engine.kind!r} has none: {instead}"
        )
    if engine.is_remote:
        return  # only the server knows where it is
    if engine.device_name == "cpu":
        raise ConfigError(f"broadcast.medium.kind {kind!r} ends in a GPU and generate.engine.device is 'cpu': {instead}")
    if config.learner.kind == "builtin":
        _check_gpus(config, kind, instead)


def _check_gpus(config: RunConfig, kind: str, instead: str) -> None:
    """Refuse cuda_ipc between different GPUs, and nccl on one: it wants each member on a GPU of its own."""
    places = places_of(config)
    gpus = f"learner.device is {config.learner.device!r} and the engine takes {_shown(places.engine_gpus)}"
    if kind == "cuda_ipc" and places.engine_gpus != {places.learner_gpu}:
        raise ConfigError(f'broadcast.medium.kind "cuda_ipc" needs learner and engine on the same GPU; {gpus}: {instead}')
    if kind == "nccl" and places.one_machine and places.learner_gpu in places.engine_gpus:
        raise ConfigError(f'broadcast.medium.kind "nccl" needs learner and engine on different GPUs; {gpus}: {instead}')


def doubts_about_medium(config: RunConfig) -> list[str]:
    """Return what works but is hardly meant, each with what to do."""
    broadcast, dtype = config.broadcast, config.learner.dtype
    if broadcast.delta is not None and (broadcast.dtype == "float32" or (broadcast.dtype == "model" and dtype == "float32")):
        return [
            f"broadcast.delta with broadcast.dtype {broadcast.dtype!r} and learner.dtype {dtype!r} sends nearly everything: an "
            'optimizer step changes almost every float32; set broadcast.dtype = "bfloat16"'
        ]
    return []


def _is_this_machine(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or host
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _is_every_interface(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _shown(gpus: frozenset[int]) -> str:
    return "GPU " + ", ".join(map(str, sorted(gpus))) if gpus else "no GPU"
