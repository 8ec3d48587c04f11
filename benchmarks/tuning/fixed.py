"""Time launch settings of the products of deterministic steps beside PyTorch's: `python -m benchmarks.tuning.fixed`.

hybrid_1b's weights and so many tokens in bf16: x W, dy W and Σ dyᵀ x, ms by CUDA events, the median of a few.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from ring_la.kernels.fixed import library, product, weight
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.runtime.triton_version import TensorDescriptor

SHAPES = ((7680, 2560), (2560, 2560), (13696, 2560), (2560, 6848), (32768, 2560))
"""N and K."""
PRODUCTS = [dict(), dict(GROUP=16), dict(BN=128, num_stages=4)]
WEIGHTS = [
    dict(),
    dict(num_stages=2),
    dict(num_stages=3),
    dict(num_stages=4),
    dict(num_stages=3, maxnreg=168),
    dict(num_stages=4, maxnreg=168),
    dict(BN=128, BK=64, num_stages=3),
    dict(BN=128, BK=128, num_warps=8, num_stages=3),
    dict(BN=128, BK=128, num_warps=8, num_stages=4),
    dict(BN=64, BK=256, num_warps=8, num_stages=3),
    dict(BN=64, BK=64, num_stages=4),
]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    device, T = torch.device("cuda"), parser.parse_args().tokens
    print("N, K:", SHAPES)
    w = {(N, K): torch.randn(N, K, device=device).bfloat16() for N, K in SHAPES}
    x = {n: torch.randn(T, n, device=device).bfloat16() for n in {m for shape in SHAPES for m in shape}}
    places = torch.arange(0, T, 64, dtype=torch.int32, device=device)
    places = torch.stack([places, places + 64], 1).contiguous()
    blocks = weight.BlockPlaces(places, places[:0])
    norms = {s: weight.largest_norms(x[s[0]], x[s[1]], places) for s in SHAPES}
    row("torch x W", [lambda s=s: x[s[1]] @ w[s].T for s in SHAPES])
    row("torch dy W", [lambda s=s: x[s[0]] @ w[s] for s in SHAPES])
    row("torch dW", [lambda s=s: x[s[0]].T @ x[s[1]] for s in SHAPES])
    row("norms", [lambda s=s: weight.largest_norms(x[s[0]], x[s[1]], places) for s in SHAPES])

    def changed(more: dict[str, Any]) -> Callable[..., None]:
        def run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
            constants |= more
            sizes = [args[-2] * constants["UN"], args[-1] * constants.get("UK", 1)]
            if isinstance(args[0], TensorDescriptor):
                of_weight = "BM" not in constants
                sides = (constants["BN"], constants["BK"]) if of_weight else (constants["BM"], constants["BN"])
                deep = 64 if of_weight else constants["BK"]
                blocks = [[deep, n] for n in sides] if of_weight else [[sides[0], deep], [sides[1], deep]]
                if not of_weight and not constants["TRANSPOSED"]:
                    blocks[1].reverse()
                given = [TensorDescriptor(d.base, d.shape, d.strides, b) for d, b in zip(args, blocks)]
                args = *given, *args[2:]
            tiles = [T, sizes[0]] if "BM" in constants else sizes
            across = [constants["BM"], constants["BN"]] if "BM" in constants else [constants["BN"], constants["BK"]]
            launch(kernel, (-(-tiles[0] // across[0]) * -(-tiles[1] // across[1]),), *args, **constants)

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

    def sums(s: tuple[int, int]) -> torch.Tensor:
        found, behind = norms[s]
        return weight.block_sums(x[s[0]], x[s[1]], blocks, found, found[behind:], torch.bfloat16)

    before = [sums(s) for s in SHAPES]
    weight.BY_CUDA = True
    row("dW in CUDA C++", [lambda s=s: sums(s) for s in SHAPES])
    print("  the bits of Triton's kernel:", [torch.equal(sums(s), b) for s, b in zip(SHAPES, before)], flush=True)
    weight.BY_CUDA = False
    for more in WEIGHTS:
        weight.launch = changed(more)
        row(f"dW {more}", [lambda s=s: sums(s) for s in SHAPES])


if __name__ == "__main__":
    main()
