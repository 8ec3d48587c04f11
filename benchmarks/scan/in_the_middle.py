"""KDA, the gated delta rule or GLA on a rank in the middle of many, measured on one GPU.

    python -m benchmarks.scan.in_the_middle [--op gla] [--lengths 4096,16384] [--gates production] [--out DIR]

The launches are those of a rank that takes a state from the one before it and sends one on, forward and backward, and
do the same work at the same places; what they find is no part of a sequence. KDA's rank sends to itself, and takes what
it has sent: its mailboxes are in this GPU's own memory. So does the gated delta rule's, where what leaves depends on
what comes, which is there then: the call before has sent it. GLA's states go by a launch of their own, which takes them
from memory here, and puts them there ("chunks": beside it the kernels that take chunks of 64 tokens, likewise). Beside
them one GPU's own call, all replayed as CUDA graphs, in turns. Says how much of one GPU's speed a rank in the middle
has where the ranks' hosts, links and pace cost nothing.

Gates are those of `bench scan`; "paper": of GLA's channels, logsigmoid(x) / 16.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
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
from ring_la.kernels.wy.recurrence import WYRecurrence
from ring_la.kernels.wy.scanned_spans import ScannedSpans
from ring_la.scan import Chain, MailboxBorder

from .arms import promised, tokens

CHUNK = 64
"""Words of a message's chunk: none is sent."""


def border(device: torch.device, itself: bool, ahead: bool) -> MailboxBorder:
    """That of a rank which is its own neighbour on both sides, or has none. `ahead`: zero states are there at first."""
    own = torch.empty(copy_kernel.words(1, CHUNK), dtype=torch.int32, device=device)
    copy_kernel.prepare(own, 1, CHUNK)
    members: Any = SimpleNamespace(size=1, rank=0, device=device, timeout=timedelta(seconds=20))
    memory, streams = MailboxMemory(own, [own.data_ptr()], own), SimpleNamespace(side=None)
    boxes: Any = SymmetricTransport(members, streams, None, memory, CHUNK=CHUNK)
    group: Any = SimpleNamespace(name="in the middle", rank=0, mailboxes=boxes)
    found = MailboxBorder(group, Chain.line(1), [(0, 0)], 1)
    if ahead:
        lanes = boxes.lanes[1]
        own[lanes.skip + lanes.count * boxes.constants["FLAG"] :][: lanes.count * lanes.room] = 0
    if itself:
        found.hops = tuple(tuple(h._replace(source=0, target=0, passes=True) for h in hops) for hops in found.hops)
    return found


class Kind(NamedTuple):
    """How a recurrence's launches go over a shard.

    Attributes:
        kernels, rule: its. carries: its launches send and take states themselves. ahead: what leaves may depend on what
            comes, and waits for it. keys: heads of q and k, as a share of v's. gates: kinds of them, the default first.
    """

    kernels: across.SpanKernels
    rule: Rule
    carries: bool
    ahead: bool
    keys: float
    gates: tuple[str, ...]


KINDS = {
    "kda": Kind(across.KDA, Rule("delta", "diagonal"), True, False, 1, ("production", "none", "trained", "mixed")),
    "gated_delta_rule": Kind(across.DELTA, Rule("delta", "scalar"), True, True, 0.5, ("production", "none", "trained")),
    "gla": Kind(across.GLA, Rule("additive", "diagonal"), False, False, 1, ("paper", "none", "trained")),
}


def drawn(op: str, gates: str, T: int, heads: int, device: torch.device) -> list[Tensor]:
    """A recurrence's tokens, as leaves."""
    kinds, keys = "none" if gates == "paper" else gates, max(1, int(heads * KINDS[op].keys))
    x = tokens(op, kinds, (T, heads, 128), torch.bfloat16, device, seed=0, keys=keys)
    if gates == "paper":
        x[3] = (logsigmoid(torch.randn(x[3].shape, device=device)) / 16).to(x[3].dtype).requires_grad_()
    return x


def steps(op: str, x: list[Tensor], do: Tensor, gates: str) -> dict[str, dict[str, Step]]:
    """Forward, and with the backward pass, of one GPU and of the rank in the middle."""
    inputs = Inputs(**dict(zip(("q", "k", "v", "g", "beta"), (t.detach() for t in x))))
    kind, scale = KINDS[op], inputs.q.shape[-1] ** -0.5
    local = functools.partial(getattr(ring_la, op), **promised(op, gates))
    to, rule = border(do.device, kind.carries, kind.ahead), kind.rule
    H, D = do.shape[2:]
    S, dS = (None, None) if kind.carries else torch.randn(2, 1, 1, H, D, D, device=do.device)

    def middle(train: bool) -> object:
        use = OutputUse(train, final=not kind.carries)
        return through(ScannedSpans.of(kind.kernels, rule, inputs, None, scale, use), train)

    def chunks(train: bool) -> object:
        return through(WYRecurrence.of(rule, inputs, None, scale, OutputUse(train)), train)

    def through(call: Any, train: bool) -> object:
        out = call.output(S, border=to)
        return call.gradients(Backward(S, do, out.saved), dS, border=to) if train else out.o

    def alone(train: bool) -> object:
        with torch.set_grad_enabled(train):
            o = local(*x).o
        return torch.autograd.grad(o, x, do) if train else o

    arms = {"local": alone, "middle": middle} | ({} if kind.carries else {"chunks": chunks})
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
    parser.add_argument("--op", default="kda", choices=KINDS)
    kinds = sorted({gates for kind in KINDS.values() for gates in kind.gates})
    parser.add_argument("--gates", choices=kinds, help="default: production, GLA's paper")
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--inner", type=count, default=24, help="replays in a row")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/in_the_middle"))
    args = parser.parse_args()
    need_gpus(parser)
    device, rows = torch.device("cuda"), []
    gates = args.gates or KINDS[args.op].gates[0]
    if gates not in KINDS[args.op].gates:
        parser.error(f"--gates: {args.op} has {', '.join(KINDS[args.op].gates)}, not {gates}")
    for T in map(int, args.lengths.split(",")):
        x = drawn(args.op, gates, T, args.heads, device)
        for what, arms in steps(args.op, x, torch.randn_like(x[2]), gates).items():
            for step in (*arms.values(), *arms.values(), *arms.values()):
                step()
            replays, refused = captured(arms)
            found = {n: round(ms, 4) for n, ms in medians(replays, args.rounds, args.inner).items()}
            row = dict(op=args.op, gates=gates, T=T, heads=args.heads, what=what, mode="graph", ms=found)
            rows.append(row | dict(failed=refused, timelines={name: timeline(step) for name, step in replays.items()}))
            share = str(refused) if refused else f"{found['local'] / found['middle']:.1%}"
            print(f"{args.op} {gates:<10} T{T:<6} {what:<17} {found} {share}", flush=True)
    how = machine() | dict(rounds=args.rounds, inner=args.inner)
    save(args.out / "in_the_middle.json", {"machine": how, "rows": rows}, indent=None)


if __name__ == "__main__":
    main()
