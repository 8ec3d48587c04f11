"""Ranks in a line, all of one process and on one device: each is called once those before it on the way are done, so
that what it waits for in its mailboxes is there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

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
