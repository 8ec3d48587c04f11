"""Linear attention without a direction, sums of outer products and reads of them, and what is turned before it: the
truth, by the kernels and by PyTorch's operations."""

from __future__ import annotations

import torch

from ring_la.kernels.fused import bidirectional as outer
from ring_la.kernels.fused import turned
from tests.support.interpreter import interpreted

interpreted()

from ring_la.kernels.fused.bidirectional_kernel import quotient, read, total  # noqa: E402
from ring_la.kernels.fused.turned_kernel import forward  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # batch, tokens, heads of q and k, heads of v, K, V, offsets
    "dense": (2, 300, 2, 2, 16, 24, None),
    "heads of 112": (1, 140, 2, 2, 112, 112, None),
    "packed, grouped heads": (1, 90, 1, 3, 20, 16, (0, 0, 3, 70, 90)),
}


def read_case(name: str, dtype: torch.dtype = torch.float32, times: int = 1) -> tuple[list, list, list]:
    """(true, by the kernels, by PyTorch): S, o, the transposed form, and o over a denominator, of q or of its own."""
    B, T, HK, H, K, V, offsets = CASES[name]
    torch.manual_seed(0)
    cu = None if offsets is None else torch.tensor(offsets, device=DEVICE) * times
    k = torch.randn(B, T * times, HK, K, device=DEVICE, dtype=dtype)
    v = torch.randn(B, T * times, H, V, device=DEVICE, dtype=dtype)
    plain = plain_total, outer.plain_read_state, outer.plain_read_quotient
    return (
        results(k.double(), v.double(), cu, *plain),
        results(k, v, cu, total, read, quotient),
        results(k, v, cu, *plain),
    )


def plain_total(k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor | None, scale: float) -> torch.Tensor:
    return scale * outer.plain_outer_sum(k, v, cu)


def results(k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor | None, total, reading, dividing) -> list[torch.Tensor]:
    S = total(k, v, cu, 0.7)
    positive, one = k.abs(), v.new_ones(*v.shape[:3], 1)
    both = torch.cat([S, total(positive, one, cu, 1.0)], -1)
    divided = [dividing(positive, own, both, cu, 0.5, 1e-15) for own in (None, positive.flip(1))]
    return [S, reading(k, S, cu, 0.5, False), reading(v, S, cu, 0.5, True), *divided]


def turned_case(D: int, dtype: torch.dtype = torch.float32, T: int = 9, tables: int = 1) -> tuple[list, list, list]:
    """(true, by the kernel, by PyTorch): a ReLU, and it turned."""
    torch.manual_seed(0)
    x = torch.randn(2, T, 3, D, device=DEVICE, dtype=dtype)
    angles = torch.randn(tables, T, 1, D // 2, device=DEVICE).repeat_interleave(2, -1)
    given = x, angles.cos(), angles.sin()
    true = turned.plain_relu_and_turn(*(t.double() for t in given))
    return [*true], [*forward(*given)], [*turned.plain_relu_and_turn(*given)]
