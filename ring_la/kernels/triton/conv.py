"""The short causal convolution, its activation, and their gradients, one pass over the tokens each.

Behind its lead a piece of n tokens is a sequence y of W−1+n rows, of which token u (counted in its piece) is row
u + W − 1. With weight w [D, W]:

    z_u = Σ_j w_j y_{u+j} + bias,   o = z or silu(z),   ends_r = y_{n+r}
    dy_i = Σ_j w_j dz_{i−j} (where 0 ≤ i−j < n) + dends_{i−n} (where i ≥ n),   dw_j = Σ_u dz_u y_{u+j}

Gradients of a SiLU take two passes: dz and the sums over tokens, then dx.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, CHANNELS, WARPS = 32, 128, 4
"""Tile of a program."""
RUN = 512
"""Tokens over which a program sums the gradients of the weight."""


def unsupported(x: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    return "" if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"dtype {x.dtype}"


@triton.jit
def place(cu, t, T, N, STEPS, PACKED: tl.constexpr):
    """(piece, its start, its end) of tokens t."""
    piece = t * 0
    if PACKED:
        beyond = piece + N
        for _ in range(STEPS):
            middle = (piece + beyond) // 2
            after = tl.load(cu + middle).to(tl.int32) <= t
            piece = tl.where(after, middle, piece)
            beyond = tl.where(after, beyond, middle)
        start = tl.load(cu + piece).to(tl.int32)
        end = tl.load(cu + piece + 1).to(tl.int32)
    else:
        start = piece
        end = piece + T
    return piece, start, end


@triton.jit
def row(x, lead, t, u, piece, m: tl.constexpr, live, inside, d, st, ln, lr, lc, W: tl.constexpr, LEAD: tl.constexpr):
    """The row m places before tokens t (u in their piece), fp32: a token, or a row of the lead."""
    own = (live & (u >= m))[:, None] & inside[None, :]
    y = tl.load(x + (t - m).to(tl.int64)[:, None] * st + d[None, :], own, other=0.0).to(tl.float32)
    if LEAD and m > 0:
        before = (live & (u < m))[:, None] & inside[None, :]
        at = piece.to(tl.int64)[:, None] * ln + (W - 1 + u - m)[:, None] * lr + d[None, :] * lc
        y += tl.load(lead + at, before, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=("T", "N", "STEPS"))
def forward_kernel(
    x, weight, bias, lead, cu, o, T, N, STEPS, sb, st, lb, ln, lr, lc, D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, LEAD: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) // columns * BT + tl.arange(0, BT)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    live = t < T
    inside = d < D
    piece, start, _ = place(cu, t, T, N, STEPS, PACKED)
    z = tl.zeros([BT, BD], tl.float32)
    if BIAS:
        z += tl.load(bias + d, inside, other=0.0).to(tl.float32)[None, :]
    for m in tl.static_range(W):
        w = tl.load(weight + d * W + (W - 1 - m), inside, other=0.0).to(tl.float32)
        y = row(x + b * sb, lead + b * lb, t, t - start, piece, m, live, inside, d, st, ln, lr, lc, W, LEAD)
        z += w[None, :] * y
    if SILU:
        z = z * tl.sigmoid(z)
    at = (b * T + t)[:, None] * D + d[None, :]
    tl.store(o + at, z.to(o.dtype.element_ty), live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=("T", "N", "STEPS"))
def backward_kernel(
    x, weight, bias, lead, cu, do, dz, sums, T, N, STEPS, sb, st, lb, ln, lr, lc, D: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, RUN: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    LEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dz, and over RUN tokens the sums of dz · y (rows 0 to W−1 of `sums`) and of dz (row W)."""
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    run = tl.program_id(0) // columns
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = d < D
    which = tl.arange(0, WP)
    total = tl.zeros([WP, BD], tl.float32)
    for first in range(run * RUN, min(run * RUN + RUN, T), BT):
        t = first + tl.arange(0, BT)
        live = t < T
        piece, start, _ = place(cu, t, T, N, STEPS, PACKED)
        u = t - start
        at = (b * T + t)[:, None] * D + d[None, :]
        g = tl.load(do + at, live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if SILU:
            z = tl.zeros([BT, BD], tl.float32)
            if BIAS:
                z += tl.load(bias + d, inside, other=0.0).to(tl.float32)[None, :]
            for m in tl.static_range(W):
                w = tl.load(weight + d * W + (W - 1 - m), inside, other=0.0).to(tl.float32)
                y = row(x + b * sb, lead + b * lb, t, u, piece, m, live, inside, d, st, ln, lr, lc, W, LEAD)
                z += w[None, :] * y
            s = tl.sigmoid(z)
            g *= s * (1 + z * (1 - s))
            tl.store(dz + at, g.to(dz.dtype.element_ty), live[:, None] & inside[None, :])
        for m in tl.static_range(W):
            y = row(x + b * sb, lead + b * lb, t, u, piece, m, live, inside, d, st, ln, lr, lc, W, LEAD)
            total += tl.where(which[:, None] == W - 1 - m, tl.sum(g * y, 0)[None, :], 0.0)
        total += tl.where(which[:, None] == W, tl.sum(g, 0)[None, :], 0.0)
    runs = (T + RUN - 1) // RUN
    into = (b * runs + run) * ((W + 1) * D) + which[:, None] * D + d[None, :]
    tl.store(sums + into, total, (which <= W)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=("T", "N", "STEPS"))
def input_gradient_kernel(
    dz, weight, dends, cu, dx, T, N, STEPS, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    ENDS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx of tokens: dy of their rows."""
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) // columns * BT + tl.arange(0, BT)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    live = t < T
    inside = d < D
    piece, _, end = place(cu, t, T, N, STEPS, PACKED)
    acc = tl.zeros([BT, BD], tl.float32)
    for m in tl.static_range(W):
        w = tl.load(weight + d * W + (W - 1 - m), inside, other=0.0).to(tl.float32)
        at = (b * T + t + m)[:, None] * D + d[None, :]
        g = tl.load(dz + at, (live & (t + m < end))[:, None] & inside[None, :], other=0.0)
        acc += w[None, :] * g.to(tl.float32)
    if ENDS:
        r = W - 1 - (end - t)
        at = ((b * N + piece) * (W - 1) + r)[:, None] * D + d[None, :]
        acc += tl.load(dends + at, (live & (r >= 0))[:, None] & inside[None, :], other=0.0).to(tl.float32)
    at = (b * T + t)[:, None] * D + d[None, :]
    tl.store(dx + at, acc.to(dx.dtype.element_ty), live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=("T", "N"))
def edges_kernel(
    x, lead, dz, weight, dends, cu, out, T, N, sb, st, lb, ln, lr, lc, D: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, BD: tl.constexpr, BACK: tl.constexpr, LEAD: tl.constexpr, ENDS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """W − 1 rows a piece, ``out [B, N, W−1, D]``: its last ones, or (BACK) the gradient of those before its first."""
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0) // columns
    d = (tl.program_id(0) % columns * BD + tl.arange(0, BD))[None, :]
    r = tl.arange(0, WP)[:, None]
    inside = (r < W - 1) & (d < D)
    start = tl.load(cu + piece).to(tl.int32) if PACKED else 0
    end = tl.load(cu + piece + 1).to(tl.int32) if PACKED else T
    length = end - start
    acc = tl.zeros([WP, BD], tl.float32)
    if BACK:
        for j in tl.static_range(W):
            u = r - j
            w = tl.load(weight + d * W + j, d < D, other=0.0).to(tl.float32)
            at = (b * T + start + u) * D + d
            acc += w * tl.load(dz + at, inside & (u >= 0) & (u < length), other=0.0).to(tl.float32)
        if ENDS:
            at = ((b * N + piece) * (W - 1) + r - length) * D + d
            acc += tl.load(dends + at, inside & (r >= length), other=0.0).to(tl.float32)
    else:
        i = length + r
        own = inside & (i >= W - 1)
        acc += tl.load(x + b * sb + (start + i - (W - 1)).to(tl.int64) * st + d, own, other=0.0).to(tl.float32)
        if LEAD:
            at = b * lb + piece.to(tl.int64) * ln + i * lr + d * lc
            acc += tl.load(lead + at, inside & (i < W - 1), other=0.0).to(tl.float32)
    at = ((b * N + piece) * (W - 1) + r) * D + d
    tl.store(out + at, acc.to(out.dtype.element_ty), inside)


# -- launches ------------------------------------------------------------------------------------------------


class Call:
    """What the launches of one convolution share. x ``[B, T, D]``, weight ``[D, W]``, lead ``[B, N, W−1, D]``."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, lead: Tensor | None, cu: Tensor | None) -> None:
        self.x = x if x.stride(2) == 1 else x.contiguous()
        self.weight, self.bias, self.lead, self.cu = weight.contiguous(), bias, lead, cu
        (self.B, self.T, self.D), self.W = x.shape, weight.shape[1]
        self.N = 1 if cu is None else cu.shape[0] - 1
        self.block = min(CHANNELS, max(16, triton.next_power_of_2(self.D)))
        self.columns = triton.cdiv(self.D, self.block)

    @property
    def lengths(self) -> tuple[int, int, int]:
        return self.T, self.N, self.N.bit_length()

    @property
    def strides(self) -> tuple[int, ...]:
        lead = (0, 0, 0, 0) if self.lead is None else self.lead.stride()
        return (*self.x.stride()[:2], *lead)

    @property
    def optional(self) -> tuple[Tensor, Tensor, Tensor]:
        """bias, lead, cu, or any tensor in their place."""
        return tuple(self.x if t is None else t for t in (self.bias, self.lead, self.cu))

    @property
    def shape(self) -> dict[str, int | bool]:
        return dict(D=self.D, W=self.W, BD=self.block, PACKED=self.cu is not None, num_warps=WARPS)

    @property
    def present(self) -> dict[str, bool]:
        return dict(BIAS=self.bias is not None, LEAD=self.lead is not None)

    def tiles(self, tokens: int) -> tuple[int, int]:
        return triton.cdiv(self.T, tokens) * self.columns, self.B

    def forward(self, silu: bool) -> Tensor:
        o = self.x.new_empty(self.B, self.T, self.D)
        if o.numel():
            forward_kernel[self.tiles(TOKENS)](
                self.x, self.weight, *self.optional, o, *self.lengths, *self.strides, BT=TOKENS, SILU=silu,
                **self.shape, **self.present,
            )  # fmt: skip
        return o

    def ends(self) -> Tensor:
        """The last W − 1 rows of each piece ``[B, N, W−1, D]``."""
        out = self.x.new_empty(self.B, self.N, self.W - 1, self.D)
        return self._edges(out, self.x, None, False)

    def lead_gradient(self, dz: Tensor, dends: Tensor | None) -> Tensor:
        out = torch.empty(self.B, self.N, self.W - 1, self.D, dtype=self.lead.dtype, device=dz.device)
        return self._edges(out, dz, dends, True)

    def _edges(self, out: Tensor, dz: Tensor, dends: Tensor | None, back: bool) -> Tensor:
        if out.numel():
            _, lead, cu = self.optional
            edges_kernel[self.N * self.columns, self.B](
                self.x, lead, dz, self.weight, dz if dends is None else dends, cu, out, self.T, self.N, *self.strides,
                WP=triton.next_power_of_2(self.W), BACK=back, LEAD=self.lead is not None, ENDS=dends is not None,
                **self.shape,
            )  # fmt: skip
        return out

    def backward(self, do: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
        """dz, and the gradients of the weight's columns and of the bias in rows ``[W+1, D]``."""
        do = do.contiguous()
        dz = torch.empty_like(do) if silu else do
        if not do.numel():
            return dz, torch.zeros(self.W + 1, self.D, device=do.device)
        runs = triton.cdiv(self.T, RUN)
        sums = torch.empty(self.B * runs, self.W + 1, self.D, device=do.device)
        backward_kernel[runs * self.columns, self.B](
            self.x, self.weight, *self.optional, do, dz, sums, *self.lengths, *self.strides,
            WP=triton.next_power_of_2(self.W + 1), RUN=RUN, BT=TOKENS, SILU=silu, **self.shape, **self.present,
        )  # fmt: skip
        return dz, sums.sum(0)

    def input_gradient(self, dz: Tensor, dends: Tensor | None) -> Tensor:
        dx = self.x.new_empty(self.B, self.T, self.D)
        if dx.numel():
            input_gradient_kernel[self.tiles(TOKENS)](
                dz, self.weight, dz if dends is None else dends, self.optional[2], dx, *self.lengths, BT=TOKENS,
                ENDS=dends is not None, **self.shape,
            )  # fmt: skip
        return dx


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, lead: Tensor | None, cu: Tensor | None, silu: bool, ends: bool
) -> tuple[Tensor, Tensor]:
    """(o [B, T, D], the last W − 1 rows of each piece, or an empty tensor); see `kernels.short_conv`."""
    call = Call(x, weight, bias, lead, cu)
    return call.forward(silu), call.ends() if ends else x.new_empty(0)


def backward(
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
    call = Call(x, weight, bias, lead, cu)
    dends = None if dends is None else dends.contiguous()
    dz, sums = call.backward(do, silu)
    dweight = sums[: call.W].t().to(weight.dtype)
    dbias = None if bias is None else sums[call.W].to(bias.dtype)
    dlead = None if lead is None else call.lead_gradient(dz, dends)
    return call.input_gradient(dz, dends), dweight, dbias, dlead
