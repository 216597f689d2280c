"""Generators that join a live run, and those that share a device with training: what goes together, and which media reach whom.

Pure. `check_joining` is called by config/load.py, `why_weights_do_not_reach` by control/joining.py in the guest's own process.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from asyncrl.config.broadcast import CUDAIPCMedium, FilesMedium, GlooMedium, NCCLMedium, SharedMemoryMedium, ZeroMQMedium
from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError

HOW_TO_REACH = (
    "set broadcast.medium.kind = 'zeromq' and its bind to an address of the run's machine, such as tcp://10.0.0.5:*, or "
    "'files' with a folder that both machines share, and resume the run"
)


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
    if isinstance(engine, VLLMServerEngineConfig):
        raise ConfigError(
            "placement.kind 'async_hybrid' bounds the engine's share of the learner's device, and generate.engine.kind "
            "'vllm_server' runs elsewhere, in a process that is not the run's: set placement.kind = 'disaggregated'"
        )
    on_gpu = getattr(engine, "device", "auto")
    if config.learner.kind == "builtin" and on_gpu != "auto" and _kind(on_gpu) != _kind(config.learner.device):
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


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _is_loopback(address: str) -> bool:
    name = urlsplit(address.replace(":*", "")).hostname or ""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
