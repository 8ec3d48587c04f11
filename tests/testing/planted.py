"""A small split implementation of its own, right or with a mistake planted where such code has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ring_la.testing import Call
from ring_la.testing.split import Split


class Gather(torch.autograd.Function):
    """Every rank's x ``[P, …]``; the gradient is summed over the ranks, or this rank's own alone."""

    @staticmethod
    def forward(ctx, x: Tensor, group, summed: bool) -> Tensor:
        ctx.group, ctx.summed = group, summed
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.contiguous()
        if ctx.summed:
            dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None, None


class SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def read(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """simple_gla in closed form: o and the state after these tokens, ``S [B, H, K, V]`` before them."""
    total = g.cumsum(1)
    decay = (total[:, :, None] - total[:, None]).permute(0, 3, 1, 2)
    decay = decay.masked_fill(torch.ones(decay.shape[-2:]).triu(1).bool(), -torch.inf).exp()
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * decay
    o = torch.einsum("bhij,bjhv->bihv", scores, v)
    o = o + torch.einsum("bihk,bih,bhkv->bihv", q, total.exp(), S)
    left = (total[:, -1:] - total).exp() if g.shape[1] else g
    after = torch.einsum("bjhk,bjh,bjhv->bhkv", k, left, v)
    return scale * o, after + g.sum(1).exp()[..., None, None] * S


def in_order(tokens: Sequence[Tensor]) -> Sequence[Tensor]:
    """As many tokens for each rank, one run of the sequence after the other."""
    return torch.arange(sum(map(len, tokens))).split([len(t) for t in tokens])


def begins_a_segment(split: Split, piece: int) -> bool:
    return split.pieces[piece].start == split.segments[split.pieces[piece].segment].start


def recurrence(call: Call, mistake: str = "") -> tuple[Tensor, Tensor | None]:
    """simple_gla: each segment's own state and decay gathered, folded locally."""
    x, P = call.tensors, call.size
    split = Split.of(call.kind, call.seq_len, P, call.cu_seqlens)
    q, k, v, g = x["q"], x["k"], x["v"], x["g"]
    if mistake == "heads":
        q, k = (t.repeat(1, 1, v.shape[2] // t.shape[2], 1) for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    if mistake == "clamped":
        g = g.clamp(min=-10.0)
    if mistake == "gradient of rank 0's gate alone" and call.rank:
        g = g.detach() + 0 * g
    if mistake == "scrambled":
        split = Split.of(lambda *of: in_order(split.tokens), call.seq_len, P, call.cu_seqlens)
    own = [i for i, s in enumerate(split.segments) if s.owner == call.rank]
    runs, at = {}, 0
    for i in own:
        n = split.segments[i].stop - split.segments[i].start
        runs[i] = tuple(t[:, at : at + n] for t in (q, k, v, g))
        at += n
    maps = _summaries(call, split, runs, mistake)
    initial = x.get("initial_state")
    if initial is not None and mistake == "many ranks" and P > 2:
        initial = initial.detach().requires_grad_()
    if initial is not None and mistake != "initial gradient":
        initial = SumGradients.apply(initial, call.group)
    outs = []
    for i in own:
        begin = split.segments[i].start
        for piece in (p for p in split.pieces if p.segment == i):
            S = _entering(call, split, maps, piece, initial, mistake)
            part = tuple(t[:, piece.start - begin : piece.stop - begin] for t in runs[i])
            if mistake == "border twice" and not piece.first:
                S = part[3][:, 0].exp()[..., None, None] * S
            outs.append(read(*part, S)[0])
    o = torch.cat(outs, 1) if outs else v[:, :0]
    o = o + 0 * sum(
        t.sum() for t in (*maps[-1], *([] if initial is None else [initial]))
    )  # all ranks go backwards alike
    return o, _final(call, split, maps, initial, mistake)


def _summaries(call: Call, split: Split, runs: dict, mistake: str) -> list[tuple[Tensor, Tensor]]:
    """(decay, own state) of every piece of every segment, by one all-gather."""
    B, _, H, V = call.tensors["v"].shape
    K, out = call.tensors["q"].shape[-1], []
    for piece in split.pieces:
        s = split.segments[piece.segment]
        mine = piece.segment in runs
        if mine:
            q, k, v, g = (t[:, piece.start - s.start : piece.stop - s.start] for t in runs[piece.segment])
            if mistake == "last token" and s.stop - s.start < max(map(len, split.tokens)):
                q, k, v, g = (t[:, :-1] for t in (q, k, v, g))
            b, A = read(q, k, v, g, q.new_zeros(B, H, K, V))[1], g.sum(1).exp()
        else:
            zero = call.tensors["q"].sum() * 0
            b, A = zero.expand(B, H, K, V), zero.expand(B, H)
        if mistake == "cut":
            b, A = b.detach().requires_grad_(), A.detach().requires_grad_()
        if mistake == "no gate gradient":
            A = A.detach().requires_grad_()
        out.append(torch.cat([A.flatten(), b.flatten()]))
    owners = torch.tensor([split.segments[p.segment].owner for p in split.pieces])
    everyone = Gather.apply(torch.stack(out), call.group, mistake != "own gradient")
    rows = everyone[owners, torch.arange(len(owners))]
    return [(row[: B * H].view(B, H), row[B * H :].view(B, H, K, V)) for row in rows]


def _entering(call: Call, split: Split, maps: list, piece, initial: Tensor | None, mistake: str) -> Tensor:
    """The state that enters a piece: a fold over the pieces before it."""
    index = split.pieces.index(piece)
    S = torch.zeros_like(maps[0][1])
    row = slice(None) if call.cu_seqlens is None else slice(piece.document, piece.document + 1)
    start = index
    while not split.pieces[start].first:
        start -= 1
    if mistake == "leak":
        start = 0
    while mistake == "leak at borders" and start and begins_a_segment(split, start):
        start -= 1
        while not split.pieces[start].first:
            start -= 1
    if initial is not None and mistake != "no initial":
        S = S + initial[row]
    chain = list(range(start, index))
    if mistake == "rank order":
        order = sorted(range(len(split.pieces)), key=lambda i: (split.segments[split.pieces[i].segment].owner, i))
        chain = [] if piece.first else order[: order.index(index)]
    if mistake == "off by one":
        chain = chain[:-1]
    if mistake == "rank 2 takes rank 0's" and call.rank == 2:
        chain = [i for i in chain if split.pieces[i].segment == 0]
    if mistake == "neighbour" and chain:
        chain, S = chain[-1:], torch.zeros_like(S)
    if mistake == "nothing crosses" and chain:
        chain, S = [], torch.zeros_like(S)
    for i in chain:
        A, b = maps[i]
        S = S + b if mistake == "no decay" else A[..., None, None] * S + b
    return S


def _final(call: Call, split: Split, maps: list, initial: Tensor | None, mistake: str) -> Tensor | None:
    if not call.output_final_state:
        return None
    rows = []
    documents = range(1 if call.cu_seqlens is None else len(call.cu_seqlens) - 1)
    for n in documents:
        row = slice(None) if call.cu_seqlens is None else slice(n, n + 1)
        S = torch.zeros_like(maps[0][1]) if mistake == "no initial" else initial[row]
        for i, piece in enumerate(split.pieces):
            after = split.segments[piece.segment].owner > call.rank and mistake == "own final state"
            if piece.document == n and not after:
                S = maps[i][0][..., None, None] * S + maps[i][1]
        rows.append(S)
    final = torch.cat(rows)
    if mistake == "another document's":
        final = final.roll(1, 0)
    if mistake == "empty shard" and not len(split.tokens[call.rank]):
        final = final * 0
    if mistake == "final state twice":
        final = final + (call.size - 1) * (final - final.detach())
    return final


def attention(call: Call, mistake: str = "") -> Tensor:
    """Softmax attention with gathered keys."""
    x, P = call.tensors, call.size
    split = Split.of(call.kind, call.seq_len, P, call.cu_seqlens)
    mine = split.tokens[call.rank]
    longest = max(map(len, split.tokens))
    summed, heads = mistake != "own gradient", x["q"].shape[2] // x["k"].shape[2]

    def whole(t: Tensor) -> Tensor:
        padded = torch.cat([t, t.new_zeros(1, longest - t.shape[1], *t.shape[2:]).expand(t.shape[0], -1, -1, -1)], 1)
        parts = Gather.apply(padded, call.group, summed)
        rows = torch.cat([part[:, : len(tokens)] for part, tokens in zip(parts, split.tokens)], 1)
        return torch.empty_like(rows).index_copy(1, torch.cat(split.tokens), rows)

    repeat = (lambda t: t.repeat(1, 1, heads, 1)) if mistake == "heads" else (lambda t: t.repeat_interleave(heads, 2))
    k, v = repeat(whole(x["k"])), repeat(whole(x["v"]))
    at = torch.arange(call.seq_len)
    document = torch.searchsorted(torch.tensor((call.cu_seqlens or (0, call.seq_len))[1:]), at, right=True)
    seen = mine[:, None] >= at[None]
    if mistake == "future":
        seen = seen | True
    if mistake == "local places":
        local = torch.empty_like(at)
        for tokens in split.tokens:
            local[tokens] = torch.arange(len(tokens))
        seen = local[mine][:, None] >= local[None]
    if mistake != "leak":
        seen = seen & (document[mine][:, None] == document[None])
    if mistake == "one rank blind" and call.rank == 1:
        seen = seen & ~torch.isin(at, split.tokens[0])[None]
    scores = torch.einsum("bihd,bjhd->bhij", x["q"], k) * x["q"].shape[-1] ** -0.5
    weights = _merged(scores, seen, split, mistake)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def _merged(scores: Tensor, seen: Tensor, split: Split, mistake: str) -> Tensor:
    if mistake != "averaged":
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    of = [seen & torch.isin(torch.arange(seen.shape[1]), tokens)[None] for tokens in split.tokens]
    parts = [scores.masked_fill(~s, -torch.inf).softmax(-1).nan_to_num(0.0) for s in of]
    return torch.stack(parts).mean(0)
