"""Keys and values of sequences that are decoded side by side, written in place and never padded to the longest.

    seats = Seats.of([30, 70_000, 12], device)       who shares memory with whom, the same for every layer
    rows = KVRows(seats).moved((), [cache], seats)   one layer's keys and values
    o = rows.decode(q, k, v)                         the next token of each sequence

Short sequences share a tensor with those of about their length, so one launch serves them all; a long one has memory
of its own, so nobody is padded to its length and it is not copied when others come and go.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import ArgumentError, UnsupportedError
from ..keystore import KeySize, LayerKeys
from ..keystore.static import StaticKeys
from ..softmax.products import product
from .layer import Layer, LayerCall
from .seats import Seats

UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's kernels without cuDNN's, which is planned anew for every number of keys: in decoding, for every token."""


class KVCache(NamedTuple):
    """Keys and values of each document's earlier tokens, ending in the last column."""

    k: Tensor
    """``[N, S, Hk, K]``, after rotation."""
    v: Tensor
    """``[N, S, Hk, V]``."""
    empty: Tensor | None
    """Columns before each document's first token, int64 ``[N]``; None: no document is shorter than S."""

    @property
    def length(self) -> Tensor:
        """Tokens of each document, int64 ``[N]``."""
        N, S = self.k.shape[:2]
        full = torch.full((N,), S, dtype=torch.int64, device=self.k.device)
        return full if self.empty is None else full - self.empty

    def extend(self, k: Tensor, v: Tensor) -> KVCache:
        """The cache with the documents' next tokens ``[N, T, Hk, ·]``."""
        for mine, new in ((self.k, k), (self.v, v)):
            if mine.shape[2:] != new.shape[2:]:
                raise ArgumentError("state", f"keys and values of {list(new.shape[2:])}", list(mine.shape[2:]))
        return KVCache(
            torch.cat([self.k, k.to(self.k.dtype)], 1), torch.cat([self.v, v.to(self.v.dtype)], 1), self.empty
        )


class KeyedLayer(Layer):
    """A layer that remembers all tokens' keys: its state is a `KVCache`, or `LayerKeys` where a `KeyStore` has them."""

    needs_runs, host_steps = False, True
    state_type = KVCache
    kept_alike: ClassVar[bool] = True
    """Whether a `KeyStore` has the keys that a `KVCache` would have."""

    @property
    @abstractmethod
    def key_size(self) -> KeySize:
        """What a token takes in a `KeyStore`."""

    def _check(self, x: Tensor, state: Any, call: LayerCall) -> None:
        others = (KVRows, LayerKeys) if self.host_steps else (KVRows, LayerKeys, StaticKeys)
        super()._check(x, None if isinstance(state, others) else state, call)
        if isinstance(state, LayerKeys):
            check_keys(x, state, self.key_size, call)
        elif isinstance(state, KVRows):
            check_rows(x, len(state.seats.lengths), call)
        elif isinstance(state, StaticKeys):
            check_rows(x, state.rows.rows, call)
        elif state is not None:
            self._check_cache(x, state, call)

    def _check_cache(self, x: Tensor, cache: KVCache, call: LayerCall) -> None:
        """Refuse a cache of other documents or heads."""
        expected, got = [x.shape[0], self.key_size.heads], [cache.k.shape[0], cache.k.shape[2]]
        if not call.packed and got != expected:
            raise ArgumentError("state", f"keys of {expected[0]} documents and {expected[1]} heads", got)

    @property
    def fixed_size(self) -> KeySize:
        """What a token takes in `StaticKeys`."""
        return self.key_size

    def fixed_parts(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What these have there of keys and values ``[n, heads, ·]``."""
        return k, v

    def carried_of(self, k: Tensor) -> Tensor | None:
        """What a `KeyStore` carries of sequences whose last keys are ``k [N, Hk, ·]``; None: nothing."""
        return None


class GroupedLayer(KeyedLayer):
    """One whose query heads share key heads; keys are as wide as values where it does not say otherwise."""

    num_kv_heads: int
    widths: list[int]
    """Channels of all heads of q, k and v."""

    @property
    def key_size(self) -> KeySize:
        """What a token's key and value take, for a `KeyStore`."""
        width = self.widths[1] // self.num_kv_heads
        return KeySize(self.num_kv_heads, width, width)


class KVRows:
    """One layer's keys and values of the sequences of `seats`: a tensor ``[n, capacity, Hk, ·]`` each a seat."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def moved(self, rows: Sequence[int], more: Sequence[KVCache], seats: Seats) -> KVRows:
        """Some of the sequences, then new ones (a cache of one row each), where `seats` has them.

        Tensors whose sequences stay together are taken over; nothing is written to those given.
        """
        out = KVRows(seats)
        had = {(seat.rows, seat.capacity): i for i, seat in enumerate(self.seats.seats)}
        at = {row: (i, n) for i, seat in enumerate(self.seats.seats) for n, row in enumerate(seat.rows)}
        for seat in seats.seats:
            old = tuple(rows[r] if r < len(rows) else -1 for r in seat.rows)
            i = had.get((old, seat.capacity))
            if i is not None:
                out.k.append(self.k[i])
                out.v.append(self.v[i])
                continue
            sources = []
            for new, row in zip(seat.rows, old):
                if row < 0:
                    cache = more[new - len(rows)]
                    sources.append((cache.k[0], cache.v[0]))
                else:
                    i, n = at[row]
                    length = self.seats.lengths[row]
                    sources.append((self.k[i][n, :length], self.v[i][n, :length]))
            out.k.append(_stacked([k for k, _ in sources], seat.capacity))
            out.v.append(_stacked([v for _, v in sources], seat.capacity))
        return out

    @property
    def length(self) -> Tensor:
        """Tokens of each sequence, int64 ``[N]``."""
        return self.seats.length

    def last_keys(self) -> Tensor:
        """The key of each sequence's last token ``[N, Hk, K]``."""
        seats = self.seats
        rows = [k[here, seats.length[index] - 1] for k, here, index in zip(self.k, seats.here, seats.index)]
        out = torch.cat(rows)
        return out if seats.order is None else out[seats.order]

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int = -1,
        scale: float | None = None,
        width: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The next token of each sequence ``q [N, 1, H, K]`` over all of it: ``[N, 1, H, V]``.

        Its key and value ``[N, 1, Hk, ·]`` are written; `seats` counts it when all layers are done. With a `width` the
        first channels of keys are the values, and those given have none. softcap, sinks: as in `ring_la.attention`.
        """
        out, seats = [], self.seats
        for i, (seat, index, keys, values) in enumerate(zip(seats.seats, seats.index, self.k, self.v)):
            rows = slice(None) if len(seats.seats) == 1 and seats.order is None else index
            lengths = [seats.lengths[r] for r in seat.rows]
            end, begin = max(lengths) + 1, 0 if window < 0 else max(0, min(lengths) - window)
            if len(lengths) == 1:
                keys[0, end - 1], values[0, end - 1] = k[rows, 0][0], v[rows, 0][0]
            else:
                at = seats.here[i], seats.length[index]
                keys[at], values[at] = k[rows, 0].to(keys.dtype), v[rows, 0].to(values.dtype)
            mask = seats.mask(i, begin, end, window)
            read = keys[..., :width] if width else values
            out.append(one_query(q[rows], keys[:, begin:end], read[:, begin:end], mask, scale, softcap, sinks))
        o = torch.cat(out) if len(out) > 1 else out[0]
        return o if seats.order is None else o[seats.order]

    def written(self, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ``[S, Hk, ·]`` of each sequence, with those of its next token ``[N, 1, Hk, ·]`` written."""
        out = {}
        for seat, keys, values in zip(self.seats.seats, self.k, self.v):
            for n, row in enumerate(seat.rows):
                at = self.seats.lengths[row]
                keys[n, at], values[n, at] = k[row, 0], v[row, 0]
                out[row] = keys[n, : at + 1], values[n, : at + 1]
        return [out[row] for row in range(len(out))]


def one_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token a row ``q [N, 1, H, K]`` to ``k, v [N, S, Hk, ·]``: ``[N, 1, H, V]``."""
    N, H, Hk = len(q), q.shape[2], k.shape[2]
    k, v = (y.to(q.dtype).transpose(1, 2) for y in (k, v))
    rows = q.reshape(N, Hk, H // Hk, -1)  # heads that share keys are rows of one: nothing is copied for a mask
    if softcap or sinks is not None:
        return _by_scores(rows, k, v, mask, scale, softcap, sinks).reshape(N, 1, H, -1)
    with sdpa_kernel(UNPLANNED) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(rows, k, v, mask, scale=scale).reshape(N, 1, H, -1)


def _by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """What PyTorch's function cannot: ``q [N, Hk, H / Hk, K]``, ``k, v [N, Hk, S, ·]``, scores in fp32 or fp64."""
    (N, heads), (keys, values) = q.shape[:2], (x.flatten(0, 1) for x in (k, v))  # of one sequence as they lie
    scores = product(q.flatten(0, 1), keys.mT).unflatten(0, (N, heads))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        more = sinks.to(scores.dtype).view(1, *q.shape[1:3], 1).expand(len(q), -1, -1, -1)
        scores = torch.cat([scores, more], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return product(weights.flatten(0, 1), values).unflatten(0, (N, heads)).to(q.dtype)


def decode(q: Tensor, cache: KVCache, window: int, scale: float | None = None) -> Tensor:
    """The last T tokens of each document ``q [N, T, H, K]`` over the whole of it: ``[N, T, H, V]``."""
    (T, S), mask = (q.shape[1], cache.k.shape[1]), None
    if T > 1 or window >= 0 or cache.empty is not None:
        column = torch.arange(S, device=q.device)
        distance = column[S - T :, None] - column
        mask = (distance >= 0) & (distance <= (window if window >= 0 else S))
        if cache.empty is not None:
            mask = mask & (column >= cache.empty[:, None])[:, None, None]
    if T == 1:
        return one_query(q, cache.k, cache.v, mask, scale)
    k, v = (y.to(q.dtype).transpose(1, 2) for y in (cache.k, cache.v))
    grouped = q.shape[2] != cache.k.shape[2]
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=grouped, scale=scale)
    return o.transpose(1, 2)


def cache_of(k: Tensor, v: Tensor, call: LayerCall) -> KVCache:
    """The cache of whole documents, on every rank, from this rank's keys and values."""
    if call.layout is not None:
        k, v = call.layout.gather(k), call.layout.gather(v)
    if not call.packed:
        return KVCache(k, v, None)
    cu = call.cu_seqlens if call.layout is None else torch.tensor(call.layout.cu_seqlens, device=k.device)
    assert cu is not None  # for documents are packed
    length = cu.long().diff()
    longest = int(length.max())
    empty = longest - length
    column = torch.arange(longest, device=k.device)
    token = (cu[:-1, None] + column - empty[:, None]).clamp(min=0)
    seen = (column >= empty[:, None])[..., None, None]
    return KVCache(k[0, token] * seen, v[0, token] * seen, empty)


def each_row(rows: KVRows, k: Tensor, v: Tensor, *x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Of each sequence its keys and values ``[1, S, Hk, ·]``, those of its next token ``[N, 1, Hk, ·]`` written, and
    its row of each `x`."""
    for n, (key, value) in enumerate(rows.written(k, v)):
        yield key[None], value[None], *(y[n : n + 1] for y in x)


def each_document(cache: KVCache, *x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Keys, values and rows of `x` of documents of one length together, else of each by itself."""
    if cache.empty is None:
        yield cache.k, cache.v, *x
        return
    for n, a in enumerate(cache.empty.tolist()):
        yield cache.k[n : n + 1, a:], cache.v[n : n + 1, a:], *(y[n : n + 1] for y in x)


def begins(state: object, call: LayerCall) -> bool:
    """Whether what a call reads is a layout's tokens before which a `KeyStore` has none."""
    return isinstance(state, LayerKeys) and call.layout is not None and not any(state.rows.earlier)


def refuse_split_cache(call: LayerCall) -> None:
    """Refuse to go on from a `KVCache` with tokens that are packed or split, where keys are chosen."""
    if call.packed or (call.layout is not None and call.layout.cp.size > 1):
        hint = "Read all of a prompt at once, or with a KeyStore, or go on with layout=None and cu_seqlens=None"
        raise UnsupportedError("state", "None where tokens are split or packed", "a KVCache", hint)


def refuse_packed(cache: KVCache, call: LayerCall) -> None:
    """Refuse to go on from a `KVCache` under a layout where documents are packed or of several lengths."""
    if call.packed or cache.empty is not None:
        raise UnsupportedError(
            "state",
            "documents of one length, not packed, where the next tokens are split or packed too",
            "packed documents or a cache of documents of several lengths",
            "Continue each document as a batch row with layout=None and cu_seqlens=None",
        )


def check_rows(x: Tensor, N: int, call: LayerCall) -> None:
    """Refuse anything but one token of each of N sequences."""
    if call.layout is not None or call.packed or x.shape[:2] != (N, 1):
        got = f"{list(x.shape)}{', split or packed' if call.layout is not None or call.packed else ''}"
        raise ArgumentError("x", f"one token of each of {N} sequences, [{N}, 1, {x.shape[-1]}], on one device", got)


def check_keys(x: Tensor, state: LayerKeys, size: KeySize, call: LayerCall) -> None:
    """Refuse anything but tokens of a layout, or one token more, of the sequences whose keys are in `state`."""
    rows = state.rows
    if state.size != size:
        raise ArgumentError("state", f"keys of {size}", state.size)
    if call.layout is None:
        check_rows(x, len(rows), call)
    elif (documents := call.layout.num_documents if call.packed else x.shape[0]) != len(rows):
        raise ArgumentError("state", f"keys of {documents} documents", len(rows))
    elif call.packed and any(rows.earlier):
        raise UnsupportedError("state", "no earlier tokens of packed documents", f"{rows.earlier}")


def _stacked(rows: Sequence[Tensor], capacity: int) -> Tensor:
    """Sequences ``[T, Hk, ·]`` as rows with room for `capacity` tokens, zero where there are none."""
    out = rows[0].new_zeros(len(rows), capacity, *rows[0].shape[1:])
    for row, x in zip(out, rows):
        row[: len(x)] = x
    return out
