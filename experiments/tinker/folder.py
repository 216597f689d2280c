"""The server's folder: the model, and what clients save in `saved/MODEL/KIND/NAME`.

Invariants: it is one server's at a time, and of one config in all that saved weights depend on. What only a session has, sampler
weights without a name, is not there when the server begins.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path

import msgspec

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.config.load import load_config
from asyncrl.config.run import RunConfig
from asyncrl.control.tools.choices import with_choices
from asyncrl.errors import ConfigError
from asyncrl.folders import lock_folder
from asyncrl.learner.checkpoint_folder import PARTIAL

SNAPSHOT = "snapshot-"
"""How the names begin of sampler weights to which no client gave one."""
log = logging.getLogger(__name__)


def remove_sampler_weights(saved: Path, models: str, prefix: str) -> None:
    """Remove those whose name begins so, of the models that match."""
    for folder in saved.glob(f"{models}/sampler_weights/{prefix}*"):
        shutil.rmtree(folder, ignore_errors=True)


def prepared(args: argparse.Namespace) -> tuple[RunConfig, Path]:
    """Return the config, checked, and the folder, which is this process's from now on.

    Raises:
        ConfigError: The config cannot be served, or the folder has another model or another server.
    """
    config, _ = with_choices(load_config(args.config, args.set))
    learner = config.learner
    if learner.dtype != "float32" or learner.ranks != 1 or learner.offload_optimizer or learner.optimizer != "adamw":
        raise ConfigError("the learner must have one rank, float32 and adamw here, without offload_optimizer")
    if not isinstance(config.generate.engine, TransformersEngineConfig):
        raise ConfigError("generate.engine.kind must be 'transformers' here")
    folder = args.folder or Path(config.folder) / f"{config.name}-tinker"
    note, lora = folder / "made_of.json", learner.lora or LoRAConfig()
    made_of = msgspec.json.encode((config.model, config.task, config.seed, lora.alpha, lora.target_modules))
    if note.is_file() and note.read_bytes() != made_of:
        what = "model, task, seed, lora.alpha or lora.target_modules"
        raise ConfigError(f"{folder} is of a config with another {what}; take another --folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock_folder(folder.resolve())  # until the process ends
    except BlockingIOError as error:
        raise ConfigError(f"{folder} is another server's; take another --folder, or end that server") from error
    except OSError:
        log.warning("%s has no locks: see to it that no other server has this folder", folder)
    note.write_bytes(made_of)
    for prefix in (SNAPSHOT, PARTIAL):  # also those half written
        remove_sampler_weights(folder / "saved", "*", prefix)
    return config, folder
