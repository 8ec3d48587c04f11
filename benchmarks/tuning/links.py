"""Time a link of the ring under dense maps, and a scan over them, on one GPU:
`python -m benchmarks.tuning.links [--limit SECONDS] [--out FILE]`.

Maps of spans of heads of 128 channels, of which a quarter lets something through a span, half of these nothing through
all spans, and the others forget all that came before a span.
The scan (`prefix_dense_kernel`) by columns of a program, warps and stages: forward the states and the transitions of
pieces, and back the states alone. The link (`dense_link_kernel`) as the first, a middle and the last rank's; what comes
lies in its mailboxes. µs of a launch within a CUDA graph of many, which counts what lies between two launches; the
link's without what fills its mailboxes each time. `apart`: the largest relative error beside fp64.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from benchmarks.errors import relative_error
from benchmarks.options import counts, names, need_gpus
from benchmarks.rows import Rows
from benchmarks.tuning.products import microseconds
from ring_la.algebra import Rule
from ring_la.kernels.protocol import Inputs, SpanMaps
from ring_la.kernels.spans import dense, table
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.prefix import prefix, prefix_and_transitions
from ring_la.kernels.spans.runs import Runs
from ring_la.scan.mailbox_ring import DenseMaps, Hop, LinkStates, launch_dense
from tests.support.line_of_ranks import groups

K, SPAN, CALLS = 128, 1024, 20
"""Channels, tokens of a span, and launches of a graph."""
TILES: list[tuple[int, ...]] = [
    (64, 8, 2), (32, 8, 2, 128), (32, 8, 1, 128), (32, 8, 2), (64, 8, 1), (64, 8, 3), (32, 8, 1), (32, 8, 3),
    *itertools.product((16, 32, 64), (4,), (1, 2, 3)), *itertools.product((16,), (8,), (1, 2, 3)),
]  # fmt: skip
"""Columns, warps, stages and registers."""
HOPS = {"first": Hop(None, 2, False), "middle": Hop(0, 2, True), "last": Hop(0, None, False)}
"""Of rank 1 of three."""


class Links(NamedTuple):
    """Maps of spans, and fp64's word on them.

    Attributes:
        A, b ``[1, NS, H, K, K]``, zero ``[1, NS, H]``. x: what enters ``[H, K, K]``. keeps: the heads that let
        something through. entering ``[NS, H, K, K]``, left, added, through ``[H, K, K]``: under x, without it, and the
        map.
    """

    A: Tensor
    b: Tensor
    zero: Tensor
    x: Tensor
    keeps: Tensor
    entering: Tensor
    left: Tensor
    added: Tensor
    through: Tensor

    @classmethod
    def of(cls, spans: int, heads: int, reverse: bool, device: torch.device) -> Links:
        torch.manual_seed(0)
        A, b = (torch.randn(1, spans, heads, K, K, device=device) / K**0.5 for _ in range(2))
        x, zero = torch.randn(heads, K, K, device=device), torch.ones(1, spans, heads, device=device).int()
        zero[:, :, ::4] = 0
        A[:, :, ::8] *= 1e-5
        a = A[0].double().masked_fill(zero[0, :, :, None, None].bool(), 0)
        S, added, through = x.double(), torch.zeros_like(x).double(), torch.eye(K).to(a).expand_as(a[0])
        entering: list[Tensor] = []
        for s in range(spans)[::-1] if reverse else range(spans):
            entering.append(S)
            m = a[s].mT if reverse else a[s]
            S, added, through = m @ S + b[0, s], m @ added + b[0, s], m @ through
        if reverse:
            through = through.mT
        A.masked_fill_(zero[..., None, None].bool(), torch.nan)
        return cls(
            A, b, zero, x, zero[0, 0] == 0, torch.stack(entering[::-1] if reverse else entering), S, added, through
        )


def about(m: Links, reverse: bool) -> dict[str, object]:
    return dict(step=dense.STEP.value, spans=m.b.shape[1], reverse=reverse)


def plan_of(m: Links) -> SpanPlan:
    spans, heads = m.b.shape[1:3]
    x = torch.zeros(1, spans * SPAN, heads, K, dtype=torch.bfloat16, device=m.b.device)
    gates = torch.zeros(1, spans * SPAN, heads, device=m.b.device)
    runs = Runs(SPAN, 64, spans, 1, None, None)
    return SpanPlan.of(Rule("delta", "scalar"), Inputs(x, x, x, gates, gates), None, 1.0, (runs, runs))


def scans(m: Links, reverse: bool) -> Iterator[dict[str, object]]:
    """The scan by its launch settings, as rules in chunks make it, which do not know what is 0."""
    plan, maps = plan_of(m), SpanMaps("dense", m.b, m.A.nan_to_num(nan=0.0), True)
    call: Callable[[], Any] = partial(prefix_and_transitions, plan, maps, None)
    if reverse:
        call = partial(prefix, plan, maps, None, True, enter=False)
    for tile in TILES:
        table.PREFIX[K] = table.PREFIX_MAPS[K] = table.Tiling(*tile)
        row: dict[str, object] = dict(kernel="scan", **about(m, reverse), tile=tile)
        try:
            got = call()
            error = relative_error(got[1 if reverse else 0][0, 0], m.added)
            if not reverse:
                error = max(error, relative_error(got[1][0, 0], m.through))
            yield row | dict(us=round(microseconds([call] * CALLS), 2), apart=error)
        except Exception as fault:  # too much shared memory: it says so
            yield row | dict(fault=f"{type(fault).__name__}: {str(fault)[:120]}")


class Middle:
    """Rank 1 of three, whose mailboxes are filled by hand."""

    def __init__(self, m: Links, reverse: bool) -> None:
        self.m, self.reverse, self.groups = m, reverse, groups(3, m.b.device)
        boxes = [g.mailboxes for g in self.groups]
        count, room, skip = boxes[1].lanes[1]
        flags, self.columns = 3 * count * boxes[1].constants["FLAG"], room // K
        rooms = [box.own[skip + flags :][: 3 * count * room].view(3, count, room) for box in boxes]
        heads = len(m.x)
        self.units = heads * K // self.columns
        parted = m.x.view(heads, K, -1, self.columns).transpose(1, 2).reshape(self.units, room)
        self.words, self.here, self.there = parted.view(torch.int32), rooms[1][0], rooms[2][1]
        self.flags = boxes[1].own[skip:][:flags].view(3, count, -1)[2, :, 0]
        self.entering = torch.empty_like(m.b)
        self.maps = DenseMaps(m.A, m.b, m.zero, squares=m.A.square().view(*m.zero.shape, 8, -1).sum(-1))

    def fill(self) -> None:
        """What comes is there, and the lanes to the next rank are free."""
        if self.units <= len(self.here):
            self.here[: self.units] = self.words
        self.flags.zero_()

    def link(self, name: str) -> None:
        launch_dense(self.groups[1], self.maps, LinkStates(None, self.entering, None), HOPS[name], reverse=self.reverse)

    def both(self, name: str) -> None:
        self.fill()
        self.link(name)

    def late(self) -> list[int]:
        return self.groups[1].mailboxes.late()

    def apart(self, name: str) -> float:
        self.both(name)
        keeps, errors = self.m.keeps, []
        if name != "first":
            errors.append(relative_error(self.entering[0][:, keeps], self.m.entering[:, keeps]))
        if name != "last":
            parted = self.there[: self.units].view(torch.float32).view(len(keeps), -1, K, self.columns)
            left = parted.transpose(1, 2).reshape(len(keeps), K, K)
            errors.append(relative_error(left, self.m.left if name == "middle" else self.m.added))
        return max(errors)


def links(m: Links, reverse: bool) -> Iterator[dict[str, object]]:
    """The link by the rank's place."""
    middle = Middle(m, reverse)
    for name in HOPS:
        row: dict[str, object] = dict(kernel="link", **about(m, reverse), rank=name)
        error = middle.apart(name)
        assert not middle.late(), "what comes was not seen in the mailboxes"
        fill = microseconds([middle.fill] * CALLS)
        yield row | dict(us=round(microseconds([partial(middle.both, name)] * CALLS) - fill, 2), apart=error)


PARTS = {"links": links, "scans": scans}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--spans", type=counts, default=[4, 8])
    parser.add_argument("--parts", type=names(PARTS), default=[*PARTS])
    parser.add_argument("--step", type=int, default=dense.STEP.value, help="columns of a transition in one product")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which no row is begun")
    parser.add_argument("--out")
    args = parser.parse_args()
    need_gpus(parser)
    dense.STEP = tl.constexpr(args.step)
    rows, began, device = Rows(args.out), time.monotonic(), torch.device("cuda")
    for part, spans, reverse in itertools.product(args.parts, args.spans, (False, True)):
        for row in PARTS[part](Links.of(spans, args.heads, reverse, device), reverse):
            rows.add(row)
            if time.monotonic() - began > args.limit:
                return


if __name__ == "__main__":
    main()
