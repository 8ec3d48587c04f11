"""Time launch settings of the products of deterministic steps beside PyTorch's: `python -m benchmarks.tuning.fixed`.

hybrid_1b's weights and so many tokens in bf16: x W, dy W and Σ dyᵀ x, ms by CUDA events, the median of a few.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

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
    WeightTile(num_stages=10),
    WeightTile(num_stages=14),
    WeightTile(halves=2, num_stages=5),
    WeightTile(halves=2, num_stages=6),
    WeightTile(256, 128),
    WeightTile(256, 128, halves=2, num_stages=6),
    WeightTile(128, 128),
    WeightTile(128, 128, num_warps=4, num_stages=6),
]
"""Of `weight_sum`."""
NARROW = ((20, 2560), (48, 2560))
"""N and K of weights of few columns."""


def milliseconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 4)
    return statistics.median(times)


def row(name: str, calls: list[Callable[[], Any]]) -> None:
    times = [milliseconds(call) for call in calls]
    print(f"{name:70} {sum(times):7.3f}  " + " ".join(f"{t:.3f}" for t in times), flush=True)


def convolutions(x: torch.Tensor, places: torch.Tensor) -> None:
    """The short convolution of four taps, forward and back."""
    lead, w = torch.zeros(len(places), 3, x.shape[1], device=x.device, dtype=x.dtype), torch.randn(x.shape[1], 4)
    w = w.to(x)
    for how in ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8)):
        conv.FORWARD = conv.SLOPES = conv.BACK = how
        row(
            f"convolution {how}, forward; and back",
            [
                lambda: conv.block_conv(x, lead, w, None, places, True),
                lambda: conv.block_conv_gradients(x, x, lead, w, None, places, True),
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    device, T = torch.device("cuda"), parser.parse_args().tokens
    print("N, K:", SHAPES)
    small = {n: torch.randn(T, n, device=device).bfloat16() for n, _ in NARROW}
    w = {(N, K): torch.randn(N, K, device=device).bfloat16() for N, K in SHAPES}
    x = {n: torch.randn(T, n, device=device).bfloat16() for n in {m for shape in SHAPES for m in shape}}
    places = torch.arange(0, T, 64, dtype=torch.int32, device=device)
    places = torch.stack([places, places + 64], 1).contiguous()
    blocks = weight.BlockPlaces(places, places[:0])
    x |= small
    bounds = {s: bounds_of(x[s[0]], x[s[1]], places) for s in (*SHAPES, *NARROW)}
    row("torch x W", [lambda s=s: x[s[1]] @ w[s].T for s in SHAPES])
    row("torch dy W", [lambda s=s: x[s[0]] @ w[s] for s in SHAPES])
    row("torch dW", [lambda s=s: x[s[0]].T @ x[s[1]] for s in SHAPES])
    for wide in ((128, 4), (128, 2), (256, 4), (256, 8), (512, 8)):
        bounds_.WIDE, bounds_.WARPS = wide
        row(f"bounds {wide}", [lambda s=s: bounds_of(x[s[0]], x[s[1]], places) for s in SHAPES])

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

    convolutions(x[7680], places)
    row("cuBLAS, checked, x W", [lambda s=s: product.row_product(x[s[1]], w[s], transposed=True) for s in SHAPES])
    row("cuBLAS, checked, dy W", [lambda s=s: product.row_product(x[s[0]], w[s]) for s in SHAPES])
    for kind, found in library._found.items():
        print(f"  {kind.N} x {kind.K}, transposed {kind.transposed}: {found}", flush=True)
    product.BY_LIBRARY = False
    for more in PRODUCTS:
        product.launch = changed(more)
        row(f"x W {more}", [lambda s=s: product.row_product(x[s[1]], w[s], transposed=True) for s in SHAPES])
        row(f"dy W {more}", [lambda s=s: product.row_product(x[s[0]], w[s]) for s in SHAPES])

    def sums(s: tuple[int, int]) -> torch.Tensor:
        return weight.block_sums(x[s[0]], x[s[1]], blocks, bounds[s], torch.bfloat16)

    row(f"dW of {NARROW}", [lambda s=s: sums(s) for s in NARROW])
    for tile in WEIGHTS:
        weight_sum.TILE = tile
        try:
            exactly = weight_sum.adds_exactly(torch.bfloat16, device)
            row(f"dW {tuple(tile)}, exactly: {exactly}", [lambda s=s: sums(s) for s in SHAPES])
        except Exception as error:
            print(f"dW {tuple(tile)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    weight_sum.TILE = WeightTile()
    for s in SHAPES[1:2]:
        exact, found = x[s[0]].double().T @ x[s[1]].double(), sums(s).double()
        nearest = (exact.bfloat16().double() - exact).square().mean().sqrt()
        print(f"error beside rounding to bf16: {(found - exact).square().mean().sqrt() / nearest:.4f}", flush=True)
    weight_sum.adds_exactly = weight.adds_exactly = lambda dtype, device: False
    row("dW, products added by themselves", [lambda s=s: sums(s) for s in SHAPES])


if __name__ == "__main__":
    main()
