"""MesaNet: a state read by the solution of a regularised least-squares problem, for each token.

    G ← e^g G + β k kᵀ,        S ← e^g S + β k vᵀ,        o = Sᵀ x,        (G + diag λ) x = scale · q

G times a vector a token is linear attention with k for values, so conjugate gradients are so many calls of it (or one
kernel on one device); nothing of the solver is differentiated. With x fixed, ``y = G x`` is one call more, whose
gradient is −u where u solves the same system for the gradient of x: dq = u, dλ = −Σ u x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..autograd import first_derivative_only, traced
from ..blockwise import by_block, exact_sum, fixed
from ..blockwise.sums import OF_TOKENS, part_of
from ..checks import check_int
from ..context import ShardedLayout
from ..kernels.choice import triton_installed
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import DECAY, KEY, QUERY, RATE, VALUE, Argument, state_dtype_of
from .definition import CommonOptions
from .erase import keys_of
from .recurrence import recurrence
from .retention import simple_gla

WIDEST = 128
Times = Callable[[Tensor], Tensor]
Solver = Callable[[Tensor, float], Tensor]


def _ridge(normal: Callable[..., Tensor], drawn: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """An example of λ."""
    return 0.5 + normal(*shape).sigmoid()


def token(
    states: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor, steps: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One token of MesaNet, solved exactly."""
    G, S = states
    kept, written = g.exp()[..., None, None], beta[..., None] * k
    G, S = kept * G + outer(written, k), kept * S + outer(written, v)
    x = torch.linalg.solve(G + torch.diag_embed(lam), q)
    return (G, S), read(S, x)


@recurrence(
    paper="von Oswald et al. 2025, arXiv 2506.05233, eq. 8",
    equation="G ← e^g G + β k kᵀ, S ← e^g S + β k vᵀ, o = Sᵀ (G + diag λ)⁻¹ q",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=DECAY, beta=RATE, lam=Argument("HK", _ridge)),
    token=token,
    states=("HKK", "HKV"),
    flags=dict(steps=30),
    opaque=True,
    same_bits=True,
)
def mesa_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor, steps: int = 30, *, options: CommonOptions
) -> LinearAttentionOutput:
    """MesaNet: G ← e^g G + β k kᵀ, S ← e^g S + β k vᵀ, o = Sᵀ x with (G + diag λ) x = scale · q.

    Args:
        q, k: ``[B, T, Hk, K]``, unit length (use_qk_l2norm) keeps the system well posed. v: ``[B, T, H, V]`` with H a
            multiple of Hk. g: log-decay ``[B, T, H]``, ≤ 0. beta: ``[B, T, H]``, ≥ 0. lam: λ ``[H, K]``, > 0.
        steps: of conjugate gradients, at most (the kernel ends when no more would show in k's dtype).

    States are ``(G [N,H,K,K], S [N,H,K,V])``. On one CUDA device all steps are one kernel (K up to 128); elsewhere each
    is a call of linear attention, and on a split sequence an exchange.
    """
    check_int("steps", steps, 1)
    G, S = (None, None) if options.initial_state is None else options.initial_state
    heads, scale = v.shape[2], float(options.scale)  # type: ignore[arg-type]
    wide, same_bits = state_dtype_of({"k": k}), fixed(options.layout)

    def ready(q: Tensor, k: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        q, k = (keys_of(heads, t) for t in (q, k))
        written = beta[..., None].to(wide) * k
        return q, k, written if same_bits else written.to(k.dtype)

    q, k, written = by_block(ready, q, k, beta, layout=options.layout)
    solver = _solver(k, g, beta, lam, G, steps, options)
    with torch.no_grad():
        x = solver(q, scale)
    final = dict(scale=1.0, output_final_state=options.output_final_state)
    # the solver goes on from G, which then has to have the bits of the one it had within a document
    given = (x.to(wide), k.to(wide), written) if same_bits else (x, k, written)
    y, G = simple_gla(*given, g, initial_state=None if G is None else G.mT, **final, **options.scan)  # G x
    o, S = simple_gla(
        _Solved.apply(q, y, lam, x, solver, scale, options.layout),
        written.to(k.dtype),
        v,
        g,
        initial_state=S,
        **final,
        **options.scan,
    )
    return LinearAttentionOutput(o, None if S is None or G is None else (G.mT, S))  # type: ignore[arg-type]


def _solver(
    k: Tensor, g: Tensor, beta: Tensor, lam: Tensor, G: Tensor | None, steps: int, options: CommonOptions
) -> Solver:
    """What gives x of the system's right sides ``[B, T, H, K]`` times a number, in their dtype."""
    k, g, beta, lam, G = (None if t is None else t.detach() for t in (k, g, beta, lam, G))  # type: ignore[assignment]
    if options.backend != "torch" and options.layout is None and _fits(k, g, beta, lam):
        from ..kernels.conjugate_gradients.solve import System, solved
        from ..kernels.runtime.launch import aligned

        cu = [0, k.shape[1]] if options.cu_seqlens is None else options.cu_seqlens.tolist()
        system = System(aligned(k), aligned(g), aligned(beta), aligned(lam), None if G is None else aligned(G.float()))
        return lambda right, scale: solved(aligned(right.to(k.dtype)), system, cu, steps, scale)
    keys, rate = k.to(state_dtype_of({"k": k, "lam": lam, "beta": beta})), beta[..., None]
    written, turned = rate * keys, None if G is None else G.mT

    def times(p: Tensor) -> Tensor:
        return simple_gla(p, keys, written, g, scale=1.0, initial_state=turned, **options.scan).o

    def solve(right: Tensor, scale: float) -> Tensor:
        return _conjugate_gradients(times, lam, scale * right.to(keys.dtype), steps, options.layout).to(right.dtype)

    return solve


def _fits(k: Tensor, *others: Tensor) -> bool:
    """Whether the kernel can take a call."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    dtypes = all(t.dtype in narrow for t in (k, *others))
    return bool(k.is_cuda and triton_installed() and not traced(k) and dtypes and k.shape[3] <= WIDEST and k.numel())


def _conjugate_gradients(
    times: Times, lam: Tensor, right: Tensor, steps: int, layout: ShardedLayout | None = None
) -> Tensor:
    """x with ``times(x) + λ x = right``, each row by itself, after so many steps from zero."""
    x, r, p = torch.zeros_like(right), right, right
    for _ in range(steps):
        x, r, p = by_block(_step, x, r, p, times(p), layout=layout, shared=(lam,))
    return x


def _step(x: Tensor, r: Tensor, p: Tensor, y: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, what is left of the right side and the next direction, of those before and y, the product with p."""
    y, size = y + lam * p, r.square().sum(-1, keepdim=True)
    step = _over(size, (p * y).sum(-1, keepdim=True))
    x, r = x + step * p, r - step * y
    return x, r, r + _over(r.square().sum(-1, keepdim=True), size) * p


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, zero where there is nothing left."""
    tiny = 1e-30
    return torch.where(b > tiny, a / b.clamp(min=tiny), 0.0)


class _Solved(torch.autograd.Function):
    """x, the solution found; u, that of the same system for the gradient of x, is what q, y and λ get."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, y: Tensor, lam: Tensor, x: Tensor, solver: Solver, scale: float,
        layout: ShardedLayout | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, lam)
        ctx.layout, ctx.way_back = layout, layout.cp.comm.agreement.way_back() if fixed(layout) else None
        ctx.solver, ctx.scale, ctx.dtypes = solver, scale, (q.dtype, y.dtype)
        return x.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        (x, lam), u = ctx.saved_tensors, ctx.solver(dx, 1.0)
        q, y = ctx.dtypes
        wide = torch.promote_types(lam.dtype, torch.float32)
        if fixed(ctx.layout):
            ctx.way_back()
            rows = -(u.to(wide) * x.to(wide)).flatten(0, 1)
            dlam = part_of(exact_sum(rows, ctx.layout, OF_TOKENS), ctx.layout, lam)
        else:
            dlam = -(u.to(wide) * x).sum((0, 1)).to(lam.dtype)  # an einsum would lay both out anew first
        return (ctx.scale * u).to(q), (-u).to(y), dlam, *[None] * 4
