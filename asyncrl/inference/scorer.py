"""What an inference worker computes: a batch of requests in, one answer each, by every model the run has there.

Owns the models and the normalisation of each reward model's scores: shift and scale by fixed figures, then by running ones, then
clip. Invariants: every request gets one answer, with values or with the reason why there are none; a bad sample (tokens outside a
vocabulary, too long, without a prompt) fails alone; evaluation samples are scored by the reward models only and do not change the
running figures; the scores of one batch are all counted before any of them is normalised, so that members of a group scored
together are compared on one scale. Runs on one thread, off the event loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from asyncrl.config.check import REFERENCE
from asyncrl.config.run import RewardModel, RunConfig
from asyncrl.inference.batching import num_tokens, pack
from asyncrl.inference.models import ReferenceModel, RewardScorer
from asyncrl.schema.samples import InferRequest, InferResult, ids_from_bytes, logprobs_to_bytes

log = logging.getLogger(__name__)


class Scorer:
    """Every model of this worker, and the running figures of their scores."""

    def __init__(self, config: RunConfig, model_folder: Path) -> None:
        """Open every model.

        Args:
            config: `inference`, `algorithm` and `model` are read.
            model_folder: The run's own initial model, the reference where no other is named.

        Raises:
            ConfigError: One of them cannot be opened.
        """
        self.reference: ReferenceModel | None = None
        self.reward_models: dict[str, RewardScorer] = {}
        algorithm, inference = config.algorithm, config.inference
        started_s = time.perf_counter()
        if config.has_reference_worker:
            is_own = not algorithm.reference.path
            self.reference = ReferenceModel(
                model_folder if is_own else Path(algorithm.reference.path),
                dtype=inference.dtype,
                device=inference.device,
                fp32_head=config.model.fp32_head,
                trust_remote_code=is_own and config.trusts_code,
            )
        for model in inference.reward_models:
            self.reward_models[model.name] = RewardScorer(model, inference.device)
        self._normalisers = {model.name: ScoreNormaliser(model) for model in inference.reward_models}
        mib, seconds = self.num_bytes / 2**20, time.perf_counter() - started_s
        log.info("loaded %s: %.1f MiB in %.1f s", ", ".join(self.names), mib, seconds)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models."""
        return (*([REFERENCE] if self.reference is not None else []), *self.reward_models)

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Every model, as `reference` or `reward NAME`."""
        own: dict[str, torch.nn.Module] = {} if self.reference is None else {REFERENCE: self.reference.model}
        return own | {f"reward {name}": scorer.model for name, scorer in self.reward_models.items()}

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights and buffers, tied ones once."""
        return sum(tensor.nbytes for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers()))

    def score(self, requests: Sequence[InferRequest]) -> list[InferResult]:
        """Return an answer for each request of a batch, in order; by whom and when is left open."""
        errors, logprobs = [self._refusal(request) for request in requests], [b""] * len(requests)
        rewards: list[dict[str, float]] = [{} for _ in requests]
        if sound := [at for at, error in enumerate(errors) if not error]:
            chosen = [requests[at] for at in sound]
            batch = pack(chosen)
            lengths = [len(request.token_ids) // 4 if self._wants_reference(request) else 0 for request in chosen]
            if self.reference is not None and any(lengths):
                parts = self.reference.logprobs(batch, lengths, [request.temperature for request in chosen])
                for at, part in zip(sound, parts, strict=True):
                    logprobs[at] = logprobs_to_bytes(part)
            for name, reward_model in self.reward_models.items():
                raw = dict(zip(sound, reward_model.scores(batch), strict=True))
                finite = [at for at, score in raw.items() if math.isfinite(score)]
                counts = [requests[at].purpose == "train" for at in finite]
                normalised = self._normalisers[name].normalise([raw[at] for at in finite], counts)
                for at, reward in zip(finite, normalised, strict=True):
                    rewards[at][name] = reward
                for at in raw.keys() - finite:
                    errors[at] = errors[at] or f"reward model {name} gave {raw[at]}"
        return [
            InferResult(asked.group_id, asked.index, asked.attempt, logprobs[at], rewards[at], errors[at], purpose=asked.purpose)
            for at, asked in enumerate(requests)
        ]

    def _refusal(self, request: InferRequest) -> str:
        length = num_tokens(request)
        if not length:
            return "the sample has no tokens at all"
        token_ids = ids_from_bytes(request.prompt_ids + request.token_ids)
        smallest, largest = int(token_ids.min()), int(token_ids.max())
        if smallest < 0:
            return f"token id {smallest} is negative"
        if self.reference is not None and self._wants_reference(request):
            if not request.prompt_ids:
                return "the sample has no prompt: its first token has no probability under the reference"
            vocabulary = self.reference.model.config.get_text_config().vocab_size
            if largest >= vocabulary:
                return f"token {largest} is outside the reference's vocabulary of {vocabulary}"
        return next(filter(None, (scorer.refusal(length, largest) for scorer in self.reward_models.values())), "")

    def _wants_reference(self, request: InferRequest) -> bool:
        return self.reference is not None and request.purpose == "train"


class ScoreNormaliser:
    """Normalises the scores of one reward model; what `running` has seen is forgotten with the process.

    Source: Welford 1962, Note on a method for calculating corrected sums of squares and products.
    """

    def __init__(self, config: RewardModel) -> None:
        self._config = config
        self.count, self._mean, self._squares = 0, 0.0, 0.0
        """Of the scores that counted: how many, their mean, and the sum of squared distances from it."""

    def normalise(self, scores: Sequence[float], counts: Sequence[bool]) -> list[float]:
        """Return the reward of each score.

        Args:
            scores: Finite, of one batch.
            counts: Which of them enter the running figures (those of training samples).

        Returns:
            clip((score - mean) / std), and with `running` minus the running mean over the running (unbiased) deviation before the
            clip (a deviation of 0, as of a first score, divides by 1).
        """
        config = self._config
        fixed = [(score - config.mean) / config.std for score in scores]
        if config.normalise == "running":
            for score in (score for score, is_counted in zip(fixed, counts, strict=True) if is_counted):
                self.count += 1
                before = score - self._mean
                self._mean += before / self.count
                self._squares += before * (score - self._mean)
            std = math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0
            fixed = [(score - self._mean) / (std or 1.0) for score in fixed]
        if config.clip is None:
            return fixed
        return [min(max(score, -config.clip), config.clip) for score in fixed]
