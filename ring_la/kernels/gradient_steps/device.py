"""Device helpers: tiles of tokens, a norm's parts, and which tokens of a chunk step for which."""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("T", "NB", "NC")
"""Kernel arguments that change from call to call: no kernel is compiled anew for them."""


@triton.jit
def pair(a0, a1, b0, b1):
    """Two sums at once."""
    return a0 + b0, a1 + b1


@triton.jit
def four(a0, a1, a2, a3, b0, b1, b2, b3):
    """Four sums at once."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def rows(p, token, live, d, K: tl.constexpr):
    """[tokens, channels] of rows at these places, K wide."""
    return tl.load(p + token[:, None] * K + d[None, :], live[:, None] & (d < K)[None, :], other=0.0)


@triton.jit
def columns(p, token, live, d, K: tl.constexpr):
    """The same as [channels, tokens]."""
    return tl.load(p + token[None, :] * K + d[:, None], live[None, :] & (d < K)[:, None], other=0.0)


@triton.jit
def put(p, x, token, live, d, K: tl.constexpr):
    """Store what `rows` loads."""
    at = p + token[:, None] * K + d[None, :]
    tl.store(at, x.to(p.dtype.element_ty), live[:, None] & (d < K)[None, :])


@triton.jit
def put_columns(p, x, token, live, d, K: tl.constexpr):
    """Store what `columns` loads."""
    at = p + token[None, :] * K + d[:, None]
    tl.store(at, x.to(p.dtype.element_ty), live[None, :] & (d < K)[:, None])


@triton.jit
def normal(x, d, eps, K: tl.constexpr):
    """(x ``[n, K]`` with mean 0 and variance 1, one over the deviation it had ``[n]``)."""
    centred = tl.where((d < K)[None, :], x - (tl.sum(x, 1) / K)[:, None], 0.0)
    over = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / K + eps)
    return centred * over[:, None], over


@triton.jit
def steps(rate, last, t, N: tl.constexpr):
    """``[t, s]``: the rate by which token t reads the gradient of token s, of its own mini-batch up to itself, and of
    those before."""
    own = (t[:, None] // N == t[None, :] // N) & (t[:, None] >= t[None, :])
    return tl.where(own, rate[:, None], before(last, t, N))


@triton.jit
def before(last, t, N: tl.constexpr):
    """``[t, s]``: the same of mini-batches before alone."""
    return tl.where(t[:, None] // N > t[None, :] // N, last[None, :], 0.0)
