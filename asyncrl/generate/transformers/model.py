"""A transformers causal LM driven over a `SlotCache`: decode a token for every row, prefill pieces, score, take new weights.

Owns the model and the cache. The model's own forward runs unchanged. Only its attention is replaced, through transformers'
attention interface, which passes the `slot_plan` argument to `_slot_attention`.

Invariants:
- `prefill` always runs a length that depends on each piece alone. `decode` runs all rows, or a first number of rows that was
  measured to give identical bits (`_same_bits`). So no bit of a row's result depends on the rest of the batch.
- Used from one thread only, after `load`. New weights are copied in only between two forwards.

R rows, V vocabulary, T tokens.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import ConfigError, EngineConfigError, GenerationError, first_line
from asyncrl.generate.transformers.kv_cache import (
    AttentionPlan,
    CacheFilledError,
    DecodePlan,
    Piece,
    PrefillPlan,
    SlotCache,
    WholePlan,
)
from asyncrl.generate.transformers.weight_loader import WeightsInPlace
from asyncrl.models.causal import most_positions
from asyncrl.models.logprobs import use_float32_head
from asyncrl.models.memory import LEAST_ROWS, cache_rows
from asyncrl.weights.tensors import ArrivingTensors, SharedTensors

log = logging.getLogger(__name__)

_ATTENTION: Final = "asyncrl_slots"
_PIECE_TOKENS: Final = 64
"""On a CPU, a longer prompt is prefilled in several forwards: prompts share whole pieces of a common prefix."""
_GPU_PIECE_TOKENS: Final = 256
ForwardTokens = tuple[tuple[int, int], ...]
"""(maximum piece length, length of the forward for pieces up to that length)."""
_GPU_FORWARD_TOKENS: Final[ForwardTokens] = ((_GPU_PIECE_TOKENS, 2048),)
"""On a GPU a forward of 2,048 tokens takes little more time than one of 64."""


def _slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    slot_plan: AttentionPlan | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Run the plan's attention; the signature is transformers' attention interface."""
    del attention_mask
    if slot_plan is None:
        raise EngineConfigError(
            f"{type(module).__name__} does not pass attention arguments on, so the transformers engine cannot run this model"
        )
    for name in ("softcap", "position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise EngineConfigError(f"{type(module).__name__} attends with {name}, which the transformers engine cannot do")
    window, cache = kwargs.get("sliding_window"), slot_plan.cache
    if isinstance(window, int) and cache is not None and window < cache.max_tokens:
        raise EngineConfigError(
            f"the model attends within a sliding window of {window} tokens and generate.engine.max_sequence_tokens is "
            f"{cache.max_tokens}: set it to at most {window}"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return slot_plan.attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]


class SlotModel:
    """The model, its cache, and the forwards of generation."""

    def __init__(self, model: Any, config: TransformersEngineConfig, *, adapters_only: bool) -> None:  # noqa: ANN401
        self._model = model
        self.device = torch.device(config.device)
        slots, self.max_tokens = config.slots, config.max_sequence_tokens
        self.num_rows = cache_rows(slots)
        self.cache = SlotCache(self.num_rows, self.max_tokens, self.device)
        self.vocabulary_size = int(model.get_input_embeddings().weight.shape[0])
        end = getattr(model.generation_config, "eos_token_id", None)
        end = getattr(model.config, "eos_token_id", None) if end is None else end
        self.end_ids = frozenset([] if end is None else [end] if isinstance(end, int) else end)
        self.weights = WeightsInPlace(model, trainable_only=adapters_only)
        self._graphs = DecodeGraphs(self) if self.device.type == "cuda" else None
        self.row_counts: tuple[int, ...] = (self.num_rows,)
        """The row counts that `decode` may run, ascending."""
        # More slots are refilled with more prompts at once: half a token per slot.
        least = min(256, 1 << max(5, (slots // 2).bit_length() - 1))
        on_cpu = tuple((longest, max(longest, least)) for longest in (16, _PIECE_TOKENS))
        self._forward_tokens: ForwardTokens = on_cpu if self._graphs is None else _GPU_FORWARD_TOKENS
        self.piece_tokens = self._forward_tokens[-1][0]
        """Tokens of a sequence in one prefill piece; a piece's bits do not depend on how earlier pieces were computed."""
        self._has_adopted = False
        """The weights are the learner's own, so the engine's sleep does not free them."""

    @classmethod
    def load(
        cls,
        folder: Path,
        config: TransformersEngineConfig,
        *,
        trust_remote_code: bool = False,
        fp32_head: bool = False,
        lora: LoRAConfig | None = None,
    ) -> SlotModel:
        """Open a Hugging Face folder and run one decode to check that the engine can run the model.

        Args:
            folder: The model's folder; with adapters, the base model's.
            config: Slots, maximum sequence length, dtype and device are used.
            trust_remote_code: `model.trust_remote_code` of the run's config.
            fp32_head: `model.fp32_head` of the run's config.
            lora: The LoRA config if the learner trains adapters: then new weights are only the adapters.

        Raises:
            ConfigError: The weights are damaged, or the adapters or the output layer do not fit the model.
            EngineConfigError: The model has too few positions, or its attention cannot be replaced.
            GenerationError: The folder cannot be opened.
        """
        AttentionInterface.register(_ATTENTION, _slot_attention)
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, config.dtype),
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                attn_implementation=_ATTENTION,
            )
        except SafetensorError as error:
            raise ConfigError(f"cannot open the model in {folder}: {error}") from error
        except (OSError, ValueError, KeyError) as error:
            raise GenerationError(f"cannot open the model folder {folder}: {error}") from error
        positions = most_positions(model.config)
        if positions and config.max_sequence_tokens > positions:
            raise EngineConfigError(
                f"generate.engine.max_sequence_tokens is {config.max_sequence_tokens}; the model was made for {positions} "
                "positions: set it to at most that"
            )
        if kinds := set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
            raise EngineConfigError(f"the transformers engine runs attention layers only; this model also has {sorted(kinds)}")
        if fp32_head:
            use_float32_head(model)
        if lora is not None:
            import_module("asyncrl.models.adapters").add_adapters(
                model, lora, 0
            )  # any seed: the first version replaces all of them
        made = cls(model.eval().to(config.device), config, adapters_only=lora is not None)
        # The first decode allocates the cache, and raises every error about the model before any request.
        made.row_counts = made._same_bits()
        if not made.cache.num_bytes:
            raise EngineConfigError(
                f"{type(model).__name__} never called the replaced attention: the transformers engine cannot run it"
            )
        return made

    @property
    def resident(self) -> dict[str, int]:
        """Return the bytes of weights and cache that are on the device now, without weights that the learner owns."""
        return {"engine weights": 0 if self._has_adopted else self.weights.num_bytes, "KV cache": self.cache.num_bytes}

    @torch.inference_mode()
    def decode(self, tokens_R: NDArray[np.int64], positions_R: NDArray[np.int64]) -> torch.Tensor:
        """Feed one token to each of the first rows.

        Args:
            tokens_R: A token id per row, with R one of `row_counts`; any valid id in idle rows.
            positions_R: Position of that token in its sequence; -1 for an idle row.

        Returns:
            Logits [R, V] of each row's next token; meaningless in idle rows.
        """
        idle = positions_R < 0
        attend = np.where(idle, 0, positions_R)
        num_blocks = int(attend.max()) // self.cache.block_tokens + 1
        inputs_3R = torch.from_numpy(np.stack([tokens_R, np.where(idle, self.cache.idle_position, positions_R), attend]))
        if self._graphs is not None and self.cache.num_bytes:
            return self._graphs.decode(inputs_3R, num_blocks)
        return self.decode_eagerly(inputs_3R.to(self.device), num_blocks)

    def decode_eagerly(self, inputs_3R: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return logits [R, V]; the inputs, on the device, are tokens, write positions and last visible positions."""
        tokens_R, write_R, attend_R = inputs_3R
        plan = DecodePlan(self.cache, write_positions_R=write_R, attend_positions_R=attend_R, num_blocks=num_blocks)
        return self._forward(tokens_R.view(-1, 1), attend_R.view(-1, 1), plan)[:, 0]

    def rows_for(self, num_rows: int) -> int:
        """Return how many rows `decode` runs if the first `num_rows` are needed."""
        return next(count for count in self.row_counts if count >= num_rows)

    def _same_bits(self) -> tuple[int, ...]:
        """Return the row counts with which a test decode gave the same bits as with all rows; on a GPU only all rows.

        The summation order of a matrix product may depend on the number of rows. Which row counts differ depends on the library
        and the processor, not on the weights.
        """
        rows = np.arange(self.num_rows)
        tokens_R, last = rows * 7 % self.vocabulary_size, min(self.max_tokens - 1, self.cache.block_tokens)
        whole = [self.decode(tokens_R, np.full(self.num_rows, position)) for position in (0, last)]
        if self._graphs is not None:
            return (self.num_rows,)
        counts = [LEAST_ROWS << power for power in range(self.num_rows.bit_length()) if LEAST_ROWS << power < self.num_rows]
        return *(
            count
            for count in counts
            if all(
                torch.equal(self.decode(tokens_R[:count], np.full(count, position)), logits_RV[:count])
                for position, logits_RV in zip((0, last), whole, strict=True)
            )
        ), self.num_rows

    @torch.inference_mode()
    def prefill(self, sequences: Iterable[tuple[int, Sequence[int], int]]) -> None:
        """Fill rows' caches with sequences.

        Args:
            sequences: Row, token ids, and how many first tokens are in the row already (a multiple of `piece_tokens`); empty
                sequences are allowed.
        """
        for pieces, num_tokens in _forwards(sequences, self._forward_tokens):
            plan = PrefillPlan(self.cache, pieces, num_tokens)
            tokens = np.zeros(num_tokens, dtype=np.int64)
            ids = [token for piece in pieces for token in piece.token_ids]
            tokens[: len(ids)] = ids
            with contextlib.suppress(CacheFilledError):
                self._forward(torch.from_numpy(tokens).to(self.device).view(1, -1), plan.positions.view(1, -1), plan)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token after the first, temperature 1."""
        ids_T = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        positions_T = torch.arange(len(token_ids), device=self.device)
        logits_TV = self._forward(ids_T.view(1, -1), positions_T.view(1, -1), WholePlan())[0, :-1].float()
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        chosen: list[float] = logprobs_TV.gather(1, ids_T[1:, None]).squeeze(1).tolist()
        return chosen

    def load_weights(self, tensors: Mapping[str, torch.Tensor] | ArrivingTensors) -> None:
        """Copy new weights in, also one by one as they arrive, or use the learner's own; see `WeightsInPlace`."""
        if isinstance(tensors, SharedTensors):
            is_first = not self._has_adopted
            self.weights.adopt(tensors)
            self._has_adopted = True
            if self._graphs is not None:
                self._graphs.clear()
            if is_first and self.device.type == "cuda":  # the engine's own weights are freed: the learner needs their memory
                torch.cuda.empty_cache()
        else:
            self.weights.load(tensors)

    def sleep(self, keep_tokens: int = 0) -> None:
        """Free the weights, and the cache except the first tokens of every row; no forward until `wake`."""
        if self._graphs is not None:  # recordings read memory that is about to be freed
            self._graphs.clear()
        self.cache.give_back(keep_tokens)
        if not self._has_adopted:
            self.weights.leave()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate the memory again; kept cache is restored, weights have no values. GenerationError if memory is short."""
        try:
            self.weights.come_back()
            self.cache.take_again()
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain one on a CPU
            raise GenerationError(f"cannot wake: no room for weights and KV cache on {self.device}: {error}") from error

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=tokens, position_ids=positions, use_cache=False, slot_plan=plan).logits
        return logits


class DecodeGraphs:
    """A GPU's decode forwards as CUDA graphs: recorded once for each number of blocks, then replayed with one launch.

    Recordings read the weights and the cache at fixed addresses, so they use new weights that are copied in. Before the memory
    itself is freed (sleep, the learner's weights), call `clear`. If a forward cannot be recorded, or there is no memory for the
    recordings, the model runs without graphs.

    Invariant: recordings share one memory pool, and no data in it is read after a replay: the logits are copied out. So they may
    be replayed in any order.
    """

    def __init__(self, model: SlotModel) -> None:
        self._model: SlotModel = weakref.proxy(model)  # a cycle would keep the GPU's memory after the engine's end
        self._inputs_3R = torch.zeros(3, model.num_rows, dtype=torch.int64, device=model.device)
        self._logits_RV: torch.Tensor | None = None
        self._recorded: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        self._cannot = False

    def clear(self) -> None:
        """Remove all recordings, and the workspace of the matrix products: 32 MB per stream."""
        self._recorded.clear()
        self._logits_RV, self._pool = None, torch.cuda.graph_pool_handle()  # torch refuses a pool without recordings
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - torch has no public name for it

    def decode(self, inputs_3R: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """See `SlotModel.decode_eagerly`; the inputs are on the host, and the next call overwrites the logits."""
        self._inputs_3R.copy_(inputs_3R)
        if num_blocks not in self._recorded and not self._cannot:
            try:
                self._record(num_blocks)
            except RuntimeError as error:  # too little memory, or a branch that depends on values, such as expert routing
                self._cannot = True
                self.clear()
                told = "decoding goes on without CUDA graphs: %s; where memory is short, set generate.engine.num_slots lower"
                log.warning(told, first_line(error))
        if self._cannot:
            return self._model.decode_eagerly(self._inputs_3R, num_blocks)
        self._recorded[num_blocks].replay()
        assert self._logits_RV is not None
        return self._logits_RV

    def _record(self, num_blocks: int) -> None:
        """Record the forward on a separate stream; its work is complete on return."""
        self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
        # Also around the recording: it waits for the current device, and leaves a wrong current stream if it fails.
        with torch.cuda.stream(self._stream):
            # Kernels that tune themselves on first use must do so before the recording.
            logits_RV = self._model.decode_eagerly(self._inputs_3R, num_blocks)
            if self._logits_RV is None:
                self._logits_RV = logits_RV
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._logits_RV.copy_(self._model.decode_eagerly(self._inputs_3R, num_blocks))
        self._recorded[num_blocks] = graph


def _forwards(
    sequences: Iterable[tuple[int, Sequence[int], int]], forward_tokens: ForwardTokens
) -> list[tuple[tuple[Piece, ...], int]]:
    """Split sequences into pieces and group them into forwards; a piece's forward length depends on its own length."""
    forwards: list[tuple[tuple[Piece, ...], int]] = []
    tails: dict[int, list[Piece]] = {num_tokens: [] for _, num_tokens in forward_tokens}
    most = forward_tokens[-1][0]
    for row, token_ids, begin in sequences:
        for start in range(begin, len(token_ids), most):
            piece = Piece(row, start, tuple(token_ids[start : start + most]))
            if len(piece.token_ids) == most:
                forwards.append(((piece,), most))
            else:
                tails[next(num for longest, num in forward_tokens if len(piece.token_ids) <= longest)].append(piece)
    for num_tokens, pieces in tails.items():
        pack: list[Piece] = []
        room = num_tokens
        for piece in sorted(pieces, key=lambda piece: (piece.start, len(piece.token_ids))):
            if len(piece.token_ids) > room:
                forwards.append((tuple(pack), num_tokens))
                pack, room = [], num_tokens
            pack.append(piece)
            room -= len(piece.token_ids)
        if pack:
            forwards.append((tuple(pack), num_tokens))
    return forwards
