"""One rank's part of a short causal convolution: tokens in pieces, each behind the W−1 rows before it, its lead.

    ring_la::short_conv            (tokens, leads) -> (outputs, the last W−1 rows of each piece)
    ring_la::short_conv_backward   their gradients

On CUDA a registered operator, by Triton where it can; elsewhere PyTorch's own operations, which have derivatives of
every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import Operator, fused, kernels_of


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, lead: Tensor | None, cu: Tensor | None, silu: bool, ends: bool
) -> tuple[Tensor, Tensor | None]:
    """``o_t = Σ_j weight[:, j] · x_{t−W+1+j} + bias`` in each piece, through a SiLU if `silu`.

    Args:
        x: ``[B, T, D]``. weight: ``[D, W]``. bias: ``[D]``.
        lead: the W−1 rows before each piece ``[B, N, W−1, D]``, oldest first; None: zeros.
        cu: offsets of the pieces ``[N+1]``; None: one.
        ends: also return the last W−1 rows of each piece, lead included, ``[B, N, W−1, D]``.

    Returns:
        (o ``[B, T, D]``, the rows or None), in x's dtype.
    """
    if fused(x):
        o, last = short_conv(x, weight, bias, lead, cu, silu, ends)
        return o, last if ends else None
    return plain_convolve(x, weight, bias, lead, cu, silu, ends)


def convolve_backward(
    do: Tensor,
    dends: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lead: Tensor | None,
    cu: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `convolve`'s x, weight, bias and lead."""
    if not fused(x):
        return plain_convolve_backward(do, dends, x, weight, bias, lead, cu, silu)
    grads = iter(_short_conv_backward((do, dends), x, weight, bias, lead, cu, silu, dends is not None))
    return tuple(None if t is None else next(grads) for t in (x, weight, bias, lead))  # type: ignore[return-value]


# -- in PyTorch ----------------------------------------------------------------------------------------------


@dataclass
class LedTokens:
    """Tokens with a lead of `width` rows before each piece.

    Attributes:
        rows: ``[B, T + pieces·width, D]``, lead and tokens of the first piece, then of the second, …
        tokens: T. cu: the pieces' offsets, int64; None: there is one piece.
    """

    rows: Tensor
    tokens: int
    width: int
    cu: Tensor | None

    @classmethod
    def of(cls, x: Tensor, width: int, lead: Tensor | None, cu: Tensor | None) -> LedTokens:
        """``x [B, T, D]`` behind `lead` ``[B, pieces, width, D]``, zeros where it is None."""
        pieces, T = 1 if cu is None else cu.shape[0] - 1, x.shape[1]
        if lead is None:
            lead = x.new_zeros(x.shape[0], pieces, width, x.shape[2])
        if cu is None:
            return cls(torch.cat([lead[:, 0].to(x.dtype), x], 1), T, width, None)
        led = cls(x.new_zeros(x.shape[0], T + pieces * width, x.shape[2]), T, width, cu.long())
        led.rows = led.rows.index_copy(1, led.token + width, x)
        led.rows = led.rows.index_copy(1, led.lead.flatten(), lead.to(x.dtype).flatten(1, 2))
        return led

    @property
    def single(self) -> bool:
        """Whether there is one piece."""
        return self.cu is None or self.cu.shape[0] == 2

    @cached_property
    def token(self) -> Tensor:
        """For each token, where the row `width` places before it is, int64 ``[T]``."""
        t = torch.arange(self.tokens, device=self.rows.device)
        return t if self.cu is None else t + self.width * torch.searchsorted(self.cu[1:], t, right=True)

    @cached_property
    def _border(self) -> Tensor:
        """Where the lead of each piece is, and of one more behind the last, ``[pieces + 1, width]``."""
        r = torch.arange(self.width, device=self.rows.device)
        if self.cu is None:
            return torch.stack([r, self.tokens + self.width + r])
        return (self.cu + self.width * torch.arange(self.cu.shape[0], device=r.device))[:, None] + r

    @property
    def lead(self) -> Tensor:
        """Where each piece's lead is, int64 ``[pieces, width]``."""
        return self._border[:-1]

    @property
    def last(self) -> Tensor:
        """Where each piece's last `width` rows are, the same."""
        return self._border[1:] - self.width

    @property
    def before(self) -> Tensor:
        """The row `width` places before each token ``[B, T, D]``."""
        return self.rows[:, : self.tokens] if self.single else self.rows.index_select(1, self.token)

    @property
    def ends(self) -> Tensor:
        """The last `width` rows of each piece ``[B, pieces, width, D]``."""
        if self.cu is None:
            return self.rows[:, self.tokens :].unsqueeze(1).clone()  # what is kept of a call keeps none of its tokens
        last = self.last
        return self.rows.index_select(1, last.flatten()).unflatten(1, last.shape)


def plain_convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, lead: Tensor | None, cu: Tensor | None, silu: bool, ends: bool
) -> tuple[Tensor, Tensor | None]:
    """`convolve` from PyTorch's operations, accumulated in fp32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    behind = LedTokens.of(x, weight.shape[1] - 1, lead, cu)
    rows, w = behind.rows.to(wide), weight.to(wide)
    n = max(0, rows.shape[1] - behind.width)  # 0 on a rank without tokens
    o = w[:, 0] * rows[:, :n]
    for j in range(1, w.shape[1]):
        o = o + w[:, j] * rows[:, j : j + n]
    if bias is not None:
        o = o + bias.to(wide)
    o = o if behind.single else o.index_select(1, behind.token)
    return (F.silu(o) if silu else o).to(x.dtype), behind.ends if ends else None


def plain_convolve_backward(
    do: Tensor,
    dends: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lead: Tensor | None,
    cu: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and lead."""
    wide = torch.promote_types(x.dtype, torch.float32)
    behind, w = LedTokens.of(x, weight.shape[1] - 1, lead, cu), weight.to(wide)
    rows = behind.rows.to(wide)
    taps = [rows.index_select(1, behind.token + j) for j in range(w.shape[1])]
    dz = do.to(wide)
    if silu:
        z = sum(w[:, j] * y for j, y in enumerate(taps))
        z = z if bias is None else z + bias.to(wide)
        s = torch.sigmoid(z)  # type: ignore[arg-type]
        dz = dz * s * (1 + z * (1 - s))
    drows = torch.zeros_like(rows)
    for j in range(w.shape[1]):
        drows.index_add_(1, behind.token + j, dz * w[:, j])
    if dends is not None:
        drows.index_add_(1, behind.last.flatten(), dends.to(wide).flatten(1, 2))
    dx = drows.index_select(1, behind.token + behind.width).to(x.dtype)
    dweight = torch.stack([(dz * y).sum((0, 1)) for y in taps], 1).to(weight.dtype)
    dbias = None if bias is None else dz.sum((0, 1)).to(bias.dtype)
    if lead is None:
        return dx, dweight, dbias, None
    dlead = drows.index_select(1, behind.lead.flatten()).unflatten(1, behind.lead.shape)
    return dx, dweight, dbias, dlead.to(lead.dtype)


# -- the operator --------------------------------------------------------------------------------------------


def _short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, lead: Tensor | None, cu: Tensor | None, silu: bool, ends: bool
) -> tuple[Tensor, Tensor]:
    """`convolve`; the rows are an empty tensor unless `ends`."""
    kernels = kernels_of("short_conv", x)
    if kernels is not None:
        return kernels.forward(x, weight, bias, lead, cu, silu, ends)
    o, last = plain_convolve(x, weight, bias, lead, cu, silu, ends)
    return o.contiguous(), x.new_empty(0) if last is None else last.contiguous()


def _fake(x, weight, bias, lead, cu, silu, ends):
    pieces = 1 if cu is None else cu.shape[0] - 1
    last = (x.shape[0], pieces, weight.shape[1] - 1, x.shape[2]) if ends else (0,)
    return x.new_empty(x.shape), x.new_empty(last)


def _short_conv_backward(
    grads: Sequence[Tensor | None],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lead: Tensor | None,
    cu: Tensor | None,
    silu: bool,
    ends: bool,
) -> list[Tensor]:
    """Gradients of x and the weight, then of the bias and the lead where they are given."""
    do, dends = grads
    do = torch.zeros_like(x) if do is None else do
    tensors = do, dends if ends else None, x, weight, bias, lead, cu
    kernels = kernels_of("short_conv", x)
    backward = plain_convolve_backward if kernels is None else kernels.backward
    return [g.contiguous() for g in backward(*tensors, silu) if g is not None]


short_conv = Operator("short_conv", _short_conv, _short_conv_backward, _fake, 4)
