"""Attention over latents on a split sequence, by what travels: latents, or the keys and values made of them.

    torchrun --nproc-per-node 4 -m benchmarks.latents [--tokens 16384:16 65536:16 262144:8] [--out FILE.json]

A line for each pair of tokens a rank and heads: forward + backward of all ranks (ms, in turns), bytes that a rank's
copy engines send in it, and peak memory above the inputs. DeepSeek's widths: L 512, R 64, N 128, V 128; bf16, zigzag.
First both are compared with the fp64 reference at 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from benchmarks.options import join_gpus
from ring_la import reference
from ring_la.softmax.strategies import mailbox

from .attention.measure import milliseconds
from .errors import relative_error
from .rows import save
from .timing import elapsed, largest, peak

L, R, N, V = 512, 64, 128, 128
CHECKED = 2048

Step = Callable[..., Tensor]
Left = Callable[[], float]


def draw(B: int, T: int, H: int, seed: int) -> list[Tensor]:
    """q, latent, k_rope, w_uk, w_uv."""
    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device="cuda", dtype=torch.bfloat16)

    weights = [normal(H, width, L) / L**0.5 for width in (N, V)]
    return [normal(B, T, H, N + R), normal(B, T, L), normal(B, T, R), *weights]


def keys_travel(layout: ring_la.ShardedLayout) -> Step:
    def step(q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        k = (latent @ w_uk.flatten(0, 1).mT).unflatten(-1, (-1, N))
        k = torch.cat([k, k_rope[:, :, None].expand(-1, -1, k.shape[2], -1)], -1)
        return ring_la.attention(q, k, (latent @ w_uv.flatten(0, 1).mT).unflatten(-1, (-1, V)), layout=layout).o

    return step


def latents_travel(layout: ring_la.ShardedLayout) -> Step:
    return lambda *x: ring_la.mla(*x, layout=layout, form="expanded").o


ARMS = {"latents": latents_travel, "keys": keys_travel}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that this rank copies into other ranks' memory."""
    own, sent = mailbox.copy_rows, [0]

    def copy(into: Tensor, source: Tensor) -> None:
        sent[0] += source.nbytes
        own(into, source)

    mailbox.copy_rows = copy
    try:
        yield sent
    finally:
        mailbox.copy_rows = own


def check(cp: ring_la.ContextParallel) -> dict[str, dict[str, float]]:
    """Relative errors of both against fp64, and whether kernels could do it."""
    layout, x = cp.layout(CHECKED, "zigzag"), draw(1, CHECKED, 4, 1)
    do = torch.randn(1, CHECKED, 4, V, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    exact = [t.double().requires_grad_() for t in x]
    o = reference.mla(*exact).o
    want = [o, *torch.autograd.grad(o, exact, do.double())]
    found = {}
    for name, arm in ARMS.items():
        leaves = [(layout.shard(t) if i < 3 else t).clone().requires_grad_() for i, t in enumerate(x)]
        o = arm(layout)(*leaves)
        got = [o, *torch.autograd.grad(o, leaves, layout.shard(do).to(o.dtype))]
        whole = [layout.gather(t.detach()) for t in got[:4]]
        whole += [cp.comm.all_reduce(t.float()).wait() for t in got[4:]]
        names = ("o", "dq", "dlatent", "dk_rope", "dw_uk", "dw_uv")
        found[name] = {n: relative_error(a, b) for n, a, b in zip(names, whole, want)}
    return found


def total(step: Step, leaves: list[Tensor], do: Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(step(*leaves), leaves, do)


def row(cp: ring_la.ContextParallel, tokens: int, heads: int) -> dict[str, float]:
    """Times, bytes and memory of both arms."""
    layout = cp.layout(tokens * cp.size, "zigzag")
    leaves = [t.requires_grad_() for t in draw(1, tokens, heads, cp.rank)]
    do = torch.randn(1, tokens, heads, V, device="cuda", dtype=torch.bfloat16)
    steps = {n: partial(total, arm(layout), leaves, do) for n, arm in ARMS.items()}
    out: dict[str, float] = dict(tokens=tokens, heads=heads)
    for name, step in steps.items():
        with counted() as sent:
            out[f"{name}_GiB"] = peak(step)
        out[f"{name}_bytes"] = sent[0]
    few = tokens > 100_000  # seconds a call
    times = once_each([*steps.values()]) if few else milliseconds([*steps.values()])
    return out | {f"{name}_ms": t for name, t in zip(steps, times)}


def once_each(steps: list[Callable[[], object]]) -> list[float]:
    """ms of one call of each, of the slowest rank."""
    return largest([together(step) for step in steps])


def together(step: Callable[[], object]) -> float:
    """ms of one call on this rank, which all begin behind a barrier of their hosts: calls of seconds, so that devices
    need not start together."""
    torch.cuda.synchronize()
    dist.barrier()
    return elapsed(step)


def clock(limit: float) -> Left:
    """Seconds of `limit` that are left, the same on all ranks."""
    began = time.monotonic()

    def left() -> float:
        return limit - largest([time.monotonic() - began])[0]

    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", default=["16384:16", "65536:16", "262144:8"], help="tokens a rank:heads")
    parser.add_argument("--limit", type=float, default=100, help="seconds after which no row is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    join_gpus(parser)
    cp = ring_la.ContextParallel(attention="ring")
    result = {"errors": check(cp), "rows": []}
    if cp.rank == 0:
        print(json.dumps(result["errors"]), flush=True)
    left = clock(args.limit)
    for pair in args.tokens:
        if left() < 0:
            break
        result["rows"].append(row(cp, *map(int, pair.split(":"))))
        if cp.rank == 0:
            print(json.dumps(result["rows"][-1]), flush=True)
            save(args.out, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
