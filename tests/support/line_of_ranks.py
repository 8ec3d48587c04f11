"""Ranks in a line, all of one process and on one device: each is called once those before it on the way are done, so
that what it waits for in its mailboxes is there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.comm import copy_kernel
from ring_la.comm.symmetric import MailboxMemory, SymmetricTransport
from ring_la.kernels.protocol import Backward, Inputs, OutputUse
from ring_la.kernels.wy.across import SpanKernels
from ring_la.kernels.wy.scanned_spans import ScannedSpans
from ring_la.scan import Chain, MailboxBorder

CHUNK = 64
"""Words of a message's chunk: none is sent, and so they need no room."""


def groups(size: int, device: torch.device) -> list[Any]:
    """Groups of which a link's launch reads ranks and mailboxes."""
    memory = torch.empty(size, copy_kernel.words(size, CHUNK), dtype=torch.int32, device=device)
    addresses, found = [own.data_ptr() for own in memory], []
    for rank, own in enumerate(memory):
        copy_kernel.prepare(own, size, CHUNK)
        members: Any = SimpleNamespace(size=size, rank=rank, device=device, timeout=timedelta(seconds=20))
        streams: Any = SimpleNamespace(side=None)
        boxes: Any = SymmetricTransport(members, streams, None, MailboxMemory(own, addresses, memory), CHUNK=CHUNK)
        found.append(SimpleNamespace(name="line", rank=rank, mailboxes=boxes))
    return found


class Shard:
    """A rank's tokens: its documents' parts, `cu` of them (None: one), and which start and end here."""

    def __init__(self, begin: int, end: int, documents: Sequence[int]) -> None:
        self.tokens = slice(begin, end)
        parts = [(n, max(a, begin), min(b, end)) for n, (a, b) in enumerate(pairwise(documents))]
        self.parts = [(n, a, b) for n, a, b in parts if a < b]
        cu = [begin, *(b for _, _, b in self.parts)]
        self.cu = None if len(self.parts) == 1 else torch.tensor([t - begin for t in cu], dtype=torch.int32)
        self.starts = [(i, n) for i, (n, a, _) in enumerate(self.parts) if a == documents[n]]
        self.ends = [(i, n) for i, (n, _, b) in enumerate(self.parts) if b == documents[n + 1]]

    def of(self, states: Tensor, chosen: list[tuple[int, int]]) -> Tensor | None:
        """Those documents' states [B, N, …] as its parts have them, zero where another rank's enters."""
        if not chosen:
            return None
        out = states.new_zeros(len(states), len(self.parts), *states.shape[2:])
        for i, n in chosen:
            out[:, i] = states[:, n]
        return out


def results(
    kernels: SpanKernels, rule: Rule, x: dict[str, Tensor], cuts: Sequence[int], documents: Sequence[int], S0: Tensor,
    do: Tensor | None, dS: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    """o, final states S, and (given `do` and `dS`) the gradients of `x` and of S0 (states are [B, N, H, K, V]) of the
    ranks that `cuts` makes of a sequence of `documents`. States that are 0 are not given, and none are asked for where
    dS is."""
    shards = [Shard(*ends, documents) for ends in pairwise(cuts)]
    joined = [bool(i) and len(shard.starts) < len(shard.parts) for i, shard in enumerate(shards)]
    passes = [a and len(shard.parts) == 1 for a, shard in zip(joined, shards)]
    chain = Chain(tuple(range(len(shards))), tuple(joined), tuple(passes))
    made, train = groups(len(shards), S0.device), do is not None
    borders = [MailboxBorder(g, chain, [(0, len(s.parts) - 1)], len(s.parts)) for g, s in zip(made, shards)]
    calls, outs, backs, S, dS0 = [], [], [], torch.empty_like(S0), torch.empty_like(S0)
    use = OutputUse(train, final=dS is None or bool(dS.any()))
    given = lambda states, shard, which: shard.of(states, which if states.any() else [])  # noqa: E731
    for shard, border in zip(shards, borders):
        inputs = Inputs(**{n: t[:, shard.tokens].contiguous() for n, t in x.items()})
        calls.append(ScannedSpans.of(kernels, rule, inputs, shard.cu, x["q"].shape[-1] ** -0.5, use))
        outs.append(calls[-1].output(given(S0, shard, shard.starts), border=border))
        for i, n in shard.ends if use.final else ():
            S[:, n] = outs[-1].leaving[:, i]
    for shard, border, call, out in reversed(list(zip(shards, borders, calls, outs)) if train else []):
        saved = tuple(None if t is None else t.clone() for t in out.saved)  # as hooks for saved tensors may
        back = Backward(given(S0, shard, shard.starts), do[:, shard.tokens].contiguous(), saved)
        backs.insert(0, call.gradients(back, given(dS, shard, shard.ends), border=border))
        for i, n in shard.starts if back.S0 is not None else ():
            dS0[:, n] = backs[0].entering[:, i]
    found = {n: torch.cat([getattr(back.inputs, n) for back in backs], 1) for n in x if train}
    late = [g.mailboxes.late() for g in made]
    assert not any(late), f"ranks that were waited for in vain: {late}"
    return {"o": torch.cat([out.o for out in outs], 1), "S": S, "S0": dS0, **found}


class Piece(NamedTuple):
    """A document's part in a segment: its rank and number there, its tokens, and whether it starts or ends there."""

    rank: int
    number: int
    begin: int
    end: int
    document: int
    starts: bool
    ends: bool


def zigzag(cuts: Sequence[int], documents: Sequence[int]) -> list[Piece]:
    """The pieces of 2 P segments, of which each of P ranks has one from either end, in the sequence's order."""
    segments, found = list(pairwise(cuts)), []
    counts = [0] * len(segments)
    for i, segment in enumerate(segments):
        rank = min(i, len(segments) - 1 - i)
        for n, a, b in Shard(*segment, documents).parts:
            found.append(Piece(rank, counts[rank], a, b, n, a == documents[n], b == documents[n + 1]))
            counts[rank] += 1
    return found


def by_messages(
    kernels: SpanKernels, rule: Rule, x: dict[str, Tensor], pieces: Sequence[Piece], S0: Tensor, do: Tensor, dS: Tensor
) -> dict[str, Tensor]:
    """The same of ranks whose states go by messages: each says what its `pieces` do to a state, and then takes what
    enters them."""
    ranks = [[p for p in pieces if p.rank == rank] for rank in range(1 + max(p.rank for p in pieces))]
    mine = [torch.cat([torch.arange(p.begin, p.end) for p in own]) for own in ranks]
    mine = [t.to(S0.device) for t in mine]
    cus = [torch.tensor([0, *accumulate(p.end - p.begin for p in own)], dtype=torch.int32) for own in ranks]
    new = lambda: [S0.new_zeros(len(S0), len(own), *S0.shape[2:]) for own in ranks]  # noqa: E731
    calls = []
    for tokens, cu in zip(mine, cus):
        inputs = Inputs(**{n: t[:, tokens].contiguous() for n, t in x.items()})
        calls.append(ScannedSpans.of(kernels, rule, inputs, cu, x["q"].shape[-1] ** -0.5, OutputUse(True)))

    def through(A: Tensor, S: Tensor, back: bool) -> Tensor:
        return A[..., None] * S if A.dim() < S.dim() else (A.mT if back else A) @ S

    summaries, enters, S, on = [call.summary(None, True) for call in calls], new(), torch.empty_like(S0), S0[:, 0]
    for p in pieces:
        on = S0[:, p.document] if p.starts else on
        enters[p.rank][:, p.number] = on
        summary = summaries[p.rank]
        on = through(summary.transition[:, p.number], on, False) + summary.leaving[:, p.number]
        if p.ends:
            S[:, p.document] = on
    outs = [call.output(S, summary) for call, S, summary in zip(calls, enters, summaries)]
    backs = [Backward(S, do[:, t].contiguous(), out.saved) for S, t, out in zip(enters, mine, outs)]
    adjoints = [call.adjoint(back, None) for call, back in zip(calls, backs)]
    ends, dS0 = new(), torch.empty_like(S0)
    for p in reversed(pieces):
        on = dS[:, p.document] if p.ends else on
        ends[p.rank][:, p.number] = on
        on = through(summaries[p.rank].transition[:, p.number], on, True) + adjoints[p.rank].entering[:, p.number]
        if p.starts:
            dS0[:, p.document] = on
    grads = [call.gradients(*of) for call, *of in zip(calls, backs, ends, adjoints)]
    found = {n: torch.cat([getattr(g.inputs, n) for g in grads], 1) for n in x}
    found |= {"o": torch.cat([out.o for out in outs], 1)}
    order = torch.cat(mine).argsort()
    return {n: t[:, order] for n, t in found.items()} | {"S": S, "S0": dS0}
