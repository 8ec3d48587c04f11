"""What passes under a scalar decay read: tensors by pointers or by descriptors, and the decay.

BULK: tensors are descriptors [B·T, heads · D], moved by the copy engine without addresses in registers; then a chunk is
whole, or ends with the tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels import gpu
from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.runtime.triton_version import TensorDescriptor
from ring_la.kernels.sizes import cdiv, power_of_2, width
from ring_la.kernels.spans import table
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.triton.gates import factors_kernel
from ring_la.kernels.triton.tiles import head, tile


@triton.jit
def rows(p, b, start, h, T, H: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, BULK: tl.constexpr):
    """Where `take` starts in one head: pointer, row and column; of a descriptor only the latter two."""
    if BULK:
        at = 0
    else:
        at = head(p, b, start, h, T, H, HV, D)
    return at, b * T + start, h // (HV // H) * D


@triton.jit
def take(p, at, row, column, c, t, left, d, first, STRIDE: tl.constexpr, D: tl.constexpr, BULK: tl.constexpr):
    """[t, d] of the chunk at token c; d begins at column `first` of the head."""
    if BULK:
        return p.load([row + c, column + first])
    else:
        return tile(at + c * STRIDE, t, left - c, d, STRIDE, D)


@triton.jit
def constant(rate, scale, n, t):
    """Rows 1 and 2 of `gates.factors_kernel`, scale · e^G and e^{G_C − G}, of a chunk of n tokens, and G_C, where every
    token decays by `rate` (a power of two)."""
    return scale * tl.exp2(rate * (t + 1)), tl.exp2(rate * tl.maximum(n - 1 - t, 0)), rate * n


class Gates(NamedTuple):
    """What passes read of a scalar decay: its factors by token (see `triton.gates`) or, if it is `constant`, that of
    each head; None: there is no decay. `strong`: what is written is multiplied by β, which the factors have. `skip`:
    what v is added to the output times [H]."""

    read: Tensor | None = None
    constant: bool = False
    strong: bool = False
    skip: Tensor | None = None

    @property
    def present(self) -> bool:
        return self.read is not None


def gates_of(plan: SpanPlan, inputs: Inputs, factors: Tensor | None = None) -> Gates:
    """Those of the inputs. `factors`: of a decay by token, if they are known."""
    if plan.rule.decay == "none":
        return Gates()
    return Gates(inputs.g, True) if plan.constant else by_token(plan, inputs, factors)


def by_token(plan: SpanPlan, inputs: Inputs, factors: Tensor | None = None) -> Gates:
    """Factors by token, chunk by chunk, also of a decay that is constant."""
    if factors is None:
        factors, chunks, (B, T, H, *_) = plan.factors(), plan.chunks, plan.sizes
        block = min(16, power_of_2(H))
        launch(
            factors_kernel, (chunks.count, cdiv(H, block), B), *filled(inputs.g, inputs.beta), factors, chunks.table, T,
            chunks.count, plan.scale, H=H, C=plan.chunk, BH=block, STATIC=plan.by_head,
            STRONG=inputs.beta is not None, VARLEN=plan.packed, num_warps=4,
        )  # fmt: skip
    return Gates(factors, strong=inputs.beta is not None, skip=inputs.a)


def columns(D: int) -> int:
    """A head as a tile is wide: narrower ones than 64 columns are what the compiler gets wrong."""
    return max(64, width(D))


def described(plan: SpanPlan) -> bool:
    """Whether tensors go by descriptor: large enough, in whole tiles, none of which holds another row's tokens.

    Beside an exchange in any case: without addresses in registers the passes leave room for its kernel."""
    B, T, H, _, K, V = plan.sizes
    whole = all(columns(n) == n for n in (K, V)) and (B == 1 or T % plan.chunk == 0)
    large = B * T * H * max(K, V) >= table.DESCRIBED
    return (large or plan.crowded) and whole and not plan.packed and plan.half and gpu.copies_tiles(plan.device)


def tiles(plan: SpanPlan, x: Tensor, block: int, by_descriptor: bool = True) -> Tensor | TensorDescriptor:
    """`x` [B, T, H, D], or what reads and writes its tiles of a chunk by `block` columns."""
    if not (by_descriptor and described(plan)):
        return x
    return _descriptor(x, [x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]], [plan.chunk, block])


def state_tiles(plan: SpanPlan, states: Tensor | None, rows: int, block: int) -> Tensor | TensorDescriptor | None:
    """The chunks' states [B, NC, H, K, V], or what writes them by `rows` and `block` columns."""
    if states is None or not described(plan):
        return states
    return _descriptor(states, [states.numel() // states.shape[-1], states.shape[-1]], [rows, block])


def _descriptor(x: Tensor, shape: list[int], block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, shape, [shape[1], 1], block)


def chunk_states(plan: SpanPlan) -> Tensor:
    """A place for the state before each chunk."""
    B, _, H, _, K, V = plan.sizes
    return plan.new(B, plan.chunk_count, H, K, V, dtype=plan.dtype)


def shared_constants(plan: SpanPlan) -> dict[str, Any]:
    """The constants all passes share."""
    return dict(H=plan.sizes.H, C=plan.chunk, BULK=described(plan), PREC=plan.precision, VARLEN=plan.packed)
