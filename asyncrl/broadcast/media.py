"""The one table from `broadcast.medium.kind` to the two ends of a medium. Called by publisher.py and subscriber.py.

A new medium is a file with a writer and a reader, a config variant in config/stages.py, a line in each function here, and a row
in tests/contract/test_medium.py.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.broadcast.files import FilesReader, FilesWriter
from asyncrl.broadcast.medium import MediumReader, MediumWriter
from asyncrl.broadcast.shared_memory import SharedMemoryReader, SharedMemoryWriter
from asyncrl.broadcast.zeromq import CurveKeys, ZeroMQReader, ZeroMQWriter, keys_of_run
from asyncrl.config.stages import (
    AutoMedium,
    CUDAIPCMedium,
    FilesMedium,
    GlooMedium,
    MediumConfig,
    NCCLMedium,
    SharedMemoryMedium,
    ZeroMQMedium,
)
from asyncrl.errors import ConfigError


def open_writer(config: MediumConfig, run_folder: Path, curve_keys: CurveKeys | None = None) -> MediumWriter:
    """Return the learner's end of the configured medium. Keys matter to `zeromq` only; None: the run's own, if it has any."""
    match config:
        case SharedMemoryMedium():
            return SharedMemoryWriter(run_folder)
        case FilesMedium():
            return FilesWriter(config, run_folder)
        case ZeroMQMedium():
            return ZeroMQWriter(config, curve_keys or keys_of_run(run_folder))
        case GlooMedium() | NCCLMedium() | CUDAIPCMedium() | AutoMedium():
            raise ConfigError(f"broadcast.medium.kind {kind_of(config)!r} is not built yet")


def open_reader(config: MediumConfig, run_folder: Path, curve_keys: CurveKeys | None = None) -> MediumReader:
    """Return a generator's end of the configured medium. Keys matter to `zeromq` only; None: the run's own, if it has any."""
    match config:
        case SharedMemoryMedium():
            return SharedMemoryReader(run_folder)
        case FilesMedium():
            return FilesReader(config, run_folder)
        case ZeroMQMedium():
            return ZeroMQReader(config, curve_keys or keys_of_run(run_folder))
        case GlooMedium() | NCCLMedium() | CUDAIPCMedium() | AutoMedium():
            raise ConfigError(f"broadcast.medium.kind {kind_of(config)!r} is not built yet")


def kind_of(config: MediumConfig) -> str:
    """Return the medium's name, as config and announcements write it."""
    return str(config.__struct_config__.tag)
