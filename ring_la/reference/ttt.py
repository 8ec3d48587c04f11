"""TTT-Linear in fp64: the inner gradient by differentiating the inner loss, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

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
    first: int | tuple[int, ...] = 0,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, ...] | None = None,
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
    N = spans[-1].states.stop
    zeros = (q.new_zeros(N, H, K, K), q.new_zeros(N, H, K)) * 2
    given = [x.double() for x in (zeros if initial_state is None else initial_state)]

    def normal(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * w + b

    def loss(W: Tensor, c: Tensor, key: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (normal(torch.einsum("nhk,nhkv->nhv", key, W) + c) - target).square().sum()

    inner, outputs, states = torch.func.grad(loss, argnums=(0, 1)), [], []
    for number, d in enumerate(spans):
        W, c, dW, dc = (x[d.states] for x in given)
        end, last = W, c
        begin = first[number] if isinstance(first, tuple) else first
        for n, (query, key, value, size) in enumerate(d.each(q, k, v, eta), begin):
            if n % mini_batch == 0:
                W, c, dW, dc = end, last, torch.zeros_like(W), torch.zeros_like(c)
            step = inner(W, c, key, value - key)
            dW, dc = dW + step[0], dc + step[1]
            rate = size[..., None]
            end, last = W - rate[..., None] * dW, c - rate * dc
            z = torch.einsum("nhk,nhkv->nhv", query, end) + last
            outputs.append(z + normal(z))
        if (begin + d.tokens.stop - d.tokens.start) % mini_batch == 0:
            W, c, dW, dc = end, last, torch.zeros_like(W), torch.zeros_like(c)
        states.append((W, c, dW, dc))
    final = tuple(torch.cat(parts) for parts in zip(*states)) if output_final_state else None
    return LinearAttentionOutput(torch.stack(outputs, 1), final)  # type: ignore[arg-type]
