"""TTT-Linear in fp64: the inner gradient by differentiating the inner loss, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.outputs import LinearAttentionOutput
from ring_la.reference.arguments import documents, expect_local, expect_shape


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w: Tensor,
    b: Tensor,
    mini_batch: int = 16,
    eps: float = 1e-6,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    mode: str = "auto",
    backend: str | None = None,
) -> LinearAttentionOutput:
    """`ring_la.ttt_linear`, a token at a time, in fp64."""
    expect_local(layout, backend, mode)
    expect_shape("q", q, B=None, T=None, H=None, K=None)
    B, T, H, K = q.shape
    q, k, v, eta, w, b = (x.double() for x in (q, k, v, eta, w, b))
    if use_qk_l2norm:
        q, k = (x * torch.rsqrt((x**2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (K**-0.5 if scale is None else scale)
    spans = documents(B, T, cu_seqlens)
    zeros = q.new_zeros(spans[-1].states.stop, H, K, K), q.new_zeros(spans[-1].states.stop, H, K)
    weights, biases = (x.double() for x in (zeros if initial_state is None else initial_state))
    parts, states = [], []
    for d in spans:
        tokens = [(q[d.rows, t], k[d.rows, t], v[d.rows, t], eta[d.rows, t]) for t in range(T)[d.tokens]]
        o, end = _document(Inner(w, b, eps), tokens, (weights[d.states], biases[d.states]), mini_batch)
        parts += o
        states.append(end)
    final = tuple(torch.cat(parts) for parts in zip(*states)) if output_final_state else None
    return LinearAttentionOutput(torch.stack(parts, 1), final)  # type: ignore[arg-type]


class Inner(NamedTuple):
    """The inner model but for its weights W and c: a norm's weight and bias [H, K], its ε."""

    w: Tensor
    b: Tensor
    eps: float

    def normal(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.w + self.b

    def loss(self, W: Tensor, c: Tensor, key: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (self.normal(torch.einsum("nhk,nhkv->nhv", key, W) + c) - target).square().sum()


def _document(
    inner: Inner, tokens: Sequence[tuple[Tensor, ...]], state: tuple[Tensor, Tensor], mini_batch: int
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """The outputs of a document's tokens (q, k, v, η), and its weights after them."""
    (W, c), (end, last) = state, state
    dW, dc = torch.zeros_like(W), torch.zeros_like(c)
    gradient, outputs = torch.func.grad(inner.loss, argnums=(0, 1)), []
    for n, (query, key, value, eta) in enumerate(tokens):
        if n % mini_batch == 0:
            W, c, dW, dc = end, last, torch.zeros_like(W), torch.zeros_like(c)
        step = gradient(W, c, key, value - key)
        dW, dc = dW + step[0], dc + step[1]
        rate = eta[..., None]
        end, last = W - rate[..., None] * dW, c - rate * dc
        z = torch.einsum("nhk,nhkv->nhv", query, end) + last
        outputs.append(z + inner.normal(z))
    return outputs, (end, last)
