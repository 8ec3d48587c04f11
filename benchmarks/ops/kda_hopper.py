"""KDA at Kimi's gate on one Hopper GPU, beside NVIDIA's kernels: `python -m benchmarks.ops.kda_hopper [--out FILE]`.

Gates are ``-5 sigmoid(x)``, x of N(0, 1), q and k of unit length, beta a sigmoid, states given. ring_la runs with the
gate's `lower_bound` given (``bound``) and without (``plain``). Times are CUDA graphs, ms; errors against fp64 are from
256 tokens of the same kind with spans of 64, where also gates are drawn to break a bound: channels that stay slow, slow
channels that change, and keys that pass the state from a fast channel to a slow one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la
from benchmarks.options import need_gpus
from benchmarks.peers import cudnn

ROWS = (
    (2048, 12, 1), (4096, 8, 1), (8192, 16, 1), (8192, 24, 1), (16384, 8, 8), (8192, 12, 4), (8192, 64, 1),
    (32768, 32, 1),
)  # fmt: skip
"""Tokens in all, heads, sequences."""
MORE = ((8192, 16, 1, "slow"), (8192, 16, 1, "mixed"), (8192, 64, 1, "mixed"))
NAMES = "o", "S", "dq", "dk", "dv", "dg", "dbeta", "dS0"


def kimi(*shape: int) -> Tensor:
    return -5 * torch.sigmoid(torch.randn(shape, device="cuda"))


def slow(*shape: int) -> Tensor:
    return -0.002 * torch.rand(shape, device="cuda")


def mixed(*shape: int) -> Tensor:
    """Half-lives by head and channel, log-uniform from 0.3 to 10,000 tokens."""
    lives = torch.empty(shape[2:], device="cuda").uniform_(-1.204, 9.21).exp()
    return (-0.6931 / lives).expand(shape).contiguous()


def one_slow_channel(*shape: int) -> Tensor:
    g = kimi(*shape)
    g[..., 5] = -0.01
    return g


def slow_channels_change(*shape: int) -> Tensor:
    """At every token another eighth of the channels stays."""
    g, t = kimi(*shape), torch.arange(shape[1], device="cuda")
    stays = (torch.arange(shape[3], device="cuda") - t[:, None]) % 8 == 0
    return torch.where(stays[None, :, None], -0.001, g)


GATES = dict(kimi=kimi, slow=slow, mixed=mixed, one_slow_channel=one_slow_channel, changing=slow_channels_change)
GATES["handed_on"] = one_slow_channel  # with keys that lead from fast channels to the slow one


def inputs(T: int, H: int, gate: str, sequences: int = 1) -> dict[str, Tensor]:
    q, k = (F.normalize(torch.randn(1, T, H, 128, device="cuda"), dim=-1) for _ in range(2))
    if gate == "handed_on":
        k = F.normalize(0.05 * k + F.one_hot(torch.full_like(k[..., 0], 5, dtype=torch.long), 128), dim=-1)
    x = dict(q=q, k=k, v=torch.randn(1, T, H, 128, device="cuda"), do=torch.randn(1, T, H, 128, device="cuda"))
    x = {name: t.bfloat16() for name, t in x.items()}
    x["g"], x["beta"] = GATES[gate](1, T, H, 128), torch.randn(1, T, H, device="cuda").sigmoid()
    x["S0"], x["dS"] = (torch.randn(sequences, H, 128, 128, device="cuda") for _ in range(2))
    x["cu_seqlens"] = torch.arange(0, T + 1, T // sequences, dtype=torch.int32, device="cuda")
    return x


def call(x: dict[str, Tensor], bound: float | None, function: Callable = ring_la.kda, wide: bool = False):
    """A forward, and what its gradients are to be taken of."""
    leaves = [x[n].double() if wide else x[n].clone() for n in ("q", "k", "v", "g", "beta", "S0")]
    leaves = [t.requires_grad_() for t in leaves]
    *args, S0 = leaves
    cu = x["cu_seqlens"] if len(x["cu_seqlens"]) > 2 else None
    keywords = dict(initial_state=S0, output_final_state=True, cu_seqlens=cu)
    if bound is not None:
        keywords["lower_bound"] = bound
    return leaves, lambda: function(*args, **keywords)


def results(x: dict[str, Tensor], bound: float | None, function: Callable = ring_la.kda, wide: bool = False) -> list:
    leaves, forward = call(x, bound, function, wide)
    out = forward()
    do, dS = (t.double() if wide else t for t in (x["do"], x["dS"]))
    return [out.o, out.final_state, *torch.autograd.grad([out.o, out.final_state], leaves, [do, dS])]


def graph_ms(step: Callable[[], object], repetitions: int = 20) -> float:
    """The median of a CUDA graph's replays."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for n in range(repetitions + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(stop)] if n >= 3 else []
    return round(sorted(times)[len(times) // 2], 4)


def ours(x: dict[str, Tensor], bound: float | None) -> dict[str, float]:
    leaves, forward = call(x, bound)

    def both() -> None:
        for t in leaves:
            t.grad = None
        out = forward()
        torch.autograd.backward([out.o, out.final_state], [x["do"], x["dS"]])

    with torch.no_grad():
        there = graph_ms(forward)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    peak = torch.cuda.max_memory_allocated() - before
    return {"forward": there, "both": graph_ms(both, 10), "peak_gib": round(peak / 2**30, 2)}


def theirs(x: dict[str, Tensor]) -> cudnn.CudnnKDA:
    return cudnn.CudnnKDA(**x)


def errors(found: Sequence[Tensor], true: Sequence[Tensor]) -> dict[str, float]:
    return {n: float(f"{(a - b).norm() / b.norm():.2e}") for n, a, b in zip(NAMES, (x.double() for x in found), true)}


def check(gate: str) -> dict[str, object]:
    """Errors against fp64 of 256 tokens."""
    torch.manual_seed(0)
    x = inputs(256, 4, gate)
    true = results(x, None, ring_la.reference.kda, wide=True)
    row: dict[str, object] = {"gate": gate, "T": 256, "H": 4}
    from ring_la.kernels.wy import kda_launches

    with mock.patch.object(kda_launches, "multiprocessors", return_value=16):  # spans of 64 tokens
        row["bound"] = errors(results(x, -5.0), true)
    row["plain"] = errors(results(x, None), true)
    if not cudnn.unsupported():
        them = theirs(x)
        them.both()()
        row["cudnn"] = errors([them.o, them.final_state, *them.gradients], true)
    return row


def measure(T: int, H: int, sequences: int, gate: str, plain: bool) -> dict[str, object]:
    torch.manual_seed(0)
    x = inputs(T, H, gate, sequences)
    row: dict[str, object] = {"T": T, "H": H, "sequences": sequences, "gate": gate, "bound": ours(x, -5.0)}
    if plain:
        row["plain"] = ours(x, None)
    if not cudnn.unsupported():
        them = theirs(x)
        row["cudnn"] = {"forward": graph_ms(them.forward), "both": graph_ms(them.both(), 10)}
        found, again = results(x, -5.0), [them.o, them.final_state, *them.gradients]
        row["difference"] = errors(again, [t.double() for t in found])
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON of what was found")
    parser.add_argument("--plain", action="store_true", help="without a bound, too")
    args = parser.parse_args(arguments)
    need_gpus(parser)
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": cudnn.unsupported() or "here"}
    found |= {"checks": [], "times": []}

    def note(kind: str, row: dict[str, object]) -> None:
        found[kind].append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(found, file, indent=1)

    for gate in GATES:
        note("checks", check(gate))
    for T, H, n in ROWS:
        note("times", measure(T, H, n, "kimi", args.plain))
    for row in MORE:
        note("times", measure(*row, args.plain))


if __name__ == "__main__":
    main()
