"""The frozen policy on an inference worker: log-probabilities of response tokens, by the learner's own forward.

Invariants: packed attention and chunked logits as in the learner (asyncrl/models), so that both give the same numbers; no
gradient, dropout off. Called by inference/judge.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.inference.batching import PackedSequences
from asyncrl.models.attention import PACKED_ATTENTION
from asyncrl.models.causal import DTYPES, check_head, missing_weights
from asyncrl.models.logprobs import token_logprobs
from asyncrl.models.output_layer import use_float32_head

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once."""


class ReferenceModel:
    """A causal language model that is never trained."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @classmethod
    def open(
        cls, folder: Path, *, dtype: str, device: str, fp32_head: bool = False, trust_remote_code: bool = False
    ) -> ReferenceModel:
        """Open a Hugging Face folder.

        Args:
            folder: With config and safetensors.
            dtype: Of the weights.
            device: Where it runs.
            fp32_head: Its output layer runs in float32, as the policy's does (`model.fp32_head`).
            trust_remote_code: Whether code in the folder may run.

        Raises:
            ConfigError: The folder is missing something, or the model cannot run on packed rows.
        """
        missing = missing_weights(folder)
        if missing:
            raise ConfigError(f"algorithm.reference.path: {folder} has no {', no '.join(missing)}")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                attn_implementation=PACKED_ATTENTION,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"algorithm.reference.path: cannot open the model in {folder}: {error}") from error
        model = model.to(device).eval().requires_grad_(False)
        if fp32_head:
            use_float32_head(model)
        check_head(model)
        return cls(model)

    @torch.inference_mode()
    def logprobs(
        self, batch: PackedSequences, responses: Sequence[int], temperatures: Sequence[float]
    ) -> list[NDArray[np.float32]]:
        """Return the log-probability of every response token under the reference.

        Args:
            batch: S sequences.
            responses: T of each sequence, at most its length minus 1; 0: none is wanted of it.
            temperatures: That of each sequence's sampling; divides the logits.

        Returns:
            S arrays float32 [T].
        """
        batch = batch.to(self.model.device)
        hidden_ND = self.model.base_model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            packed_layout=batch.layout,
        ).last_hidden_state[0]
        logprobs: list[NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(responses)
        for temperature in sorted(set(temperatures)):
            members = [at for at, own in enumerate(temperatures) if own == temperature and responses[at]]
            if not members:
                continue
            before = np.concatenate([batch.sequences[at][-responses[at] - 1 : -1] for at in members])
            targets = np.concatenate([batch.sequences[at][-responses[at] :] for at in members])
            values, _ = token_logprobs(
                hidden_ND.index_select(0, torch.from_numpy(before).to(hidden_ND.device)),
                batch.input_ids[torch.from_numpy(targets).to(hidden_ND.device)],
                self.model.get_output_embeddings(),
                temperature=temperature,
                chunk_tokens=CHUNK_TOKENS,
            )
            ends = np.cumsum([responses[at] for at in members])[:-1]
            for at, part in zip(members, np.split(values.float().cpu().numpy(), ends), strict=True):
                logprobs[at] = part
        return logprobs
