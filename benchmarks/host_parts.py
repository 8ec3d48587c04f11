"""Where the host's time of one call goes: `python -m benchmarks.host_parts --out host-parts.json`.

µs of the host, medians over rounds of calls none of which waits for the GPU, at 2,048 tokens and 16 heads (where
the host is the bound): for each operator forward without and with gradients, and of each the parts that its tape has
(allocations, launches, all that a tape does) and how many there are; what is left is Python before and behind. Beside
it what one of each part takes (an allocation, a launch by Triton and by ours, an autograd Function, zeros), PyTorch's
scaled_dot_product_attention, and with --fla fla-core's functions. --profile prints the functions of Python.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import ring_la
from benchmarks.options import need_gpus
from benchmarks.rows import Rows, machine
from ring_la.kernels.runtime.tape import TapedLaunch
from ring_la.kernels.runtime.written import allocator, function_of

from .errors import relative_error
from .host import Nothing, backward_microseconds, drawn, microseconds, operation
from .peers import ops as peers
from .tapes import TapesOfACall

OPS = "gated_delta_rule", "kda", "gla", "mamba2", "rwkv7", "simple_gla"
HEADS = 16
WARM = 4


def measured(call: Callable[[], Any]) -> dict[str, Any]:
    """µs of a call that has come by, of its tapes' parts and of each of their steps."""
    for _ in range(WARM):
        call()
    with TapesOfACall() as tapes:
        call()
    return {"us": microseconds(call), **tapes.parts(microseconds), "steps": tapes.steps(microseconds)}


def with_gradients(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves of the same values."""
    return {n: t.clone().requires_grad_() for n, t in x.items()}


def operator(name: str, channels: int, tokens: int) -> dict[str, Any]:
    """Of one recurrence."""
    x = drawn(name, dict(B=1, T=tokens, Hk=HEADS, H=HEADS, K=channels, V=channels))
    if "k" in x:  # a delta rule grows without end by keys that are longer
        x["k"] = F.normalize(x["k"], dim=-1)
    op, leaves = operation(name), with_gradients(x)
    row: dict[str, Any] = {"op": name, "channels": channels, "tokens": tokens}
    want = op(**{n: t.float() for n, t in x.items()}, backend="torch")
    row["forward"] = measured(lambda: op(**x))
    row["forward, gradients"] = measured(lambda: op(**leaves))
    played = op(**x)
    row["error"] = round(relative_error(played, want), 5)
    do = torch.randn_like(op(**x))
    whole = lambda: torch.autograd.grad(op(**leaves), list(leaves.values()), do)  # noqa: E731
    row["both"] = measured(whole)
    row["backward"] = backward_microseconds(lambda: op(**leaves), list(leaves.values()))
    return row


def attention(tokens: int) -> dict[str, Any]:
    """Of attention, causal, beside PyTorch's."""
    q, k, v = (torch.randn(1, tokens, HEADS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wanting = [t.clone().requires_grad_() for t in (q, k, v)]
    row: dict[str, Any] = {"op": "attention", "channels": 128, "tokens": tokens}
    row["forward"] = measured(lambda: ring_la.attention(q, k, v, causal=True).o)
    row["forward, gradients"] = measured(lambda: ring_la.attention(*wanting, causal=True).o)
    for way, given in (("torch", [q, k, v]), ("torch, gradients", wanting)):
        tq, tk, tv = (t.transpose(1, 2) for t in given)
        row[way] = microseconds(lambda: F.scaled_dot_product_attention(tq, tk, tv, is_causal=True))  # noqa: B023
    return row


def each() -> dict[str, float]:
    """µs of one of each part."""
    like, shape, strides = torch.empty(4, device="cuda"), (1, 2048, 16, 128), (4194304, 2048, 128, 1)
    leaves = [torch.randn(4, device="cuda", requires_grad=True) for _ in range(5)]
    x, op = drawn("simple_gla", dict(B=1, T=2048, Hk=16, H=16, K=64, V=64)), operation("simple_gla")
    for _ in range(WARM):
        op(**x)
    with TapesOfACall() as tapes:
        op(**x)
    (tape, playing), *_ = tapes.played
    tape._written(playing)
    one = [step for step in tape.work if isinstance(step, TapedLaunch)][:1]
    direct, fast = function_of((), one, tape.device), allocator("cuda")
    found = {
        "torch.empty": lambda: torch.empty(shape, device="cuda", dtype=torch.bfloat16),
        "new_empty_strided": lambda: like.new_empty_strided(shape, strides, dtype=torch.bfloat16),
        "torch.zeros": lambda: torch.zeros(64, device="cuda", dtype=torch.int32),
        "a launch of Triton's, written": lambda: direct(playing),
        "a launch of Triton's, by its frame": lambda: one[0].play(playing),
        "Function": lambda: Nothing.apply(*leaves),
        "an operation": lambda: like.add_(1),
    }
    if fast is not None:
        found["_empty_strided_cuda"] = lambda: fast(shape, strides, torch.bfloat16)
    return {name: microseconds(call) for name, call in found.items()}


def of_fla(name: str, channels: int, tokens: int) -> dict[str, Any]:
    """Of fla-core's function, after it has tuned itself."""
    x = drawn(name, dict(B=1, T=tokens, Hk=HEADS, H=HEADS, K=channels, V=channels))
    peer, leaves = peers.fla(name), with_gradients(x)
    if peer is None:
        return {}
    for _ in range(WARM):
        with torch.no_grad():
            peer(x)
        peer(leaves)
    with torch.no_grad():
        plain = microseconds(lambda: peer(x))
    return {"op": name, "channels": channels, "fla": plain, "fla, gradients": microseconds(lambda: peer(leaves))}


def profiled(name: str, channels: int, tokens: int) -> None:
    """Print where Python's time of a forward goes."""
    x, op = drawn(name, dict(B=1, T=tokens, Hk=HEADS, H=HEADS, K=channels, V=channels)), operation(name)
    for _ in range(WARM):
        op(**x)
    torch.cuda.synchronize()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(200):
        op(**x)
    profile.disable()
    torch.cuda.synchronize()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", nargs="+", default=OPS)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--channels", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--fla", nargs="*", default=[], help="operators of which fla-core's are measured, too")
    parser.add_argument("--profile", nargs="*", default=[])
    args = parser.parse_args()
    need_gpus(parser)
    note = Rows(args.out, **machine()).add
    note({"each": each()})
    note(attention(args.tokens))
    for channels in args.channels:
        for name in args.ops:
            note(operator(name, channels, args.tokens))
    for name in args.profile:
        profiled(name, args.channels[0], args.tokens)
    for name in args.fla:
        note(of_fla(name, args.channels[0], args.tokens))


if __name__ == "__main__":
    main()
