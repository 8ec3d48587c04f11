"""Calls whose ranks exchange states among the Triton kernels' own launches, beside one device in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

import ring_la
from tests.support.recurrence_cases import make_inputs

LAYOUTS = {
    "contiguous": ("contiguous", 1, None),
    "zigzag": ("zigzag", 1, None),
    "rows": ("contiguous", 2, None),
    "folded": ("zigzag", 2, None),
    "documents": ("zigzag", 1, (0, 20, 119, 132)),  # borders inside the first and the last segment, a document over all
    "edges": ("zigzag", 1, (0, 20, 99, 132)),  # one where a segment ends
}
"""Layout, rows of the batch, where documents start and end in 132 tokens."""
SEGMENT = 33
"""Tokens of a segment: the kernels cut it in two."""


def ended(name: str, x: dict[str, Tensor], S0: Tensor | None, do: Tensor, dS: Tensor | None, **where) -> dict:
    """o, the final state and every gradient, by name."""
    leaves = {n: t.clone().requires_grad_() for n, t in (x | ({} if S0 is None else {"initial_state": S0})).items()}
    out = getattr(ring_la, name)(**leaves, output_final_state=dS is not None, **where)
    outs, given = ([out.o], [do]) if dS is None else ([*out], [do, dS])
    grads = torch.autograd.grad(outs, list(leaves.values()), given)
    return {"o": out.o.detach(), "final_state": out.final_state} | dict(zip(leaves, grads))


def errors(
    cp: ring_la.ContextParallel, name: str, kind: str, scale: int = 1, dtype: torch.dtype = torch.float32, **shape: int
) -> dict[str, float]:
    """Errors of a split call, with states once and without often enough to be replayed, against one device in fp64; on
    segments `scale` times as long."""
    layout_kind, B, documents = LAYOUTS[kind]
    T = SEGMENT * cp.size * (2 if layout_kind == "zigzag" else 1) * scale
    documents = None if documents is None else [n * T // documents[-1] for n in documents]
    layout, device = cp.layout(T, layout_kind, documents), cp.device
    x = make_inputs(name, B=B, T=T, **shape, dtype=torch.float32, seed=5)
    x = {n: t.detach().to(dtype if n in ("q", "k", "v") else torch.float32) for n, t in x.items()}
    draw = torch.Generator().manual_seed(3)
    N, H, K, V = B if documents is None else len(documents) - 1, x["v"].shape[2], x["q"].shape[3], x["v"].shape[3]
    states, do = torch.randn(2, N, H, K, V, generator=draw), torch.randn(x["v"].shape, generator=draw).to(dtype)
    x, states, do = {n: t.to(device) for n, t in x.items()}, states.to(device), do.to(device)
    wide, mine = {n: t.double() for n, t in x.items()}, {n: layout.shard(t) for n, t in x.items()}
    cu, worst = None if documents is None else torch.tensor(documents, device=device), {}
    for (S0, dS), times in ((states, 1), ((None, None), 4)):
        ends = (None, None) if dS is None else (S0.double(), dS.double())
        want = ended(name, wide, ends[0], do.double(), ends[1], cu_seqlens=cu, backend="torch")
        each = None if dS is None else dS / cp.size  # the sum over ranks counts
        for _ in range(times):
            got = ended(name, mine, S0, layout.shard(do), each, layout=layout)
            for n, true in want.items():
                if true is not None:
                    true = true if n in ("final_state", "initial_state") else layout.shard(true)
                    worst[n] = max(worst.get(n, 0.0), ((got[n] - true).norm() / true.norm()).item())
    return worst
