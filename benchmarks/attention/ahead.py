"""Kernels of Triton compiled before anything is timed, side by side in threads: the compiler leaves Python alone.

A kernel takes 2 to 3 s on one core, and a first row of `bench attention` has six: one forward and two backward of its
mask, and of the bound's. One after the other, a command with a limit was over before its first row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from ring_la.softmax.backends import AttentionBackend, QueryRows
from ring_la.softmax.backends.triton import TritonBackend
from ring_la.softmax.geometry import Pair, Tokens
from ring_la.softmax.merging import Gradients, Partial
from ring_la.softmax.scores import Scores

TOKENS = 256
"""No kernel is compiled for a length."""


def compile_ahead(kernels: Iterable[AttentionBackend], scores: Iterable[Scores], heads: tuple[int, int], K: int) -> int:
    """Every pass of these kernels, of those that are Triton's, under these scores (each beside those of a call that
    sees everything, as bounds are), of so many heads of queries and keys; returns how many passes that were."""
    several = {s._replace(left=None, right=None) for s in scores}.union(scores)
    passes = [one for b in kernels if isinstance(b, TritonBackend) for s in several for one in _passes(b, s, heads, K)]
    device = torch.cuda.current_device()

    def run(one: Callable[[], None]) -> None:
        torch.cuda.set_device(device)
        one()

    with ThreadPoolExecutor(max(1, len(passes))) as pool:
        for done in [pool.submit(run, one) for one in passes]:
            done.result()
    torch.cuda.synchronize()
    return len(passes)


def _passes(kernel: TritonBackend, scores: Scores, heads: tuple[int, int], K: int) -> list[Callable[[], None]]:
    """Forward and backward, each into nothing and beside an earlier block."""
    device = torch.device("cuda", torch.cuda.current_device())
    H, groups = heads
    q, k = (torch.zeros(1, TOKENS, h, K, device=device, dtype=torch.bfloat16) for h in (H, groups))
    tokens = Tokens.whole(TOKENS, device)
    pair, lse = Pair(tokens, tokens, scores.reach), torch.zeros(1, H, TOKENS, device=device)
    rows = QueryRows(q, q, q, lse, lse)

    def forward(before: bool) -> None:
        out = Partial(q.shape, q.dtype, device)
        if before:
            out.add(torch.zeros_like(q), torch.zeros_like(lse))
        kernel.forward(q, k, k, scores, pair, out)
        out.result()

    def backward(before: bool) -> None:
        grads = Gradients.of(q, k, k)
        if before:
            grads.dq.add(torch.zeros_like(q))
        kernel.backward(rows, k, k, scores, pair, grads)
        for x in (grads.dq, grads.dk, grads.dv):
            x.result(q.dtype)

    return [lambda way=way, before=before: way(before) for way in (forward, backward) for before in (False, True)]
