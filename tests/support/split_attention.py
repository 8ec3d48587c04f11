"""Split attention beside the whole one, by every strategy and layout."""

from __future__ import annotations

import torch

from ring_la.softmax import attention
from tests.support.attention_cases import error, finite

STRATEGIES = ("ring", "all_gather", "ulysses")
KINDS = ("contiguous", "zigzag", "striped")


def compare(layout, case, want, strategy: str, dtype=torch.float64, **keywords) -> dict[str, float]:
    """Relative errors of one call under a layout, of this rank's part of everything."""
    keys = keywords.get("kv_layout", layout)
    split = {"q": layout, "k": keys, "v": keys, "o": layout, "dq": layout, "dk": keys, "dv": keys}
    local = {n: (split[n].shard(t) if n in split else t) for n, t in case.tensors.items()}
    local = {n: t.to(dtype).detach().clone().requires_grad_() for n, t in local.items()}
    out = attention(**local, **case.keywords, layout=layout, strategy=strategy, **keywords)
    loss = (out.o * layout.shard(case.do)).sum() + (finite(out.lse) * layout.shard(case.dlse, dim=2)).sum()
    grads = {f"d{n}": g for n, g in zip(local, torch.autograd.grad(loss, list(local.values())))}
    got = {"o": out.o, "lse": out.lse} | {
        n: g if n[1:] in split else layout.cp.comm.all_reduce(g).wait() for n, g in grads.items()
    }
    parts = {n: split[n].shard(t) if n in split else t for n, t in want.items()}
    parts["lse"] = layout.shard(want["lse"], dim=2)
    assert all(g.dtype == local[n[1:]].dtype for n, g in grads.items())
    return {n: error(g, parts[n]) for n, g in got.items()}
