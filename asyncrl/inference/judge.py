"""What an inference worker computes: a batch of requests in, one answer each, by every model the run has there.

Owns the shelf and each reward model's normaliser. Invariants: every request gets one answer, with values or with the reason why
there are none; a bad sample (tokens outside a vocabulary, too long, without a prompt) fails alone; evaluation samples are judged
by the reward models only and do not move the running figures. Runs on one thread, off the event loop. Called by
inference/worker.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from asyncrl.config.inference_rules import REFERENCE
from asyncrl.config.model import PretrainedModel
from asyncrl.config.run import RunConfig
from asyncrl.inference.batching import PackedSequences, num_tokens, pack
from asyncrl.inference.normalise import ScoreNormaliser
from asyncrl.inference.reference import ReferenceModel
from asyncrl.inference.reward_model import RewardScorer
from asyncrl.inference.shelf import ModelShelf
from asyncrl.schema.samples import InferRequest, ids_from_bytes, logprobs_to_bytes


@dataclass(slots=True)
class Answer:
    """What the models say about one request."""

    reference_logprobs: bytes = b""
    rewards: dict[str, float] = field(default_factory=dict)
    error: str = ""


class Judge:
    """Every model of this worker, and what they have seen."""

    def __init__(self, config: RunConfig, model_folder: Path) -> None:
        """Name the models; nothing is opened before `load_all` or the first batch.

        Args:
            config: `inference`, `algorithm` and `model` are read.
            model_folder: The run's own initial model, the reference where no other is named.
        """
        self.references: ModelShelf[ReferenceModel] = ModelShelf(_reference_opener(config, model_folder))
        self.scorers: ModelShelf[RewardScorer] = ModelShelf({
            model.name: partial(RewardScorer.open, model, config.inference.device) for model in config.inference.reward_models
        })
        self._normalisers = {model.name: ScoreNormaliser(model) for model in config.inference.reward_models}

    @property
    def loaded(self) -> tuple[str, ...]:
        """Return the names of the models in memory."""
        return self.references.loaded + self.scorers.loaded

    @property
    def num_bytes(self) -> int:
        """Return the bytes of their weights."""
        return self.references.num_bytes + self.scorers.num_bytes

    def load_all(self) -> None:
        """Open every model.

        Raises:
            ConfigError: One of them cannot be opened.
        """
        for name in self.references.names:
            self.references.load(name)
        for name in self.scorers.names:
            self.scorers.load(name)

    def judge(self, requests: Sequence[InferRequest]) -> list[Answer]:
        """Return an answer for each request of a batch, in order."""
        answers = [Answer(error=self._refusal(request)) for request in requests]
        sound = [at for at, answer in enumerate(answers) if not answer.error]
        if not sound:
            return answers
        chosen = [requests[at] for at in sound]
        batch = pack(chosen)
        for at, logprobs in zip(sound, self._reference_logprobs(chosen, batch), strict=True):
            answers[at].reference_logprobs = logprobs
        for name in self.scorers.names:
            self._score(name, chosen, batch, [answers[at] for at in sound])
        return answers

    def _refusal(self, request: InferRequest) -> str:
        length = num_tokens(request)
        if not length:
            return "the sample has no tokens at all"
        smallest, largest = _id_range(request)
        if smallest < 0:
            return f"token id {smallest} is negative"
        if self._wants_reference(request):
            if not request.prompt_ids:
                return "the sample has no prompt: its first token has no probability under the reference"
            vocabulary = self.references.load(REFERENCE).model.config.get_text_config().vocab_size
            if largest >= vocabulary:
                return f"token {largest} is outside the reference's vocabulary of {vocabulary}"
        for name in self.scorers.names:
            refusal = self.scorers.load(name).refusal(length, largest)
            if refusal:
                return refusal
        return ""

    def _wants_reference(self, request: InferRequest) -> bool:
        return REFERENCE in self.references.names and request.purpose == "train"

    def _reference_logprobs(self, requests: Sequence[InferRequest], batch: PackedSequences) -> list[bytes]:
        lengths = [len(request.token_ids) // 4 if self._wants_reference(request) else 0 for request in requests]
        if not any(lengths):
            return [b""] * len(requests)
        temperatures = [request.temperature for request in requests]
        return [logprobs_to_bytes(part) for part in self.references.load(REFERENCE).logprobs(batch, lengths, temperatures)]

    def _score(self, name: str, requests: Sequence[InferRequest], batch: PackedSequences, answers: list[Answer]) -> None:
        raw = self.scorers.load(name).scores(batch)
        finite = [at for at, score in enumerate(raw) if math.isfinite(score)]
        rewards = self._normalisers[name].normalise(
            [raw[at] for at in finite], [requests[at].purpose == "train" for at in finite]
        )
        for at, answer in enumerate(answers):
            if not math.isfinite(raw[at]):
                answer.error = answer.error or f"reward model {name} gave {raw[at]}"
        for at, reward in zip(finite, rewards, strict=True):
            answers[at].rewards[name] = reward


def _id_range(request: InferRequest) -> tuple[int, int]:
    """Return the smallest and the largest token id."""
    token_ids = ids_from_bytes(request.prompt_ids + request.token_ids)
    return int(token_ids.min()), int(token_ids.max())


def _reference_opener(config: RunConfig, model_folder: Path) -> dict[str, partial[ReferenceModel]]:
    reference, inference = config.algorithm.reference, config.inference
    if not (config.algorithm.needs_reference and reference.where == "worker"):
        return {}
    is_own = not reference.path
    trusted = is_own and isinstance(config.model, PretrainedModel) and config.model.trust_remote_code
    folder = model_folder if is_own else Path(reference.path)
    opener = partial(
        ReferenceModel.open,
        folder,
        dtype=inference.dtype,
        device=inference.device,
        fp32_head=config.model.fp32_head,
        trust_remote_code=trusted,
    )
    return {REFERENCE: opener}
