"""The fused kernels on the GPU against fp64, and their times: `python -m tests.gpu.check_fused [--out FILE]`.

Convolution, unit length and decays: forward and every gradient, several dtypes and shapes, packed and not; the error
beside that of PyTorch's own operations in the same dtype, which it may not exceed by more than half. Then ms of forward
and of both, by the kernels and by PyTorch, over the bytes that must move.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ring_la.cli.bench_ops.measure import bandwidth, error, milliseconds, peak
from ring_la.kernels import short_conv
from tests.kernels import test_triton_conv as conv_cases

Rows = list[dict]


def apart(got: list[Tensor], true: list[Tensor]) -> list[float]:
    return [error(x, t) for x, t in zip(got, true, strict=True) if t.numel()]


def conv_errors() -> Rows:
    shapes = {
        **conv_cases.CASES,
        "long": dict(B=2, T=3000, D=520, W=4, bias=True),
        "long packed": dict(T=5000, D=264, W=4, cu=(0, 1, 1, 700, 4999, 5000), lead=True, ends=True),
        "eight taps": dict(T=2049, D=128, W=8, cu=(0, 1000, 2049), lead=True, ends=True, bias=True),
    }
    rows = []
    for name, case in shapes.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            case = case | {"dtype": dtype}
            true = conv_cases.both(case, conv_cases.in_fp64, conv_cases.by_autograd)
            got = conv_cases.both(case, conv_cases.conv.forward, conv_cases.conv.backward)
            plain = conv_cases.both(case, short_conv.plain_convolve, short_conv.plain_convolve_backward)
            ours, theirs = apart(got, true), apart(plain, true)
            ok = all(a < 1.5 * b + 2e-6 for a, b in zip(ours, theirs))
            rows.append(dict(what="conv", case=name, dtype=str(dtype), ok=ok, ours=ours, plain=theirs))
    return rows


def timed(what: str, ours: Callable, plain: Callable, given: list[Tensor], moved: tuple[int, int], copy: float) -> dict:
    """ms forward and forward + backward of both, beside the floors of the bytes `moved` by each."""
    row: dict = dict(what=what, floor=[round(m / copy * 1e3, 4) for m in (moved[0], sum(moved))])
    for name, function in (("ours", ours), ("plain", plain)):
        out = function(*given)
        do = torch.randn_like(out)

        def forward(function=function) -> None:
            with torch.no_grad():
                function(*given)

        def both(function=function, do=do) -> None:
            torch.autograd.grad(function(*given), [t for t in given if t.requires_grad], do)

        row[name] = [milliseconds(forward), milliseconds(both), peak(both)]
    return row


def conv_times(copy: float) -> Rows:
    rows = []
    for T, D in ((32768, 12288), (32768, 3072), (8192, 3072)):
        x = torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(D, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        size = x.numel() * 2

        def run(function: Callable) -> Callable:
            return lambda x, w: function(x, w, None, None, None, True, False)[0]

        rows.append(
            timed(
                f"conv {T}x{D}",
                run(short_conv.convolve),
                run(short_conv.plain_convolve),
                [x, weight],
                (2 * size, 3 * size),
                copy,
            )
        )
    return rows


PARTS: tuple[Callable[[], Rows], ...] = (conv_errors,)
TIMES: tuple[Callable[[float], Rows], ...] = (conv_times,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    args = parser.parse_args()
    copy, rows, start = bandwidth(), [], time.time()
    for part in (*PARTS, *TIMES):
        try:
            rows += part() if part in PARTS else part(copy)
        except Exception as e:  # the others still say something
            rows.append(dict(what=part.__name__, ok=False, failed=f"{type(e).__name__}: {str(e)[-600:]}"))
        if args.out:
            with open(args.out, "w") as f:
                json.dump(rows, f, indent=1)
    for row in rows:
        if "floor" in row or not row.get("ok", True):
            print(json.dumps(row), flush=True)
    checks = [r for r in rows if "ok" in r]
    print(f"{sum(r['ok'] for r in checks)} of {len(checks)} right in {time.time() - start:.0f} s")
    raise SystemExit(not all(r["ok"] for r in checks))


if __name__ == "__main__":
    main()
