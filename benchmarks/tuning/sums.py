"""Where the sizes in `kernels/sums/walks.py` come from: `python -m benchmarks.tuning.sums [--out FILE]`.

HGRN forward, and forward and backward, ms, for every choice of a program's tile, its warps and the tokens of a span;
errors of the output against fp64 on the first channels.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch.nn.functional import logsigmoid

import ring_la
from benchmarks.options import need_gpus
from ring_la.kernels.sums import walks

from ..errors import relative_error
from ..ops.measure import bandwidth, milliseconds
from ..rows import save

SHAPES = ((1, 8192, 4096), (1, 32768, 2048), (4, 4096, 1024))
TILES = ((32, 32, 4), (32, 64, 4), (64, 32, 4), (64, 64, 4), (32, 128, 4), (32, 64, 8), (16, 64, 2), (16, 128, 4))
"""Tokens, channels, warps."""
SPANS = (128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    args = parser.parse_args()
    need_gpus(parser)
    rows, copy = [], bandwidth()
    for B, T, C in SHAPES:
        torch.manual_seed(0)
        x, do = (torch.randn(B, T, C, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        g = logsigmoid(torch.randn(B, T, C, device="cuda") + 3).bfloat16()
        true = ring_la.hgrn(x[:1, :2048, :64].double(), g[:1, :2048, :64].double(), backend="torch").o
        leaves = [t.detach().requires_grad_() for t in (x, g)]
        for (tokens, channels, warps), span in itertools.product(TILES, SPANS):
            walks.TOKENS, walks.CHANNELS, walks.WARPS, walks.SPAN = tokens, channels, warps, span
            o = ring_la.hgrn(x, g, backend="triton").o
            row = dict(shape=(B, T, C), tile=(tokens, channels, warps), span=span)
            row["error"] = relative_error(o[:1, :2048, :64], true)
            row["forward"] = milliseconds(lambda x=x, g=g: ring_la.hgrn(x, g, backend="triton"), budget=0.02)
            row["both"] = milliseconds(lambda leaves=leaves, do=do: torch.autograd.grad(
                ring_la.hgrn(*leaves, backend="triton").o, leaves, do), budget=0.02)  # fmt: skip
            rows.append(row)
            save(args.out, rows)
        here = [r for r in rows if r["shape"] == (B, T, C)]
        floors = [round(n * x.numel() * 2 / copy * 1e3, 4) for n in (3, 8)]
        print((B, T, C), "floors", floors, "worst error", max(r["error"] for r in here))
        for way in ("forward", "both"):
            print(
                "  ", way, [(r["tile"], r["span"], r[way]) for r in sorted(here, key=lambda r: r[way])[:5]], flush=True
            )


if __name__ == "__main__":
    main()
