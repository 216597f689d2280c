"""Level 3: drawn samples generated once more, each token by the version that the run recorded for it.

The weights are those of the learner's replay (learner.py), so the run keeps none. One sample is generated at a time. The engine
draws by (seed, position) alone, so tokens and log-probabilities are those of the run, whatever else was in its batch.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.control.batch_feeder import RecordedStep
from asyncrl.control.evaluation import sampling_of
from asyncrl.errors import ConfigError
from asyncrl.generate.engine import EngineRequest, RequestRules
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.scheduler import InFlight, SlotDecoder
from asyncrl.learner.model.lora import publishable_tensors
from asyncrl.replay.learner import LearnerReplay
from asyncrl.schema.samples import Sample, SamplingParams, derive_seed, ids_from_bytes, ids_to_bytes, logprobs_to_bytes


@dataclass(frozen=True, slots=True)
class SamplesReplayed:
    """What became of the drawn samples."""

    num_equal: int
    """With the same tokens and, bit for bit, the same log-probabilities."""
    num_tokens: int
    """Of those."""
    num_swapped: int
    """Of those, samples whose weights changed on the way."""
    difference: str
    """The first sample that differs; empty where none does."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    sample: Sample
    sampling: SamplingParams
    versions: list[int]


class SampleReplay:
    """Samples drawn from the recorded steps, and the versions of the weights that they need.

    Args:
        learner: The replay that makes those versions; at version 0.
        num_samples: How many to draw, evenly over the recorded steps; fewer where there are fewer.
        until: The last optimizer step to draw from; None: any.

    Raises:
        ConfigError: The run's engine is not the transformers engine, on a device that is here.
    """

    def __init__(self, learner: LearnerReplay, num_samples: int, until: int | None) -> None:
        self._learner, self._config = learner, learner.config
        engine = self._config.generate.engine
        if not isinstance(engine, TransformersEngineConfig):
            raise ConfigError(f"--samples wants a run of the transformers engine: {engine.kind} draws by numbers of its own")
        if engine.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"the samples were generated on {engine.device}, which this machine has not")
        self._engine = engine
        wanted = Counter(random.Random(self._config.seed).choices(learner.steps(until) or [0], k=num_samples))
        self._drawn = [drawn for step, count in sorted(wanted.items()) for drawn in self._draw(learner.recorded(step), count)]
        self._needed = {version for drawn in self._drawn for version in drawn.versions}
        self._scratch = tempfile.TemporaryDirectory(prefix="asyncrl-replay-")
        self.keep(0)

    def keep(self, version: int) -> None:
        """Keep the learner's weights, which are of this version, where a sample needs them."""
        if version in self._needed:
            tensors = {name: tensor.detach().cpu() for name, tensor in publishable_tensors(self._learner.model).items()}
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, self._path(version))

    def run(self) -> SamplesReplayed:
        """Generate every drawn sample again, once all versions are kept."""
        config, engine = self._config, self._engine
        torch.set_num_threads(engine.num_threads)
        with self._scratch, torch.no_grad():
            model = SlotModel.load(
                self._learner.model_folder, engine, trust_remote_code=config.trusts_code, fp32_head=config.model.fp32_head,
                lora=config.learner.lora,
            )  # fmt: skip
            decoder = SlotDecoder(model, engine.slots)
            rules = RequestRules(model.vocabulary_size, engine.max_sequence_tokens, model.end_ids)
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

    def _draw(self, recorded: RecordedStep, count: int) -> list[_Drawn]:
        members = [member.sample for group in recorded.groups for member in group.members]
        chosen = random.Random(recorded.step).sample(members, min(count, len(members)))
        sampling, greedy = sampling_of(self._config, recorded.params.temperature), recorded.params.screen.greedy_index
        cold = msgspec.structs.replace(sampling, temperature=0.0)
        return [
            _Drawn(sample, cold if sample.index == greedy else sampling, ids_from_bytes(sample.versions).tolist())
            for sample in chosen
        ]

    def _differs(self, decoder: SlotDecoder, rules: RequestRules, drawn: _Drawn) -> str:
        """Generate one sample again; return how it differs from the run's, or nothing."""
        sample, versions = drawn.sample, drawn.versions
        seed = derive_seed(self._config.seed, sample.group_id, sample.index)
        prompt_ids = tuple(int(token) for token in ids_from_bytes(sample.prompt_ids))
        request = EngineRequest(f"g{sample.group_id}.{sample.index}", prompt_ids, drawn.sampling, seed)
        token_ids, logprobs, reason = list[int](), list[float](), None
        for place, version in enumerate(versions):
            if version != decoder.version:
                decoder.load_weights(version, load_file(self._path(version)), self._config.generate.kv)
            if place == 0:
                decoder.submit(InFlight(request, rules.stop_ids(request)))
            for _, news in [*decoder.step(), *decoder.chunks()]:
                if isinstance(news, Exception):
                    raise news
                token_ids += news.token_ids
                logprobs += news.logprobs
                reason = news.finish_reason or reason
        decoder.abort_all()
        if ids_to_bytes(token_ids) != sample.token_ids or reason != sample.finish_reason:
            was = [int(token) for token in ids_from_bytes(sample.token_ids)]
            return f"its tokens were {was} ({sample.finish_reason}), and are {token_ids} ({reason}) by versions {versions}"
        if logprobs_to_bytes(logprobs) != sample.logprobs:
            return f"its tokens are the same, and their log-probabilities are others by versions {versions}"
        return ""

    def _path(self, version: int) -> Path:
        return Path(self._scratch.name) / f"{version}.safetensors"
