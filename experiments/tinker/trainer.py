"""A model that a client trains: passes, optimizer steps, checkpoints. asyncrl's learner does the work.

Gradients add up from one pass to the next until a step takes them. Invariants: a pass that fails leaves the gradients as they
were, and a step that fails the weights; log-probabilities are in the order of the examples, at temperature 1.

Legend: M targets of a row, N tokens of an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from tinker import types
from wire import Example, RefusedError

from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.types import Denominators, LossConfig, LossInputs
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.checkpoint import build_train_state, load_trainer, save_checkpoint
from asyncrl.learner.checkpoint_folder import PREFIX, TrainerState, newest_checkpoint
from asyncrl.learner.model.policy import publishable_tensors, run_row
from asyncrl.learner.step.microbatch import Row
from asyncrl.models.attention import build_layout
from asyncrl.packing.pack import pack_lengths

OWN_NAMES = {"cross_entropy": "reinforce", "ppo": "ppo_clip"}
"""Losses of the protocol that have another name in asyncrl. Cross-entropy is a policy gradient with weights for advantages."""
CLIPPING = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SETTINGS: dict[str, dict[str, float]] = {"ppo": CLIPPING, "cispo": CLIPPING, "dro": {"beta": 0.0}}
"""What `loss_fn_config` may say, with defaults; a beta must be given. Other losses take nothing: asyncrl's defaults hold."""
OF_SEQUENCES = ("gspo", "gspo_token", "rloo_product", "gmpo", "topr", "vespo")
"""Losses that look at a whole sequence, and so must know which tokens are trained."""
KNOWN = (*OWN_NAMES, *LOSSES)


class ChosenLoss:
    """A loss by name with its settings, and what it reads of an example."""

    def __init__(self, name: str, given: Mapping[str, float]) -> None:
        """Choose.

        Raises:
            RefusedError: There is no such loss, or it does not take a setting.
        """
        known = SETTINGS.get(name, {})
        if name not in KNOWN:
            raise RefusedError(f"there is no loss {name[:80]!r} here; take one of {', '.join(KNOWN)}")
        if unknown := sorted(given.keys() - known.keys()):
            raise RefusedError(f"loss_fn_config: {name} takes {', '.join(known) or 'nothing'}, got {unknown[0][:80]!r}")
        settings = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0, "beta": 1.0, **known, **given}
        low, high, beta = settings.values()
        if not 0.0 <= low <= 1.0 <= high or beta <= 0.0:
            raise RefusedError(
                f"loss_fn_config: {name} wants clip_low_threshold in [0, 1], clip_high_threshold from 1, beta over 0"
            )
        own: dict[str, Any] = {
            "ppo": {"clip_low": 1.0 - low, "clip_high": high - 1.0},
            "cispo": {"min_ratio": low, "max_ratio": high},
        }
        own["dro"] = {"log_ratio_penalty": beta / 2}
        self._name, self._loss = name, LOSSES[OWN_NAMES.get(name, name)]
        self._config = LossConfig(aggregation="token-sum", **own.get(name, {}))
        self._needed, self._optional = {"logprobs", "advantages"}, {"sequence_ratio_mask"}
        if name == "cross_entropy":
            self._needed, self._optional = set(), {"weights"}
        elif name in OF_SEQUENCES:
            self._needed, self._optional = self._needed | self._optional, set()

    def check(self, examples: Sequence[Example]) -> None:
        """Refuse examples without what the loss reads, or with more."""
        takes = ", ".join(["target_tokens", *sorted(self._needed | self._optional)])
        for number, inputs in enumerate(example.inputs.keys() for example in examples):
            if not self._needed <= inputs <= self._needed | self._optional:
                given = ", ".join(["target_tokens", *sorted(inputs)])[:200]
                raise RefusedError(f"data[{number}]: {self._name} reads {takes} of loss_fn_inputs, and there are {given}")

    def of_row(self, logprobs: torch.Tensor, row: Row, own: Sequence[Example]) -> torch.Tensor:
        """Return the loss of a row, summed over its tokens, which has the gradient of `logprobs` [M]."""

        def flat(name: str, default: float) -> torch.Tensor:
            parts = [one.inputs.get(name, np.full(len(one.token_ids), default, np.float32)) for one in own]
            return torch.from_numpy(np.concatenate(parts)).to(logprobs.device)

        behaviour = flat("logprobs", 0.0)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=behaviour,
            behaviour_logprobs=behaviour,
            advantages=flat("weights", 1.0) if self._name == "cross_entropy" else flat("advantages", 0.0),
            mask=flat("sequence_ratio_mask", 1.0) != 0,
            sequence_ids=row.sequence_ids,
            num_sequences=len(own),
            denominators=Denominators(1.0, 1.0),
        )
        return self._loss(inputs, self._config).loss


class Policy:
    """One model in training, of which adapters are trained. Every call is made from one thread.

    Example:
        >>> policy = Policy(config, model_folder, stopped, None, has_moments=False)  # doctest: +SKIP
        >>> policy.run(examples, ChosenLoss("cross_entropy", {}))             # doctest: +SKIP
        >>> policy.step(types.AdamParams(learning_rate=1e-3))                 # doctest: +SKIP
    """

    def __init__(
        self, config: RunConfig, model_folder: Path, stopped: Callable[[], bool], saved: Path | None, *, has_moments: bool
    ) -> None:
        """Open the model.

        Args:
            config: `learner`, `model`, `packing` and `seed` are read.
            model_folder: The base.
            stopped: Asked between two rows of a pass, which ends where it says so.
            saved: What `save` wrote, to go on from; None: new adapters.
            has_moments: Whether the moments are those saved.

        Raises:
            LearnerError: What was saved is of other adapters, or damaged.
            RefusedError: It is gone.
        """
        self._version, self._stopped = 0, stopped
        learner = replace(config.learner, warmup_steps=0, min_learning_rate_ratio=1.0)
        self._config = replace(config, learner=learner, algorithm=AlgorithmConfig())
        torch.set_num_threads(learner.num_threads)
        checkpoint = None if saved is None else newest_checkpoint(saved)
        if saved is not None and checkpoint is None:
            raise RefusedError(f"weights {saved.name!r} are there no more; load others", 410)
        self._state = build_train_state(self._config, model_folder, checkpoint)
        if checkpoint is not None and has_moments:
            self._version = load_trainer(checkpoint, self._state).version

    def run(self, examples: Sequence[Example], loss: ChosenLoss, *, is_backward: bool = True) -> tuple[list[NDArray[Any]], float]:
        """Return the log-probabilities [N] of each example's targets, and the loss; add up its gradients.

        Raises:
            RefusedError: The loss or a gradient is not finite, or the server stops.
        """
        loss.check(examples)
        learner, model, total = self._config.learner, self._state.model, 0.0
        trained = [one for one in model.parameters() if one.requires_grad]
        logprobs: list[NDArray[Any]] = [np.zeros(0)] * len(examples)
        gradients = [torch.zeros_like(one) for one in trained]
        for members in pack_lengths([len(one.token_ids) for one in examples], self._config.packing.tokens_per_row):
            if self._stopped():
                raise RefusedError("the server stops", 503)
            own = [examples[member] for member in members]
            row = _row(own, members).to(model.device)
            with torch.set_grad_enabled(is_backward):
                given = run_row(model, row, temperature=1.0, chunk_tokens=learner.logprob_chunk_tokens).logprobs
                share = loss.of_row(given, row, own)
            if is_backward:
                torch._foreach_add_(gradients, torch.autograd.grad(share, trained, materialize_grads=True))
            total += float(share.detach())
            for place, member in enumerate(members):
                logprobs[member] = given.detach()[row.sequence_ids == place].cpu().numpy()
        if not math.isfinite(total) or not all(bool(one.isfinite().all()) for one in gradients):
            raise RefusedError(f"the loss is {total}, or a gradient is not finite; the gradients are those of before")
        for one, gradient in zip(trained, gradients, strict=True) if is_backward else ():
            one.grad = gradient if one.grad is None else one.grad.add_(gradient)
        return logprobs, total

    def step(self, params: types.AdamParams) -> dict[str, float]:
        """Change the weights by the gradients, as these parameters say, and forget the gradients.

        Raises:
            RefusedError: A parameter is out of its range, or there are no gradients, or they add up to what is not finite.
        """
        for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
            # An eps of 0 in float32 would make a weight NaN where its gradient is 0.
            value, below, least = getattr(params, name), 1.0 if name.startswith("beta") else 1e30, 1e-30 if name == "eps" else 0.0
            if not least <= value < below:
                raise RefusedError(f"adam_params: {name} must be at least {least:g} and under {below:g}, got {value}")
        if all(one.grad is None for one in self._state.model.parameters()):
            raise RefusedError("there are no gradients; call forward_backward before optim_step")
        said: dict[str, Any] = {"learning_rate": params.learning_rate, "epsilon": params.eps, "weight_decay": params.weight_decay}
        said |= {"betas": (params.beta1, params.beta2), "max_grad_norm": params.grad_clip_norm or math.inf}
        optimizer = self._state.optimizer
        optimizer.follow(replace(self._config.learner, **said), num_steps=1)
        norm = optimizer.clip()
        if not math.isfinite(norm):
            optimizer.zero_grad()
            raise RefusedError(f"the norm of the gradients is {norm}; they are dropped and the weights are those of before")
        optimizer.step(self._version)
        self._version += 1
        return {"grad_norm": norm}

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write a checkpoint of weights and optimizer; one that is there is removed once the new one is whole."""
        there = [int(one.name.removeprefix(PREFIX)) for one in folder.glob(f"{PREFIX}*")]
        version = max([self._version, *(one + 1 for one in there)])  # the highest is the newest, also after `load_weights`
        save_checkpoint(folder, self._state, tokenizer, TrainerState(version=version), keep_last=1)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what a sampler must load to sample from this version: copies, on the CPU."""
        return {name: one.detach().cpu().clone() for name, one in publishable_tensors(self._state.model).items()}


def with_rank(config: RunConfig, rank: int) -> RunConfig:
    """Return the config with adapters of this rank; alpha and layers are the config's, or asyncrl's defaults."""
    return replace(config, learner=replace(config.learner, lora=replace(config.learner.lora or LoRAConfig(), rank=rank)))


def _row(own: Sequence[Example], members: Sequence[int]) -> Row:
    """Lay examples end to end; every token has a target."""
    lengths = np.array([len(one.token_ids) for one in own])
    places, lines = np.concatenate([np.arange(length) for length in lengths]), np.repeat(np.arange(len(own)), lengths)
    total = len(places)
    return Row(
        input_ids=torch.from_numpy(np.concatenate([one.token_ids for one in own])),
        position_ids=torch.from_numpy(places),
        layout=build_layout(np.split(np.arange(total), np.cumsum(lengths)[:-1]), total),
        hidden_index=torch.arange(total),
        hidden_tokens=torch.arange(total),
        target_ids=torch.from_numpy(np.concatenate([one.target_ids for one in own])),
        behaviour_logprobs=torch.zeros(total),
        versions=torch.full((total,), -1),
        sequence_ids=torch.from_numpy(lines),
        sample_index=np.array(members),
        places=(np.array(members)[lines], places),
    )
