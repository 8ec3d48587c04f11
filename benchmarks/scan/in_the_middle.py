"""KDA on a rank in the middle of many, measured on one GPU: it sends to itself, and takes what it has sent.

    python -m benchmarks.scan.in_the_middle [--lengths 4096,16384] [--gates production] [--out DIR]

The launches are those of a rank that takes a state from the one before it and sends one on, forward and backward, and
do the same work at the same places; what they find is no part of a sequence, and its mailboxes are in this GPU's own
memory, so that a state needs no link. Beside it one GPU's own call, both replayed as CUDA graphs, in turns. Says how
much of one GPU's speed a rank in the middle has where the ranks' hosts, links and pace cost nothing.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import ring_la
from benchmarks.options import need_gpus
from benchmarks.rows import machine, save
from benchmarks.timing import Step, captured, medians
from ring_la.algebra import Rule
from ring_la.cli.options import count
from ring_la.comm import copy_kernel
from ring_la.comm.symmetric import MailboxMemory, SymmetricTransport
from ring_la.kernels.protocol import Backward, Inputs, OutputUse
from ring_la.kernels.wy import across
from ring_la.kernels.wy.scanned_spans import ScannedSpans
from ring_la.scan import Chain, MailboxBorder

from .arms import promised, tokens

CHUNK = 64
"""Words of a message's chunk: none is sent."""


def border(device: torch.device) -> MailboxBorder:
    """That of a rank which is its own neighbour on both sides."""
    own = torch.empty(copy_kernel.words(1, CHUNK), dtype=torch.int32, device=device)
    copy_kernel.prepare(own, 1, CHUNK)
    members: Any = SimpleNamespace(size=1, rank=0, device=device, timeout=timedelta(seconds=20))
    memory, streams = MailboxMemory(own, [own.data_ptr()], own), SimpleNamespace(side=None)
    boxes: Any = SymmetricTransport(members, streams, None, memory, CHUNK=CHUNK)
    group: Any = SimpleNamespace(name="in the middle", rank=0, mailboxes=boxes)
    found = MailboxBorder(group, Chain.line(1), [(0, 0)], 1)
    found.hops = tuple(tuple(h._replace(source=0, target=0, passes=True) for h in hops) for hops in found.hops)
    return found


def steps(x: list[Tensor], do: Tensor, gates: str) -> dict[str, dict[str, Step]]:
    """Forward, and with the backward pass, of one GPU and of the rank in the middle."""
    inputs = Inputs(**dict(zip(("q", "k", "v", "g", "beta"), (t.detach() for t in x))))
    to, scale = border(do.device), inputs.q.shape[-1] ** -0.5
    local = functools.partial(ring_la.kda, **promised("kda", gates))

    def middle(train: bool) -> object:
        call = ScannedSpans.of(
            across.KDA, Rule("delta", "diagonal"), inputs, None, scale, OutputUse(train, final=False)
        )
        out = call.output(None, border=to)
        return call.gradients(Backward(None, do, out.saved), None, border=to) if train else out.o

    def alone(train: bool) -> object:
        with torch.set_grad_enabled(train):
            o = local(*x).o
        return torch.autograd.grad(o, x, do) if train else o

    arms = {"local": alone, "middle": middle}
    passes = {"forward": False, "forward+backward": True}
    return {what: {name: functools.partial(f, train) for name, f in arms.items()} for what, train in passes.items()}


def timeline(step: Step) -> list[list[Any]]:
    """Of a replay in a row of them: each kernel's name, when it begins and how long it takes, us."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(8):
            step()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in e.name]
    events.sort(key=lambda e: e.time_range.start)
    each = len(events) // 8
    mine = events[4 * each : 5 * each]
    begin = mine[0].time_range.start
    return [[e.name[:40], round(e.time_range.start - begin, 1), round(e.time_range.elapsed_us(), 1)] for e in mine]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,16384", help="tokens")
    parser.add_argument("--gates", default="production", choices=("trained", "none", "production", "mixed"))
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--inner", type=count, default=24, help="replays in a row")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/in_the_middle"))
    args = parser.parse_args()
    need_gpus(parser)
    device, rows = torch.device("cuda"), []
    for T in map(int, args.lengths.split(",")):
        x = tokens("kda", args.gates, (T, args.heads, 128), torch.bfloat16, device, seed=0)
        for what, arms in steps(x, torch.randn_like(x[2]), args.gates).items():
            for step in (*arms.values(), *arms.values(), *arms.values()):
                step()
            replays, refused = captured(arms)
            found = {n: round(ms, 4) for n, ms in medians(replays, args.rounds, args.inner).items()}
            row = dict(op="kda", gates=args.gates, T=T, heads=args.heads, what=what, mode="graph", ms=found)
            rows.append(row | dict(failed=refused, timelines={name: timeline(step) for name, step in replays.items()}))
            share = f"{found['local'] / found['middle']:.1%}" if len(found) == 2 else str(refused)
            print(f"kda {args.gates:<10} T{T:<6} {what:<17} {found} {share}", flush=True)
    how = machine() | dict(rounds=args.rounds, inner=args.inner)
    save(args.out / "in_the_middle.json", {"machine": how, "rows": rows}, indent=None)


if __name__ == "__main__":
    main()
