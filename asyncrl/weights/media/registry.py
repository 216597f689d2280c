"""The one table of media: from `broadcast.medium.kind` to the ends of a medium.

A new medium is a file with a writer and a reader, a config variant in config/broadcast.py, a row here, and a row in
tests/contract/media/test_medium.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

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
from asyncrl.errors import ConfigError
from asyncrl.transport.security import ClientKeys
from asyncrl.weights.buckets import gpu_for
from asyncrl.weights.media.base import MediumReader, MediumWriter, ReceiverArguments
from asyncrl.weights.media.collective import CollectiveWriter
from asyncrl.weights.media.collective_member import CollectiveReader
from asyncrl.weights.media.files import FilesReader, FilesWriter
from asyncrl.weights.media.learner_memory import CUDAIPCWriter
from asyncrl.weights.media.shared_memory import SharedMemoryReader, SharedMemoryWriter
from asyncrl.weights.media.zeromq import ZeroMQWriter
from asyncrl.weights.media.zeromq_reader import ZeroMQReader
from asyncrl.weights.sockets import keys_of_run


@dataclass(frozen=True, slots=True)
class Medium:
    """The two ends of a medium, each made from its config, the run folder and the keys."""

    writer: Callable[[Any, Path, ClientKeys | None], MediumWriter] | None = None
    reader: Callable[[Any, Path, ClientKeys | None], MediumReader] | None = None
    """None: the medium writes to the engine's own GPU memory."""
    receiver: str = ""
    """`module:class` of the receiver, which is made in the process that holds the model (`make_receiver`)."""
    refusal: str = "ends in the engine's own GPU memory: its versions are received by the process that holds the model"
    """Reason in the error if an end is missing."""


MEDIA: dict[type[MediumConfig], Medium] = {
    SharedMemoryMedium: Medium(lambda _, run, __: SharedMemoryWriter(run), lambda _, run, __: SharedMemoryReader(run)),
    FilesMedium: Medium(lambda config, run, _: FilesWriter(config, run), lambda config, run, _: FilesReader(config, run)),
    ZeroMQMedium: Medium(lambda config, _, keys: ZeroMQWriter(config, keys), lambda config, _, keys: ZeroMQReader(config, keys)),
    GlooMedium: Medium(
        lambda config, _, keys: CollectiveWriter(config, keys), lambda config, _, keys: CollectiveReader(config, keys)
    ),
    NCCLMedium: Medium(
        lambda config, _, keys: CollectiveWriter(config, keys, lambda: gpu_for("nccl")),
        receiver="asyncrl.weights.media.collective_member:CollectiveReceiver",
    ),
    CUDAIPCMedium: Medium(lambda _, run, __: CUDAIPCWriter(run), receiver="asyncrl.weights.media.learner_memory:CUDAIPCReceiver"),
    SharedStorageMedium: Medium(
        refusal="moves nothing: the engine opens the learner's own parameters (weights/media/learner_memory.py)"
    ),
    AutoMedium: Medium(
        refusal="is chosen when a run starts: take the run's own config, as Run.config.broadcast and RUN/config.toml have it"
    ),
}


def open_writer(config: MediumConfig, run_folder: Path) -> MediumWriter:
    """Return the learner's end of the configured medium."""
    medium = MEDIA[type(config)]
    if medium.writer is None:
        raise ConfigError(f"broadcast.medium.kind {config.kind!r} {medium.refusal}")
    return medium.writer(config, run_folder, keys_of_run(run_folder))


def open_reader(config: MediumConfig, run_folder: Path) -> MediumReader:
    """Return a generator's end of the configured medium."""
    medium = MEDIA[type(config)]
    if medium.reader is None:
        raise ConfigError(f"broadcast.medium.kind {config.kind!r} {medium.refusal}")
    return medium.reader(config, run_folder, keys_of_run(run_folder))


def receiver_of(config: MediumConfig, run_folder: Path) -> tuple[str, bytes] | None:
    """Return how to make the receiving end in the model's process (`make_receiver`); None if generators fetch the bytes."""
    receiver = MEDIA[type(config)].receiver
    return (receiver, msgspec.json.encode(ReceiverArguments(str(run_folder.resolve()), config))) if receiver else None
