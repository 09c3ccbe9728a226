"""Holds the keys and values of running requests, one row a request, and attends over them.

Rows are dense, 0 to n-1, so that one decoding step reads them through a view, without a gather. All tokens of
a step, of all requests, pass through the model packed in one sequence; `packed_attention`, which transformers
models call in place of their own attention, splits them by request again. Nothing is padded but the
attention of decoding requests of different lengths, and grouped-query heads read the one copy of their
keys. KV of idle trajectories is a tight copy outside the rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "hpc_rollart_packed"

_BLOCK = 64  # capacity is a multiple of this, which also keeps rows aligned for vector loads
_CALL_COST = 128  # on a CPU, one attention call costs about as much as attending to this many positions
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")

SavedKV = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Chunk:
    """New tokens of one request: positions `start` to `stop` of a row, from index `offset` of the pack."""

    row: int
    start: int
    stop: int
    offset: int


@dataclass
class _Layer:
    """Keys and values of one layer, each of shape (rows, kv_heads, capacity, head_dim)."""

    keys: torch.Tensor
    values: torch.Tensor


class RowCache:
    """Keys and values of all layers; rows and capacity grow as they are needed.

    Parameters
    ----------
    max_rows, max_length
        Rows and positions a row that may ever be asked for.
    """

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.max_length = max_length
        self._max_rows = max_rows
        self._rows = 0
        self._capacity = 0
        self._layers: dict[int, _Layer] = {}

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions; at least doubles what it has to enlarge."""
        if rows <= self._rows and length <= self._capacity:
            return
        if rows > self._rows:
            self._rows = min(max(rows, 2 * self._rows), self._max_rows)
        if length > self._capacity:
            wanted = min(max(length, 2 * self._capacity), self.max_length)
            self._capacity = -(-wanted // _BLOCK) * _BLOCK
        for layer in self._layers.values():
            layer.keys = self._enlarged(layer.keys)
            layer.values = self._enlarged(layer.values)

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> _Layer:
        """Layer `index`; its tensors are allocated when first seen, shaped after `key` and `value`."""
        found = self._layers.get(index)
        if found is None:
            shape = (self._rows, key.shape[1], self._capacity)
            found = _Layer(key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3]))
            self._layers[index] = found
        return found

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        for layer in self._layers.values():
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def save(self, row: int, length: int) -> SavedKV:
        """A tight copy of the first `length` positions of a row."""
        return [
            (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
            for layer in self._layers.values()
        ]

    def restore(self, row: int, saved: SavedKV, length: int) -> None:
        """Write the first `length` positions of a saved copy into a row."""
        for layer, (keys, values) in zip(self._layers.values(), saved, strict=True):
            layer.keys[row, :, :length] = keys[:, :length]
            layer.values[row, :, :length] = values[:, :length]

    def clear(self) -> None:
        """Free all memory."""
        self._layers.clear()
        self._rows = self._capacity = 0

    def _enlarged(self, old: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: a masked position has weight 0, and 0 * NaN would still be NaN.
        new = old.new_zeros(self._rows, old.shape[1], self._capacity, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


class Pack:
    """Which tokens of a packed sequence belong to which row: first one of each decoding row, then the chunks.

    Parameters
    ----------
    cache
        Where the rows are; `reserve` must have made room for every position of the pack.
    rows, positions
        Of the decoding rows, in increasing order of row: the row and the position of its one new token.
    chunks
        New tokens of the other rows, at offsets from `len(rows)` on.
    device, dtype
        Of the queries.
    """

    def __init__(
        self,
        cache: RowCache,
        rows: list[int],
        positions: list[int],
        chunks: list[Chunk],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.chunks = chunks
        self._masks = [_causal_mask(chunk, device, dtype) for chunk in chunks]
        if not rows:
            return
        self._positions = positions
        self._row_index = torch.tensor(rows, device=device)
        self._position_index = torch.tensor(positions, device=device)
        # One row is written and read by plain slices, much the faster for a lone request.
        self._at: tuple[Any, ...] = (self._row_index, slice(None), self._position_index)
        if len(rows) == 1:
            self._at = (slice(rows[0], rows[0] + 1), slice(None), positions[0])
        self._first, self._last = rows[0], rows[-1]
        self._longest = max(positions) + 1
        # Rows in between that do not decode (they are being prefilled) are attended to for nothing.
        self._span = self._last - self._first + 1
        batched = self._span * self._longest + _CALL_COST
        one_by_one = sum(positions) + len(rows) * (1 + _CALL_COST)
        self._one_by_one = device.type == "cpu" and one_by_one < batched
        self._mask: torch.Tensor | None = None
        if not self._one_by_one and (self._span > len(rows) or min(positions) + 1 < self._longest):
            lengths = torch.ones(self._span, dtype=torch.long, device=device)
            lengths[self._row_index - self._first] = self._position_index + 1
            hidden = torch.arange(self._longest, device=device) >= lengths[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
            self._mask = mask[:, None, None]

    def attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Store the new keys and values of layer `index`, then attend.

        Parameters
        ----------
        query, key, value
            Shapes (1, heads, N, head_dim) and (1, kv_heads, N, head_dim), N the tokens of the pack.
        scale
            Of the scores; None for 1 / sqrt(head_dim).

        Returns
        -------
        torch.Tensor
            Shape (1, N, heads, head_dim).
        """
        layer = self.cache.layer(index, key, value)
        n = len(self.rows)
        parts = []
        if n:
            layer.keys[self._at] = key[0, :, :n].transpose(0, 1)
            layer.values[self._at] = value[0, :, :n].transpose(0, 1)
            parts.append(self._decode(layer, query[0, :, :n].transpose(0, 1), scale))
        for chunk, mask in zip(self.chunks, self._masks, strict=True):
            new = slice(chunk.offset, chunk.offset + chunk.stop - chunk.start)
            layer.keys[chunk.row, :, chunk.start : chunk.stop] = key[0, :, new]
            layer.values[chunk.row, :, chunk.start : chunk.stop] = value[0, :, new]
            parts.append(_prefill(layer, chunk, mask, query[0, :, new], scale))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _decode(self, layer: _Layer, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attend from one token a row: (n, heads, head_dim) to (n, heads, value_dim)."""
        n, heads, _ = query.shape
        kv_heads = layer.keys.shape[1]
        # The query heads that share a key head stand in for a sequence of queries: nothing is repeated.
        query = query.reshape(n, kv_heads, heads // kv_heads, -1)
        if self._one_by_one:
            out = [
                scaled_dot_product_attention(
                    query[i : i + 1],
                    layer.keys[row : row + 1, :, : position + 1],
                    layer.values[row : row + 1, :, : position + 1],
                    scale=scale,
                )
                for i, (row, position) in enumerate(zip(self.rows, self._positions, strict=True))
            ]
            return torch.cat(out).reshape(n, heads, -1)
        full = query
        if self._span > n:
            full = query.new_zeros(self._span, *query.shape[1:])
            full[self._row_index - self._first] = query
        span = slice(self._first, self._last + 1)
        result = scaled_dot_product_attention(
            full,
            layer.keys[span, :, : self._longest],
            layer.values[span, :, : self._longest],
            attn_mask=self._mask,
            scale=scale,
        )
        if self._span > n:
            result = result[self._row_index - self._first]
        return result.reshape(n, heads, -1)


def _prefill(
    layer: _Layer, chunk: Chunk, mask: torch.Tensor | None, query: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend from all tokens of a chunk: (heads, T, head_dim) to (T, heads, value_dim)."""
    heads, length, _ = query.shape
    kv_heads = layer.keys.shape[1]
    groups = heads // kv_heads
    # Query heads that share a key head read it through an expanded view: nothing is repeated.
    keys = layer.keys[chunk.row, :, None, : chunk.stop].expand(-1, groups, -1, -1)
    values = layer.values[chunk.row, :, None, : chunk.stop].expand(-1, groups, -1, -1)
    result = scaled_dot_product_attention(
        query.reshape(kv_heads, groups, length, -1),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return result.reshape(heads, length, -1).transpose(0, 1)


def _causal_mask(chunk: Chunk, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """(T, stop) mask of a chunk that continues a row; None where the plain causal triangle will do."""
    if chunk.start == 0:
        return None
    seen_from = torch.arange(chunk.start, chunk.stop, device=device)
    hidden = torch.arange(chunk.stop, device=device) > seen_from[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    pack: Pack,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers models call when their implementation is `ATTENTION`.

    Raises
    ------
    NotImplementedError
        If the model asks for more than causal attention over all positions.
    """
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    window = kwargs.get("sliding_window")
    if window is not None and window < pack.cache.max_length:
        asked.append(f"sliding_window={window} below max_context={pack.cache.max_length}")
    if asked:
        raise NotImplementedError(
            f"{type(module).__name__} needs {', '.join(asked)}, which the transformers engine does not offer"
        )
    index = module.layer_idx
    assert isinstance(index, int)
    return pack.attend(index, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, packed_attention)
