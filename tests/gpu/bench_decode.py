"""The one-token step for 64 sequences of 32 heads, K = V = 128, against a copy: `python -m tests.gpu.bench_decode`."""

from __future__ import annotations

from functools import partial

import torch

from ring_la.algebra import Rule
from ring_la.cli.bench_ops import bandwidth, milliseconds
from ring_la.kernels.local import Inputs
from ring_la.kernels.triton import decode
from tests.kernels.triton_cases import Case


def main() -> None:
    copy = bandwidth()
    state = torch.randn(64, 32, 128, 128, device="cuda")
    moved = 2 * state.numel() * 4
    for name in ("additive_scalar", "delta_scalar", "delta_diagonal", "dplr_diagonal"):
        case = Case(name, 64, 1, 32, 32, 128, 128, torch.bfloat16)
        x = Inputs(*(None if t is None else t[:, 0] for t in case.inputs("cuda")))
        step = partial(decode.step, Rule.parse(name), x, state, 0.1, in_place=True)
        best = []
        for block in (8, 16, 32, 64, 128):
            for warps in (1, 2, 4, 8):
                decode.BLOCK_V, decode.WARPS = block, warps
                ms = milliseconds(step, 0.01)
                best.append((moved / (ms / 1e3) / copy, block, warps, ms))
        best.sort(reverse=True)
        print(name, [(f"{share:.3f} of copy", block, warps, ms) for share, block, warps, ms in best[:3]], flush=True)


if __name__ == "__main__":
    main()
