"""Native sparse attention, dense: a loop over documents, queries and heads, with every score formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ring_la.outputs import NSAOutput
from ring_la.reference.arguments import documents, expect_local, expect_shape


def nsa(
    q: Tensor,
    k: tuple[Tensor, Tensor, Tensor],
    v: tuple[Tensor, Tensor, Tensor],
    gates: Tensor,
    compress_k: Callable[[Tensor, Tensor], Tensor],
    compress_v: Callable[[Tensor, Tensor], Tensor],
    *,
    length: int = 32,
    stride: int = 16,
    block: int = 64,
    topk: int = 16,
    initial: int = 1,
    local: int = 2,
    window: int = 512,
    scale: float | None = None,
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: str | None = None,
) -> NSAOutput:
    """The three branches of arXiv 2502.11089, eq. 5 to 12, one query at a time.

    q [B, Tq, H, K]; k three [B, T, Hk, K]; v three [B, T, Hk, V]; gates [B, Tq, H, 3]; compress_k and compress_v of
    blocks [B, N, length, Hk, D] and positions [N]. Returns `NSAOutput(o [B, Tq, H, V] in float64, chosen)`.
    """
    expect_local(layout, backend)
    expect_shape("q", q, B=None, Tq=None, H=None, K=None)
    (B, Tq, H, K), (T, Hk) = q.shape, k[0].shape[1:3]
    expect_shape("gates", gates, B=B, Tq=Tq, H=H, branches=3)
    factor, group = K**-0.5 if scale is None else scale, H // Hk
    compress, outputs = (compress_k, compress_v), {}
    chosen = torch.full((B, Tq, Hk, topk), -1, dtype=torch.int32)
    for _, rows, tokens in documents(B, T, cu_seqlens):
        begin, size = tokens.start, tokens.stop - tokens.start
        starts = [a for a in range(0, size, stride) if a + length <= size]
        few = [_compressed(x[rows, tokens].double(), f, starts, length) for x, f in zip((k[0], v[0]), compress)]
        for b in range(*rows.indices(B)):
            for t in range(max(0, T - Tq - begin), size):
                at, full = begin + t - (T - Tq), sum(a + length <= t + 1 for a in starts)
                for g in range(Hk):
                    heads = range(g * group, (g + 1) * group)
                    weight: dict[int, float] = {}
                    for h in heads:
                        o, p = q.new_zeros(v[0].shape[3]).double(), q.new_zeros(0)
                        if full:
                            key, value = (x[b - rows.indices(B)[0], :full, g].double() for x in few)
                            o, p = _attended(factor * key @ q[b, at, h].double(), value)
                        outputs[b, at, h] = gates[b, at, h, 0].double() * o
                        _weigh(weight, p, starts, length, stride, block)
                    picked = _picked(weight, t // block, initial, local)[:topk]
                    chosen[b, at, g, : len(picked)] = torch.tensor(picked) * block + begin
                    read = [begin + j for n in sorted(picked) for j in range(n * block, (n + 1) * block) if j <= t]
                    near = list(range(begin + max(0, t - window), begin + t + 1))
                    for branch, seen in ((1, read), (2, near)):
                        for h in heads:
                            key, value = k[branch][b, seen, g].double(), v[branch][b, seen, g].double()
                            o, _ = _attended(factor * key @ q[b, at, h].double(), value)
                            outputs[b, at, h] = outputs[b, at, h] + gates[b, at, h, branch].double() * o
    each = [outputs[b, t, h] for b in range(B) for t in range(Tq) for h in range(H)]
    return NSAOutput(torch.stack(each).view(B, Tq, H, -1), chosen.to(q.device))


def _attended(s: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What softmax of scores [n] gives of values [n, V], and the softmax."""
    p = torch.softmax(s, 0)
    return p @ value, p


def _compressed(x: Tensor, compress: Callable[[Tensor, Tensor], Tensor], starts: list[int], length: int) -> Tensor:
    """One token of each block of a document's tokens [B, n, Hk, D]: [B, blocks, Hk, D']."""
    blocks = [x[:, a : a + length] for a in starts]
    return compress(torch.stack(blocks, 1), torch.tensor(starts)) if blocks else x[:, :0]


def _weigh(weight: dict[int, float], p: Tensor, starts: list[int], length: int, stride: int, block: int) -> None:
    """What compressed blocks are given goes to the blocks in which the strides of their tokens begin."""
    for start, part in zip(starts, p):
        for stretch in range(start, start + length, stride):
            weight[stretch // block] = weight.get(stretch // block, 0.0) + float(part.detach())


def _picked(weight: dict[int, float], own: int, initial: int, local: int) -> list[int]:
    """A query's blocks up to its own, those first that are always read, then by what compressed keys gave them."""
    always = [j for j in range(own + 1) if j < initial or j > own - local]
    return always + sorted(set(range(own + 1)) - set(always), key=lambda j: -weight.get(j, 0.0))
