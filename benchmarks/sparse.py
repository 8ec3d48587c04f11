"""Attention to chosen keys on a split sequence, beside all keys and the ideal split; and what a layout does to an
indexer's load.

    torchrun --nproc-per-node 4 -m benchmarks.sparse --tokens 262144 --strategies auto ring --limit 100 --out s.json

DeepSeek's widths (latents of 512 + 64), bf16, zigzag; --tokens a rank. Rows as they come, of the slowest rank, in
milliseconds, with the peak of memory beside what the tensors take and what a rank sends by messages (a ring that copies
sends none so). First errors beside PyTorch's form in fp64, 4,096 tokens. Then:

    auto, FORM          2,048 chosen keys, forward + backward, latents as `auto` has them come; also --strategies
    ideal, FORM         the same queries of each rank with all latents at hand: no exchange
    index …             the choice: a lightning indexer of 4 heads of 128, also with products of 8 bits; and its loss,
                        with gradients, a first call of that length and a second, and one that is given attention's lse
    all keys …          expanded from latents under way, of a quarter of the tokens; then of all, forward + backward,
                        where 17 times what the quarter took is left of --limit

--parts loads: the indexer at 131,072 tokens under a contiguous and a zigzag layout. --limit: seconds after which no row
is begun, from the start of the ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from benchmarks.options import join_gpus
from ring_la.indexers import lightning_index, lightning_loss
from ring_la.softmax.backends import latents

from .errors import relative_error
from .latents import L, Left, N, R, V, clock, draw, once_each, together
from .rows import save

INDEXED, CHECKED, COMPILED = 131_072, 4096, 65_536
LOSSES = ("triton",)
Row = dict[str, Any]


def choose(places: Tensor, S: int) -> Tensor:
    """S tokens spread over those up to each place, int32 ``[1, T, 1, S]``; all of them where there are fewer."""
    rng = torch.Generator("cuda").manual_seed(0)
    slots, out = torch.arange(S, device="cuda"), []
    for t in places.split(8192):
        count = t[:, None] + 1
        spread = (slots + torch.rand(len(t), S, generator=rng, device="cuda")) * (count / S)
        few = torch.where(slots < count, slots, -1)
        out.append(torch.where(count > S, spread.long().clamp(max=t[:, None]), few).int())
    return torch.cat(out)[None, :, None]


def check(cp: ring_la.ContextParallel, forms: list[str]) -> Iterator[tuple[str, Row]]:
    """Relative errors of o and all gradients of each form, split and some queries at a time, beside PyTorch's form on
    the whole in fp64."""
    layout, x, S = cp.layout(CHECKED, "zigzag"), draw(1, CHECKED, 16, 1), 256
    do = torch.randn(1, CHECKED, 16, V, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    whole = choose(torch.arange(CHECKED, device="cuda"), S)
    mine = whole[:, layout.tokens().cuda()]
    exact = [t.double().requires_grad_() for t in x]
    o = ring_la.mla(*exact, chosen=whole, backend="torch").o
    want = [o.detach(), *torch.autograd.grad(o, exact, do.double())]
    for form, strategy in product(forms, ("ring", "all_gather")):
        leaves = [(layout.shard(t) if i < 3 else t).clone().requires_grad_() for i, t in enumerate(x)]
        with patch.object(latents, "AT_ONCE", 1000):
            o = ring_la.mla(*leaves, chosen=mine, layout=layout, backend=form, strategy=strategy).o
            got = [o, *torch.autograd.grad(o, leaves, layout.shard(do).to(o.dtype))]
        all_of = [layout.gather(t.detach()) for t in got[:4]]
        all_of += [cp.comm.all_reduce(t.float()).wait() for t in got[4:]]
        names = ("o", "dq", "dlatent", "dk_rope", "dw_uk", "dw_uv")
        yield (
            f"{strategy}, {form}",
            {n: relative_error(a, b) for n, a, b in zip(names, all_of, want)},
        )


def ways(cp: ring_la.ContextParallel, args: argparse.Namespace, left: Left) -> Iterator[tuple[str, Row]]:
    """Milliseconds and memory of each way."""
    forms, layout = args.forms, cp.layout(args.tokens * cp.size, "zigzag")
    chosen = choose(layout.tokens().cuda(), args.chosen)
    for strategy in args.strategies:
        for form in forms:
            step = attending(cp, layout, args, chosen=chosen, backend=form, strategy=strategy)
            yield row(cp, f"{strategy}, {form}", step, left, args.warm)
            if cp.size > 1 and strategy == args.strategies[0]:
                yield row(cp, f"ideal, {form}", at_hand(cp, args, chosen, form), left, args.warm)
    yield from indexed(cp, layout, args, chosen, left)
    del chosen
    quarter = cp.layout(args.tokens // 4 * cp.size, "zigzag")
    name, one = row(cp, f"all keys of {quarter.seq_len}", attending(cp, quarter, args, form="expanded"), left)
    yield name, one
    enough = 17e-3 * one["ms"] if isinstance(one["ms"], float) else 1e9
    step = attending(cp, layout, args, form="expanded")
    yield row(cp, f"all keys of {layout.seq_len}", step, lambda: left() - enough, 0)


def indexed(
    cp: ring_la.ContextParallel, layout: ring_la.ShardedLayout, args: argparse.Namespace, chosen: Tensor, left: Left
) -> Iterator[tuple[str, Row]]:
    """Rows of the choice and of its loss."""
    few = cp.layout(COMPILED, "zigzag")  # compiles: lists are as long as of all tokens
    of_few = choose(few.tokens().cuda(), args.chosen)
    for step in (indexing(few), indexing(few, fp8=True), *(learning(few, args.heads, of_few, b) for b in LOSSES)):
        step()
    yield row(cp, "index", indexing(layout), left)
    yield row(cp, "index, 8 bits", indexing(layout, fp8=True), left)
    for backend in LOSSES:
        step = learning(layout, args.heads, chosen, backend)
        for call in ("first", "second"):
            yield row(cp, f"index, its loss, {backend}, {call} call", step, left, 0)
        step = learning(layout, args.heads, chosen, backend, attention_lse=lse_like(layout, args.heads))
        yield row(cp, f"index, its loss, {backend}, attention's lse given", step, left)


def row(cp: ring_la.ContextParallel, name: str, step: Callable[[], None], left: Left, warm: int = 1) -> tuple[str, Row]:
    """One call, after `warm` others; which are not made where the time is over."""
    if left() < 0:
        return name, dict(ms="not begun: the limit")
    for _ in range(warm):
        step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held, sent = torch.cuda.memory_allocated(), cp.comm.bytes_sent
    (ms,) = once_each([step])
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    return name, dict(ms=ms, GiB=peak, GB_by_messages=(cp.comm.bytes_sent - sent) / 1e9)


def attending(
    cp: ring_la.ContextParallel, layout: ring_la.ShardedLayout, args: argparse.Namespace, **how: Any
) -> Callable[[], None]:
    """`mla` over a layout, forward and backward."""
    x = [t.requires_grad_() for t in draw(1, layout.local_length, args.heads, cp.rank)]

    def step() -> None:
        o = ring_la.mla(*x, layout=layout, **how).o
        torch.autograd.grad(o, x, o.detach())

    return step


def at_hand(cp: ring_la.ContextParallel, args: argparse.Namespace, chosen: Tensor, form: str) -> Callable[[], None]:
    """This rank's queries, with the latents of all ranks: what they choose stands before them, so nothing is masked."""
    q, latent, k_rope, *weights = draw(1, args.tokens, args.heads, cp.rank)
    latent, k_rope = (t.repeat(1, cp.size, 1) for t in (latent, k_rope))
    x = [t.requires_grad_() for t in (q, latent, k_rope, *weights)]

    def step() -> None:
        o = ring_la.mla(*x, chosen=chosen, backend=form, causal=False).o
        torch.autograd.grad(o, x, o.detach())

    return step


def indexing(layout: ring_la.ShardedLayout, **how: Any) -> Callable[[], None]:
    """An indexer's choice."""
    shapes = ((4, 128), (128,), (4,))
    q, k, w = (torch.randn(1, layout.local_length, *s, device="cuda", dtype=torch.bfloat16) for s in shapes)

    def step() -> None:
        lightning_index(q, k, w, 2048, layout=layout, **how)

    return step


def lse_like(layout: ring_la.ShardedLayout, heads: int) -> Tensor:
    """What attention might give."""
    return torch.full((1, heads, layout.local_length), 8.0, device="cuda")


def learning(layout: ring_la.ShardedLayout, heads: int, chosen: Tensor, backend: str, **how: Any) -> Callable[[], None]:
    """An indexer's loss with its gradients, of queries taken to the latents."""
    how |= dict(layout=layout, scale=(N + R) ** -0.5, backend=backend)
    shapes = ((4, 128), (128,), (4,), (heads, L + R), (1, L + R))
    x = [torch.randn(1, layout.local_length, *s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    index = [t.requires_grad_() for t in x[:3]]

    def step() -> None:
        loss = lightning_loss(*index, chosen, *x[3:], **how)
        torch.autograd.grad(loss, index)

    return step


def loads(cp: ring_la.ContextParallel, left: Left) -> Iterator[tuple[str, list[float]]]:
    """ms of the lightning indexer on each rank, by layout."""
    for kind in ("contiguous", "zigzag"):
        if left() < 0:
            return
        layout, T = cp.layout(INDEXED, kind), INDEXED // cp.size
        q, k = (torch.randn(1, T, *shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 128), (128,)))
        w = torch.rand(1, T, 4, device="cuda")
        call = partial(lightning_index, q, k, w, 2048, layout=layout, backend="triton")
        call()
        mine = torch.tensor([together(call)], device="cuda")
        each = [torch.zeros_like(mine) for _ in range(cp.size)]
        dist.all_gather(each, mine)
        yield kind, [t.item() for t in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 524_288), ("heads", 16), ("chosen", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--parts", nargs="+", default=["check", "ways", "loads"])
    parser.add_argument("--forms", nargs="+", default=["triton_sorted"], help="of the kernels for chosen keys")
    parser.add_argument("--warm", type=int, default=1, help="calls before the one that counts, of chosen keys")
    parser.add_argument("--strategies", nargs="+", default=["auto"], help="of chosen keys: auto, ring, all_gather")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which no row is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    join_gpus(parser)
    cp = ring_la.ContextParallel(attention="ring")
    result: dict[str, dict] = {}
    began = time.monotonic()
    left = clock(args.limit)
    parts = {
        "check": partial(check, cp, args.forms),
        "loads": partial(loads, cp, left),
        "ways": partial(ways, cp, args, left),
    }
    for name in args.parts:
        for way, found in parts[name]():
            result.setdefault(name, {})[way] = found
            if cp.rank == 0:
                print(name, way, json.dumps(found), f"{time.monotonic() - began:.0f} s", flush=True)
                save(args.out, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
