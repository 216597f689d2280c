"""The KV cache of all slots, with a layout that makes a row's attention independent of other rows.

Owns the static KV cache and three kinds of attention over it. Each layer has one tensor for keys and one for values, of shape
[block, row, KV head, token in block, head dim]: for every n, the first n blocks are contiguous.

Invariants:
- A decoded row attends block by block, with matrix products of the same shape for every block, and blocks are summed in order;
  blocks past the row's end add exact zeros. So the number of blocks of the longest other row changes no bit of the result.
- A prefilled piece attends with products whose shape depends on the piece alone; pieces of one length share a call.
- The last token place of every row is unused: rows without a request, and padding, write there.

B blocks in use, R rows, N pieces of one length, H KV heads, G query heads a KV head, D head dim, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.errors import GenerationError

BLOCK_TOKENS = 64

KeysValues = tuple[torch.Tensor, torch.Tensor]


class CacheFilledError(Exception):
    """A prefill has written the keys and values of the last layer; the rest of the forward is not needed."""


class SlotCache:
    """Static storage for `num_rows` sequences of `max_tokens` each; a layer is allocated at its first write."""

    def __init__(self, num_rows: int, max_tokens: int, device: torch.device) -> None:
        self.num_rows, self.max_tokens, self.device = num_rows, max_tokens, device
        self.block_tokens = min(BLOCK_TOKENS, -(-max_tokens // 16) * 16)
        self.num_blocks = -(-max_tokens // self.block_tokens)
        self.idle_position = self.num_blocks * self.block_tokens - 1
        self.layers: dict[int, KeysValues] = {}
        """The layers; complete after a whole forward."""
        self._given_back: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """During sleep, for keys and values: shape and dtype (on the meta device), and the kept first blocks in host memory."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes allocated so far."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers.values())

    def write(self, layer: int, index: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> KeysValues:
        """Write key and value [batch, H, T, D] to the places of `flat_index`; return the layer's storage, made at the first."""
        if layer not in self.layers:
            shape = (self.num_blocks, self.num_rows, key.shape[1], self.block_tokens)
            self.layers[layer] = (key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3]))
        for storage, new in zip(self.layers[layer], (key, value), strict=True):
            storage.view(-1, new.shape[3]).index_copy_(0, index, new.transpose(1, 2).reshape(-1, new.shape[3]))
        return self.layers[layer]

    def give_back(self, keep_tokens: int = 0) -> None:
        """Free all storage; the first `keep_tokens` places of every row move to host memory, the rest must be computed again.

        Raises:
            GenerationError: Host memory is too small for the kept part; then nothing is freed.
        """
        blocks, pins = -(-keep_tokens // self.block_tokens), self.device.type != "cpu"
        given_back: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        try:
            for layer, storages in self.layers.items():
                firsts = [storage[:blocks] for storage in storages]
                kept = [torch.empty_like(first, device="cpu", pin_memory=pins).copy_(first) for first in firsts]
                given_back[layer] = [(storage.to("meta"), host) for storage, host in zip(storages, kept, strict=True)]
        except (RuntimeError, MemoryError) as error:
            raise GenerationError(f"cannot sleep: no room in host memory for the keys and values to keep: {error}") from error
        self._given_back = given_back
        self.layers.clear()

    def take_again(self) -> None:
        """Allocate the storage that `give_back` freed, and restore the kept part. Raises RuntimeError without enough memory."""
        for layer, parts in self._given_back.items():
            keys, values = (torch.zeros_like(shape, device=self.device) for shape, _ in parts)
            self.layers[layer] = (keys, values)
            for storage, (_, host) in zip((keys, values), parts, strict=True):
                storage[: len(host)].copy_(host)
        self._given_back.clear()

    def flat_index(self, rows: torch.Tensor, positions: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Return the flat index of each (row, position, head), in that order, in a layer seen as [tokens, D]; on the device."""
        block, offset = positions // self.block_tokens, positions % self.block_tokens
        first_head = (block * self.num_rows + rows) * kv_heads * self.block_tokens + offset
        heads = torch.arange(kv_heads, device=self.device) * self.block_tokens
        return (first_head[:, None] + heads).reshape(-1)

    @torch.inference_mode()
    def copy_rows(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy the first places of rows to others.

        Args:
            copies: Source row, target row, and how many places (at least); no row is both.
        """
        by_blocks: dict[int, list[tuple[int, int, int]]] = {}
        for copy in copies:
            by_blocks.setdefault(-(-copy[2] // self.block_tokens), []).append(copy)
        for blocks, rows in by_blocks.items():
            sources_N, targets_N, num_tokens_N = torch.tensor(rows, device=self.device).T
            tokens = int(num_tokens_N.max()) if blocks == 1 else self.block_tokens
            for storage in (storage for layer in self.layers.values() for storage in layer):
                places = storage[:blocks, :, :, :tokens]
                places.index_copy_(1, targets_N, places.index_select(1, sources_N))

    @torch.inference_mode()
    def clear_rows(self, rows: list[int]) -> None:
        """Set all places of rows to zero."""
        rows_N = torch.tensor(rows, device=self.device)
        for storage in (storage for layer in self.layers.values() for storage in layer):
            storage.index_fill_(1, rows_N, 0)


@dataclass(slots=True)
class DecodePlan:
    """Attention for one new token of each of the first rows, or of all rows."""

    cache: SlotCache
    write_positions_R: torch.Tensor  # noqa: N815
    """int64, on the cache's device, like the next tensor."""
    attend_positions_R: torch.Tensor  # noqa: N815
    """Last visible position of each row: its own for a running row, 0 for an idle one."""
    num_blocks: int
    _by_heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Write index [R * H] and additive mask [B * R * H, 1, tokens], computed once per forward."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Write one token per row, then attend over all blocks in use.

        Args:
            layer: Its number.
            query: [R, H * G, 1, D].
            key: [R, H, 1, D].
            value: As `key`.
            scale: Multiplies the scores.

        Returns:
            [R, 1, H * G, D], as every plan: [batch, T, heads, D].
        """
        cache, blocks, tokens = self.cache, self.num_blocks, self.cache.block_tokens
        rows, kv_heads, groups = query.shape[0], key.shape[1], query.shape[1] // key.shape[1]
        if kv_heads not in self._by_heads:
            index = cache.flat_index(torch.arange(rows, device=cache.device), self.write_positions_R, kv_heads)
            places = torch.arange(blocks * tokens, device=cache.device)
            hidden = places.view(blocks, 1, 1, tokens) > self.attend_positions_R.view(1, -1, 1, 1)
            bias = torch.zeros(hidden.shape, dtype=query.dtype, device=cache.device).masked_fill_(hidden, -torch.inf)
            self._by_heads[kv_heads] = (index, bias.expand(-1, -1, kv_heads, -1).reshape(-1, 1, tokens))
        index, bias = self._by_heads[kv_heads]
        keys, values = cache.write(layer, index, key, value)
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


def _sum_in_order(blocks: torch.Tensor) -> torch.Tensor:
    """Sum along the first axis strictly in order, so that trailing zeros change nothing; `sum` does not guarantee this."""
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one row to prefill."""

    row: int
    start: int
    """Position of the first token in its sequence; the cache already has all earlier tokens."""
    token_ids: tuple[int, ...]


class PrefillPlan:
    """Pieces of several rows in one forward of fixed length, padded at the end. Pieces of equal length are adjacent."""

    def __init__(self, cache: SlotCache, pieces: tuple[Piece, ...], num_tokens: int) -> None:
        self.cache, self.num_tokens = cache, num_tokens
        lengths = [len(piece.token_ids) for piece in pieces]
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        rows, positions = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int64)
        rows[:total] = np.repeat([piece.row for piece in pieces], lengths)
        positions[:total] = np.arange(total) - np.repeat(ends - lengths - [piece.start for piece in pieces], lengths)
        self.positions = torch.from_numpy(positions.copy()).to(cache.device)
        """Each token's position in its sequence [num_tokens]; 0 for padding."""
        positions[total:] = cache.idle_position
        self._places = (torch.from_numpy(rows).to(cache.device), torch.from_numpy(positions).to(cache.device))
        self._index: dict[int, torch.Tensor] = {}
        self._runs: list[tuple[int, list[Piece]]] = []
        """Place of the first token, and pieces that attend together: of equal length and equal start position."""
        for piece, length, end in zip(pieces, lengths, ends.tolist(), strict=True):
            last = self._runs[-1][1] if self._runs else []
            if last and (piece.start, length) == (last[0].start, len(last[0].token_ids)):
                last.append(piece)
            else:
                self._runs.append((end - length, [piece]))
        rows_N = torch.tensor([piece.row for piece in pieces], device=cache.device)
        self._rows_of_runs = torch.split(rows_N, [len(run) for _, run in self._runs])

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Write every piece to its row, then attend run by run; see `DecodePlan`. Raises CacheFilledError in the last layer."""
        kv_heads = key.shape[1]
        if kv_heads not in self._index:
            self._index[kv_heads] = self.cache.flat_index(*self._places, kv_heads)
        keys, values = self.cache.write(layer, self._index[kv_heads], key, value)
        if layer == max(self.cache.layers):
            raise CacheFilledError
        output = query.new_zeros(1, self.num_tokens, query.shape[1], value.shape[3])
        for (start, pieces), rows_N in zip(self._runs, self._rows_of_runs, strict=True):
            num, tokens = len(pieces), len(pieces[0].token_ids)
            here = slice(start, start + num * tokens)
            query_N, key_N, value_N = (
                t[0, :, here].view(-1, num, tokens, t.shape[3]).transpose(0, 1) for t in (query, key, value)
            )
            if pieces[0].start:  # all tokens of the rows up to the pieces' end, [N, H, end, D]
                end = pieces[0].start + tokens
                blocks = -(-end // self.cache.block_tokens)
                key_N, value_N = (
                    storage[:blocks, rows_N].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end] for storage in (keys, values)
                )
            mixed_N = causal_attention(query_N, key_N, value_N, scale)
            output[0, here].view(num, tokens, *output.shape[2:]).copy_(mixed_N.transpose(1, 2))
        return output


class WholePlan:
    """One sequence alone, not stored in the cache: the probe."""

    cache = None

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend causally within the sequence; see `DecodePlan`."""
        del layer
        return causal_attention(query, key, value, scale).transpose(1, 2)


AttentionPlan = DecodePlan | PrefillPlan | WholePlan
"""Where a forward writes its keys and values, and which ones its queries see."""


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention in which the queries are the last T of the keys' S positions.

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
