"""The short causal convolution, its activation, and their gradients, one pass over the tokens each.

Behind its lead a piece of n tokens is a sequence y of W−1+n rows, of which token u (counted in its piece) is row
u + W − 1. With weight w [D, W]:

    z_u = Σ_j w_j y_{u+j} + bias,   o = z or silu(z),   ends_r = y_{n+r}
    dy_i = Σ_j w_j dz_{i−j} (where 0 ≤ i−j < n) + dends_{i−n} (where i ≥ n),   dw_j = Σ_u dz_u y_{u+j}

A program is one warp that walks over a run of tokens with its channels' last W − 1 rows in registers: every row is read
once, and sums over tokens are sums of a thread. The backward computes z again and is done in the same walk. A run that
meets neither a piece's first tokens nor its last takes a walk that does not ask where they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.triton import strided
from ring_la.kernels.triton.launch import aligned, launch
from ring_la.kernels.triton.table import cdiv, power_of_2

CHANNELS = 128
"""Of a program, one warp."""
FORWARD, BACKWARD = (8, 32, 128), (4, 32, 256)
"""Tokens whose rows are loaded together; fewest and most tokens a program walks over. From tests.gpu.tune_conv."""
REGISTERS = (80, 128)
"""Of the walks without borders, forward and backward, for up to four taps: what the others spill is seldom run."""
SUMS = (16, 128)
"""Runs and numbers a program adds up at a time."""
PROGRAMS = 4224
"""As many as fill the GPU: 32 a multiprocessor of 132."""
SIZES = ("T", "N", "STEPS", "RUN", "sb", "st", "lb", "ln", "lr", "lc")


def unsupported(x: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    return "" if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"dtype {x.dtype}"


@triton.jit
def place(cu, t, T, N, STEPS, PACKED: tl.constexpr):
    """(piece, its start, its end) of token t."""
    piece = t * 0
    start = piece
    end = piece + T
    if PACKED:
        beyond = piece + N
        for _ in range(STEPS):
            middle = (piece + beyond) // 2
            after = tl.load(cu + middle).to(tl.int32) <= t
            piece = tl.where(after, middle, piece)
            beyond = tl.where(after, beyond, middle)
        start = tl.load(cu + piece).to(tl.int32)
        end = tl.load(cu + piece + 1).to(tl.int32)
    return piece, start, end


@triton.jit
def onward(cu, t, piece, start, end, N, PACKED: tl.constexpr):
    """(piece, its start, its end) of token t, from those of an earlier one; the last piece's beyond it."""
    if PACKED:
        while (t >= end) & (piece < N - 1):
            piece += 1
            start = end
            end = tl.load(cu + piece + 1).to(tl.int32)
    return piece, start, end


@triton.jit
def rows(x, t, T, stride, d, inside, COUNT: tl.constexpr):
    """Rows t, t + 1, … of x, zero from T on."""
    out = ()
    for i in tl.static_range(COUNT):
        out += (tl.load(x + (t + i).to(tl.int64) * stride + d, inside & (t + i < T), other=0.0),)
    return out


@triton.jit
def taps(weight, d, inside, W: tl.constexpr):
    """The weight's columns, fp32."""
    out = ()
    for j in tl.static_range(W):
        out += (tl.load(weight + d * W + j, inside, other=0.0).to(tl.float32),)
    return out


@triton.jit
def before(x, t, start, stride, d, inside, W: tl.constexpr):
    """Rows t − 1 to t − W + 1 of x, fp32, zero before `start`."""
    out = ()
    for m in tl.static_range(1, W):
        y = tl.load(x + (t - m).to(tl.int64) * stride + d, inside & (t - m >= start), other=0.0)
        out += (y.to(tl.float32),)
    return out


@triton.jit
def window(
    y, earlier, lead, u, piece, d, inside, ln, lr, lc, W: tl.constexpr, LEAD: tl.constexpr, PACKED: tl.constexpr
):
    """Row u of a piece and the W − 1 before it, given those before in the sequence: tokens, the lead's, or zeros."""
    out = (y,)
    for m in tl.static_range(1, W):
        y = earlier[m - 1]
        if PACKED:
            y = tl.where(u >= m, y, 0.0)
        if LEAD:
            at = piece.to(tl.int64) * ln + (W - 1 + u - m) * lr + d * lc
            y += tl.load(lead + at, inside & (u < m), other=0.0).to(tl.float32)
        out += (y,)
    return out


@triton.jit
def reading(ys, w, offset, W: tl.constexpr):
    """z of a window."""
    z = offset
    for m in tl.static_range(W):
        z += w[W - 1 - m] * ys[m]
    return z


@triton.jit
def shifted(new, old, COUNT: tl.constexpr):
    """The newest COUNT."""
    out = ()
    if COUNT > 0:
        out += (new,)
    for m in tl.static_range(COUNT - 1):
        out += (old[m],)
    return out


@triton.jit
def walk(
    x, w, offset, lead, cu, o, begin, stop, piece, start, end, N, st, d, inside, ln, lr, lc, D: tl.constexpr,
    W: tl.constexpr, STEP: tl.constexpr, SILU: tl.constexpr, LEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o of tokens begin to stop, one after the other."""
    earlier = before(x, begin, start, st, d, inside, W)
    for n in range(tl.cdiv(stop - begin, STEP)):
        first = begin + n * STEP
        new = rows(x, first, stop, st, d, inside, STEP)
        for i in tl.static_range(STEP):
            t = first + i
            piece, start, end = onward(cu, t, piece, start, end, N, PACKED)
            y = new[i].to(tl.float32)
            ys = window(y, earlier, lead, t - start, piece, d, inside, ln, lr, lc, W, LEAD, PACKED)
            z = reading(ys, w, offset, W)
            if SILU:
                z = z * tl.sigmoid(z)
            tl.store(o + t.to(tl.int64) * D + d, z.to(o.dtype.element_ty), inside & (t < stop))
            earlier = shifted(y, earlier, W - 1)


@triton.jit(do_not_specialize=SIZES)
def conv_kernel(
    x, weight, bias, lead, cu, o, T, N, STEPS, RUN, sb, st, lb, ln, lr, lc, D: tl.constexpr, W: tl.constexpr,
    BD: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    LEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o of RUN tokens, one after the other: the rows a token reads stay in registers."""
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = d < D
    begin = tl.program_id(0) // columns * RUN
    stop = tl.minimum(begin + RUN, T)
    piece, start, end = place(cu, begin, T, N, STEPS, PACKED)
    st *= UNIT
    x += b * sb * UNIT
    o += b * T * D
    lead += b * lb
    w = taps(weight, d, inside, W)
    offset = tl.zeros([BD], tl.float32)
    if BIAS:
        offset += tl.load(bias + d, inside, other=0.0).to(tl.float32)
    far = LEAD or PACKED
    if far:  # from borders, as most runs are: half the work
        far = (begin >= start + W - 1) & (stop <= end)
    if far:
        walk(
            x, w, offset, lead, cu, o, begin, stop, piece, start, end, N, st, d, inside, ln, lr, lc, D, W, STEP, SILU,
            False, False,
        )  # fmt: skip
    else:
        walk(
            x, w, offset, lead, cu, o, begin, stop, piece, start, end, N, st, d, inside, ln, lr, lc, D, W, STEP, SILU,
            LEAD, PACKED,
        )  # fmt: skip


@triton.jit
def walk_back(
    x, w, offset, lead, cu, do, dends, dx, heads, sums, begin, stop, T, piece, start, end, b, N, st, d, inside, ln, lr,
    lc, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, SILU: tl.constexpr,
    LEAD: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx of tokens begin to stop and their sums for weight and bias."""
    behind, since, last = piece, start, end
    earlier = before(x, begin, start, st, d, inside, W)
    zero = tl.zeros([BD], tl.float32)
    dzs = ()
    dw = (zero,)
    for _ in tl.static_range(1, W):
        dzs += (zero,)
        dw += (zero,)
    dbias = zero
    for n in range(tl.cdiv(stop + W - 1 - begin, STEP)):
        first = begin + n * STEP
        new = rows(x, first, T, st, d, inside, STEP)
        given = rows(do, first, T, D, d, inside, STEP)
        for i in tl.static_range(STEP):
            t = first + i
            piece, start, end = onward(cu, t, piece, start, end, N, PACKED)
            u = t - start
            y = new[i].to(tl.float32)
            dz = given[i].to(tl.float32)
            ys = window(y, earlier, lead, u, piece, d, inside, ln, lr, lc, W, LEAD, PACKED)
            if SILU:
                z = reading(ys, w, offset, W)
                s = tl.sigmoid(z)
                dz *= s * (1 + z * (1 - s))
            own = tl.where(t < stop, dz, 0.0)
            more = ()
            for j in tl.static_range(W):
                more += (dw[j] + own * ys[W - 1 - j],)
            dw = more
            dbias += own
            if LEAD:
                at = ((b * N + piece) * (W - 1) + u) * D + d
                tl.store(heads + at, dz, inside & (u < W - 1) & (t < stop))
            late = t - (W - 1)
            behind, since, last = onward(cu, late, behind, since, last, N, PACKED)
            g = w[0] * dz
            if PACKED:
                g = tl.where(t < last, g, 0.0)
            for k in tl.static_range(1, W):
                more_g = w[k] * dzs[k - 1]
                if PACKED:
                    more_g = tl.where(t - k < last, more_g, 0.0)
                g += more_g
            out = (late >= begin) & (late < stop)
            if ENDS:
                r = W - 1 - (last - late)
                at = ((b * N + behind) * (W - 1) + r) * D + d
                g += tl.load(dends + at, inside & (r >= 0) & out, other=0.0).to(tl.float32)
            tl.store(dx + late.to(tl.int64) * D + d, g.to(dx.dtype.element_ty), inside & out)
            earlier = shifted(y, earlier, W - 1)
            dzs = shifted(dz, dzs, W - 1)
    for j in tl.static_range(W):
        tl.store(sums + d * W + j, dw[j], inside)
    tl.store(sums + W * D + d, dbias, inside)


@triton.jit(do_not_specialize=SIZES)
def conv_backward_kernel(
    x, weight, bias, lead, cu, do, dends, dx, heads, sums, T, N, STEPS, RUN, sb, st, lb, ln, lr, lc, D: tl.constexpr,
    W: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    LEAD: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx of RUN tokens, their sums for weight ``[D, W]`` and bias ``[D]``, and dz of the pieces' first W − 1 tokens.

    A token's dx reads dz of the W − 1 after it, so the walk goes on for as many and is that much behind with dx.
    """
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = d < D
    run = tl.program_id(0) // columns
    begin = run * RUN
    stop = tl.minimum(begin + RUN, T)
    piece, start, end = place(cu, begin, T, N, STEPS, PACKED)
    st *= UNIT
    x += b * sb * UNIT
    do += b * T * D
    dx += b * T * D
    lead += b * lb
    sums += (b * tl.num_programs(0) // columns + run) * ((W + 1) * D)
    w = taps(weight, d, inside, W)
    offset = tl.zeros([BD], tl.float32)
    if BIAS:
        offset += tl.load(bias + d, inside, other=0.0).to(tl.float32)
    far = LEAD or ENDS or PACKED
    if far:
        far = (begin >= start + W - 1) & (stop + W - 1 <= end)
    if far:
        walk_back(
            x, w, offset, lead, cu, do, dends, dx, heads, sums, begin, stop, T, piece, start, end, b, N, st, d, inside,
            ln, lr, lc, D, W, BD, STEP, SILU, False, False, False,
        )  # fmt: skip
    else:
        walk_back(
            x, w, offset, lead, cu, do, dends, dx, heads, sums, begin, stop, T, piece, start, end, b, N, st, d, inside,
            ln, lr, lc, D, W, BD, STEP, SILU, LEAD, ENDS, PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def conv_edges_kernel(
    x, lead, dz, weight, dends, cu, out, T, N, sb, st, lb, ln, lr, lc, D: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr, BACK: tl.constexpr, LEAD: tl.constexpr,
    ENDS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """W − 1 rows a piece, ``out [B, N, W−1, D]``: its last ones, or (BACK) the gradient of those before its first, from
    dz of its first ones, shaped like `out`."""
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
            at = ((b * N + piece) * (W - 1) + u) * D + d
            acc += w * tl.load(dz + at, inside & (u >= 0) & (u < length), other=0.0).to(tl.float32)
        if ENDS:
            at = ((b * N + piece) * (W - 1) + r - length) * D + d
            acc += tl.load(dends + at, inside & (r >= length), other=0.0).to(tl.float32)
    else:
        i = length + r
        own = inside & (i >= W - 1)
        at = (b * sb + (start + i - (W - 1)).to(tl.int64) * st) * UNIT + d
        acc += tl.load(x + at, own, other=0.0).to(tl.float32)
        if LEAD:
            at = b * lb + piece.to(tl.int64) * ln + i * lr + d * lc
            acc += tl.load(lead + at, inside & (i < W - 1), other=0.0).to(tl.float32)
    at = ((b * N + piece) * (W - 1) + r) * D + d
    tl.store(out + at, acc.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=("RUNS",))
def conv_sums_kernel(
    sums, dweight, dbias, RUNS, D: tl.constexpr, W: tl.constexpr, BLK: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The runs' sums ``[RUNS, (W + 1) D]`` added up: the gradients of weight and bias."""
    size: tl.constexpr = (W + 1) * D
    i = tl.program_id(0) * BLK + tl.arange(0, BLK)
    r = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLK], tl.float32)
    for n in range(0, RUNS, ROWS):
        inside = (n + r < RUNS)[:, None] & (i < size)[None, :]
        acc += tl.load(sums + (n + r).to(tl.int64)[:, None] * size + i[None, :], inside, other=0.0)
    total = tl.sum(acc, 0)
    tl.store(dweight + i, total.to(dweight.dtype.element_ty), i < W * D)
    if BIAS:
        tl.store(dbias + i - W * D, total.to(dbias.dtype.element_ty), (i >= W * D) & (i < size))


# -- launches ------------------------------------------------------------------------------------------------


class Call:
    """What the launches of one convolution share. x ``[B, T, D]``, weight ``[D, W]``, lead ``[B, N, W−1, D]``."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, lead: Tensor | None, cu: Tensor | None) -> None:
        self.x, self.weight = strided.rows(x), aligned(weight)
        self.bias, self.cu = (None if t is None else aligned(t) for t in (bias, cu))
        self.lead = None if lead is None else strided.based(lead)
        (self.B, self.T, self.D), self.W = x.shape, weight.shape[1]
        self.N = 1 if cu is None else cu.shape[0] - 1
        self.unit, self.steps = strided.strides(self.x)
        self.block = min(CHANNELS, max(32, power_of_2(self.D)))
        self.columns = cdiv(self.D, self.block)

    def run(self, fewest: int, most: int) -> int:
        """Tokens a program walks over."""
        return min(max(cdiv(self.B * self.T * self.columns, PROGRAMS), fewest), most)

    @property
    def strides(self) -> tuple[int, ...]:
        lead = (0, 0, 0, 0) if self.lead is None else self.lead.stride()
        return (*self.steps, *lead)

    @property
    def optional(self) -> tuple[Tensor, Tensor, Tensor]:
        """bias, lead, cu, or any tensor in their place."""
        return tuple(self.x if t is None else t for t in (self.bias, self.lead, self.cu))

    @property
    def shape(self) -> dict[str, int | bool]:
        return dict(D=self.D, W=self.W, BD=self.block, UNIT=self.unit, PACKED=self.cu is not None, num_warps=1)

    @property
    def present(self) -> dict[str, bool]:
        return dict(BIAS=self.bias is not None, LEAD=self.lead is not None)

    def capped(self, registers: int) -> dict[str, int]:
        """The option of a kernel with both walks."""
        return {"maxnreg": registers} if self.W <= 4 and not (self.lead is None and self.cu is None) else {}

    def forward(self, silu: bool) -> Tensor:
        o = self.x.new_empty(self.B, self.T, self.D)
        if o.numel():
            step, run = FORWARD[0], self.run(*FORWARD[1:])
            launch(
                conv_kernel, (cdiv(self.T, run) * self.columns, self.B), self.x, self.weight, *self.optional, o,
                self.T, self.N, self.N.bit_length(), run, *self.strides, STEP=step, SILU=silu, **self.shape,
                **self.present, **self.capped(REGISTERS[0]),
            )  # fmt: skip
        return o

    def ends(self) -> Tensor:
        """The last W − 1 rows of each piece ``[B, N, W−1, D]``."""
        out = self.x.new_empty(self.B, self.N, self.W - 1, self.D)
        return self._edges(out, self.x, None, False)

    def backward(
        self, do: Tensor, dends: Tensor | None, silu: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients of x, the weight, the bias and the lead."""
        do, D, W = aligned(do), self.D, self.W
        dends = None if dends is None else aligned(dends)
        dx = self.x.new_empty(self.B, self.T, D)
        heads = dlead = None
        if self.lead is not None:
            heads = torch.empty(self.B, self.N, W - 1, D, device=do.device)
            dlead = torch.empty(heads.shape, dtype=self.lead.dtype, device=do.device)
        if not do.numel():
            dweight, dbias = torch.zeros_like(self.weight), None if self.bias is None else torch.zeros_like(self.bias)
        else:
            dweight, dbias = torch.empty_like(self.weight), None if self.bias is None else torch.empty_like(self.bias)
            step, run = BACKWARD[0], self.run(*BACKWARD[1:])
            runs = cdiv(self.T, run)
            sums = torch.empty(self.B * runs, (W + 1) * D, device=do.device)
            launch(
                conv_backward_kernel, (runs * self.columns, self.B), self.x, self.weight, *self.optional, do,
                do if dends is None else dends, dx, do if heads is None else heads, sums, self.T, self.N,
                self.N.bit_length(), run, *self.strides, STEP=step, SILU=silu, ENDS=dends is not None, **self.shape,
                **self.present, **self.capped(REGISTERS[1]),
            )  # fmt: skip
            launch(
                conv_sums_kernel, (cdiv((W + 1) * D, SUMS[1]),), sums, dweight, dweight if dbias is None else dbias,
                self.B * runs, D=D, W=W, ROWS=SUMS[0], BLK=SUMS[1], BIAS=dbias is not None, num_warps=4,
            )  # fmt: skip
        if dlead is not None:
            self._edges(dlead, heads, dends, True)
        return dx, dweight, dbias, dlead

    def _edges(self, out: Tensor, dz: Tensor, dends: Tensor | None, back: bool) -> Tensor:
        if out.numel():
            _, lead, cu = self.optional
            launch(
                conv_edges_kernel, (self.N * self.columns, self.B), self.x, lead, dz, self.weight,
                dz if dends is None else dends, cu, out, self.T, self.N, *self.strides, WP=power_of_2(self.W),
                BACK=back, LEAD=self.lead is not None, ENDS=dends is not None, **self.shape,
            )  # fmt: skip
        return out


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
    return Call(x, weight, bias, lead, cu).backward(do, dends, silu)
