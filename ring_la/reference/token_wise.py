"""The operators whose reach is short: the causal convolution, the token shift, and the matmul by groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_la.choices import Activation
from ring_la.errors import ArgumentError
from ring_la.outputs import ShortConvOutput, TokenShiftOutput
from ring_la.reference.arguments import Document, documents, expect_local, expect_shape


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: Literal["reference"] | None = None,
) -> ShortConvOutput:
    """Depthwise causal convolution over each document: y_t = Σ_j weight[:, j] · x_{t−W+1+j} (+ bias).

    x [B, T, D] or [B, T, H, D / H]; weight [D, W] or [D, 1, W]; bias [D]; `activation` None or "silu". Tokens before
    a document's first come from `initial_state` [N, D, W − 1], oldest first, or are zero; `final_state` holds the last
    W − 1 inputs in that form. Returns `ShortConvOutput(o, final_state or None)` in float64.
    """
    expect_local(layout, backend)
    if activation not in (None, "silu"):
        raise ArgumentError("activation", "None or 'silu'", repr(activation))
    if x.dim() not in (3, 4):
        raise ArgumentError("x", "shape [B, T, D] or [B, T, H, D / H]", list(x.shape))
    flat = x.flatten(2).double()
    B, T, D = flat.shape
    taps = (weight.squeeze(1) if weight.dim() == 3 else weight).double()
    expect_shape("weight", taps, D=D, W=None)
    if bias is not None:
        expect_shape("bias", bias, D=D)
    W = taps.shape[1]
    spans = documents(B, T, cu_seqlens)
    N = spans[-1].states.stop
    if initial_state is None:
        initial_state = flat.new_zeros(N, D, W - 1)
    expect_shape("initial_state", initial_state, N=N, D=D, tail=W - 1)
    y, states = _convolve(flat, taps, initial_state.double(), spans)
    if bias is not None:
        y = y + bias.double()
    y = F.silu(y) if activation == "silu" else y
    return ShortConvOutput(y.view(x.shape), states if output_final_state else None)


def _convolve(x: Tensor, taps: Tensor, initial_state: Tensor, spans: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Σ_j taps[:, j] · x_{t−W+1+j} for each token ``[B, T, D]``, and each document's last inputs ``[N, D, W − 1]``."""
    outputs, states = [x.new_zeros(x.shape[0], 0, x.shape[2])], []
    for document in spans:
        tail = initial_state[document.states]
        for (token,) in document.each(x):
            seen = torch.cat([tail, token[..., None]], dim=-1)
            outputs.append((taps * seen).sum(-1)[:, None])
            tail = seen[..., 1:]
        states.append(tail)
    return torch.cat(outputs, dim=1), torch.cat(states)


def token_shift(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: Literal["reference"] | None = None,
) -> TokenShiftOutput:
    """Each token's predecessor in its document (RWKV): o_t = x_{t−1}.

    x [B, T, D] or [B, T, H, D / H]. A document's first token gets `initial_state` [N, D], or zeros; `final_state`
    [N, D] is its last token. Returns `TokenShiftOutput(o, final_state or None)` in float64.
    """
    expect_local(layout, backend)
    if x.dim() not in (3, 4):
        raise ArgumentError("x", "shape [B, T, D] or [B, T, H, D / H]", list(x.shape))
    flat = x.flatten(2).double()
    B, T, D = flat.shape
    spans = documents(B, T, cu_seqlens)
    N = spans[-1].states.stop
    if initial_state is None:
        initial_state = flat.new_zeros(N, D)
    expect_shape("initial_state", initial_state, N=N, D=D)

    outputs, states = [flat.new_zeros(B, 0, D)], []
    for document in spans:
        last = initial_state[document.states].double()
        for (token,) in document.each(flat):
            outputs.append(last[:, None])
            last = token
        states.append(last)
    return TokenShiftOutput(torch.cat(outputs, 1).view(x.shape), torch.cat(states) if output_final_state else None)


def grouped_gemm(a: Tensor, b: Tensor, group_sizes: Tensor | Sequence[int]) -> Tensor:
    """Row blocks of `a` [M, K], each times its own matrix of `b` [G, K, N]: the float64 [M, N].

    `group_sizes` [G] are the blocks' heights, in order; some may be zero; their sum is M.
    """
    expect_shape("a", a, M=None, K=None)
    expect_shape("b", b, G=None, K=a.shape[1], N=None)
    sizes = torch.as_tensor(group_sizes).tolist()
    if len(sizes) != len(b) or sum(sizes) != len(a) or min(sizes, default=0) < 0:
        raise ArgumentError("group_sizes", f"{len(b)} sizes ≥ 0 that sum to {len(a)}", sizes)
    blocks = [rows @ matrix for rows, matrix in zip(a.double().split(sizes), b.double(), strict=True)]
    return torch.cat([a.new_zeros(0, b.shape[2], dtype=torch.float64), *blocks])
