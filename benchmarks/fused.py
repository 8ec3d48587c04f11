"""The fused kernels' times: `python -m benchmarks.fused [--out FILE]`.

ms of forward and of both, by the kernels and by PyTorch, over the bytes that must move. That they are right is for
tests/gpu/test_fused.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.options import need_gpus
from benchmarks.rows import Rows
from ring_la.kernels.fused import ahead, cross_entropy, discretise, log_decay, short_conv, skip, swiglu, unit_length
from ring_la.kernels.fused import rms_norm as rms

from .ops.measure import bandwidth, milliseconds
from .timing import peak

Row = dict


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

        row[name] = [milliseconds(forward), milliseconds(both), round(peak(both), 3)]
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
        plain = lambda *x: log_decay.plain_log_decay(*x, 1.0, 1.0, False)  # noqa: E731
        yield timed(f"decay {sizes[0]}", log_decay.decay_gate, plain, [a, A_log, bias], moved, copy)
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
    moved, fused = (4 * x.numel(), 6 * x.numel()), lambda *x: discretise.discretise(*x, softplus=True)[0]
    plain = lambda *x: discretise.plain_discretise(*x, True)[0]  # noqa: E731
    yield timed("discretise", fused, plain, [x, dt, A, bias], moved, copy)
    y = torch.randn_like(x, requires_grad=True)
    yield timed("skip", skip.skip, skip.plain_skip, [y, x, A], (6 * x.numel(), 6 * x.numel()), copy)
    p, g = torch.randn_like(o, requires_grad=True), -torch.rand(1, 32768, 32, device="cuda")
    moved, given = (4 * p.numel(), 6 * p.numel()), [p, g.requires_grad_()]
    fused, plain = (lambda p, g, of=of: of(p, g, -60.0)[0] for of in (ahead.ahead_of_decay, ahead.plain_ahead))
    yield timed("ahead 128", fused, plain, given, moved, copy)
    y = torch.randn(1, 32768, 2 * 5472, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    yield timed("swiglu 5472", swiglu.swiglu, swiglu.plain_swiglu, [y], (3 * y.numel(), 5 * y.numel()), copy)
    x, weight = (torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16) for n in (8192, 32768))
    for name, of in (("ours", cross_entropy.losses_and_gradient), ("plain", cross_entropy.plain_losses)):
        logits, targets = x @ weight.T, torch.randint(32768, (8192,), device="cuda")
        ms = milliseconds(lambda of=of, logits=logits, targets=targets: of(logits, targets, -100, True))
        yield dict(what=f"losses of 8192 x 32768, {name}", ms=ms, floor=round(6 * logits.numel() / copy * 1e3, 4))
    moved = 4 * q.numel(), 6 * q.numel()
    plain = lambda x: unit_length.plain_unit_length(x, 1e-6)  # noqa: E731
    yield timed("unit 128", unit_length.l2norm, plain, [q.requires_grad_()], moved, copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    args = parser.parse_args()
    need_gpus(parser)
    rows, copy = Rows(args.out), bandwidth()
    for times in (conv_times, gates_times):
        for row in times(copy):
            rows.add(row)


if __name__ == "__main__":
    main()
