"""The store: sequences side by side, what they take of the memory (`slabs`), and one layer's view of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import check_int, check_kind
from ..context import ContextParallel, ShardedLayout
from ..errors import ArgumentError, describe_tensor
from .pages import Held, Pages, SlabTokens
from .plan import Plan
from .slabs import KeySize, Slabs

T = TypeVar("T")
BLOCK = 256
"""Tokens of a block."""


class KeyStore:
    """Keys and values of any number of sequences, in each layer, on each rank those of its own tokens.

        store = KeyStore([KeySize(heads=2, key=64, value=64)], cp, dtype=torch.bfloat16)
        rows = store.open(1).extended(layout)         # a sequence, and room for this rank's tokens of it
        rows[0].put(k, v)                             # layer 0: keys and values [1, T_local, 2, 64]
        rows = rows.advanced()                        # a token more, on one of the ranks
        rows[0].put(k, v)                             # [1, 1, 2, 64], the same on all ranks
        o, lse = decode_attention(q, rows[0])         # over the keys of all ranks

    Memory is taken in slabs of blocks, never copied to grow and never padded to the longest sequence. A sequence that
    is not referred to any more gives its blocks back.

    Args:
        sizes: of each layer that has keys. cp: the ranks; None: this process alone.
        dtype, device: of the keys; device None: the ranks' (without `cp`, the CPU).
        block: tokens a block has room for.

    Raises:
        ArgumentError: by name.
    """

    def __init__(
        self,
        sizes: Sequence[KeySize],
        cp: ContextParallel | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        block: int = BLOCK,
    ) -> None:
        check_kind("sizes", sizes, Sequence)
        for size in sizes:
            if not isinstance(size, KeySize) or min(size.heads, size.key, size.value + 1) < 1:
                raise ArgumentError("sizes", "a KeySize of positive numbers for each layer", size)
        check_kind("cp", cp, ContextParallel, optional=True)
        check_int("block", block, 1)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ArgumentError("dtype", "a floating torch.dtype", repr(dtype))
        if device is not None and not isinstance(device, torch.device):
            raise ArgumentError("device", "a torch.device or None", repr(device))
        self.sizes, self.cp, self.dtype = list(sizes), cp, dtype
        self.device = device or (torch.device("cpu") if cp is None else cp.device)
        self.ranks, self.rank = (1, 0) if cp is None else (cp.size, cp.rank)
        memory = Slabs(self.sizes, block, self.dtype, self.device)
        self.pages, self.k, self.v = Pages(block, memory.grow, memory.drop, memory.copy), memory.k, memory.v

    def open(self, count: int) -> KeyRows:
        """`count` sequences without a token."""
        check_int("count", count, 0)
        return KeyRows(self, [Held(self.pages) for _ in range(count)])

    def reserve(self, tokens: int) -> None:
        """Take memory for so many tokens of this rank now, which stays."""
        check_int("tokens", tokens, 1)
        self.pages.reserve(-(-tokens // self.pages.block))

    @property
    def token_bytes(self) -> int:
        """What one token takes in all layers together."""
        return sum(size.heads * (size.key + size.value) for size in self.sizes) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes this rank has taken."""
        return sum(x.nbytes for layer in (*self.k, *self.v) for x in layer.values())


class Put(NamedTuple):
    """Tokens of a call that this rank keeps: those at `tokens` of row `row` go where `spans` says, in order."""

    row: int
    tokens: Tensor | slice
    spans: list[SlabTokens]


class KeyRows:
    """Sequences side by side, one for all layers: ``rows[i]`` is what layer i reads and writes.

    Attributes:
        held: the sequences, as this rank has them. lengths: tokens of each, those of the call under way among them.
        seen: tokens of each before that call, int64 ``[N]`` on the device. earlier: the same on the host.
        carried: of layers that need more of a sequence's last token than its key, by the layer's number a tensor with
            a row a sequence, the same on all ranks.
    """

    def __init__(self, store: KeyStore, held: Sequence[Held], carried: Mapping[int, Tensor] | None = None) -> None:
        self.store, self.held = store, list(held)
        self.carried: dict[int, Tensor] = dict(carried or {})
        self.earlier = [x.length for x in self.held]
        self.here = [x.here for x in self.held]  # tokens of this rank before the call under way
        self.puts: list[Put] = []
        self._plans: dict[int, Plan] = {}
        self._kept: dict[object, Any] = {}
        self._seen: Tensor | None = None

    def __getitem__(self, layer: int) -> LayerKeys:
        return LayerKeys(self, layer)

    def __len__(self) -> int:
        return len(self.held)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, on all ranks."""
        return [x.length for x in self.held]

    @property
    def seen(self) -> Tensor:
        """Tokens before the call under way."""
        if self._seen is None:
            self._seen = torch.tensor(self.earlier, dtype=torch.int64, device=self.store.device)
        return self._seen

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tokens of all sequences and layers; shared ones count for each."""
        return self.store.token_bytes * sum(x.here for x in self.held)

    def chosen(self, rows: Sequence[int]) -> KeyRows:
        """Some of the sequences, in this order."""
        carried = {layer: x[list(rows)] for layer, x in self.carried.items()}
        return KeyRows(self.store, [Held(self.store.pages, self.held[i]) for i in rows], carried)

    @staticmethod
    def joined(parts: Sequence[KeyRows]) -> KeyRows:
        """The sequences of all parts, one part after the other."""
        store = parts[0].store
        carried = {layer: torch.cat([part.carried[layer] for part in parts]) for layer in parts[0].carried}
        return KeyRows(store, [Held(store.pages, held) for part in parts for held in part.held], carried)

    def place(self, row: int, tokens: Tensor | slice, runs: Sequence[range], length: int) -> None:
        """`length` tokens more of sequence `row`; `put` takes those at `runs` from `tokens` of its first row."""
        self.puts.append(Put(0, tokens, self.held[row].add(runs, length)))

    def extended(self, layout: ShardedLayout) -> KeyRows:
        """The sequences with the tokens of a layout more (packed: of each document), which layers will `put`. An
        `ArgumentError` refuses a layout over others than the store's ranks."""
        cp, own = layout.cp, self.store
        if (cp.size, cp.rank) != (own.ranks, own.rank):
            raise ArgumentError("layout", f"one over the {own.ranks} rank(s) of the store's cp", f"{cp.size} others")
        rows = self.chosen(range(len(self)))
        positions, packed = layout.positions_of(layout.tokens()), layout.packed
        documents = layout.documents_of(layout.tokens()) if packed else None
        cu = layout.cu_seqlens
        for i, held in enumerate(rows.held):
            mine: Tensor | slice = slice(None) if documents is None else (documents == i).nonzero().flatten()
            new = cu[i + 1] - cu[i] if packed else layout.seq_len
            spans = held.add(_runs(positions[mine] + held.length), new)
            at = mine if isinstance(mine, slice) else mine.to(self.store.device)
            rows.puts.append(Put(i if not packed else 0, at, spans))
        return rows

    def advanced(self, in_place: bool = False, tokens: int = 1) -> KeyRows:
        """The sequences with so many tokens more each, which go to the ranks in turn; layers will `put` all of them.
        `in_place`: these are not used again."""
        rows = KeyRows(self.store, self.held, self.carried) if in_place else self.chosen(range(len(self)))
        for i, held in enumerate(rows.held):
            first = (self.store.rank - held.length) % self.store.ranks
            mine = range(held.length + first, held.length + tokens, self.store.ranks)
            spans = held.add([mine] if mine else [], tokens)
            if spans:
                rows.puts.append(Put(i, slice(first, None, self.store.ranks), spans))
        return rows

    def kept(self, name: object, make: Callable[[], T]) -> T:
        """What `make` gives, made once for all layers."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def plan(self, window: int) -> Plan:
        """Where one more token of each sequence finds the keys of this rank that it sees; made once for all layers."""
        if window not in self._plans:
            first = [0 if window < 0 else x.before(x.length - 1 - window) for x in self.held]
            self._plans[window] = Plan.of(self.held, first, self.store.pages.block, self.store.device)
        return self._plans[window]


class LayerKeys(NamedTuple):
    """One layer's keys and values of `rows`: a layer's state, where keys stay on their ranks.

    heads: those it reads; None: all. Branches of a layer are kept side by side.
    part: to read what stands in the places of keys, or of values, alone, as keys without values; "joined": keys that
        are both side by side, with those in the places of keys for values; None: both.
    """

    rows: KeyRows
    layer: int
    heads: slice | None = None
    part: Literal["key", "value", "joined"] | None = None

    @property
    def length(self) -> Tensor:
        """Tokens of each sequence before the call under way, int64 ``[N]``."""
        return self.rows.seen

    @property
    def size(self) -> KeySize:
        """What a token takes, in these heads."""
        size = self.rows.store.sizes[self.layer]
        if self.part == "joined":
            size = KeySize(size.heads, size.key + size.value, size.key)
        elif self.part is not None:
            size = KeySize(size.heads, size.key if self.part == "key" else size.value, 0)
        return size if self.heads is None else size._replace(heads=len(range(size.heads)[self.heads]))

    def of(self, heads: slice) -> LayerKeys:
        """Some of the heads, to read."""
        return self._replace(heads=heads)

    def alone(self, part: Literal["key", "value"]) -> LayerKeys:
        """What stands in the places of keys, or of values, to read."""
        return self._replace(part=part)

    def joined(self) -> LayerKeys:
        """Latents in the places of keys and their rotary keys in those of values, to read: every key is ``[c ; r]``."""
        return self._replace(part="joined")

    def memory(self, slab: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens of a slab, ``[tokens, heads, ·]``."""
        store, heads = self.rows.store, slice(None) if self.heads is None else self.heads
        k, v = store.k[self.layer][slab][:, heads], store.v[self.layer][slab][:, heads]
        if self.part in (None, "joined"):
            return k, v
        read = k if self.part == "key" else v
        return read, read[..., :0]

    @property
    def carried(self) -> Tensor | None:
        """What the layer knows of each sequence's last token; None: there is none."""
        return self.rows.carried.get(self.layer)

    def carry(self, x: Tensor) -> None:
        """Know this of each sequence's last token, ``[N, …]``, the same on all ranks."""
        self.rows.carried[self.layer] = x

    @property
    def token_bytes(self) -> int:
        """What a token takes in this layer."""
        heads, key, value = self.size
        return heads * (key + value) * self.rows.store.dtype.itemsize

    def put(self, k: Tensor, v: Tensor | None = None) -> None:
        """Write keys ``[B, T, heads, ·]`` and values of the call under way: this rank's tokens of a layout, or one
        token of each sequence, the same on all ranks.

        Raises:
            ArgumentError: other rows, heads or channels.
        """
        (heads, key, value), N = self.size, len(self.rows)
        for name, x, width in (("k", k, key), ("v", v, value)):
            if x is None and not width:
                continue
            fits = isinstance(x, Tensor) and x.dim() == 4 and x.shape[2:] == (heads, width)
            if not fits or x is None or len(x) not in (1, N):  # several may be packed into one
                raise ArgumentError(name, f"[B, T, {heads}, {width}] of {N} sequences", describe_tensor(x))
            memory = (self.rows.store.k if name == "k" else self.rows.store.v)[self.layer]
            for row, tokens, spans in self.rows.puts:
                mine, at = x[row, tokens], 0
                for slab, start, stop in spans:
                    memory[slab][start:stop] = mine[at : at + stop - start]
                    at += stop - start

    def views(self, span: SlabTokens) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n, heads, ·]`` of tokens side by side."""
        return self.read(*(x[span.start : span.stop] for x in self.memory(span.slab)))

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what stands in their places; of latents the keys are the values, of which what comes out
        is cut."""
        if self.part == "joined":
            return torch.cat([k, v], -1), k
        return k, v if self.size.value else k


def rows_of(states: Sequence[Any] | None) -> KeyRows | None:
    """The sequences whose keys stay on their ranks, if these are such states."""
    return next((state.rows for state in states or [] if isinstance(state, LayerKeys)), None)


def with_rows(states: Sequence[Any], rows: KeyRows) -> list[Any]:
    """The states with keys of these sequences."""
    return [rows[state.layer] if isinstance(state, LayerKeys) else state for state in states]


def _runs(positions: Tensor) -> list[range]:
    """Ascending positions ``[n]`` as ranges: one where all are as far apart, else of those side by side."""
    if not len(positions):
        return []
    apart = positions.diff()
    step = int(apart[0]) if len(apart) and bool((apart == apart[0]).all()) else 1
    cuts = (apart != step).nonzero().flatten() + 1
    return [range(int(part[0]), int(part[-1]) + 1, step) for part in positions.tensor_split(cuts)]
