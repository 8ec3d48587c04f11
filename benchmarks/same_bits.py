"""What the same bits cost: a step of a hybrid model with and without ``deterministic=True``.

python -m benchmarks.same_bits --tokens 2048 --dim 256
torchrun --nproc-per-node 2 -m benchmarks.same_bits
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from ring_la import ContextParallel
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import sum_gradients


def seconds(deterministic: bool, tokens: int, dim: int, repeats: int) -> list[float]:
    """Of each step, forward, backward and the sum of the gradients over the ranks."""
    torch.manual_seed(0)
    cp = ContextParallel(deterministic=deterministic)
    model = HybridLM(HybridConfig(1024, dim, ["gdn", "gdn", "gdn", "attention"], dim // 64)).to(cp.device)
    layout = cp.layout(tokens, "zigzag")
    ids = layout.shard(torch.randint(0, 1024, (1, tokens), device=cp.device))
    out = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        model.zero_grad()
        model.loss(ids, layout=layout).backward()
        sum_gradients(model.parameters(), cp)
        float(model.norm.weight.grad.sum())  # waits for a GPU
        out.append(time.perf_counter() - begin)
    return out[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 2048), ("dim", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, same = (statistics.median(seconds(d, args.tokens, args.dim, args.repeats)) for d in (False, True))
    if dist.get_rank() == 0:
        print(
            f"{args.tokens} tokens, dim {args.dim}, {dist.get_world_size()} ranks, {torch.get_num_threads()} threads:"
        )
        print(f"  {plain:.3f} s a step; deterministic {same:.3f} s, {same / plain:.2f} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
