"""Time launch settings of a deterministic recurrence's passes on a GPU: `python -m benchmarks.tuning.in_order`.

The gated delta rule of hybrid_1b (20 heads of 128 channels), one document, bf16: states go from chunk to chunk, so that
a program's columns decide how many programs there are. ms of the whole forward and the whole backward pass.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.errors import worst_error
from benchmarks.timing import median
from benchmarks.tuning.fixed import INNER, ROUNDS
from ring_la.algebra import Rule
from ring_la.kernels.in_order import Pieces, forward, gradients
from ring_la.kernels.protocol import Backward, Inputs
from ring_la.kernels.spans.table import Tiling
from ring_la.kernels.wy import in_order

SETTINGS = ((16, 4, 3), (64, 4, 2), (32, 4, 2), (32, 4, 3), (16, 4, 2), (16, 4, 4), (64, 8, 2), (64, 4, 3))
"""Columns of a program, warps and stages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    T, device, rule = parser.parse_args().tokens, torch.device("cuda"), Rule.parse("delta_scalar")
    q, k, v, do = (torch.randn(1, T, 20, 128, device=device).bfloat16() for _ in range(4))
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (q, k))
    g, beta = -torch.rand(1, T, 20, device=device) / 8, torch.rand(1, T, 20, device=device)
    pieces = Pieces.of(T, torch.tensor([0, T], dtype=torch.int32, device=device))
    S = torch.zeros(1, 1, 20, 128, 128, device=device)
    inputs, first = Inputs(q, k, v, g=g, beta=beta), None
    for how in SETTINGS:
        in_order.IN_ORDER_OUTPUT = in_order.IN_ORDER_BACKWARD = {128: Tiling(*how)}
        try:
            out = forward(rule, inputs, pieces, 128**-0.5, S, True)
            back = Backward(S, do, out.saved)
            grads = gradients(rule, inputs, pieces, 128**-0.5, back, S).inputs
            found = [out.o, *(t for t in grads if t is not None)]
            first = first or found
            off = worst_error(found, first)
            times = (
                median(lambda: forward(rule, inputs, pieces, 128**-0.5, S, True), ROUNDS, INNER),
                median(lambda back=back: gradients(rule, inputs, pieces, 128**-0.5, back, S), ROUNDS, INNER),
            )
            print(f"{how} {times[0]:.3f} {times[1]:.3f}, off by {off:.1e}", flush=True)
        except Exception as error:
            print(f"{how} {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
