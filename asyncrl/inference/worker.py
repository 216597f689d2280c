"""The inference process: completions in, reference log-probabilities and reward-model scores out, forward only.

Owns the models from LoadModel to Shutdown, one thread on which its models run, and four loops over one connection:
- orders (CONTROL): load the models, take a shared device or give it back, shut down;
- requests (DATA): put requests into the queue, which the channel's window bounds;
- batches: while the worker has the device, take the requests of one forward pass off the queue, run them on the thread, send the
  results, acknowledge the requests;
- heartbeat: what the worker does or waits for, and its gauges.

On a shared device every model is a component, `reference` or `reward NAME`: it is on the device in phase `inference`, and off it
in the others. Each worker has an equal part of the device's budget; whether all fit is checked before anything is started
(control/placement/memory.py).

Invariants: every request gets one InferResult, with values or with the reason why there are none; it is acknowledged after its
result is sent, so that the controller's window bounds the queue; nothing is scored while other processes use a shared device; an
order is answered after the memory is given back, or taken and filled, and every switch is a line of the memory timeline; only a
model that cannot be opened or run ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from asyncrl.clock import Clock
from asyncrl.config.check import REFERENCE
from asyncrl.config.places import inference_takes_turns
from asyncrl.config.run import RewardModel, RunConfig
from asyncrl.inference.models import ReferenceModel, RewardScorer, num_tokens, pack, take_batch
from asyncrl.residency.components import ResidencyManager, TensorComponent
from asyncrl.residency.device import device_at
from asyncrl.residency.plan import GIB, SWAP_FOLDER, PhaseNeeds
from asyncrl.schema.control import LoadModel, Message, ModelsReady, SetPhase
from asyncrl.schema.samples import InferRequest, InferResult, ids_from_bytes, logprobs_to_bytes
from asyncrl.transport.protocol import Connection, Delivery, Lane
from asyncrl.transport.stage import Stage

T = TypeVar("T")
log = logging.getLogger(__name__)


class InferenceWorker:
    """One worker's state and loops.

    Args:
        config: Config of the run.
        run_folder: Folder of the run; `memory/` and `swap/` in it are written if the device is shared.
        connection: To the controller.
        clock: Times batches and heartbeats.
        name: This process's name, as in its hello message.
    """

    def __init__(self, config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, name: str) -> None:
        self._config, self._run_folder, self._clock, self._name = config, run_folder, clock, name
        self._stage = Stage(connection, clock, name, config.supervision.heartbeat_s, self._report)
        threads = config.inference.num_threads
        self._thread = ThreadPoolExecutor(1, "asyncrl-inference", torch.set_num_threads, (threads,))
        self._scorer: Scorer | None = None
        self._offload: ResidencyManager | None = None
        """Moves the models, if processes use the device in turn; else None."""
        self._has_device = False
        self._queue: deque[InferRequest] = deque()
        self._deliveries: dict[int, Delivery] = {}
        """By the identity of their requests, which the queue and the present batch keep alive."""
        self._news = asyncio.Event()
        """Set when a request arrives or the worker gets the device."""
        self._num_scored = 0
        self._num_failed = 0
        self._num_tokens = 0

    async def run(self) -> None:
        """Serve until Shutdown arrives or the connection closes; then wait for the present batch, and end the thread.

        Raises:
            ConfigError: A model cannot be opened, or is not of the kind that its config field needs.
        """

        def end() -> None:
            self._thread.shutdown()
            if self._offload is not None:
                self._offload.close()

        try:
            await self._stage.run(self._obey, self._receive(), self._serve())
        finally:
            # Shielded, because a cancelled future that has not started would never run.
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, end))

    # -- loops -----------------------------------------------------------------------------------------------------------

    async def _obey(self, order: Message) -> None:
        if isinstance(order, LoadModel):
            if self._scorer is None:  # else a learner restarted, and only needs the answer
                await self._on_thread(partial(self._open, Path(order.model_folder)))
            assert self._scorer is not None
            await self._stage.tell(ModelsReady(self._name, self._scorer.names, self._scorer.num_bytes))
            if self._offload is None:
                self._take_device(True)
        elif isinstance(order, SetPhase):  # take a shared device, or give it back after the present batch
            assert self._offload is not None, f"told to {order.phase} before the models were loaded"
            if order.phase != "inference":
                self._take_device(False)
            reached = await self._on_thread(partial(self._offload.switch, order.phase, order.number))
            self._take_device(order.phase == "inference")
            await self._stage.tell(reached)

    def _open(self, model_folder: Path) -> None:
        scorer = Scorer(self._config, model_folder)
        if inference_takes_turns(self._config):
            config, name, models = self._config, self._name, scorer.modules
            budget_bytes = int(config.placement.device_memory_gib * GIB) // config.inference.num_workers or None
            device, swap = device_at(config.inference.device, budget_bytes), self._run_folder / SWAP_FOLDER / name
            components = [TensorComponent.of_module(*named, device, swap, is_frozen=True) for named in models.items()]
            away = [PhaseNeeds(phase, soon=tuple(models), gives_back=True) for phase in ("rollout", "train")]
            phases = [*away, PhaseNeeds("inference", now=tuple(models))]
            self._offload = ResidencyManager(config.placement, self._run_folder, name, components, phases, device, self._clock)
        self._scorer = scorer

    def _take_device(self, has_device: bool) -> None:
        self._has_device = has_device
        self._news.set()

    async def _receive(self) -> None:
        async for request, delivery in self._stage.requests(InferRequest):
            self._queue.append(request)
            self._deliveries[id(request)] = delivery
            self._news.set()

    async def _serve(self) -> None:
        while True:
            while not (self._queue and self._has_device):
                self._news.clear()
                await self._news.wait()
            assert self._scorer is not None
            with self._stage.idle.running():
                requests = take_batch(self._queue, self._config.inference.tokens_per_batch)
                started_s = self._clock.now()
                answers = await self._on_thread(partial(self._scorer.score, requests))
                told = {"worker": self._name, "started_s": started_s, "finished_s": self._clock.now()}
                for request, answer in zip(requests, answers, strict=True):
                    await self._stage.connection.send(msgspec.structs.replace(answer, **told), Lane.DATA)
                    self._deliveries.pop(id(request)).ack()
                self._num_scored += len(requests)
                self._num_failed += sum(bool(answer.error) for answer in answers)
                self._num_tokens += sum(map(num_tokens, requests))

    def _report(self) -> tuple[str, dict[str, float]]:
        waiting_for = ""
        if self._scorer is None:
            waiting_for = "its models to load"
        elif self._stage.idle.is_idle:
            is_away = self._queue and not self._has_device
            waiting_for = "the device, in use by others" if is_away else "a sample to score"
        _, busy_s = self._stage.idle.totals_s()
        return waiting_for, {
            "process/samples_scored": float(self._num_scored - self._num_failed),
            "process/samples_failed": float(self._num_failed),
            "process/samples_scoring": float(len(self._deliveries)),
            "process/tokens_judged": float(self._num_tokens),
            "process/judged_tokens_per_sec": self._num_tokens / busy_s if busy_s > 0 else 0.0,
            "process/models_loaded": float(len(self._scorer.names) if self._scorer else 0),
            "process/model_bytes": float(self._scorer.num_bytes if self._scorer else 0),
        }

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class Scorer:
    """All models of a worker, and the running statistics of their scores: takes a batch of requests, gives one answer each.

    The scores of a reward model are shifted and scaled by fixed numbers, then by running statistics, then clipped. Invariants: an
    invalid sample (tokens outside a vocabulary, too long, without a prompt) fails alone; evaluation samples are scored by the
    reward models only and do not change the running statistics; all scores of a batch are counted before any is normalised, so
    that group members scored together have the same scale.
    """

    def __init__(self, config: RunConfig, model_folder: Path) -> None:
        """Open every model.

        Args:
            config: `inference`, `algorithm` and `model` are read.
            model_folder: The run's initial model, which is the reference if no other is configured.

        Raises:
            ConfigError: A model cannot be opened.
        """
        self.reference: ReferenceModel | None = None
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
        self.reward_models = {model.name: RewardScorer(model, inference.device) for model in inference.reward_models}
        self._normalisers = {model.name: ScoreNormaliser(model) for model in inference.reward_models}
        own: dict[str, torch.nn.Module] = {} if self.reference is None else {REFERENCE: self.reference.model}
        self.names = (*own, *self.reward_models)
        self.modules = own | {f"reward {name}": scorer.model for name, scorer in self.reward_models.items()}
        """Every model, as `reference` or `reward NAME`."""
        tensors = (tensor for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers()))
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)
        """Bytes of all weights and buffers in any place, tied ones once."""
        mib, seconds = self.num_bytes / 2**20, time.perf_counter() - started_s
        log.info("loaded %s: %.1f MiB in %.1f s", ", ".join(self.names), mib, seconds)

    def score(self, requests: Sequence[InferRequest]) -> list[InferResult]:
        """Return an answer for each request of a batch, in order, without worker name and times."""
        errors, logprobs = [self._refusal(request) for request in requests], [b""] * len(requests)
        rewards: list[dict[str, float]] = [{} for _ in requests]
        if sound := [at for at, error in enumerate(errors) if not error]:
            chosen = [requests[at] for at in sound]
            batch = pack(chosen)
            lengths = [len(request.token_ids) // 4 if request.purpose == "train" else 0 for request in chosen]
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
        rewards = [{} if error else reward for error, reward in zip(errors, rewards, strict=True)]
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
        if self.reference is not None and request.purpose == "train":
            if not request.prompt_ids:
                return "the sample has no prompt: its first token has no probability under the reference"
            vocabulary = self.reference.model.config.get_text_config().vocab_size
            if largest >= vocabulary:
                return f"token {largest} is outside the reference's vocabulary of {vocabulary}"
        return next(filter(None, (scorer.refusal(length, largest) for scorer in self.reward_models.values())), "")


class ScoreNormaliser:
    """Normalises the scores of one reward model; the running statistics are lost when the process ends.

    Source: Welford 1962, Note on a method for calculating corrected sums of squares and products.
    """

    def __init__(self, config: RewardModel) -> None:
        self._config = config
        self.count, self._mean, self._squares = 0, 0.0, 0.0
        """Number of counted scores, their mean, and the sum of squared distances from the mean."""

    def normalise(self, scores: Sequence[float], counts: Sequence[bool]) -> list[float]:
        """Return the reward of each score.

        Args:
            scores: Finite, of one batch.
            counts: Which scores count for the running statistics (those of training samples).

        Returns:
            clip((score - mean) / std); with `running`, before the clip, minus the running mean and divided by the running
            (unbiased) standard deviation (by 1 if that is 0, as for a first score).
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
