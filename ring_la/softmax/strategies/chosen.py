"""Chosen keys alone: each rank asks the owners for the keys that its queries have chosen, and gets no others.

    count   how many keys each rank wants of each, [P, P], to all ranks; their hosts read it
    ask     the rows that are wanted, to their owners
    send    these keys and values; in the backward pass their gradients come back to the owner, who adds them up

Where the busiest rank would send or get as many bytes as in a gather, all keys are gathered: all ranks know the counts,
so all decide alike. Both passes count and ask anew; a choice stands among the tensors that are saved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import Group
from ...kept import once
from ..backends import ChosenBackend, LatentBackend, QueryRows
from ..geometry import Tokens
from ..merging import Gradients, Partial, Sum
from .all_gather import KeyGather
from .job import AttentionJob

ROW = 4
"""Bytes that ask for a key."""


class SomeKeys(Tokens):
    """Keys of several ranks that stand anywhere, in no order: known to the device alone.

    Args:
        among: all keys. rows: of these, int64 ``[n]``.
    """

    def __init__(self, among: Tokens, rows: Tensor) -> None:
        columns = among.positions[rows], among.documents[rows]
        super().__init__(None, len(rows), rows.device, columns)
        self._places, self._end = among.index[rows], len(among.places)

    @once
    def index(self) -> Tensor:
        """Place of each in the whole sequence."""
        return self._places

    @once
    def places(self) -> Tensor:
        """The row of each place."""
        out = torch.full((self._end,), -1, dtype=torch.int32, device=self.device)
        out[self._places] = torch.arange(len(self), dtype=torch.int32, device=self.device)
        return out


class AskedKeys(NamedTuple):
    """Keys under way between ranks.

    Attributes:
        keys: where those that come here stand. mine: rows of this rank that go, by the rank they go to.
        send, receive: how many go to each rank, and come from each.
    """

    keys: Tokens
    mine: Tensor
    send: list[int]
    receive: list[int]


class KeysAsked:
    """Keys that some query of a rank has chosen."""

    name = "chosen"

    def forward(self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        wanted = _ask(job, k, v)
        if wanted is None:
            KeyGather().forward(job, q, k, v, out)
            return
        some_k, some_v = _fetch(job, wanted, k, v)
        job.forward_to(q, some_k, some_v, wanted.keys, out)

    def backward(self, job: AttentionJob, x: QueryRows, k: Tensor, v: Tensor) -> Gradients:
        wanted = _ask(job, k, v)
        if wanted is None:
            return KeyGather().backward(job, x, k, v)
        some_k, some_v = _fetch(job, wanted, k, v)
        grads = Gradients.of(x.q, some_k, some_v)
        job.backward_to(x, some_k, some_v, wanted.keys, grads)
        dtype, own = job.message_dtype(k.dtype), Gradients(grads.dq, Sum.like(k), Sum.like(v))
        rows = _rows(grads.dk.result(dtype), grads.dv.result(dtype))
        came = _group(job).all_to_all_uneven(rows, wanted.receive, wanted.send).wait()
        dk, dv = _keys(came, k, v)
        own.dk.add(dk, wanted.mine)
        own.dv.add(dv, wanted.mine)
        return own


def _ask(job: AttentionJob, k: Tensor, v: Tensor) -> AskedKeys | None:
    """Tell every owner which of its keys this rank wants; None where a gather costs less."""
    group, tokens = _group(job), [len(keys) for keys in job.keys]
    among = job.all_keys
    assert among is not None
    rows = among.places[_chosen_places(job, len(among.places))].long()
    rows = rows[rows >= 0]
    joined = rows if job.order is None else job.order[rows]  # of all ranks' keys, one rank's after another's
    joined, by_owner = joined.sort()
    rows = rows[by_owner]
    borders = torch.tensor([0, *tokens], device=k.device).cumsum(0)
    cuts = torch.searchsorted(joined, borders)
    counts = group.all_gather(cuts.diff()).wait().tolist()  # [who wants][of whom]
    size = k[:, :1].nbytes + v[:, :1].nbytes
    if not pays(counts, tokens, size):
        return None
    send, receive = [row[group.rank] for row in counts], counts[group.rank]
    local = (joined - borders[:-1].repeat_interleave(cuts.diff(), output_size=len(joined))).int()
    mine = group.all_to_all_uneven(local, receive, send).wait()
    return AskedKeys(SomeKeys(among, rows), mine.long(), send, receive)


def pays(counts: list[list[int]], tokens: list[int], size: int) -> bool:
    """Whether asking for keys moves fewer bytes over the busiest rank than gathering all `tokens` of `size` bytes."""
    ranks = range(len(tokens))
    come = [sum(counts[r]) - counts[r][r] for r in ranks]
    go = [sum(row[r] for row in counts) - counts[r][r] for r in ranks]
    return max(*come, *go) * (size + ROW) < max(tokens) * (len(tokens) - 1) * size


def _chosen_places(job: AttentionJob, end: int) -> Tensor:
    """Places before `end` that any query of this rank has chosen, in order, int64."""
    backend, block = job.backend, job.scores.block
    kernel = backend.inner if isinstance(backend, LatentBackend) else backend
    assert isinstance(kernel, ChosenBackend)
    starts = torch.zeros(end + 1, dtype=torch.int32, device=kernel.chosen.device)
    first = kernel.chosen.flatten().long()
    starts[torch.where((first < 0) | (first >= end), end, first)] = 1
    begun = starts[:end].cumsum(0)
    if block > 1:
        begun[block:] = begun[block:] - begun[:-block].clone()  # blocks that began and have not ended
        return begun.nonzero().flatten()
    return starts[:end].nonzero().flatten()


def _fetch(job: AttentionJob, wanted: AskedKeys, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values that this rank asked for."""
    rows = _rows(k.index_select(1, wanted.mine), v.index_select(1, wanted.mine))
    return _keys(_group(job).all_to_all_uneven(rows, wanted.send, wanted.receive).wait(), k, v)


def _rows(k: Tensor, v: Tensor) -> Tensor:
    """``[B, n, …]`` twice as ``[n, ·]``."""
    return torch.cat([x.transpose(0, 1).flatten(1) for x in (k, v)], 1)


def _keys(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `_rows` has joined, shaped as k and v are but for their number."""
    widths = [x.shape[0] * x.shape[2:].numel() for x in (k, v)]
    parts = rows.split(widths, 1)
    a, b = (p.unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1).contiguous() for p, x in zip(parts, (k, v)))
    return a, b


def _group(job: AttentionJob) -> Group:
    assert job.group is not None
    return job.group
