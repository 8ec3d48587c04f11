"""Time launch settings of the products of deterministic steps beside PyTorch's: `python -m benchmarks.tuning.fixed`.

hybrid_1b's weights and so many tokens in bf16: x W, dy W and Σ dyᵀ x, ms by CUDA events, the median of a few.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import median
from ring_la.kernels.fixed import bounds as bounds_
from ring_la.kernels.fixed import conv, library, product, weight, weight_sum
from ring_la.kernels.fixed.bounds import bounds_of
from ring_la.kernels.fixed.weight_sum import WeightTile
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.runtime.triton_version import TensorDescriptor

SHAPES = ((7680, 2560), (2560, 2560), (13696, 2560), (2560, 6848), (32768, 2560))
"""N and K."""
PRODUCTS = [dict(), dict(GROUP=16), dict(BN=128, num_stages=4)]
WEIGHTS = [
    WeightTile(),
    WeightTile(num_stages=6),
    WeightTile(num_stages=5),
    WeightTile(num_stages=4),
    WeightTile(256, 128),
]
"""Of `weight_sum`."""
BOUNDS = ((256, 1, 16), (256, 1, 8), (512, 2, 16), (256, 2, 32), (128, 4, 64))
"""Columns of a program, its warps, and rows at a time."""
CONVOLUTIONS = ((128, 8, 4, 128), (128, 8, 8, 160), (64, 8, 8, 128), (128, 16, 4, 160))
"""Channels of a program, rows at a time forward and back, and registers."""
NARROW = ((20, 2560), (48, 2560))
"""N and K of weights of few columns."""


ROUNDS, INNER = 5, 4
"""Of a call's times, and calls of each."""


def row(name: str, calls: list[Callable[[], Any]]) -> None:
    times = [median(call, ROUNDS, INNER) for call in calls]
    print(f"{name:70} {sum(times):7.3f}  " + " ".join(f"{t:.3f}" for t in times), flush=True)


def convolutions(x: torch.Tensor, places: torch.Tensor) -> None:
    """The short convolution of four taps, forward; and back."""
    T, D = x.shape
    lead, w = x.new_zeros(1, 3, D), torch.randn(D, 4).to(x)
    table = torch.cat([places, torch.tensor([[0, T, 0]], device=x.device).expand(len(places), 3)], 1).int()
    for how in CONVOLUTIONS:
        conv.CHANNELS, conv.FORWARD, conv.BACK, conv.REGISTERS = how
        row(
            f"convolution {how}, forward; and back",
            [
                lambda: conv.block_conv(x, lead, w, None, table, True),
                lambda: conv.block_conv_gradients(x, None, x, lead, w, None, table, True),
            ],
        )


def weights(calls: Callable[[], list[Callable[[], Any]]]) -> None:
    """dW by each tile, undivided too."""
    divide = weight_sum.division
    for tile in WEIGHTS:
        weight_sum.TILE = tile
        try:
            exactly = weight_sum.adds_exactly(torch.bfloat16, torch.device("cuda"))
            row(f"dW {tuple(tile)}, exactly: {exactly}", calls())
        except Exception as error:
            print(f"dW {tuple(tile)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    weight_sum.TILE = WeightTile()
    weight_sum.division = lambda tiles, count, slots: weight_sum.Division(tiles, 0, 0, count)
    row("dW, no tile divided", calls())
    weight_sum.division = divide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", default="bounds,convolutions,weights,products", help="parts, commas between them")
    options = parser.parse_args()
    device, T, only = torch.device("cuda"), options.tokens, options.only.split(",")
    print("N, K:", SHAPES)
    small = {n: torch.randn(T, n, device=device).bfloat16() for n, _ in NARROW}
    w = {(N, K): torch.randn(N, K, device=device).bfloat16() for N, K in SHAPES}
    x = {n: torch.randn(T, n, device=device).bfloat16() for n in {m for shape in SHAPES for m in shape}}
    places = torch.arange(0, T, 64, dtype=torch.int32, device=device)
    places = torch.stack([places, places + 64], 1).contiguous()
    blocks = weight.BlockPlaces(places, places[:0], True)
    x |= small
    bounds = {n: bounds_of(t, places) for n, t in x.items()}
    row("torch x W", [lambda s=s: x[s[1]] @ w[s].T for s in SHAPES])
    row("torch dy W", [lambda s=s: x[s[0]] @ w[s] for s in SHAPES])
    row("torch dW", [lambda s=s: x[s[0]].T @ x[s[1]] for s in SHAPES])
    for how in BOUNDS if "bounds" in only else ():
        bounds_.WIDE, bounds_.WARPS, bounds_.ROWS = how
        row(f"bounds {how}", [lambda s=s: (bounds_of(x[s[0]], places), bounds_of(x[s[1]], places)) for s in SHAPES])

    def sums(s: tuple[int, int], blocks: weight.BlockPlaces = blocks) -> torch.Tensor:
        return weight.block_sums(x[s[0]], x[s[1]], blocks, (bounds[s[0]], bounds[s[1]]), torch.bfloat16)

    if "convolutions" in only:
        convolutions(x[7680], places)
    if "weights" in only:
        weights(lambda: [lambda s=s: sums(s) for s in SHAPES])
        row("dW, blocks looked up", [lambda s=s: sums(s, weight.BlockPlaces(places, places[:0])) for s in SHAPES])
        row(f"dW of {NARROW}", [lambda s=s: sums(s) for s in NARROW])
        for s in SHAPES[1:2]:
            exact, found = x[s[0]].double().T @ x[s[1]].double(), sums(s).double()
            nearest = (exact.bfloat16().double() - exact).square().mean().sqrt()
            print(f"error beside rounding to bf16: {(found - exact).square().mean().sqrt() / nearest:.4f}", flush=True)
    if "products" not in only:
        return

    def changed(more: dict[str, Any]) -> Callable[..., None]:
        def run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
            constants |= more
            sides, deep = (constants["BM"], constants["BN"]), constants["BK"]
            if isinstance(args[0], TensorDescriptor):
                blocks = [[sides[0], deep], [sides[1], deep] if constants["TRANSPOSED"] else [deep, sides[1]]]
                given = [TensorDescriptor(d.base, d.shape, d.strides, b) for d, b in zip(args, blocks)]
                args = *given, *args[2:]
            sizes = T, args[-2] * constants["UN"]
            launch(kernel, (-(-sizes[0] // sides[0]) * -(-sizes[1] // sides[1]),), *args, **constants)

        return run

    row("cuBLAS, checked, x W", [lambda s=s: product.row_product(x[s[1]], w[s], transposed=True) for s in SHAPES])
    row("cuBLAS, checked, dy W", [lambda s=s: product.row_product(x[s[0]], w[s]) for s in SHAPES])
    for kind, found in library._found.items():
        print(f"  {kind.N} x {kind.K}, transposed {kind.transposed}: {found}", flush=True)
    product.BY_LIBRARY = False
    for more in PRODUCTS:
        product.launch = changed(more)
        row(f"x W {more}", [lambda s=s: product.row_product(x[s[1]], w[s], transposed=True) for s in SHAPES])
        row(f"dy W {more}", [lambda s=s: product.row_product(x[s[0]], w[s]) for s in SHAPES])


if __name__ == "__main__":
    main()
