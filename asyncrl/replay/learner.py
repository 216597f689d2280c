"""Replay levels 2 and 3, which need torch: train the recorded batches again, and generate drawn samples again.

The learner trains the recorded batches from version 0, with the normal packing and steps. Every version's weights are compared
with the fingerprint in the recording. On a CPU they are the same bits. Runs with several learner ranks have no fingerprints,
because their sums are in another order. The first version that differs ends the replay.

`whatif` computes the gradient of one recorded batch under another config. That is not another run: batch and weights are those of
the recorded run.

A sample is generated with the weights of the learner's replay, each token with the version in the recording, so the run need not
store weights. One sample is generated at a time. The engine draws by (seed, position) only, so tokens and log-probabilities are
those of the run, independent of the other samples in its batch.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import zstandard
from safetensors.torch import load_file, save_file

from asyncrl.buffer.ledger.records import StepParams
from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.config.live import settings_of, with_settings
from asyncrl.config.load import resolve_config
from asyncrl.config.run import RunConfig
from asyncrl.control.batch_feeder import RecordedStep, pack_taken
from asyncrl.control.evaluation import sampling_of
from asyncrl.control.launch.processes import plan_ranks
from asyncrl.errors import ConfigError
from asyncrl.generate.engine import EngineRequest, RequestRules
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.scheduler import InFlight, SlotDecoder
from asyncrl.learner.checkpoint import (
    VERSIONS_FILE,
    VersionRecord,
    build_train_state,
    load_trainer,
    record_of,
    resolve_functions,
    save_checkpoint,
)
from asyncrl.learner.checkpoint_folder import TrainerState
from asyncrl.learner.model.policy import open_tokenizer, publishable_tensors
from asyncrl.learner.step.train_step import OpenStep, train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.observe.decisions import RECORD_FOLDER, read_journal, recordings
from asyncrl.observe.steps import read_lines
from asyncrl.replay.untrained import untrained
from asyncrl.schema.samples import Sample, SamplingParams, StepBatch, derive_seed, ids_from_bytes, ids_to_bytes, logprobs_to_bytes


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One batch's gradient under another config, beside that of the run."""

    step: int
    cosine: float
    """Cosine of the two gradients; 0 if one of them is 0."""
    norms: tuple[float, float]
    """Norms of the unclipped gradients: of the run, and under the other config."""
    ess: tuple[float | None, float | None]
    """`ratio/ess` of both; None if the algorithm does not measure it."""


class LearnerReplay:
    """A learner that starts at version 0 of a recorded run and repeats its steps.

    Args:
        run_folder: Folder of the run; nothing in it is changed.

    Raises:
        ConfigError: The run has several learner ranks, its model or device is missing here, or its recording is incomplete.
    """

    def __init__(self, run_folder: Path) -> None:
        self.run_folder, self._folder = run_folder, run_folder / RECORD_FOLDER
        self.configs: dict[int, RunConfig] = {}
        """Configs by the number of the controller's life."""
        for life, path in recordings(self._folder).items():
            if (journal := read_journal(path)) is not None:
                self.configs[life] = journal.beginning.config
        if not self.configs:
            raise ConfigError(f"{self._folder} has no recording with an intact beginning")
        self._life = self.recorded(0).life
        """Life of the controller that made the newest step."""
        self.config = config = self.config_of(self._life)
        """The config with which the run was first trained."""
        if config.learner.ranks > 1:
            raise ConfigError(
                f"the batches of {run_folder} were trained by {config.learner.ranks} learner ranks, whose sums are in another "
                "order: only runs with learner.ranks = 1 replay their learner"
            )
        if config.learner.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"{run_folder} was trained on {config.learner.device}: replay it on a machine with a GPU")
        self._recorded = {row.version: row for row in read_lines(self._folder / VERSIONS_FILE, VersionRecord)}
        if not self._recorded:
            raise ConfigError(f"{self._folder / VERSIONS_FILE} is missing or empty: it has the versions to compare with")
        resolve_functions(config.algorithm)
        torch.set_num_threads(config.learner.num_threads)
        self.model_folder = run_folder / "model"
        self.state: TrainState = build_train_state(config, self.model_folder)
        self.version = 0

    def run(self, until: int | None = None, on_version: Callable[[int], object] = lambda _: None) -> tuple[int, str]:
        """Train the recorded steps, up to `until` if given; call `on_version` with each new version.

        Returns:
            Number of versions with the weights of the run, and why the replay stopped early; empty if all requested steps were
            trained.
        """
        num_equal = 0
        for step in self.steps(until)[self.version :]:
            batch, config = self._step(step)
            train_step(self.state, batch, config)
            self.version = batch.step + 1
            recorded = self._recorded.get(self.version)
            if recorded is None:
                return num_equal, f"the run recorded no weights of version {self.version}, and of later ones"
            if recorded != record_of(self.version, self.state.model):
                fault = f"version {self.version} has other weights than in the run: step {batch.step} is the first that differs"
                return num_equal, fault
            num_equal += 1
            on_version(self.version)
        return num_equal, ""

    def whatif(self, overrides: Mapping[str, Any]) -> WhatIf:
        """Return the gradient of the next step's batch under other values of these config fields, compared with the run's.

        Raises:
            ConfigError: A field or its value is wrong, or there is no such step.
        """
        batch, config = self._step(self.version)
        other = resolve_config(config, overrides)
        if "algorithm.kl.coefficient" in overrides and other.algorithm.kl is not None and other.algorithm.kl.target is not None:
            raise ConfigError("algorithm.kl.coefficient is not read: algorithm.kl.target adapts it")
        resolve_functions(other.algorithm)
        was, figures = OpenStep(self.state, batch, config).gradient()
        would_be, others = OpenStep(self.state, batch, other).gradient()
        norms = float(was.norm()), float(would_be.norm())
        cosine = float(was @ would_be) / (norms[0] * norms[1]) if all(norms) else 0.0
        return WhatIf(batch.step, cosine, norms, (figures.get("ratio/ess"), others.get("ratio/ess")))

    def steps(self, until: int | None) -> range:
        """Return the steps that the run trained, up to `until`; a later batch was sent but never trained."""
        last = max(self._recorded, default=0) - 1
        return range((last if until is None else min(until, last)) + 1)

    def recorded(self, step: int) -> RecordedStep:
        """Return the recorded inputs of a step.

        Raises:
            ConfigError: The recording of the step is missing or damaged.
        """
        path = RecordedStep.path(self._folder, step)
        if not path.exists():
            raise ConfigError(f"the batch of step {step} is not in {path.parent}: it was not recorded, or is gone")
        try:
            content = zstandard.ZstdDecompressor().decompress(path.read_bytes())
            return msgspec.msgpack.decode(content, type=RecordedStep)
        except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, MemoryError) as error:
            before = f"; the steps before it replay with --until {step - 1}" if step else ""
            raise ConfigError(f"{path} is damaged: {error}{before}") from error

    def config_of(self, life: int) -> RunConfig:
        """Return the config of a life of the controller.

        Raises:
            ConfigError: Its recording is missing.
        """
        if life not in self.configs:
            raise ConfigError(
                f"{self._folder / f'decisions-{life:04}.bin'}, with the config of some steps, is missing or damaged"
            )
        return self.configs[life]

    def _step(self, step: int) -> tuple[StepBatch, RunConfig]:
        """Return the batch of the next step and its config, after bringing the learner to the run's state."""
        recorded = self.recorded(step)
        of_life = self.config_of(recorded.life)
        built = with_settings(self.config_of(self._life), settings_of(of_life))  # live settings change in `follow`
        self._life = recorded.life
        if (built.model, built.learner, built.algorithm) != (of_life.model, of_life.learner, of_life.algorithm):
            self._resume(of_life)
        config = with_settings(of_life, recorded.params.settings)
        self.state.follow(config)
        return pack_taken(step, recorded.groups, recorded.params, plan_ranks(config)), config

    def _resume(self, config: RunConfig) -> None:
        """Rebuild the learner from a checkpoint, as the run did: reference and critic may have been added or removed."""
        resolve_functions(config.algorithm)
        torch.set_num_threads(config.learner.num_threads)
        tokenizer = open_tokenizer(self.model_folder, trust_remote_code=config.trusts_code)
        saved = TrainerState(self.version, memory=self.state.memory)
        with tempfile.TemporaryDirectory(prefix="asyncrl-replay-") as scratch:
            checkpoint = save_checkpoint(Path(scratch), self.state, tokenizer, saved, keep_last=1)
            self.state = build_train_state(config, self.model_folder, checkpoint)
            load_trainer(checkpoint, self.state)


@dataclass(frozen=True, slots=True)
class SamplesReplayed:
    """Result of generating the drawn samples again."""

    num_equal: int
    """Samples with the same tokens and, bit for bit, the same log-probabilities."""
    num_tokens: int
    """Tokens of those samples."""
    num_swapped: int
    """Number of those samples whose weights changed during generation."""
    difference: str
    """The first sample that differs; empty if none does."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    sample: Sample
    config: RunConfig
    """Config of the controller's life in which it was trained or lost."""
    sampling: SamplingParams
    versions: list[int]


class SampleReplay:
    """Samples drawn from the recorded steps, and the weights of the versions that they need.

    Args:
        learner: The replay that makes those versions; at version 0.
        num_samples: Number of samples to draw, uniformly over the recorded steps and the samples lost before each; fewer if there
            are not enough.
        until: The last optimizer step to draw from; None: any.

    Raises:
        ConfigError: The run's engine is not the transformers engine, or its device is missing here.
    """

    def __init__(self, learner: LearnerReplay, num_samples: int, until: int | None) -> None:
        self._learner, self._config = learner, learner.config
        engine = self._config.generate.engine
        if not isinstance(engine, TransformersEngineConfig):
            raise ConfigError(f"--samples needs a run of the transformers engine: {engine.kind} has other random numbers")
        if engine.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"the samples were generated on {engine.device}: replay on a machine with a GPU")
        self._engine = engine
        steps = learner.steps(until)
        wanted = Counter(random.Random(self._config.seed).choices(steps or [0], k=num_samples))
        lost: dict[int, list[tuple[Sample, StepParams, int]]] = {step: [] for step in wanted}
        for life, step, one in untrained(learner.run_folder, until):  # a controller that was killed may have known later versions
            made = [sample for sample in one.samples if step in lost and ids_from_bytes(sample.versions).max() <= len(steps)]
            lost.get(step, []).extend((sample, one.params, life) for sample in made)
        self._drawn = [one for step in sorted(wanted) for one in self._draw(learner.recorded(step), lost[step], wanted[step])]
        self._needed = {version for drawn in self._drawn for version in drawn.versions}
        self._scratch = tempfile.TemporaryDirectory(prefix="asyncrl-replay-")
        self.keep(0)

    def keep(self, version: int) -> None:
        """Store the learner's weights, which are of this version, if a sample needs them."""
        if version in self._needed:
            tensors = {name: tensor.detach().cpu() for name, tensor in publishable_tensors(self._learner.state.model).items()}
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, self._path(version))

    def run(self) -> SamplesReplayed:
        """Generate every drawn sample again, after all versions are stored."""
        config, engine = self._config, self._engine
        torch.set_num_threads(engine.num_threads)
        with self._scratch, torch.no_grad():
            model = SlotModel.load(
                self._learner.model_folder, engine, trust_remote_code=config.trusts_code, fp32_head=config.model.fp32_head,
                lora=config.learner.lora,
            )  # fmt: skip
            decoder = SlotDecoder(model, engine.slots)
            end = open_tokenizer(self._learner.model_folder, trust_remote_code=config.trusts_code).eos_token_id
            rules = RequestRules(model.vocabulary_size, engine.max_sequence_tokens, model.end_ids | {end} - {None})
            num_equal = num_tokens = num_swapped = 0
            for drawn in self._drawn:
                sample = drawn.sample
                if differs := self._differs(decoder, rules, drawn):
                    where = f"sample g{sample.group_id}.{sample.index}"
                    return SamplesReplayed(num_equal, num_tokens, num_swapped, f"{where}: {differs}")
                num_equal += 1
                num_tokens += sample.num_tokens
                num_swapped += len(set(drawn.versions)) > 1
        return SamplesReplayed(num_equal, num_tokens, num_swapped, "")

    def _draw(self, recorded: RecordedStep, lost: list[tuple[Sample, StepParams, int]], count: int) -> list[_Drawn]:
        members = [(member.sample, recorded.params, recorded.life) for group in recorded.groups for member in group.members]
        members += lost
        drawn = []
        for sample, params, life in random.Random(recorded.step).sample(members, min(count, len(members))):
            config, temperature = self._learner.config_of(life), params.temperature
            sampling = sampling_of(config, 0.0 if sample.index == params.screen.greedy_index else temperature)
            drawn.append(_Drawn(sample, config, sampling, ids_from_bytes(sample.versions).tolist()))
        return drawn

    def _differs(self, decoder: SlotDecoder, rules: RequestRules, drawn: _Drawn) -> str:
        """Generate one sample again; return how it differs from the run's, or an empty string."""
        sample, versions = drawn.sample, drawn.versions
        seed = derive_seed(drawn.config.seed, sample.group_id, sample.index)
        prompt_ids = tuple(int(token) for token in ids_from_bytes(sample.prompt_ids))
        request = EngineRequest(f"g{sample.group_id}.{sample.index}", prompt_ids, drawn.sampling, seed)
        token_ids, logprobs, reason = list[int](), list[float](), None
        for place, version in enumerate(versions):
            if version != decoder.version:
                decoder.load_weights(version, load_file(self._path(version)), drawn.config.generate.kv)
            if place == 0:
                decoder.submit(InFlight(request, rules.stop_ids(request)))
            for _, news in [*decoder.step(), *decoder.chunks()]:
                if isinstance(news, Exception):
                    raise news
                token_ids += news.token_ids
                logprobs += news.logprobs
                reason = news.finish_reason or reason
        decoder.abort()
        if ids_to_bytes(token_ids) != sample.token_ids or reason != sample.finish_reason:
            was = [int(token) for token in ids_from_bytes(sample.token_ids)]
            return f"its tokens were {was} ({sample.finish_reason}), and are {token_ids} ({reason}) by versions {versions}"
        if logprobs_to_bytes(logprobs) != sample.logprobs:
            return f"its tokens are the same, but their log-probabilities differ with versions {versions}"
        return ""

    def _path(self, version: int) -> Path:
        return Path(self._scratch.name) / f"{version}.safetensors"
