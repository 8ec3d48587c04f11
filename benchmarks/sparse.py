"""Attention to chosen keys on a split sequence, beside all keys; and what a layout does to an indexer's load.

    torchrun --nproc-per-node 2 -m benchmarks.sparse --tokens 131072 --forms triton torch --limit 75 --out s.json

DeepSeek's widths (latents of 512 + 64), bf16, zigzag. Rows as they come, forward + backward of all ranks, milliseconds
and the peak of memory beside what the tensors take: chosen keys by each strategy and each form of the kernels, all
keys, and what a GPU takes for a sequence of its own of as many tokens ("alone": the ideal split). Then the lightning
indexer at 131,072 tokens under a contiguous and a zigzag layout. --limit: seconds after which no further row is begun.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from benchmarks.options import need_gpus
from ring_la.indexers import lightning_index

from .latents import V, draw, once_each

INDEXED = 131_072


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


def clock(limit: float) -> Callable[[], bool]:
    """Whether the ranks have been at it for longer than `limit` seconds, the same on all."""
    began = time.monotonic()

    def late() -> bool:
        spent = torch.tensor(time.monotonic() - began, device="cuda")
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return spent.item() > limit

    return late


def arms(
    cp: ring_la.ContextParallel, tokens: int, heads: int, S: int, forms: list[str], late: Callable[[], bool]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Milliseconds and memory of each way."""
    layout = cp.layout(tokens * cp.size, "zigzag")
    leaves = [t.requires_grad_() for t in draw(1, tokens, heads, cp.rank)]
    do = torch.randn(1, tokens, heads, V, device="cuda", dtype=torch.bfloat16)
    chosen, own = (choose(t, S) for t in (layout.tokens().cuda(), torch.arange(tokens, device="cuda")))

    def step(**how: object) -> None:
        torch.autograd.grad(ring_la.mla(*leaves, **how).o, leaves, do)

    ways: dict[str, Callable[[], None]] = {}
    for form in forms:
        ways[f"alone, {form}"] = partial(step, chosen=own, backend=form)
        for strategy in ("ring", "all_gather"):
            ways[f"{strategy}, {form}"] = partial(step, chosen=chosen, layout=layout, strategy=strategy, backend=form)
    ways["all keys"] = partial(step, layout=layout, form="expanded")
    for name, way in ways.items():
        if late():
            yield name, dict(ms="not begun: the limit")  # type: ignore[dict-item]
            continue
        if name != "all keys":
            way()  # compile
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        (ms,) = once_each([way])
        yield name, dict(ms=ms, GiB=(torch.cuda.max_memory_allocated() - held) / 2**30)


def loads(cp: ring_la.ContextParallel, late: Callable[[], bool]) -> Iterator[tuple[str, list[float]]]:
    """ms of the lightning indexer on each rank, by layout."""
    for kind in ("contiguous", "zigzag"):
        if late():
            return
        layout, T = cp.layout(INDEXED, kind), INDEXED // cp.size
        q, k = (torch.randn(1, T, *shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 128), (128,)))
        w = torch.rand(1, T, 4, device="cuda")
        lightning_index(q, k, w, 2048, layout=layout, backend="triton")
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        lightning_index(q, k, w, 2048, layout=layout, backend="triton")
        stop.record()
        torch.cuda.synchronize()
        mine = torch.tensor([start.elapsed_time(stop)], device="cuda")
        each = [torch.zeros_like(mine) for _ in range(cp.size)]
        dist.all_gather(each, mine)
        yield kind, [t.item() for t in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 262_144), ("heads", 16), ("chosen", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--parts", nargs="+", default=["ways", "loads"])
    parser.add_argument("--forms", nargs="+", default=["triton"], help="of the kernels for chosen keys")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which no row is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus(parser)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    cp = ring_la.ContextParallel(attention="ring")
    result: dict[str, dict] = {}
    late = clock(args.limit)
    parts = {
        "loads": partial(loads, cp, late),
        "ways": partial(arms, cp, args.tokens, args.heads, args.chosen, args.forms, late),
    }
    for name in args.parts:
        for way, found in parts[name]():
            result.setdefault(name, {})[way] = found
            if cp.rank == 0:
                print(name, way, json.dumps(found), flush=True)
                if args.out:  # as rows come: a run that is cut off still counts
                    args.out.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
