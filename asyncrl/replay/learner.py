"""Level 2: the learner once more, from version 0 over the recorded batches, by its own packing and its own steps.

Every version's weights are compared with the fingerprint that the run recorded. On a CPU they are the same bits. With several
learner ranks the run recorded none: sums are in another order there. The first version that differs ends the replay.

`whatif` asks of one recorded batch what its gradient would have been under another config. That is not another run: batch and
weights are those of the run as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import zstandard
from transformers import PreTrainedModel

from asyncrl.config.live import with_settings
from asyncrl.config.run import RunConfig
from asyncrl.control.batch_feeder import RecordedStep, pack_taken
from asyncrl.control.launch.processes import plan_ranks
from asyncrl.errors import ConfigError
from asyncrl.learner.checkpoint import VERSIONS_FILE, VersionRecord, record_of
from asyncrl.learner.resume import build_train_state, resolve_functions
from asyncrl.learner.step.train_step import OpenStep, train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.observe.decisions.journal import RECORD_FOLDER, read_journal
from asyncrl.observe.steps import read_lines
from asyncrl.schema.batches import StepBatch


@dataclass(frozen=True, slots=True)
class LearnerReplayed:
    """What became of the recorded steps."""

    num_equal: int
    """Versions whose weights are those of the run."""
    fault: str
    """Why it went no further; empty where every recorded step was trained, or all that were asked for."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One batch's gradient under another config, beside that of the run."""

    step: int
    cosine: float
    """Between the two gradients; 0 where one is nothing."""
    norms: tuple[float, float]
    """Of the gradients, unclipped: as it was, as it would have been."""
    ess: tuple[float | None, float | None]
    """`ratio/ess` of both; None where the algorithm measures none."""


class LearnerReplay:
    """A learner at version 0 of a recorded run, and the steps that it is to take.

    Args:
        run_folder: Of the run; nothing in it is changed.

    Raises:
        ConfigError: The run has several learner ranks, its model or device is not here, or its recording is not whole.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / RECORD_FOLDER
        self._configs: dict[int, RunConfig] = {}
        """By number of the controller's life."""
        for path in sorted(self._folder.glob("decisions-*.bin")):
            if (journal := read_journal(path)) is not None:
                self._configs[int(path.stem.rpartition("-")[2])] = journal.beginning.config
        if not self._configs:
            raise ConfigError(f"{self._folder} has no recording that begins whole")
        self.config: RunConfig = self._configs[min(self._configs)]
        """That the run began with."""
        config = self.config
        if config.learner.ranks > 1:
            raise ConfigError(
                f"the batches of {run_folder} were trained by {config.learner.ranks} learner ranks, whose sums are in another "
                "order: only runs with learner.ranks = 1 replay their learner"
            )
        if config.learner.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"{run_folder} was trained on {config.learner.device}, which this machine has not")
        self._recorded = {row.version: row for row in read_lines(self._folder / VERSIONS_FILE, VersionRecord)}
        resolve_functions(config.algorithm)
        torch.set_num_threads(config.learner.num_threads)
        self.model_folder = run_folder / "model"
        self._state: TrainState = build_train_state(config, self.model_folder)
        self.version = 0

    def run(self, until: int | None = None, on_step: Callable[[int], None] = lambda _: None) -> LearnerReplayed:
        """Train the recorded steps, those up to `until` alone where it is given; call back behind each."""
        num_equal, fault = 0, ""
        for step in self.steps(until)[self.version :]:
            batch, config = self._step(step)
            self._state.follow(config)
            train_step(self._state, batch, config)
            self.version = batch.step + 1
            recorded = self._recorded.get(self.version)
            if recorded is None:
                fault = f"the run recorded no weights of version {self.version}, and of later ones"
                break
            if recorded != record_of(self.version, self._state.model):
                fault = f"version {self.version} has other weights than in the run: step {batch.step} is the first that differs"
                break
            num_equal += 1
            on_step(batch.step)
        return LearnerReplayed(num_equal, fault)

    def whatif(self, overrides: Mapping[str, Any]) -> WhatIf:
        """Return what the gradient of the next step's batch would have been under these fields of the config.

        Raises:
            ConfigError: A field or its value is wrong, or there is no such step.
        """
        batch, config = self._step(self.version)
        other = with_settings(config, overrides)
        resolve_functions(other.algorithm)
        was, figures = OpenStep(self._state, batch, config).gradient()
        would_be, others = OpenStep(self._state, batch, other).gradient()
        norms = float(was.norm()), float(would_be.norm())
        cosine = float(was @ would_be) / (norms[0] * norms[1]) if all(norms) else 0.0
        return WhatIf(batch.step, cosine, norms, (figures.get("ratio/ess"), others.get("ratio/ess")))

    @property
    def model(self) -> PreTrainedModel:
        """Return the policy at `version`."""
        return self._state.model

    def steps(self, until: int | None) -> range:
        """Return the steps that the run trained, up to `until`; a batch behind the newest version was sent and never trained."""
        last = max(self._recorded, default=0) - 1
        return range((last if until is None else min(until, last)) + 1)

    def recorded(self, step: int) -> RecordedStep:
        """Return what a step was trained with.

        Raises:
            ConfigError: It is not there, or damaged.
        """
        path = RecordedStep.path(self._folder, step)
        if not path.exists():
            raise ConfigError(f"the batch of step {step} is not in {path.parent}")
        try:
            content = zstandard.ZstdDecompressor().decompress(path.read_bytes())
            return msgspec.msgpack.decode(content, type=RecordedStep)
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            before = f"; the steps before it replay with --until {step - 1}" if step else ""
            raise ConfigError(f"{path} is damaged: {error}{before}") from error

    def _step(self, step: int) -> tuple[StepBatch, RunConfig]:
        recorded = self.recorded(step)
        config = with_settings(self._configs[recorded.life], recorded.params.settings)
        return pack_taken(step, recorded.groups, recorded.params, plan_ranks(config)), config
