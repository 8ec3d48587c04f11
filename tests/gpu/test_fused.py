"""The fused kernels on the GPU against fp64, and their times: `python -m tests.gpu.check_fused [--out FILE]`.

Convolution, unit length and decays: forward and every gradient, several dtypes and shapes, packed and not; the error
beside that of PyTorch's own operations in the same dtype, which it may exceed by half, or up to that of two roundings.
Then ms of forward and of both, by the kernels and by PyTorch, over the bytes that must move.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ring_la.cli.bench_ops.measure import bandwidth, error, milliseconds, peak
from ring_la.kernels.fused import gates, short_conv, skip, swiglu
from ring_la.kernels.fused import rms_norm as rms
from ring_la.models import loss
from tests.kernels import test_triton_conv as conv_cases
from tests.kernels import test_triton_gates as gates_cases
from tests.kernels import test_triton_loss as loss_cases
from tests.kernels import test_triton_read as read_cases

Row = dict


def apart(got: list[Tensor], true: list[Tensor]) -> list[float]:
    pairs = zip(got, true, strict=True)
    return [error(x, t) for x, t in pairs if t.numel()]


def conv_case(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    case = CONV[name] | {"dtype": dtype}
    true = conv_cases.both(case, conv_cases.in_fp64, conv_cases.by_autograd)
    got = conv_cases.both(case, conv_cases.conv.forward, conv_cases.conv.backward)
    return true, got, conv_cases.both(case, short_conv.plain_convolve, short_conv.plain_convolve_backward)


CONV = {
    **conv_cases.CASES,
    "long": dict(B=2, T=3000, D=520, W=4, bias=True),
    "long packed": dict(T=5000, D=264, W=4, cu=(0, 1, 1, 700, 4999, 5000), lead=True, ends=True),
    "eight taps": dict(T=2049, D=128, W=8, cu=(0, 1000, 2049), lead=True, ends=True, bias=True),
}
CHECKS: dict[str, Callable[[torch.dtype], tuple[list[Tensor], list[Tensor], list[Tensor]]]] = {
    **{f"conv {name}": partial(conv_case, name) for name in CONV},
    **{f"decay {name}": partial(gates_cases.decay_case, name, times=40) for name in gates_cases.CASES},
    **{
        f"rms {D} {gate}": partial(gates_cases.rms_case, D, gate, rows=3000)
        for D, gate in ((128, "silu"), (128, "sigmoid"), (80, "silu"), (1, None), (2048, None), (5000, "silu"))
    },
    **{f"discretise {V}": partial(gates_cases.step_case, V, V != 64, V != 80, T=900) for V in (5, 64, 80, 128)},
    **{f"skip {V} {w}": partial(gates_cases.skip_case, V, w, T=900) for V, w in ((64, False), (80, True), (5, True))},
    **{f"read {name}": partial(read_cases.read_case, name, times=10) for name in read_cases.CASES},
    **{f"unit {D}": partial(gates_cases.unit_case, D, T=700) for D in (5, 64, 128, 256)},
    **{f"swiglu {D}": partial(gates_cases.swiglu_case, D, rows=1001) for D in (5, 96, 2048, 5472)},
    **{f"loss {V}": partial(loss_cases.loss_case, V, rows=300) for V in (257, 4096, 32768, 151936)},
}
"""name: what gives (true, by the kernels, by PyTorch)."""


def chosen(beginnings: list[str]) -> dict[str, Callable]:
    """The checks whose name begins in one of these ways; all without any."""
    return {n: check for n, check in CHECKS.items() if not beginnings or n.startswith(tuple(beginnings))}


def work(part: int, parts: int, beginnings: list[str]) -> None:
    """Every `parts`-th check, a line of JSON each."""
    for i, (name, check) in enumerate(chosen(beginnings).items()):
        if i % parts != part:
            continue
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            row, rounding = dict(what=name, dtype=str(dtype)), 0.4 * torch.finfo(dtype).eps
            try:
                true, got, plain = check(dtype=dtype)
                ours, theirs = apart(got, true), apart(plain, true)
                row |= dict(
                    ok=all(a < max(1.5 * b, rounding) + 3e-6 for a, b in zip(ours, theirs)), ours=ours, plain=theirs
                )
            except Exception as e:  # the others still say something
                row |= dict(ok=False, failed=f"{type(e).__name__}: {str(e)[-600:]}")
            print(json.dumps(row), flush=True)


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
            torch.autograd.grad(function(*given), [t for t in given if t.requires_grad], do, allow_unused=True)

        row[name] = [milliseconds(forward), milliseconds(both), peak(both)]
    return row


def conv_times(copy: float) -> Iterator[Row]:
    for T, D in ((32768, 12288), (32768, 3072), (8192, 3072)):
        x = torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(D, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        size = x.numel() * 2

        def run(function: Callable) -> Callable:
            return lambda y, w: function(y, w, None, None, None, True, False)[0]

        ours, plain = run(short_conv.convolve), run(short_conv.plain_convolve)
        yield timed(f"conv {T}x{D}", ours, plain, [x, weight], (2 * size, 3 * size), copy)
        cu, lead = torch.tensor([0, T // 2, T], device="cuda"), torch.zeros(1, 2, 3, D, device="cuda", dtype=x.dtype)
        split = lambda y, w: short_conv.convolve(y, w, None, lead, cu, True, False)[0]  # noqa: B023, E731
        yield timed(f"conv {T}x{D}, split", split, plain, [x, weight], (2 * size, 3 * size), copy)


def gates_times(copy: float) -> Iterator[Row]:
    q = torch.randn(1, 32768, 3 * 4096, device="cuda", dtype=torch.bfloat16)[..., :4096].unflatten(2, (32, 128))
    for sizes in ((32,), (4096,)):
        a = torch.randn(1, 32768, *sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        A_log, bias = (torch.randn(n, device="cuda", requires_grad=True) for n in (32, sizes[0]))
        moved = 6 * a.numel(), 8 * a.numel()
        plain = lambda *x: gates.plain_log_decay(*x, 1.0, 1.0)  # noqa: E731
        yield timed(f"decay {sizes[0]}", gates.decay_gate, plain, [a, A_log, bias], moved, copy)
    o, z = (torch.randn(1, 32768, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weight = torch.randn(128, device="cuda", requires_grad=True)
    plain = lambda *x: rms.plain_rms_norm(*x, True, 1e-6)  # noqa: E731
    yield timed("rms 128 silu", rms.rms_norm, plain, [o, weight, z], (6 * o.numel(), 10 * o.numel()), copy)
    x, weight = torch.randn(1, 32768, 2048, device="cuda", dtype=torch.bfloat16), torch.randn(2048, device="cuda")
    given, moved = [x.requires_grad_(), weight.requires_grad_()], (4 * x.numel(), 6 * x.numel())
    for what, plain in {
        "rms 2048": lambda *x: rms.plain_rms_norm(*x, None, True, 1e-6),
        "rms 2048 beside F.rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (2048,), w.to(x.dtype), 1e-6),
    }.items():
        yield timed(what, rms.rms_norm, plain, given, moved, copy)
    x = torch.randn(1, 32768, 80, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dt = torch.randn(1, 32768, 80, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    A, bias = (torch.randn(80, device="cuda", requires_grad=True) for _ in range(2))
    moved, fused = (4 * x.numel(), 6 * x.numel()), lambda *x: gates.discretise(*x, softplus=True)[0]
    plain = lambda *x: gates.plain_discretise(*x, True)[0]  # noqa: E731
    yield timed("discretise", fused, plain, [x, dt, A, bias], moved, copy)
    y = torch.randn_like(x, requires_grad=True)
    yield timed("skip", skip.skip, skip.plain_skip, [y, x, A], (6 * x.numel(), 6 * x.numel()), copy)
    y = torch.randn(1, 32768, 2 * 5472, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    yield timed("swiglu 5472", swiglu.swiglu, swiglu.plain_swiglu, [y], (3 * y.numel(), 5 * y.numel()), copy)
    x, weight = (torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16) for n in (8192, 32768))
    for name, of in (("ours", loss.triton_losses), ("plain", loss.plain_losses)):
        logits, targets = x @ weight.T, torch.randint(32768, (8192,), device="cuda")
        ms = milliseconds(lambda of=of, logits=logits, targets=targets: of(logits, targets, -100, True))
        yield dict(what=f"losses of 8192 x 32768, {name}", ms=ms, floor=round(6 * logits.numel() / copy * 1e3, 4))
    moved = 4 * q.numel(), 6 * q.numel()
    plain = lambda x: gates.plain_unit_length(x, 1e-6)  # noqa: E731
    yield timed("unit 128", gates.l2norm, plain, [q.requires_grad_()], moved, copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of checks' names; default: all")
    parser.add_argument("--out")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--part", type=int)
    args = parser.parse_args()
    if args.part is not None:
        return work(args.part, args.jobs, args.names)
    command = [sys.executable, "-m", "tests.gpu.check_fused", *args.names, "--jobs", str(args.jobs), "--part"]
    running = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(args.jobs)]
    rows = [json.loads(line) for p in running for line in p.communicate()[0].splitlines() if line.startswith("{")]
    for row in rows:
        if not row["ok"]:
            print(json.dumps(row), flush=True)
    wanted = 3 * len(chosen(args.names))
    print(f"{sum(r['ok'] for r in rows)} of {wanted} right", flush=True)
    copy = bandwidth()
    for times in (conv_times, gates_times):
        for row in times(copy):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        with open(args.out, "w") as f:
            json.dump(rows, f, indent=1)
    raise SystemExit(sum(r.get("ok", False) for r in rows) < wanted)


if __name__ == "__main__":
    main()
