"""A module of your own on a split sequence: it learns that the second half of a sequence repeats the first.

    torchrun --standalone --nproc_per_node 4 examples/own_module.py
    python examples/own_module.py      # without torchrun one process has all tokens: the same losses, to rounding

Only `short_conv` and `gated_delta_rule` look at other tokens, so only they are given the layout. All else works token
by token. A word alone says nothing of the next one: without the memory the loss cannot fall below ln 16 = 2.77.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ring_la
from ring_la.training import sum_gradients

WORDS, DIM, HEADS = 16, 64, 2


class Memory(nn.Module):
    """A state that tokens write to and read from: ``[B, T_local, DIM]`` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 2 * HEADS), nn.Linear(DIM, DIM)
        self.taps = nn.Parameter(torch.randn(3 * DIM, 4) / 2)

    def forward(self, x: Tensor, layout: ring_la.ShardedLayout) -> Tensor:
        mixed = ring_la.short_conv(self.qkv(x), self.taps, activation="silu", layout=layout).o
        q, k, v = mixed.unflatten(-1, (3, HEADS, -1)).unbind(-3)  # [B, T_local, HEADS, DIM / HEADS]
        decay, beta = self.gates(x).chunk(2, -1)
        gates = F.logsigmoid(decay + 4), beta.sigmoid()  # a log-decay below 0, and how much of a slot is rewritten
        read = ring_la.gated_delta_rule(q, k, v, *gates, use_qk_l2norm=True, layout=layout).o
        return x + self.out(read.flatten(-2))


def main(steps: int = 100) -> list[float]:
    job = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **job)
    torch.set_num_threads(1)  # products this small gain nothing from more
    torch.manual_seed(0)  # the same weights and data on every rank
    cp = ring_la.ContextParallel(scan="ring")
    layout = cp.layout(2 * WORDS)
    model = nn.ModuleList([nn.Embedding(WORDS, DIM), Memory(), nn.Linear(DIM, WORDS)])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-2), []
    for step in range(steps):
        ids = torch.rand(16, WORDS).argsort(1).repeat(1, 2)  # every word once, then again in the same order
        mine = layout.shard(ids)  # this rank's tokens
        logits = model[2](model[1](model[0](mine), layout))
        wrong = F.cross_entropy(logits.flatten(0, 1), layout.targets(mine).flatten(), reduction="sum")
        loss = wrong / (ids.numel() - len(ids))  # divided by all targets: the ranks' parts add up to the loss
        loss.backward()
        sum_gradients(model.parameters(), cp)  # and so do their gradients
        optimizer.step()
        optimizer.zero_grad()
        losses.append(cp.comm.all_reduce(loss.detach()).wait().item())
        if cp.rank == 0 and step % 10 == 9:
            print(f"step {step + 1:3d}   loss {losses[-1]:.4f}   on {cp.size} rank(s)")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
