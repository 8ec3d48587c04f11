"""Train a tiny hybrid whose MLPs are mixtures of experts, on one process or with every sequence split over ranks.

    python examples/moe_hybrid.py
    torchrun --standalone --nproc_per_node 4 examples/moe_hybrid.py            # the same losses

Every step is one sequence of bytes of Python's standard library. The router's statistics and its auxiliary loss are
over the whole sequence, so the split changes nothing but who computes what. It computes in fp64: picking experts is
discontinuous, so that rounding errors, which the split does change, become other choices after some steps of training,
and in fp32 the printed losses would part sooner. At the end: how often each expert is picked in each layer, over text
the training did not see.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ring_la import ContextParallel
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import Routing


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    cp = join()
    say = print if cp is None or cp.rank == 0 else (lambda *_: None)
    config = HybridConfig(
        vocab_size=256,
        dim=args.dim,
        layers=["gdn", "gdn", "attention"],
        num_heads=2,
        mlp="moe",
        mlp_dim=args.dim,
        mlp_options={
            "experts": args.experts,
            "top_k": args.top_k,
            "shared_hidden": args.dim,
            "shared_gate": True,
            "balance_coef": args.balance,
            "z_coef": 1e-3,
        },
    )
    model = HybridLM(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.95))
    layout = cp.layout(args.seq_len) if cp else None
    text = read_text()
    train, held_out = text[: -args.seq_len], text[-args.seq_len :]
    ranks = f"split over {cp.size} ranks" if cp else "on one process"
    say(f"{args.seq_len} tokens a step, {ranks}; {args.top_k} of {args.experts} experts a token, and a shared one")

    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        begin = int(torch.randint(len(train) - args.seq_len, (1,), generator=generator))
        loss, routings = train_step(model, optimizer, train[begin : begin + args.seq_len][None], cp, layout)
        if step % 10 == 0 or step == args.steps - 1:
            busiest = max(float(r.load.max()) for r in routings)
            say(f"step {step:3d}   loss {loss:.5f}   busiest expert {busiest:.0%} of its layer's assignments")

    routings = []
    with torch.no_grad():
        ids = held_out[None]
        model(layout.shard(ids) if layout else ids, layout=layout, routings=routings)
    say("\nshare of each expert, in percent (all alike would be " + f"{100 / args.experts:.1f}):")
    for i, (name, routing) in enumerate(zip(config.layers, routings)):
        say(f"layer {i}, after {name:9s} " + " ".join(f"{100 * share:5.1f}" for share in routing.load.tolist()))
    if cp:
        dist.destroy_process_group()


def train_step(
    model: HybridLM, optimizer: torch.optim.Optimizer, ids: Tensor, cp: ContextParallel | None, layout
) -> tuple[float, list[Routing]]:
    """One step; the loss of the whole sequence, auxiliary losses included, and what the routers did."""
    routings: list[Routing] = []
    loss = model.loss(layout.shard(ids) if layout else ids, layout=layout, routings=routings)
    loss.backward()
    loss = loss.detach()
    if cp:  # the parts of loss and gradients add up to those of one process
        loss = cp.comm.all_reduce(loss).wait()
        for p in model.parameters():
            p.grad = cp.comm.all_reduce(p.grad).wait()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), routings


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--balance", type=float, default=0.02, help="coefficient of the load-balance loss")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def join() -> ContextParallel | None:
    """This rank of torchrun's group; None where there is none."""
    torch.set_num_threads(1)  # products this small gain nothing from more
    if "RANK" not in os.environ:
        return None
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return ContextParallel()


def read_text(limit: int = 1 << 20) -> Tensor:
    """A token a byte."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.tensor(list(b"".join(f.read_bytes() for f in files)[:limit]))


if __name__ == "__main__":
    main()
