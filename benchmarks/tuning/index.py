"""Tiles of the lightning indexer's kernels and of the backward pass over chosen latents, timed one beside the other:
`python -m benchmarks.tuning.index [--limit SECONDS] [--out FILE]`.

A line of JSON a tile, bf16, ms. The index: 4 heads of 128, 2,048 of 131,072 tokens, with products of 16 and of 8 bits,
and TFLOP/s of half of all pairs; its loss and attention to chosen latents (16 heads): 16,384 tokens. `adds` is what the
backward pass adds to keys alone: 576 fp32 numbers of 2,048 rows a query.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

import ring_la
from ring_la.indexers import index_kernel, lightning_index, lightning_loss, loss_kernel
from ring_la.softmax.backends.triton import chosen_sorted

from ..latents import L, N, R, draw
from ..options import need_gpus
from ..rows import Rows, machine, reason
from ..sparse import choose
from ..timing import wall

LONG, SHORT, TOPK = 131_072, 16_384, 2048
STAY: tuple[dict[str, int], ...] = ({}, dict(BN=32))
LOSS: tuple[dict[str, int], ...] = (
    {},
    dict(num_stages=1),
    dict(num_stages=2),
    dict(num_warps=8),
    dict(BN=64, num_warps=8),
)
BACK: tuple[dict[str, int], ...] = ({}, dict(num_stages=4), dict(BN=64, num_stages=1), dict(num_warps=4), dict(BN=16))
Row = dict[str, Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(1, *shape, device="cuda", dtype=torch.bfloat16)


def index() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Tiles of `find` where queries stay."""
    q, k, w = normal(LONG, 4, 128), normal(LONG, 128), torch.rand(1, LONG, 4, device="cuda")
    for fp8 in (False, True):
        for tile in STAY:

            def run(tile: dict = tile, fp8: bool = fp8) -> Row:
                with patch.dict(index_kernel.STAY, tile):
                    lightning_index(q[:, -4096:], k, w[:, -4096:], TOPK, fp8=fp8)  # compiles
                    ms = milliseconds(lambda: lightning_index(q, k, w, TOPK, fp8=fp8), 2)
                return dict(ms=ms, tflops=round(LONG**2 / 2 * 4 * 256 / ms / 1e9, 1))

            yield f"index {'fp8' if fp8 else 'bf16'} {tile}", run


def loss() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Tiles of the indexer's loss, with its gradients."""
    x = [normal(SHORT, *shape) for shape in ((4, 128), (128,), (4,), (16, L + R), (1, L + R))]
    chosen, index = choose(torch.arange(SHORT, device="cuda"), TOPK), [t.requires_grad_() for t in x[:3]]

    def learn(backend: str) -> None:
        found = lightning_loss(*index, chosen, *x[3:], scale=(N + R) ** -0.5, backend=backend)
        torch.autograd.grad(found, index)

    for tile in LOSS:

        def run(tile: dict = tile) -> Row:
            with patch.dict(loss_kernel.TILE, tile):
                return dict(ms=milliseconds(lambda: learn("triton"), 2))

        yield f"loss {tile}", run
    yield "loss by PyTorch", lambda: dict(ms=milliseconds(lambda: learn("torch"), 1))


def back() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Tiles of the backward pass over chosen latents, forward included."""
    x, chosen = draw(1, SHORT, 16, 0), choose(torch.arange(SHORT, device="cuda"), TOPK)
    leaves, real = [t.requires_grad_() for t in x], chosen_sorted._tile

    def both() -> None:
        o = ring_la.mla(*leaves, chosen=chosen, backend="triton_sorted").o
        torch.autograd.grad(o, leaves, o.detach())

    for tile in BACK:

        def tiled(G: int, width: int, dtype: torch.dtype, back: bool, tile: dict = tile) -> tuple[int, dict]:
            heads, options = real(G, width, dtype, back)
            return heads, options | tile if back else options

        def run(tiled: Callable = tiled) -> Row:
            with patch.object(chosen_sorted, "_tile", tiled):
                return dict(ms=milliseconds(both, 2))

        yield f"latents, forward and backward {tile}", run

    def forward() -> None:
        with torch.no_grad():
            ring_la.mla(*x, chosen=chosen, backend="triton_sorted")

    yield "latents, forward", lambda: dict(ms=milliseconds(forward, 2))
    into = torch.zeros(SHORT, L + R, device="cuda")
    for warps in (4, 8):
        call = lambda warps=warps: adds[(SHORT,)](into, chosen, TOPK, L + R, BN=32, num_warps=warps)  # noqa: E731
        yield f"adds, {warps} warps", lambda call=call: dict(ms=milliseconds(call, 2))


@triton.jit
def adds(INTO, CHOSEN, S, width, BN: tl.constexpr):
    """Ones to the chosen rows of a query, 512 + 64 columns."""
    n, c, r = tl.arange(0, BN), tl.arange(0, 512), tl.arange(0, 64)
    for first in range(0, S, BN):
        at = tl.load(CHOSEN + tl.program_id(0) * S + first + n)
        into, here = INTO + at[:, None] * width, (at >= 0)[:, None]
        tl.atomic_add(into + c[None, :], tl.full((BN, 512), 1.0, tl.float32), mask=here, sem="relaxed")
        tl.atomic_add(into + 512 + r[None, :], tl.full((BN, 64), 1.0, tl.float32), mask=here, sem="relaxed")


def milliseconds(call: Callable[[], object], n: int) -> float:
    """Of a call, the mean of n behind one."""
    call()
    return round(wall(call, n) * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["index", "back", "loss"])
    parser.add_argument("--limit", type=float, default=60, help="seconds after which no row is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus(parser)
    began, rows = time.monotonic(), Rows(args.out, **machine())
    for part in args.parts:
        for name, run in {"index": index, "back": back, "loss": loss}[part]():
            if time.monotonic() - began > args.limit:
                break
            try:
                row: Row = {"arm": name} | run()
            except Exception as error:  # what does not fit a multiprocessor is a line, too
                row = {"arm": name, "failed": reason(error)}
            rows.add(row)


if __name__ == "__main__":
    main()
