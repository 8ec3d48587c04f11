"""Gates drawn to break a bound of what KDA forgets: `python -m benchmarks.ops.bound [--out FILE]`.

Errors against fp64 from 256 tokens with spans of 64, so that spans start early, beside NVIDIA's kernels: Kimi's gate
``-5 sigmoid(x)``, gates that forget little, half-lives from 0.3 to 10,000 tokens, one channel that stays slow, slow
channels that change, and keys that pass the state from a fast channel to a slow one. ring_la runs with the gate's
`lower_bound` given (``bound``) and without (``plain``). Times: ``ring-la bench ops --rows kimi,slow,mixed``.
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
from benchmarks.errors import relative_error
from benchmarks.options import need_gpus
from benchmarks.peers import cudnn
from benchmarks.rows import machine, save

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


def inputs(T: int, H: int, gate: str) -> dict[str, Tensor]:
    q, k = (F.normalize(torch.randn(1, T, H, 128, device="cuda"), dim=-1) for _ in range(2))
    if gate == "handed_on":
        k = F.normalize(0.05 * k + F.one_hot(torch.full_like(k[..., 0], 5, dtype=torch.long), 128), dim=-1)
    x = dict(q=q, k=k, v=torch.randn(1, T, H, 128, device="cuda"), do=torch.randn(1, T, H, 128, device="cuda"))
    x = {name: t.bfloat16() for name, t in x.items()}
    x["g"], x["beta"] = GATES[gate](1, T, H, 128), torch.randn(1, T, H, device="cuda").sigmoid()
    x["S0"], x["dS"] = (torch.randn(1, H, 128, 128, device="cuda") for _ in range(2))
    x["cu_seqlens"] = torch.tensor([0, T], dtype=torch.int32, device="cuda")
    return x


def call(x: dict[str, Tensor], bound: float | None, function: Callable = ring_la.kda, wide: bool = False):
    """A forward, and what its gradients are to be taken of."""
    leaves = [x[n].double() if wide else x[n].clone() for n in ("q", "k", "v", "g", "beta", "S0")]
    leaves = [t.requires_grad_() for t in leaves]
    *args, S0 = leaves
    keywords = dict(initial_state=S0, output_final_state=True)
    if bound is not None:
        keywords["lower_bound"] = bound
    return leaves, lambda: function(*args, **keywords)


def results(x: dict[str, Tensor], bound: float | None, function: Callable = ring_la.kda, wide: bool = False) -> list:
    leaves, forward = call(x, bound, function, wide)
    out = forward()
    do, dS = (t.double() if wide else t for t in (x["do"], x["dS"]))
    return [out.o, out.final_state, *torch.autograd.grad([out.o, out.final_state], leaves, [do, dS])]


def theirs(x: dict[str, Tensor]) -> cudnn.CudnnKDA:
    return cudnn.CudnnKDA(**x)


def errors(found: Sequence[Tensor], true: Sequence[Tensor]) -> dict[str, float]:
    return {n: float(f"{relative_error(a, b):.2e}") for n, a, b in zip(NAMES, found, true)}


def check(gate: str) -> dict[str, object]:
    """Errors against fp64 of 256 tokens."""
    torch.manual_seed(0)
    x = inputs(256, 4, gate)
    true = results(x, None, ring_la.reference.kda, wide=True)
    row: dict[str, object] = {"gate": gate, "T": 256, "H": 4}
    from ring_la.kernels import gpu

    with mock.patch.object(gpu, "multiprocessors", return_value=16):  # spans of 64 tokens
        row["bound"] = errors(results(x, -5.0), true)
    row["plain"] = errors(results(x, None), true)
    if not cudnn.unsupported():
        them = theirs(x)
        them.both()()
        row["cudnn"] = errors([them.o, them.final_state, *them.gradients], true)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON of what was found")
    args = parser.parse_args(arguments)
    need_gpus(parser)
    found = machine() | {"cudnn": cudnn.unsupported() or "here"}
    found["checks"] = []
    for gate in GATES:
        found["checks"].append(check(gate))
        print(json.dumps(found["checks"][-1]), flush=True)
        save(args.out, found)


if __name__ == "__main__":
    main()
