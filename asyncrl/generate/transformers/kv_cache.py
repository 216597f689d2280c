"""Keys and values of every slot, laid out so that a row's attention cannot depend on its neighbours.

Owns the static KV cache and the three ways of attending over it. One tensor a layer for keys and one for values, of shape
[block, row, KV head, token in block, head dim]: any first n blocks are one contiguous piece, whatever n is.

Invariants:
- A decoded row attends block by block, every block by a matrix product of one and the same shape, and blocks are added up in
  order; blocks past the row's end add exact zeros. So how many blocks the longest neighbour needs changes no bit of the result.
- A prefilled piece attends by products whose shape depends on the piece alone; pieces of one length do so in one call.
- The last token place of every row is nobody's: rows without a request, and padding, write there.

B blocks in use, R rows, N pieces of one length, H KV heads, G query heads a KV head, D head dim, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.errors import GenerationError

BLOCK_TOKENS = 64


class AttentionPlan(Protocol):
    """Where one forward's keys and values go, and what its queries see."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention output [batch, T, heads, D] for query [batch, heads, T, D], key and value [batch, H, T, D]."""
        ...


class SlotCache:
    """Static storage for `num_rows` sequences of `max_tokens` each; layers are allocated when they are first written."""

    def __init__(self, num_rows: int, max_tokens: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.device = device
        self.block_tokens = min(BLOCK_TOKENS, -(-max_tokens // 16) * 16)
        self.num_blocks = -(-max_tokens // self.block_tokens)
        self.idle_position = self.num_blocks * self.block_tokens - 1
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._given_back: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Of each layer given back, the first blocks, in host memory."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes allocated so far."""
        return sum(t.numel() * t.element_size() for t in (*self._keys.values(), *self._values.values()))

    def layer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's storage, made to fit key and value [batch, H, T, D] at first."""
        if layer not in self._keys:
            self._keys[layer] = self._allocate(key)
            self._values[layer] = self._allocate(value)
        return self._keys[layer], self._values[layer]

    def give_back(self, keep_tokens: int = 0) -> None:
        """Free all storage; the first `keep_tokens` places of every row move to host memory, the rest must be computed anew.

        Raises:
            GenerationError: Host memory has no room for what is kept; nothing is freed then.
        """
        blocks = -(-keep_tokens // self.block_tokens)
        layers = list(self._keys) if blocks else []
        try:
            kept = {layer: (_on_host(self._keys[layer][:blocks]), _on_host(self._values[layer][:blocks])) for layer in layers}
        except (RuntimeError, MemoryError) as error:
            raise GenerationError(f"cannot sleep: no room in host memory for the keys and values to keep: {error}") from error
        if self._keys or not blocks:  # given back already, what was kept then stays
            self._kept = kept
        for layer, keys in self._keys.items():
            self._given_back[layer] = (keys.new_empty(keys.shape, device="meta"), self._values[layer].to("meta"))
        self._keys.clear()
        self._values.clear()

    def take_again(self) -> None:
        """Allocate what `give_back` freed, empty but for what it kept.

        Raises:
            GenerationError: There is not enough memory; nothing is held then.
        """
        try:
            for layer, (keys, values) in self._given_back.items():
                self._keys[layer] = torch.zeros_like(keys, device=self.device)
                self._values[layer] = torch.zeros_like(values, device=self.device)
        except RuntimeError as error:
            self._keys.clear()
            self._values.clear()
            raise GenerationError(f"cannot wake: no room for the KV cache on {self.device}: {error}") from error
        for layer, (keys, values) in self._kept.items():
            self._keys[layer][: len(keys)].copy_(keys)
            self._values[layer][: len(values)].copy_(values)
        self._given_back.clear()
        self._kept.clear()

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.num_blocks, self.num_rows, like.shape[1], self.block_tokens, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def flat_index(self, rows: torch.Tensor, positions: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Return where (row, position, head) lies in a layer seen as [tokens, D], in that order, flattened; all on the device."""
        block, offset = positions // self.block_tokens, positions % self.block_tokens
        first_head = (block * self.num_rows + rows) * kv_heads * self.block_tokens + offset
        heads = torch.arange(kv_heads, device=self.device) * self.block_tokens
        return (first_head[:, None] + heads).reshape(-1)

    @torch.inference_mode()
    def copy_rows(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy the first places of rows to others.

        Args:
            copies: Source row, target row, and how many places (rounded up to whole blocks); no row is both.
        """
        by_blocks: dict[int, tuple[list[int], list[int]]] = {}
        for source, target, num_tokens in copies:
            sources, targets = by_blocks.setdefault(-(-num_tokens // self.block_tokens), ([], []))
            sources.append(source)
            targets.append(target)
        for blocks, rows in by_blocks.items():
            sources_N, targets_N = (torch.tensor(own, device=self.device) for own in rows)
            for storage in (*self._keys.values(), *self._values.values()):
                storage[:blocks, targets_N] = storage[:blocks, sources_N]


def _on_host(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, pinned where that means something."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type != "cpu").copy_(values)


@dataclass(slots=True)
class DecodePlan:
    """One new token for each of the first rows at once, or of all."""

    cache: SlotCache
    write_positions_R: torch.Tensor  # noqa: N815
    """int64, on the cache's device, as the next."""
    attend_positions_R: torch.Tensor  # noqa: N815
    """Last position each row sees; its own for a running row, 0 for an idle one."""
    num_blocks: int
    _by_heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Write one token a row, then attend over all blocks in use; see `AttentionPlan`."""
        keys, values = self.cache.layer(layer, key, value)
        kv_heads, blocks, tokens = key.shape[1], self.num_blocks, self.cache.block_tokens
        index, bias = self._layout(kv_heads, query.dtype)
        keys.view(-1, key.shape[3]).index_copy_(0, index, key.reshape(-1, key.shape[3]))
        values.view(-1, value.shape[3]).index_copy_(0, index, value.reshape(-1, value.shape[3]))
        rows, groups = query.shape[0], query.shape[1] // kv_heads
        pairs = rows * kv_heads
        query = query.reshape(1, pairs, groups, -1)
        query = query.expand(blocks, -1, -1, -1).reshape(blocks * pairs, groups, -1)
        scores = torch.baddbmm(bias, query, keys[:blocks, :rows].reshape(blocks * pairs, tokens, -1).transpose(1, 2), alpha=scale)
        scores = scores.view(blocks, pairs, groups, tokens).float()
        weights = (scores - scores.amax((0, 3), keepdim=True)).exp_()
        mixed = torch.bmm(
            weights.view(blocks * pairs, groups, tokens).to(value.dtype),
            values[:blocks, :rows].reshape(blocks * pairs, tokens, -1),
        )
        mixed = _sum_in_order(mixed.view(blocks, pairs, groups, -1).float())
        total = _sum_in_order(weights.sum(3, keepdim=True))
        return (mixed / total).to(value.dtype).view(rows, 1, kv_heads * groups, -1)

    def _layout(self, kv_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return write index [R * H] and additive mask [B * R * H, 1, tokens], made once a forward."""
        if kv_heads not in self._by_heads:
            cache, device = self.cache, self.cache.device
            index = cache.flat_index(torch.arange(len(self.write_positions_R), device=device), self.write_positions_R, kv_heads)
            places = torch.arange(self.num_blocks * cache.block_tokens, device=device)
            hidden = places.view(self.num_blocks, 1, 1, cache.block_tokens) > self.attend_positions_R.view(1, -1, 1, 1)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=cache.device).masked_fill_(hidden, -torch.inf)
            bias = bias.expand(-1, -1, kv_heads, -1).reshape(-1, 1, cache.block_tokens)
            self._by_heads[kv_heads] = (index, bias)
        return self._by_heads[kv_heads]


def _sum_in_order(blocks: torch.Tensor) -> torch.Tensor:
    """Add up along the first axis strictly in order: trailing zeros then change nothing, which `sum` does not promise."""
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens of one row, to be prefilled."""

    row: int
    start: int
    """Position of the first token in its sequence; everything before is in the cache already."""
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class PrefillPlan:
    """Pieces of several rows end to end in one forward of fixed length, padded at the end. Pieces of one length lie together."""

    cache: SlotCache
    pieces: tuple[Piece, ...]
    num_tokens: int
    rows: NDArray[np.int64] = field(init=False)
    positions: NDArray[np.int64] = field(init=False)
    """Each token's position in its sequence [num_tokens]; 0 for padding."""
    _runs: list[tuple[int, list[Piece]]] = field(init=False)
    """Place of the first token, and pieces that attend together: fresh ones of one length, or one that sees earlier pieces."""
    _index: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = np.zeros(self.num_tokens, dtype=np.int64)
        self.positions = np.zeros(self.num_tokens, dtype=np.int64)
        self._runs = []
        at = 0
        for piece in self.pieces:
            here = slice(at, at + len(piece.token_ids))
            self.rows[here], self.positions[here] = piece.row, np.arange(piece.start, piece.end)
            last = self._runs[-1][1] if self._runs else []
            if last and not (piece.start or last[0].start) and piece.end == last[0].end:
                last.append(piece)
            else:
                self._runs.append((at, [piece]))
            at = here.stop

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Write every piece to its row, then attend run by run; see `AttentionPlan`."""
        keys, values = self.cache.layer(layer, key, value)
        kv_heads, device = key.shape[1], self.cache.device
        if kv_heads not in self._index:
            places = self.positions.copy()
            places[sum(len(piece.token_ids) for piece in self.pieces) :] = self.cache.idle_position
            rows, positions = torch.from_numpy(self.rows).to(device), torch.from_numpy(places).to(device)
            self._index[kv_heads] = self.cache.flat_index(rows, positions, kv_heads)
        index = self._index[kv_heads]
        keys.view(-1, key.shape[3]).index_copy_(0, index, key[0].transpose(0, 1).reshape(-1, key.shape[3]))
        values.view(-1, value.shape[3]).index_copy_(0, index, value[0].transpose(0, 1).reshape(-1, value.shape[3]))
        output = query.new_zeros(1, self.num_tokens, query.shape[1], value.shape[3])
        for start, pieces in self._runs:
            num, tokens = len(pieces), len(pieces[0].token_ids)
            here = slice(start, start + num * tokens)
            query_N, key_N, value_N = (
                t[0, :, here].view(-1, num, tokens, t.shape[3]).transpose(0, 1) for t in (query, key, value)
            )
            if pieces[0].start:
                key_N, value_N = self._row(keys, pieces[0]), self._row(values, pieces[0])
            mixed_N = causal_attention(query_N, key_N, value_N, scale)
            output[0, here].view(num, tokens, *output.shape[2:]).copy_(mixed_N.transpose(1, 2))
        return output

    def _row(self, storage: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return [1, H, piece.end, D]: everything of the row up to the piece's end."""
        blocks = -(-piece.end // self.cache.block_tokens)
        row = storage[:blocks, piece.row].transpose(0, 1)
        return row.reshape(1, row.shape[0], -1, row.shape[3])[:, :, : piece.end]


@dataclass(slots=True)
class WholePlan:
    """One sequence by itself, nothing kept: the probe."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend causally within the sequence; see `AttentionPlan`."""
        del layer
        return causal_attention(query, key, value, scale).transpose(1, 2)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend where the queries are the last T of the keys' S positions.

    Args:
        query: [batch, H * G, T, D].
        key: [batch, H, S, D].
        value: [batch, H, S, D of values].
        scale: Multiplies the scores.

    Returns:
        [batch, H * G, T, D of values].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if query.shape[2] == key.shape[2]:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    new, seen = query.shape[2], key.shape[2]
    visible = torch.ones(new, seen, dtype=torch.bool, device=query.device).tril_(seen - new)
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
