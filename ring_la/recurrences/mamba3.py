"""Mamba-3: the trapezoidal rule, and states that turn by angles of the tokens.

    h_t = e^{g_t} (h_{t−1} + c_t B̂_{t−1} x_{t−1}ᵀ) + λ_t Δ_t B̂_t x_tᵀ,   c_t = (1 − λ_t) Δ_t

with B̂ and Ĉ turned by the sum of the angles so far. What a token writes twice, now and with the next, it writes once:

    H_t = e^{g_t} H_{t−1} + (λ_t Δ_t + c_{t+1}) B̂_t x_tᵀ = h_t + c_{t+1} B̂_t x_tᵀ

so one scan of Mamba-2's kind does it; of the next token it needs one number a head, from the neighbour at a border.

With several inputs and outputs a head (MIMO), ranks r of B, C and x, B̂ xᵀ is a sum over r. Its terms are steps of a
sequence so many times as long (see `delta_product`), read at each step; what a step's query misses or has too much of
its own token's writes is added behind the scan.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..blockwise import by_block, exact_sum, fixed
from ..blockwise.sums import part_of
from ..context import ShardedLayout
from ..conv import token_shift
from ..errors import ArgumentError
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from ..running_sum import running_sum
from .arguments import DECAY, KEY, QUERY, RATE, VALUE, Argument
from .definition import CommonOptions
from .delta_product import steps
from .neighbours import first_tokens, successors
from .recurrence import recurrence
from .retention import simple_gla

States = tuple[Tensor, Tensor, Tensor, Tensor]


def token(
    S: States, x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, lam: Tensor, theta: Tensor, D: Tensor
) -> tuple[States, Tensor]:
    """One token of Mamba-3."""
    h, B_before, x_before, phi = S
    phi = phi + theta
    cos, sin = phi.cos(), phi.sin()
    B, C = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (B.chunk(2, -1), C.chunk(2, -1)))
    h = g.exp()[..., None, None] * (h + outer(((1 - lam) * dt)[..., None] * B_before, x_before))
    h = h + outer((lam * dt)[..., None] * B, x)
    return (h, B, x, phi), read(h, C) + D[..., None] * x


def token_of_ranks(
    S: States, x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, lam: Tensor, theta: Tensor, D: Tensor, up: Tensor
) -> tuple[States, Tensor]:
    """One token of its MIMO form, whose B and C are ``[N, n, H, K]``."""
    h, B_before, x_before, phi = S
    phi = phi + theta
    turn = torch.polar(torch.ones_like(phi), phi)[:, None]
    K = B.shape[-1] // 2
    turned = []
    for y in (B, C):
        z = turn * torch.complex(y[..., :K], y[..., K:])
        turned.append(torch.cat([z.real, z.imag], -1))
    B, C = turned
    ranks = range(up.shape[1])
    for r in ranks:
        h = h + outer(((1 - lam) * dt)[..., None] * B_before[:, :, r], up[:, r] * x_before)
    h = g.exp()[..., None, None] * h
    for r in ranks:
        h = h + outer((lam * dt)[..., None] * B[:, r], up[:, r] * x)
    o = [read(h, C[:, r]) + D[..., None] * (up[:, r] * x) for r in ranks]
    return (h, B.transpose(1, 2), x, phi), torch.stack(o, 1)


def _halves(sizes: Mapping[str, int]) -> None:
    """Refuse angles that are not one for two channels."""
    K, R = sizes["K"], sizes["R"]
    if K % 2:
        raise ArgumentError("B", "an even number of channels", K)
    if R != K // 2:
        raise ArgumentError("theta", f"an angle for two of the {K} channels of B, {K // 2} last", R)


@recurrence(
    paper="Lahoti et al. 2026, arXiv 2603.15569, the SISO form",
    equation="S ← e^g (S + (1−λ)Δ B₋₁ x₋₁ᵀ) + λΔ B xᵀ, B and C turned by Σ θ",
    arguments=dict(x=VALUE, dt=RATE, g=DECAY, B=KEY, C=QUERY, lam=RATE, theta=Argument("BTHR"), D=Argument("H")),
    token=token,
    default_scale=1.0,
    states=("HKV", "HK", "HV", "HR"),
    sizes=dict(R=3),
    same_bits=True,
    check=_halves,
)
def mamba3(
    x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, lam: Tensor, theta: Tensor, D: Tensor,
    *, options: CommonOptions,
) -> LinearAttentionOutput:  # fmt: skip
    """Mamba-3 with one input and output a head: S ← e^g (S + (1−λ)Δ B₋₁ x₋₁ᵀ) + λΔ B xᵀ, o = scale · Sᵀ C + D x.

    B and C are turned by the sum of the angles so far, channels k and k + K/2 by ``theta[..., k]``. (The authors' SISO
    kernels turn channels 2k and 2k + 1: for weights made for them, order B's and C's channels even ones first.)

    Args:
        x: ``[B, T, H, V]``. dt: Δ ``[B, T, H]``, ≥ 0. g: log-decay Δ A ``[B, T, H]``, ≤ 0.
        B, C: ``[B, T, Hk, K]``, K even. lam: λ ``[B, T, H]``, in [0, 1]; 1 is Mamba-2's rule.
        theta: angles of each token, radians ``[B, T, H, K/2]``. D: the skip, ``[H]``.

    `scale` is 1 by default. States are ``(S [N,H,K,V], B₋₁ turned [N,H,K], x₋₁ [N,H,V], Σ θ [N,H,K/2])``.
    """
    start = options.initial_state
    if start is not None:
        options = options._replace(initial_state=(start[0], start[1][:, :, None], *start[2:]))  # type: ignore[arg-type]
    o, final = _trapezoid(Trapezoid(x, dt, g, B[:, :, None], C[:, :, None], lam, theta, D), options)
    state: Any = final and (final[0], final[1][:, :, 0], *final[2:])
    return LinearAttentionOutput(o[:, :, 0], state)


@recurrence(
    paper="Lahoti et al. 2026, arXiv 2603.15569, the MIMO form",
    equation="S ← e^g (S + (1−λ)Δ Σ_r B₋₁ x₋₁ᵀ) + λΔ Σ_r B xᵀ, of n inputs and outputs a head",
    arguments=dict(
        x=VALUE, dt=RATE, g=DECAY, B=Argument("BTNGK", "key"), C=Argument("BTNGK", "query"), lam=RATE,
        theta=Argument("BTHR"), D=Argument("H"), up=Argument("HNV"),
    ),
    token=token_of_ranks,
    default_scale=1.0,
    states=("HKV", "HNK", "HV", "HR"),
    sizes=dict(R=3, N=2),
    same_bits=True,
    check=_halves,
)  # fmt: skip
def mamba3_mimo(
    x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, lam: Tensor, theta: Tensor, D: Tensor, up: Tensor,
    *, options: CommonOptions,
) -> LinearAttentionOutput:  # fmt: skip
    """Mamba-3 with n inputs and outputs a head, x_r = up_r ⊙ x:
    S ← e^g (S + (1−λ)Δ Σ_r B_r₋₁ x_r₋₁ᵀ) + λΔ Σ_r B_r x_rᵀ, o_r = scale · Sᵀ C_r + D x_r.

    Args:
        B, C: ``[B, T, n, Hk, K]``, K even. up: ``[H, n, V]``. The others are those of `mamba3`.

    o is ``[B, T, n, H, V]``: the paper gates each o_r and sums them up with weights behind it. States are
    ``(S [N,H,K,V], B₋₁ turned [N,H,n,K], x₋₁ [N,H,V], Σ θ [N,H,K/2])``.
    """
    return _trapezoid(Trapezoid(x, dt, g, B, C, lam, theta, D, up), options)


class Trapezoid(NamedTuple):
    """The tensors of either form, B and C ``[B, T, n, Hk, K]``; without `up` x_r is x."""

    x: Tensor
    dt: Tensor
    g: Tensor
    B: Tensor
    C: Tensor
    lam: Tensor
    theta: Tensor
    D: Tensor
    up: Tensor | None = None


def _trapezoid(tokens: Trapezoid, options: CommonOptions) -> LinearAttentionOutput:
    x, dt, g, B, C, lam, theta, D, up = tokens
    dt, lam = (t.to(torch.promote_types(t.dtype, x.dtype)) for t in (dt, lam))
    layout, n = options.layout, B.shape[2]
    start: Any = options.initial_state
    phi = running_sum(theta, layout, options.cu_seqlens, None if start is None else start[3])
    c = (1 - lam) * dt
    after = successors(c, options)
    S0 = None if start is None else _entering(start, first_tokens(c, options), up, layout)
    B, C = by_block(_both_turned, B, C, x, phi, layout=layout)
    written = by_block(_written, x, lam, dt, after, layout=layout, shared=(up,))
    o, S = simple_gla(
        C.flatten(1, 2), B.flatten(1, 2), written.flatten(1, 2), _at_first(g, n), scale=options.scale,
        initial_state=S0, output_final_state=options.output_final_state, mode=options.mode, backend=options.backend,
        **steps(options, n),
    )  # fmt: skip
    corrected = functools.partial(_corrected, scale=float(options.scale))  # type: ignore[arg-type]
    o = by_block(corrected, o.unflatten(1, (-1, n)), C, B, x, lam, dt, after, layout=layout, shared=(D, up))
    if S is None:
        return LinearAttentionOutput(o, None)
    wide = torch.promote_types(S.dtype, torch.float32)
    parts = B.transpose(2, 3), x, phi
    rows = torch.cat([t.to(wide).flatten(2) for t in parts], -1)
    tails = None if start is None else torch.cat([t.to(wide).flatten(1) for t in start[1:]], -1)
    last: Any = token_shift(rows, initial_state=tails, output_final_state=True, **options.inner).final_state
    sizes = [t.shape[2:] for t in parts]
    final = [t.unflatten(-1, size) for t, size in zip(last.split([size.numel() for size in sizes], -1), sizes)]
    return LinearAttentionOutput(o, (S, *final))  # type: ignore[arg-type]


def _both_turned(B: Tensor, C: Tensor, x: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """B and C of every head of x, turned by the angles so far."""
    heads, wide = x.shape[2], torch.promote_types(B.dtype, torch.float32)
    cos, sin = (t.to(wide)[:, :, None] for t in (phi.cos(), phi.sin()))
    B, C = (y if y.shape[3] == heads else y.repeat_interleave(heads // y.shape[3], 3) for y in (B, C))
    return _turned(B, cos, sin), _turned(C, cos, sin)


def _written(x: Tensor, lam: Tensor, dt: Tensor, after: Tensor, up: Tensor | None) -> Tensor:
    """What tokens write ``[B, T, n, H, V]``, now and with the next one."""
    return ((lam * dt + after)[:, :, None, :, None] * _inputs(x, up)).to(x.dtype)


def _corrected(
    o: Tensor, C: Tensor, B: Tensor, x: Tensor, lam: Tensor, dt: Tensor, after: Tensor, D: Tensor, up: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """What queries read, with the skip and what they miss of their own tokens' writes, or have too much."""
    inputs = _inputs(x, up)
    return (o + D[:, None] * inputs + _own(C, B, inputs, lam * dt, after, scale)).to(x.dtype)


def _entering(start: Any, c: Tensor, up: Tensor | None, layout: ShardedLayout | None) -> Tensor:
    """The state before each document, with what its first token, of weight ``c [N, H]``, writes of the token before."""
    S, B, x = start[:3]
    if not fixed(layout):
        return _after_first(S, B, x, c.to(S.dtype), _of_one_rank(up, layout))
    ups = [None] * len(S) if up is None else _ForDocuments.apply(up, len(S), layout).unbind(0)
    one_by_one = zip(*(t.split(1) for t in (S, B, x, c.to(S.dtype))), ups)  # whatever others there are
    return torch.cat([_after_first(S.clone(), B.clone(), x.clone(), c.clone(), u) for S, B, x, c, u in one_by_one])


def _after_first(S: Tensor, B: Tensor, x: Tensor, c: Tensor, up: Tensor | None) -> Tensor:
    before = _inputs(x, up)
    return S + c[..., None, None] * torch.einsum("bhnk,bnhv->bhkv", B, before.to(B.dtype))


class _ForDocuments(torch.autograd.Function):
    """``up`` of each document ``[N, …]``; its gradient, which all ranks have, is added exactly, and one rank's part."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, N: int, layout: ShardedLayout) -> Tensor:
        ctx.layout, ctx.way_back = layout, layout.cp.comm.agreement.way_back()
        return up.expand(N, *up.shape).clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.way_back()
        own = grad if ctx.layout.rank == 0 else grad[:0]
        return part_of(exact_sum(own, ctx.layout), ctx.layout, grad[0]), None, None


def _inputs(x: Tensor, up: Tensor | None) -> Tensor:
    """The inputs ``[…, n, H, V]`` of all ranks."""
    return x[..., None, :, :] if up is None else (x[..., None, :, :] * up.transpose(0, 1)).to(x.dtype)


def _of_one_rank(up: Tensor | None, layout: ShardedLayout | None) -> Tensor | None:
    """What all ranks make of it is the same: its gradient is one rank's part."""
    return up if up is None or layout is None or layout.rank == 0 else up.detach()


def _at_first(g: Tensor, n: int) -> Tensor:
    """A token's decay at the first of its steps."""
    return g if n == 1 else torch.cat([g[:, :, None], g.new_zeros(*g.shape[:2], n - 1, g.shape[2])], 2).flatten(1, 2)


def _own(C: Tensor, B: Tensor, inputs: Tensor, now: Tensor, after: Tensor, scale: float) -> Tensor:
    """What each query ``[B, T, n, H, K]`` has too much of its own token's writes, and of later steps too little."""
    n = C.shape[2]
    pairs = (C[:, :, :, None] * B[:, :, None]).sum(-1)  # [B, T, n, n, H]
    seen = torch.ones(n, n, dtype=torch.bool, device=C.device).tril()[..., None]
    weight = torch.where(seen, -after[:, :, None, None], now[:, :, None, None])
    weight = weight * pairs
    return scale * torch.einsum("btrsh,btshv->btrhv", weight, inputs.to(weight.dtype))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
