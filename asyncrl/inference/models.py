"""The models of an inference worker, forward only: the frozen reference policy and reward models; batching of requests.

Requests are taken in order of arrival, as many as `tokens_per_batch` allows. A prompt common to several of them (the members of a
group) is stored once, because a causal model's hidden states of it are the same for all.

A reward model is any sequence-classification checkpoint with one output. A decoder with a linear `score` over its last token
runs packed, like the policy. Whether a model can do so is tested, not guessed from its name: when opened, its own forward and the
packed one score the same sequences. If the results differ (a bidirectional encoder, another kind of head, attention with soft
caps), its own forward is used, one sequence at a time.

Invariants: packed attention and chunked logits are as in the learner (asyncrl/models), so both give the same numbers; a score is
read at the last token, found by the sequence's length and never by a padding id, which in many models is the end of turn; no
gradient, dropout off; every request is in exactly one batch, and a request longer than the budget has its own batch.

Legend: N tokens of the batch, S sequences, P prompt and T response tokens of a sequence, D hidden.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from asyncrl.config.run import RewardModel
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.models.attention import PACKED_ATTENTION, SequenceLayout, build_layout, on_device, use_packed_attention
from asyncrl.models.causal import check_head, open_folder
from asyncrl.models.logprobs import token_logprobs, use_float32_head
from asyncrl.schema.samples import InferRequest, ids_from_bytes, ids_to_bytes

log = logging.getLogger(__name__)

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest allowed difference of a packed score from the model's own score, relative to max(1, |score|)."""
PROBE_LENGTHS = (3, 7, 12)


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Whole sequences, concatenated, with common prompts once: int64 [N]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: SequenceLayout
    sequences: tuple[NDArray[np.int64], ...]
    """S arrays [P + T]: the positions of each sequence's tokens."""


def num_tokens(request: InferRequest) -> int:
    """Return P + T."""
    return (len(request.prompt_ids) + len(request.token_ids)) // 4


def take_batch(waiting: deque[InferRequest], tokens_per_batch: int) -> list[InferRequest]:
    """Remove the requests of the next forward pass from the queue, oldest first.

    Args:
        waiting: At least one request; the taken ones are removed.
        tokens_per_batch: Maximum number of distinct tokens, unless the first request alone has more.
    """
    taken: list[InferRequest] = []
    prompts: set[bytes] = set()
    total = 0
    while waiting:
        request = waiting[0]
        total += len(request.token_ids) // 4 + (0 if request.prompt_ids in prompts else len(request.prompt_ids) // 4)
        if taken and total > tokens_per_batch:
            break
        prompts.add(request.prompt_ids)
        taken.append(waiting.popleft())
    return taken


def pack(requests: Sequence[InferRequest]) -> PackedSequences:
    """Concatenate the sequences of these requests.

    Args:
        requests: Each has at least one token.
    """
    prompts: dict[bytes, NDArray[np.int64]] = {}
    tokens: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    sequences: list[NDArray[np.int64]] = []
    total = 0
    for request in requests:
        prompt_ids, response_ids = ids_from_bytes(request.prompt_ids), ids_from_bytes(request.token_ids)
        if request.prompt_ids not in prompts:
            prompts[request.prompt_ids] = np.arange(total, total + len(prompt_ids))
            tokens.append(prompt_ids)
            positions.append(np.arange(len(prompt_ids)))
            total += len(prompt_ids)
        sequences.append(np.concatenate([prompts[request.prompt_ids], np.arange(total, total + len(response_ids))]))
        tokens.append(response_ids)
        positions.append(np.arange(len(prompt_ids), len(prompt_ids) + len(response_ids)))
        total += len(response_ids)
    return PackedSequences(
        input_ids=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        layout=build_layout(sequences, total),
        sequences=tuple(sequences),
    )


class ReferenceModel:
    """A causal language model that is never trained."""

    def __init__(self, folder: Path, *, dtype: str, device: str, fp32_head: bool, trust_remote_code: bool) -> None:
        """Open a Hugging Face folder.

        Args:
            folder: A folder with config and safetensors.
            dtype: Dtype of the weights.
            device: Device on which it runs.
            fp32_head: Whether its output layer runs in float32, like the policy's (`model.fp32_head`).
            trust_remote_code: Whether code in the folder may run.

        Raises:
            ConfigError: The folder is incomplete (for example, a weight is missing), or the model cannot run on packed rows.
        """
        model = open_folder(
            "algorithm.reference.path", folder, AutoModelForCausalLM, dtype,
            attn_implementation=PACKED_ATTENTION, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self.model: PreTrainedModel = model.to(device).eval().requires_grad_(False)
        if fp32_head:
            use_float32_head(self.model)
        check_head(self.model)

    @torch.inference_mode()
    def logprobs(
        self, batch: PackedSequences, responses: Sequence[int], temperatures: Sequence[float]
    ) -> list[NDArray[np.float32]]:
        """Return the log-probability of every response token under the reference.

        Args:
            batch: S sequences.
            responses: T of each sequence, at most its length minus 1; 0: no log-probabilities for this sequence.
            temperatures: Sampling temperature of each sequence; divides the logits.

        Returns:
            S arrays float32 [T].
        """
        batch = on_device(batch, self.model.device)
        hidden_ND = _hidden_states(self.model, batch)
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


class RewardScorer:
    """A reward model ready to score."""

    def __init__(self, config: RewardModel, device: str) -> None:
        """Open a Hugging Face folder.

        Raises:
            ConfigError: The folder is incomplete, or the model is not a reward model: it has several outputs, or the folder has
                no weights for its head.
        """
        folder, field = Path(config.path), f"inference.reward_models {config.name!r}"
        model = open_folder(field, folder, AutoModelForSequenceClassification, config.dtype)
        if model.config.num_labels != 1:
            raise ConfigError(f"{field}: {folder} has {model.config.num_labels} outputs; a reward model has 1 (num_labels)")
        model = model.to(device).eval().requires_grad_(False)
        # Without a padding id transformers reads the last token, not the last token that differs from the padding id.
        model.config.get_text_config().pad_token_id = model.config.pad_token_id = None
        self.name, self.model, self.is_packed = config.name, model, _can_run_packed(model, TOLERANCE[config.dtype])
        if not self.is_packed:
            log.warning("reward model %s (%s) cannot run packed: it scores one sequence at a time", config.name, config.path)

    def refusal(self, length: int, largest_id: int) -> str:
        """Return why a sequence cannot be scored, or an empty string.

        Args:
            length: Number of its tokens.
            largest_id: Largest of its token ids.
        """
        text_config = self.model.config.get_text_config()
        if largest_id >= text_config.vocab_size:
            return (
                f"reward model {self.name}: token {largest_id} is outside its vocabulary of {text_config.vocab_size}; it must "
                "have the policy's tokenizer"
            )
        most = getattr(text_config, "max_position_embeddings", None)
        if most and length > most:
            return f"reward model {self.name} takes at most {most} tokens, the sample has {length}"
        return ""

    @torch.inference_mode()
    def scores(self, batch: PackedSequences) -> list[float]:
        """Return the raw score of each of the S sequences."""
        return (_packed_scores if self.is_packed else _own_scores)(self.model, batch)


@torch.inference_mode()
def _can_run_packed(model: PreTrainedModel, tolerance: float) -> bool:
    """Compare both ways of scoring on short sequences, and set the model's attention for the chosen way."""
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        return False
    vocabulary = model.config.get_text_config().vocab_size
    probe = pack([
        InferRequest(0, at, 0, b"", ids_to_bytes([(5 * at + 3 * step + 1) % vocabulary for step in range(length)]))
        for at, length in enumerate(PROBE_LENGTHS)
    ])
    own = _own_scores(model, probe)
    before = model.config._attn_implementation  # noqa: SLF001 - transformers has no public reader
    try:
        use_packed_attention(model)
        packed = _packed_scores(model, probe)
    except (LearnerError, ValueError, TypeError, RuntimeError) as error:
        log.debug("packed attention does not fit: %s", error)
        packed = []
    if packed and all(abs(a - b) <= tolerance * max(1.0, abs(a)) for a, b in zip(own, packed, strict=True)):
        return True
    model.set_attn_implementation(before)
    return False


def _hidden_states(model: PreTrainedModel, batch: PackedSequences) -> torch.Tensor:
    hidden_ND: torch.Tensor = model.base_model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        use_cache=False,
        packed_layout=batch.layout,
    ).last_hidden_state[0]
    return hidden_ND


def _packed_scores(model: PreTrainedModel, batch: PackedSequences) -> list[float]:
    batch = on_device(batch, model.device)
    hidden_ND = _hidden_states(model, batch)
    last_S = torch.tensor([int(sequence[-1]) for sequence in batch.sequences], device=hidden_ND.device)
    last_SD = hidden_ND.index_select(0, last_S)
    return [float(score) for score in model.score(last_SD).float().squeeze(-1).tolist()]


def _own_scores(model: PreTrainedModel, batch: PackedSequences) -> list[float]:
    """Run the model's own forward on each sequence separately."""
    return [
        float(model(input_ids=batch.input_ids[torch.from_numpy(tokens)].unsqueeze(0).to(model.device)).logits.float().item())
        for tokens in batch.sequences
    ]
