"""What a placement asks of the rest of a run. Called by config/load.py."""

from __future__ import annotations

from asyncrl.config.broadcast import AutoMedium, SharedStorageMedium
from asyncrl.config.generate import (
    FakeEngineConfig,
    ReplayEngineConfig,
    TransformersEngineConfig,
    VLLMEngineConfig,
    VLLMServerEngineConfig,
)
from asyncrl.config.medium_choice import gpu_of, places_of
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError


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


def judges_share_device(config: RunConfig) -> bool:
    """Return whether inference workers are on the learner's device."""
    return (
        config.needs_inference
        and config.learner.kind == "builtin"
        and gpu_of(config.inference.device) == gpu_of(config.learner.device)
    )


def judges_take_turns(config: RunConfig) -> bool:
    """Return whether inference workers have a phase of their own: they are on a device that phases share."""
    return config.placement.takes_turns and judges_share_device(config)


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
    if isinstance(engine, VLLMEngineConfig) and (engine.device == "cpu" or not engine.sleep):
        raise ConfigError(
            f"{where} needs an engine that sleeps: set generate.engine.sleep = true and run on a GPU (vLLM cannot sleep on a CPU)"
        )
    if isinstance(engine, VLLMServerEngineConfig):
        raise ConfigError(
            f"{where} shares the learner's device, and a vLLM server is a process that the run does not start: "
            "set generate.engine.kind to transformers or vllm"
        )


def _check_device(config: RunConfig) -> None:
    """Refuse a learner and engines that are not on the same device."""
    engine, learner = config.generate.engine, config.learner.device
    if isinstance(engine, FakeEngineConfig | ReplayEngineConfig):
        return
    places = places_of(config)
    shared = places.engine_gpus == (frozenset() if places.learner_gpu is None else {places.learner_gpu})
    if not shared:
        raise ConfigError(
            f"placement.kind {config.placement.kind!r} is for one device: learner.device is {learner!r}, generate.engine.device "
            f"{getattr(engine, 'device', '')!r}: set both to the same"
        )


def _check_shared_weights(config: RunConfig) -> None:
    engine, learner, broadcast = config.generate.engine, config.learner, config.broadcast
    where = 'placement.kind "hybrid" lets the engine read the learner\'s own weights'
    if not isinstance(engine, TransformersEngineConfig):
        raise ConfigError(
            f"{where}, which generate.engine.kind {engine.__struct_config__.tag!r} cannot (it fuses or has none): set "
            '"transformers", or placement.kind = "colocated"'
        )
    if engine.dtype != learner.dtype:
        raise ConfigError(
            f"{where}: generate.engine.dtype is {engine.dtype!r} and learner.dtype {learner.dtype!r}; set both to the same"
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
