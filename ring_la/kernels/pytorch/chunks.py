"""Tokens regrouped into chunks of fixed length that never cross a piece.

Made on the tensors' device from the pieces' offsets alone, with an upper bound on the number of chunks, so that
nothing is read back by the host. Tokens are padded with zeros, which change no state: k = 0 writes nothing,
g = 0 decays nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


class Chunks:
    """The chunks of ``T`` tokens in N pieces.

    Args:
        T: number of tokens.
        size: tokens a chunk, C.
        cu: offsets ``[N+1]`` of the pieces; None: one piece of T tokens.
        lead: for each piece, how many places of its first chunk stay empty ``[N]``; with them chunks start at
            multiples of C of the whole sequence, wherever pieces begin. Needs `cu`.
    """

    def __init__(self, T: int, size: int, cu: Tensor | None, lead: Tensor | None = None, device=None) -> None:
        self.T, self.size = T, size
        self.pieces = 1 if cu is None else cu.numel() - 1
        if cu is None:
            self.count = max(1, -(-T // size))
            return
        cu = cu.to(device=device, dtype=torch.int64)
        spare = 1 if lead is None else 2
        lead = torch.zeros_like(cu[:-1]) if lead is None else lead.to(cu)
        self.count = T // size + spare * self.pieces
        ends = (-(-(cu.diff() + lead) // size) * (cu.diff() > 0)).cumsum(0)
        chunk = torch.arange(self.count, device=cu.device)
        self.piece = torch.searchsorted(ends, chunk, right=True)  # N for the unused chunks at the end
        known = self.piece.clamp(max=self.pieces - 1)
        begin = torch.cat([ends.new_zeros(1), ends[:-1]])
        self.first = (chunk == begin[known]) & (self.piece < self.pieces)
        self.last = (chunk == ends[known] - 1) & (self.piece < self.pieces)
        self.begin, self.final, self.empty = begin, ends - 1, cu.diff() == 0
        self.known = known
        place = torch.arange(size, device=cu.device)
        token = (cu[known] - lead[known] + (chunk - begin[known]) * size)[:, None] + place
        inside = (token >= cu[known, None]) & (token < cu[known + 1, None]) & (self.piece < self.pieces)[:, None]
        self.token = torch.where(inside, token, T).flatten()  # T: a row of zeros
        slots = torch.arange(self.token.numel(), device=cu.device)
        self.slot = torch.zeros(T + 1, dtype=torch.int64, device=cu.device).scatter_(0, self.token, slots)[:T]

    @property
    def piece_of_token(self) -> Tensor:
        """The piece of each token, int64 ``[T]``."""
        return self.known.index_select(0, self.slot // self.size)

    @property
    def packed(self) -> bool:
        """Whether there is more than one piece to keep apart."""
        return hasattr(self, "token")

    def split(self, x: Tensor) -> Tensor:
        """``[B, T, H, …]`` as ``[B, chunks, H, C, …]``."""
        extra = [0, 0] * (x.dim() - 2)
        if self.packed:
            x = pad(x, [*extra, 0, 1]).index_select(1, self.token)
        else:
            x = pad(x, [*extra, 0, self.count * self.size - self.T])
        return x.unflatten(1, (self.count, self.size)).transpose(2, 3)

    def merge(self, x: Tensor) -> Tensor:
        """``[B, chunks, H, C, …]`` back to ``[B, T, H, …]``."""
        x = x.transpose(2, 3).flatten(1, 2)
        return x.index_select(1, self.slot) if self.packed else x[:, : self.T]
