"""The momentum delta rule: gradient steps of a linear memory that go by a running sum of gradients.

    M ← μ M + η k (Sᵀ p − v)ᵀ,        S ← α S − β M

A token mixes two states, channel by channel: that is no map of the algebra, whose transitions are diagonal but for one
direction, so runs follow one another (`linear.in_order`). With w_t = S_{t−1}ᵀ p_t − v_t, and a and m the running
products of α and μ in a chunk,

    S_t = a_t S₀ − b_t M₀ − Σ_{r≤t} Γ_tr η_r k_r w_rᵀ,        Γ_tr = Σ_{r≤s≤t} (a_t/a_s) β_s (m_s/m_r)

of which every factor is at most one, so w of a chunk is the solution of a triangular system, linear in S₀ and M₀.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blockwise import by_block, fixed
from ..errors import UnsupportedError
from ..kernels.momentum.chunks import chunks, unsupported
from ..linear.in_order import in_order
from ..linear.stretches import DocumentRun
from ..outputs import LinearAttentionOutput
from ..reference.by_token import outer, read
from .arguments import DECAY, KEY, QUERY, RATE, VALUE, Argument, state_dtype_of
from .definition import CommonOptions
from .erase import keys_of
from .recurrence import recurrence

CHUNK = 64


def token(
    states: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, mu: Tensor, beta: Tensor,
    eta: Tensor,
) -> tuple[tuple[Tensor, Tensor], Tensor]:  # fmt: skip
    """One token of the momentum delta rule."""
    S, M = states
    M = mu.exp()[..., None, None] * M + outer(eta[..., None] * k, read(S, p) - v)
    S = g.exp()[..., None, None] * S - beta[..., None, None] * M
    return (S, M), read(S, q)


@recurrence(
    paper="the momentum delta rule of fla-core 0.6.0's ops/momentum_delta_rule",
    equation="M ← e^μ M + η k (Sᵀ p − v)ᵀ, S ← e^g S − β M",
    arguments=dict(
        q=QUERY, k=KEY, v=VALUE, p=Argument("BTHK", "unit"), g=DECAY, mu=DECAY, beta=RATE, eta=RATE
    ),
    token=token,
    states=("HKV", "HKV"),
    same_bits=True,
    opaque=True,
)  # fmt: skip
def momentum_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, mu: Tensor, beta: Tensor, eta: Tensor, *,
    options: CommonOptions,
) -> LinearAttentionOutput:  # fmt: skip
    """The momentum delta rule: M ← e^μ M + η k (Sᵀ p − v)ᵀ, S ← e^g S − β M.

    The linear memory of Titans (Behrouz et al. 2025, arXiv 2501.00663, eq. 13–14) without a norm is this with p = k,
    beta = 1, ``g = log(1 − α)`` and ``mu = log η``.

    Args:
        q, k: ``[B, T, Hk, K]``; keys of unit length keep the state bounded (use_qk_l2norm, which leaves p as it is).
        v: ``[B, T, H, V]`` with H a multiple of Hk. p: what is asked of S before a step ``[B, T, H, K]`` (or Hk heads).
        g, mu: log-decays of S and of M ``[B, T, H]``, ≤ 0. beta, eta: rates of S and of M ``[B, T, H]``.

    States are ``(S, M)``. On CUDA devices q, k, v and p in bf16 or fp16, K and V from 33 to 128, go by kernels; the
    rest by PyTorch's operations, in fp32 or wider. A rank waits for the one before it, a group of heads at a time.
    """
    scale, H = float(options.scale), v.shape[2]  # type: ignore[arg-type]
    kernels = _by_kernels([q, k, v, p, g, mu, beta, eta], options)
    if kernels and options.layout is None and v.shape[1]:
        given, states = [*(keys_of(H, t) for t in (q, k)), v, p, g, mu, beta, eta], options.initial_state
        cu = [0, v.shape[1]] if options.cu_seqlens is None else options.cu_seqlens.tolist()
        o, S, M = chunks(given, states, cu, scale)  # type: ignore[arg-type]
        return LinearAttentionOutput(o, (S, M) if options.output_final_state else None)  # type: ignore[arg-type]
    wide = state_dtype_of(dict(q=q, k=k, v=v, p=p, g=g, mu=mu, beta=beta, eta=eta))

    def ready(*x: Tensor) -> tuple[Tensor, ...]:
        q, k, v, p, *gates = x if kernels else (t.to(wide) for t in x)
        return v, keys_of(H, q), keys_of(H, k), p, *(t[..., None] for t in gates)

    tokens = by_block(ready, q, k, v, p, g, mu, beta, eta, layout=options.layout)
    start = _start(options, tokens[0].new_empty(0, dtype=wide), v, k.shape[3])
    o, end = in_order(MomentumRun(scale, kernels), start, tokens, (), [0] * len(start), options)
    return LinearAttentionOutput(o.to(v.dtype), None if end is None else tuple(end.unbind(2)))  # type: ignore[arg-type]


def _by_kernels(given: Sequence[Tensor], options: CommonOptions) -> bool:
    """Whether a call goes by the kernels."""
    if options.backend == "torch":
        return False
    why = unsupported(given)
    if fixed(options.layout):
        why = "a deterministic layout, whose runs go by PyTorch's operations"
    if why and options.backend == "triton":
        raise UnsupportedError("backend", "one that can run this", f"'triton': {why}", "Use backend='torch'")
    return not why


def _start(options: CommonOptions, like: Tensor, v: Tensor, K: int) -> Tensor:
    """S and M before each document ``[N, H, 2, K, V]``."""
    if options.initial_state is not None:
        return torch.stack([x.to(like.dtype) for x in options.initial_state], 2)
    layout, N = options.layout, v.shape[0]
    if options.cu_seqlens is not None:
        N = options.cu_seqlens.numel() - 1
    elif layout is not None and layout.packed:
        N = layout.num_documents
    return like.new_zeros(N, v.shape[2], 2, K, v.shape[3])


@dataclass(frozen=True)
class MomentumRun:
    """A run of tokens; `kernels`: by those."""

    scale: float
    kernels: bool

    def __call__(self, run: DocumentRun, state: Tensor, v: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor]:
        """o of v, q, k, p, g, mu, beta and eta, and the state after them, given that before ``[B, H, 2, K, V]``."""
        if not self.kernels:
            return _chunks(state, v, self.scale * tokens[0], *tokens[1:])
        q, k, p, *gates = tokens
        given = [q, k, v, p, *(t[..., 0] for t in gates)]
        o, S, M = chunks(given, (state[:, :, 0], state[:, :, 1]), (0, v.shape[1]), self.scale)
        return o, torch.stack([S, M], 2).to(state.dtype)


@dataclass(frozen=True)
class MomentumChunks:
    """What chunks are before their states arrive, ``[B, H, chunks, …]``, X being S₀ above M₀ ``[2K, V]``:
    w = `asked` X − `known`, o = `read` X − `within` w, and X goes on as `map` X + `added`: one product a chunk is
    all that waits for the one before."""

    asked: Tensor
    known: Tensor
    read: Tensor
    within: Tensor
    map: Tensor
    added: Tensor


def _chunks(
    state: Tensor, v: Tensor, q: Tensor, k: Tensor, p: Tensor, g: Tensor, mu: Tensor, beta: Tensor, eta: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o of a run of tokens, and the state after them, given that before them ``[B, H, 2, K, V]``."""
    n = v.shape[1]
    C = min(n, CHUNK)
    padded = (F.pad(x, (0, 0, 0, 0, 0, -n % C)).transpose(1, 2) for x in (q, k, v, p, g, mu, beta, eta))
    parts = _parts(*(x.unflatten(2, (-1, C)) for x in padded))
    X, before = state.flatten(2, 3).flatten(0, 1), []
    own = (parts.map, parts.added)
    for A, b in zip(*(x.flatten(0, 1).unbind(1) for x in own)):  # an index each would fill gradients each time
        before.append(X)
        X = torch.baddbmm(b, A, X)
    S = torch.stack(before, 1).unflatten(0, state.shape[:2])
    X = X.unflatten(0, state.shape[:2])
    o = parts.read @ S - parts.within @ (parts.asked @ S - parts.known)
    return o.flatten(2, 3)[:, :, :n].transpose(1, 2), X.unflatten(2, (2, -1))


def _kept(a: Tensor, b: Tensor, m: Tensor, K: int) -> Tensor:
    """What becomes of X in a chunk without its writes ``[…, 2K, 2K]``: ``a S − b M`` above ``m M``."""
    eye = torch.eye(K, dtype=a.dtype, device=a.device)
    parts = torch.stack([a, -b, torch.zeros_like(m), m], -1).unflatten(-1, (2, 2))
    return torch.einsum("...ij,kl->...ikjl", parts, eye).flatten(-2).flatten(-3, -2)


def _parts(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, mu: Tensor, beta: Tensor, eta: Tensor
) -> MomentumChunks:  # fmt: skip
    """The parts of chunks ``[B, H, chunks, C, ·]``."""
    a, m = g.cumsum(3), mu.cumsum(3)
    A, D = (_gaps(x) for x in (a, m))
    steps = A * beta.mT
    gamma, a, m = steps @ D, a.exp(), m.exp()
    b = steps @ m
    earlier, a1, b1 = (F.pad(x[..., :-1, :], (0, 0, 1, 0), value=one) for x, one in ((gamma, 0.0), (a, 1.0), (b, 0.0)))
    written = k * eta
    N = (p @ written.mT) * earlier  # strictly lower
    right = torch.cat([a1 * p, -b1 * p, v], -1)
    solved = torch.linalg.solve_triangular(N, right, upper=False, unitriangular=True)
    K = k.shape[-1]
    asked, known = solved.split([2 * K, v.shape[-1]], -1)
    last = (x[..., -1, :, None] for x in (gamma, D))
    back, on = (written * x for x in last)
    writes = torch.cat([-back, on], -1).mT
    a_end, b_end, m_end = (x[..., -1, 0] for x in (a, b, m))
    return MomentumChunks(
        asked=asked,
        known=known,
        read=torch.cat([a * q, -b * q], -1),
        within=(q @ written.mT) * gamma,
        map=_kept(a_end, b_end, m_end, K) + writes @ asked,
        added=-(writes @ known),
    )


def _gaps(x: Tensor) -> Tensor:
    """e^{x_t − x_s} for s ≤ t of a chunk, ``[…, t, s]``."""
    gap = x - x.mT
    return gap.masked_fill(torch.ones_like(gap, dtype=torch.bool).triu(1), -torch.inf).exp()
