"""The one table from `broadcast.medium.kind` to the two ends of a medium. Called by publisher.py and subscriber.py.

A new medium is a file with a writer and a reader, a config variant in config/broadcast.py, a line in each function here, and a
row in tests/contract/test_medium.py.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.broadcast.collective_reader import CollectiveReader, ReceiverArguments
from asyncrl.broadcast.collective_writer import CollectiveWriter
from asyncrl.broadcast.cuda_ipc import CUDAIPCWriter
from asyncrl.broadcast.device import current_gpu
from asyncrl.broadcast.files import FilesReader, FilesWriter
from asyncrl.broadcast.medium import MediumReader, MediumWriter
from asyncrl.broadcast.shared_memory import SharedMemoryReader, SharedMemoryWriter
from asyncrl.broadcast.zeromq import CurveKeys, ZeroMQReader, ZeroMQWriter, keys_of_run
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

_NOT_CHOSEN = (
    'broadcast.medium.kind "auto" is chosen when a run starts (config/medium_choice.py): take the run\'s own config, as '
    "Run.config.broadcast and RUN/config.toml have it"
)
_NOT_A_JOURNEY = (
    'broadcast.medium.kind "shared_storage" moves nothing and so has no writer or reader: the engine opens the learner\'s own '
    "parameters (broadcast/shared_storage.py)"
)


def open_writer(config: MediumConfig, run_folder: Path, curve_keys: CurveKeys | None = None) -> MediumWriter:
    """Return the learner's end of the configured medium. Keys: None: the run's own, if it has any."""
    match config:
        case SharedMemoryMedium():
            return SharedMemoryWriter(run_folder)
        case FilesMedium():
            return FilesWriter(config, run_folder)
        case ZeroMQMedium():
            return ZeroMQWriter(config, curve_keys or keys_of_run(run_folder))
        case GlooMedium():
            return CollectiveWriter(config, curve_keys or keys_of_run(run_folder))
        case NCCLMedium():
            return CollectiveWriter(config, curve_keys or keys_of_run(run_folder), through=current_gpu)
        case CUDAIPCMedium():
            return CUDAIPCWriter(run_folder)
        case SharedStorageMedium():
            raise ConfigError(_NOT_A_JOURNEY)
        case AutoMedium():
            raise ConfigError(_NOT_CHOSEN)


def open_reader(config: MediumConfig, run_folder: Path, curve_keys: CurveKeys | None = None) -> MediumReader:
    """Return a generator's end of the configured medium. Keys: None: the run's own, if it has any."""
    match config:
        case SharedMemoryMedium():
            return SharedMemoryReader(run_folder)
        case FilesMedium():
            return FilesReader(config, run_folder)
        case ZeroMQMedium():
            return ZeroMQReader(config, curve_keys or keys_of_run(run_folder))
        case GlooMedium():
            return CollectiveReader(config, curve_keys or keys_of_run(run_folder))
        case NCCLMedium() | CUDAIPCMedium():
            raise ConfigError(
                f"broadcast.medium.kind {kind_of(config)!r} ends in the engine's own GPU memory: its versions are received by "
                f"the process that holds the model (models/deferred.py), and no generator can fetch them"
            )
        case SharedStorageMedium():
            raise ConfigError(_NOT_A_JOURNEY)
        case AutoMedium():
            raise ConfigError(_NOT_CHOSEN)


def receiver_of(config: MediumConfig, run_folder: Path) -> tuple[str, bytes] | None:
    """Return what makes the receiving end where the model is (`make_receiver`), None where generators fetch the bytes."""
    match config:
        case NCCLMedium():
            told = ReceiverArguments(str(run_folder.resolve()), config.timeout_s)
            return "asyncrl.broadcast.collective_reader:open_receiver", msgspec.json.encode(told)
        case CUDAIPCMedium():
            return "asyncrl.broadcast.cuda_ipc:open_receiver", msgspec.json.encode(str(run_folder.resolve()))
        case _:
            return None


def kind_of(config: MediumConfig) -> str:
    """Return the medium's name, as config and announcements write it."""
    return str(config.__struct_config__.tag)
