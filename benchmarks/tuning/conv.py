"""Where the sizes in `kernels/fused/short_conv_kernel.py` come from: `python -m benchmarks.tuning.conv [--out FILE]`.

Every choice of channels and tokens a step is compiled in parallel, compared with PyTorch's own operations, and timed:
ms forward and backward at several shapes, dense and packed, for several lengths of a program's run.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing

import torch

from benchmarks.options import need_gpus
from ring_la.kernels.fused import short_conv
from ring_la.kernels.fused import short_conv_kernel as conv
from ring_la.kernels.runtime.replayed_function import record_of

from ..errors import worst_error
from ..ops.measure import bandwidth, milliseconds
from ..rows import save

SHAPES = ((1, 32768, 12288), (1, 32768, 3072), (4, 4096, 3072), (1, 2048, 6144))
SIZES = list(itertools.product((64, 128, 256), (2, 4, 8)))
RUNS = ((32, 64), (32, 128), (32, 256), (64, 512), (16, 1024))


def choose(channels: int, step: int, runs: tuple[int, int]) -> None:
    conv.CHANNELS = channels
    conv.FORWARD = conv.BACKWARD = (step, *runs)
    record_of.cache_clear()  # what is replayed has the sizes it was written down with


def given(B: int, T: int, D: int, packed: bool) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, do = (torch.randn(B, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(D, 4, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 1, 1, T // 3, T - 2, T], device="cuda") if packed and B == 1 else None
    return x, weight, cu, do


def call(x: torch.Tensor, weight: torch.Tensor, cu: torch.Tensor | None, do: torch.Tensor) -> list[torch.Tensor]:
    o, _ = conv.forward(x, weight, None, None, cu, True, False)
    return [o, *conv.backward(do, None, x, weight, None, None, cu, True)[:2]]


def times(x: torch.Tensor, weight: torch.Tensor, cu: torch.Tensor | None, do: torch.Tensor) -> dict[str, float]:
    ways = {
        "forward": lambda: conv.forward(x, weight, None, None, cu, True, False),
        "backward": lambda: conv.backward(do, None, x, weight, None, None, cu, True),
    }
    return {name: milliseconds(way, budget=0.03) for name, way in ways.items()}


def compile_one(work: tuple[int, int]) -> None:
    for packed, shape in itertools.product((False, True), {s[2] for s in SHAPES}):
        choose(*work, RUNS[0])
        call(*given(1, 64, shape, packed))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    args = parser.parse_args()
    need_gpus(parser)
    with multiprocessing.get_context("spawn").Pool(len(SIZES)) as pool:
        pool.map(compile_one, SIZES, 1)
    rows, copy = [], bandwidth()
    for shape, packed in itertools.product(SHAPES, (False, True)):
        x, weight, cu, do = given(*shape, packed)
        if packed and cu is None:
            continue
        true = short_conv.plain_convolve(x[:, :, :64], weight[:64], None, None, cu, True, False)[0]
        for sizes, runs in itertools.product(SIZES, RUNS):
            choose(*sizes, runs)
            row = dict(shape=shape, packed=packed, channels=sizes[0], step=sizes[1], runs=runs)
            o, dx, dw = call(x, weight, cu, do)
            if runs == RUNS[0] and sizes == SIZES[0]:
                first = dx, dw
            row["error"] = worst_error((o[:, :, :64], dx, dw), (true, *first))
            row |= times(x, weight, cu, do)
            rows.append(row)
        here = rows[-len(SIZES) * len(RUNS) :]
        floors = [round(n * x.numel() * 2 / copy * 1e3, 4) for n in (2, 3)]
        print(shape, packed, "floors", floors, "worst error", max(r["error"] for r in here))
        for way in ("forward", "backward"):
            best = sorted(here, key=lambda r: r[way])[:4]
            print("  ", way, [(r["channels"], r["step"], r["runs"], r[way]) for r in best], flush=True)
        save(args.out, rows)


if __name__ == "__main__":
    main()
