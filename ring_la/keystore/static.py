"""Keys of sequences decoded side by side at fixed addresses: what a step that is one CUDA graph reads and writes.

    rows = StaticRows(4, 1024, cp, device)          4 sequences, each with room for 1,024 of this rank's tokens
    keys = StaticKeys(rows, size, dtype)            of one layer
    rows.seat(2, positions, length)                 the third has these tokens
    keys.fill(2, k, v)
    rows.begin(4, 256)                              a step of 4 rows, whose tokens are in the first 256 columns
    o = keys.decode(q, k, v)                        in each layer
    rows.advance()
    rows.leave([2])                                 nobody has the third row any more

What differs from step to step is in tensors: how many tokens a sequence has, where they stand, which rank takes the
next one. All rows of a step are read as far as the longest, so this is for sequences of about one length. A column more
than there is room for takes the tokens that a rank does not keep. A row that nobody has has no tokens, however many
steps go over it, so its place is one that every model knows, and it reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd import traced
from ..context import ContextParallel
from ..kernels.choice import triton_installed
from .columns import Columns, by_products
from .decode import merged
from .slabs import KeySize

WIDEST = 1152
"""Bytes of a head's key and value, channels rounded up to powers of two, that the kernel has room for: more would not
fit a multiprocessor's shared memory."""


class StaticRows:
    """Which token is in which column of this rank's memory, one for all layers.

    Args:
        size: sequences. capacity: tokens of this rank each has room for. cp: the ranks; None: this process alone.

    Attributes:
        length: tokens of each sequence on all ranks, int64 ``[size]``. here: those on this rank.
        position: of the token in each column, int64 ``[size, capacity + 1]``; −1: none.
    """

    def __init__(self, size: int, capacity: int, cp: ContextParallel | None, device: torch.device) -> None:
        self.size, self.capacity, self.cp = size, capacity, cp
        self.ranks, self.rank = (1, 0) if cp is None else (cp.size, cp.rank)
        self.length, self.here = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        self.position = torch.full((size, capacity + 1), -1, dtype=torch.int64, device=device)
        self._gets, self._room = torch.zeros_like(self.length), torch.zeros_like(self.length)
        self._each = torch.arange(size, device=device)
        self._outside, self._first = torch.full_like(self._each, capacity), torch.zeros_like(self._each)
        self.rows, self.columns = size, capacity
        self._at = self._kept = self.length
        self._spans: dict[int, tuple[Tensor, Tensor]] = {}

    def seat(self, row: int, positions: Tensor, length: int) -> None:
        """Row `row` is a sequence of `length` tokens, of which this rank has those at `positions`."""
        self.length[row], self.here[row] = length, len(positions)
        self._gets[row], self._room[row] = 1, self.capacity
        self.position[row] = -1
        self.position[row, : len(positions)] = positions.to(self.position.device)

    def leave(self, rows: Sequence[int]) -> None:
        """These rows are nobody's."""
        at = torch.tensor(rows, dtype=torch.int64, device=self.length.device)
        for x in (self.length, self.here, self._gets, self._room):
            x.index_fill_(0, at, 0)

    def take_over(self, old: StaticRows) -> None:
        """Have the sequences of a smaller one."""
        self.length[: old.size], self.here[: old.size] = old.length, old.here
        self._gets[: old.size] = old._gets
        self._room.copy_(self._gets * self.capacity)
        self.position[: old.size, : old.capacity] = old.position[:, :-1]

    def begin(self, rows: int, columns: int) -> None:
        """A step of the first rows: each gets a token, within the first columns of the rank it is on."""
        self.rows, self.columns, self._spans = rows, columns, {}
        length, here = self.length[:rows], self.here[:rows]
        self._kept = here < self._room[:rows]
        if self.ranks > 1:
            self._kept &= length % self.ranks == self.rank
        self._at = torch.where(self._kept, here, self._outside[:rows])
        self.position[self._each[:rows], self._at] = length  # nobody reads the last column's

    def advance(self) -> None:
        """The step is done in all layers."""
        self.length[: self.rows].add_(self._gets[: self.rows])
        self.here[: self.rows].add_(self._kept)

    @property
    def columns_written(self) -> Tensor:
        """The column that each row's new token goes to, int64 ``[rows]``."""
        return self._at

    def put(self, memory: Tensor, x: Tensor) -> None:
        """Write each row's new token ``x [rows, 1, heads, ·]`` into ``memory [size, heads, capacity + 1, ·]``."""
        memory[self._each[: self.rows], :, self._at] = x[:, 0].to(memory.dtype)

    def spans(self, window: int) -> tuple[Tensor, Tensor]:
        """The first column that each new token sees and the one behind its last, int64 ``[rows]``: positions ascend."""
        if window not in self._spans:
            end = self.here[: self.rows] + self._kept
            if window < 0:
                begin = self._first[: self.rows]
            else:
                position = self.position[: self.rows, : self.columns]
                begin = ((position >= 0) & (self.length[: self.rows, None] - position > window)).sum(1)
            self._spans[window] = begin, end
        return self._spans[window]


class StaticKeys:
    """One layer's keys and values of `rows`, a layer's state while sequences are decoded.

    Attributes:
        k: ``[size, heads, capacity + 1, K]``, so that a head's are one matrix. v: the same with V.
        carried: what the layer needs of each sequence's last token, with a row each; None: nothing.
    """

    def __init__(self, rows: StaticRows, size: KeySize, dtype: torch.dtype) -> None:
        self.rows, device = rows, rows.length.device
        self.k = torch.zeros(rows.size, size.heads, rows.capacity + 1, size.key, dtype=dtype, device=device)
        self.v = torch.zeros(rows.size, size.heads, rows.capacity + 1, size.value, dtype=dtype, device=device)
        self._carried: Tensor | None = None

    @property
    def length(self) -> Tensor:
        """Tokens of each sequence before the step under way, int64 ``[rows]``."""
        return self.rows.length[: self.rows.rows]

    @property
    def carried(self) -> Tensor | None:
        return None if self._carried is None else self._carried[: self.rows.rows]

    def carry(self, x: Tensor) -> None:
        """Know this of each sequence's last token, ``[rows, …]``."""
        assert self._carried is not None  # a sequence was put in with it
        self._carried[: len(x)] = x

    def fill(self, row: int, k: Tensor, v: Tensor, carried: Tensor | None = None) -> None:
        """The tokens of a row: ``[n, heads, ·]``, those of this rank, which may have none."""
        if len(k):
            self.k[row, :, : len(k)], self.v[row, :, : len(v)] = k.transpose(0, 1), v.transpose(0, 1)
        if carried is not None:
            if self._carried is None:
                self._carried = carried.new_zeros(self.rows.size, *carried.shape)
            self._carried[row] = carried

    def take_over(self, old: StaticKeys) -> None:
        """Have the sequences of a smaller one."""
        n, S = old.rows.size, old.rows.capacity
        self.k[:n, :, :S], self.v[:n, :, :S] = old.k[:, :, :-1], old.v[:, :, :-1]
        if old._carried is not None:
            self._carried = old._carried.new_zeros(self.rows.size, *old._carried.shape[1:])
            self._carried[:n] = old._carried

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int = -1,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The new token of each row ``q [rows, 1, H, K]``, whose key and value are written, over all of its sequence on
        all ranks: ``[rows, 1, H, V]``. One all-gather, as in `decode_attention`. softcap, sinks: as in
        `ring_la.attention`."""
        self._write(k, v)
        factor = q.shape[3] ** -0.5 if scale is None else scale
        return self._attended(q, self._read(window, values=True), factor, softcap, sinks)

    def decode_turned(self, qkv: Tensor, base: float | None, window: int = -1) -> Tensor:
        """`decode` of a token's projections ``qkv [rows, (H + 2 heads) K]``, in the dtype of the keys: queries and keys
        are turned by their position and `base` (None: not), and written, in one launch. What is read is wide. CUDA
        alone."""
        from .turned_kernel import turned_and_written  # needs Triton

        rows = self.rows
        q = turned_and_written(qkv, rows.columns_written, self.length, self.k, self.v, base)[:, None]
        return self._attended(q, self._read(window, values=True), q.shape[3] ** -0.5, 0.0, None, wide=True)

    def decode_latents(
        self,
        q: Tensor,
        turned: Tensor,
        latent: Tensor,
        rotary: Tensor,
        window: int = -1,
        scale: float = 1.0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The same where keys are latents, which are the values, too, with rotary keys in the place of those.

        Args:
            q: in the space of latents ``[rows, 1, H, L]``. turned: its part that meets rotary keys ``[rows, 1, H, R]``.
            latent, rotary: of the new token ``[rows, 1, 1, ·]``.

        Returns:
            ``[rows, 1, H, L]``, from which values are made.
        """
        self._write(latent, rotary)
        return self._attended(q, self._read(window, turned[:, 0]), scale, softcap, sinks)

    def _write(self, k: Tensor, v: Tensor) -> None:
        self.rows.put(self.k, k)
        self.rows.put(self.v, v)

    def _read(self, window: int, turned: Tensor | None = None, values: bool = False) -> Columns:
        """What the step's tokens see: keys with their `values`, or latents with rotary keys, which `turned` meets."""
        rows = self.rows
        k, v = (x[: rows.rows, :, : rows.columns] for x in (self.k, self.v))
        return Columns(k, v if values else None, *rows.spans(window), turned, None if values else v)

    def _attended(
        self, q: Tensor, read: Columns, scale: float, softcap: float, sinks: Tensor | None, wide: bool = False
    ) -> Tensor:
        """What ``q [rows, 1, H, K]`` reads of all ranks; `wide`: not rounded to its dtype."""
        o, lse = _read(q[:, 0], read, scale, softcap)
        if self.rows.ranks > 1 and self.rows.cp is not None:
            o, lse = merged(self.rows.cp.comm.all_gather(torch.cat([o, lse[..., None]], -1)).wait(), 0)
        if sinks is not None:  # a column of the softmax that has no value
            o = o * torch.exp(lse - torch.logaddexp(lse, sinks.to(lse.dtype)))[..., None]
        return o[:, None] if wide else o[:, None].to(q.dtype)


def _read(q: Tensor, keys: Columns, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """What this rank's keys give, by the kernel where it can."""
    if not (q.is_cuda and triton_installed() and fits_kernel(q, keys)) or traced(q):
        return by_products(q, keys, scale, softcap)
    from .decode_kernel import decode_columns  # needs Triton

    return decode_columns(q, keys, scale, softcap)


def fits_kernel(q: Tensor, keys: Columns) -> bool:
    """Whether the kernel has the dtype and the sizes."""
    dtypes = q.dtype == keys.k.dtype and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    read = sum(1 << (x.shape[3] - 1).bit_length() for x in (keys.k, keys.v, keys.k2) if x is not None)
    return dtypes and read * q.element_size() <= WIDEST
