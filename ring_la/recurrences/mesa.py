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

from ..autograd import first_derivative_only
from ..errors import ArgumentError
from ..kernels.choice import triton_installed
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import DECAY, KEY, QUERY, RATE, VALUE, Argument, state_dtype_of
from .definition import CommonOptions
from .erase import keys_of
from .recurrence import recurrence
from .retention import simple_gla

BY_DEFAULT = False
"""Whether a call that names no backend goes by the kernel, where that can take it."""
WIDEST = 128
Solver = Callable[[Tensor], Tensor]


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
    x = torch.linalg.solve(G.mT + torch.diag_embed(lam), q)
    return (G, S), read(S, x)


@recurrence(
    paper="von Oswald et al. 2025, arXiv 2506.05233, eq. 8",
    equation="G ← e^g G + β k kᵀ, S ← e^g S + β k vᵀ, o = Sᵀ (G + diag λ)⁻¹ q",
    arguments=dict(q=QUERY, k=KEY, v=VALUE, g=DECAY, beta=RATE, lam=Argument("HK", _ridge)),
    token=token,
    states=("HKK", "HKV"),
    flags=dict(steps=30),
)
def mesa_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lam: Tensor, steps: int = 30, *, options: CommonOptions
) -> LinearAttentionOutput:
    """MesaNet: G ← e^g G + β k kᵀ, S ← e^g S + β k vᵀ, o = Sᵀ x with (G + diag λ) x = scale · q.

    Args:
        q, k: ``[B, T, Hk, K]``, unit length (use_qk_l2norm) keeps the system well posed. v: ``[B, T, H, V]`` with H a
            multiple of Hk. g: log-decay ``[B, T, H]``, ≤ 0. beta: ``[B, T, H]``, ≥ 0. lam: λ ``[H, K]``, > 0.
        steps: of conjugate gradients.

    States are ``(G [N,H,K,K], S [N,H,K,V])``. Each step is a call of linear attention, so on a split sequence an
    exchange; on one CUDA device ``backend="triton"`` takes a kernel that has not yet run on a GPU (K up to 128).
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError("steps", "an int ≥ 1", repr(steps))
    G, S = (None, None) if options.initial_state is None else options.initial_state
    wide, heads, scale = state_dtype_of({"q": q, "v": v}), v.shape[2], float(options.scale)  # type: ignore[arg-type]
    q, k = (keys_of(heads, t) for t in (q, k))
    target, rate, ridge = scale * q.to(wide), beta.to(wide)[..., None], lam.to(wide)
    written = (rate * k).to(k.dtype)
    solver = _solver(k, g, beta, lam, G, steps, options)
    with torch.no_grad():
        x = solver(target)
    y, G = simple_gla(
        x.to(k.dtype), k, written, g, scale=1.0, initial_state=G, output_final_state=options.output_final_state,
        **options.scan,
    )  # fmt: skip
    x = _Solved.apply(target - y - ridge * x, x, solver)
    o, S = simple_gla(
        x.to(q.dtype), k, (rate * v).to(q.dtype), g, scale=1.0, initial_state=S,
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip
    final: Any = None if S is None else (G, S)
    return LinearAttentionOutput(o.to(v.dtype), final)


def _solver(
    k: Tensor, g: Tensor, beta: Tensor, lam: Tensor, G: Tensor | None, steps: int, options: CommonOptions
) -> Solver:
    """What gives x of the system's right sides ``[B, T, H, K]``."""
    k, g, beta, lam, G = (None if t is None else t.detach() for t in (k, g, beta, lam, G))  # type: ignore[assignment]
    named = options.backend == "triton" or (BY_DEFAULT and options.backend is None)
    if named and options.layout is None and _fits(k, g, beta, lam):
        from ..kernels.conjugate_gradients.solve import System, solved
        from ..kernels.runtime.launch import aligned

        cu = [0, k.shape[1]] if options.cu_seqlens is None else options.cu_seqlens.tolist()
        system = System(aligned(k), aligned(g), aligned(beta), aligned(lam), None if G is None else aligned(G.float()))
        return lambda right: solved(aligned(right.to(k.dtype)), system, cu, steps)
    keys, rate = k.to(state_dtype_of({"k": k, "lam": lam})), beta[..., None]
    written = rate * keys

    def times(p: Tensor) -> Tensor:
        return simple_gla(p, keys, written, g, scale=1.0, initial_state=G, **options.scan).o + lam * p

    return lambda right: _conjugate_gradients(times, right, steps)


def _fits(k: Tensor, *others: Tensor) -> bool:
    """Whether the kernel can take a call."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    dtypes = all(t.dtype in narrow for t in (k, *others))
    return bool(k.is_cuda and triton_installed() and dtypes and k.shape[3] <= WIDEST and k.numel())


def _conjugate_gradients(times: Solver, right: Tensor, steps: int) -> Tensor:
    """x with ``times(x) = right``, each row by itself, after so many steps from zero."""
    x, r, p, size = torch.zeros_like(right), right, right, right.square().sum(-1, keepdim=True)
    for _ in range(steps):
        y = times(p)
        step = _over(size, (p * y).sum(-1, keepdim=True))
        x, r = x + step * p, r - step * y
        left = r.square().sum(-1, keepdim=True)
        p, size = r + _over(left, size) * p, left
    return x


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, zero where there is nothing left."""
    tiny = 1e-30
    return torch.where(b > tiny, a / b.clamp(min=tiny), 0.0)


class _Solved(torch.autograd.Function):
    """x, as what a remainder of its system makes of it: the remainder's gradient solves the same system."""

    @staticmethod
    def forward(ctx: Any, remainder: Tensor, x: Tensor, solver: Solver) -> Tensor:
        ctx.solver = solver
        return x.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.solver(dx), None, None
