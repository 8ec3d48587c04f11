"""Calls of `mla`, their dense fp64 truth, and a split call beside it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

import ring_la
from ring_la import reference
from tests.support.attention_cases import DOCUMENTS, Case, error, finite

HEADS, N, R, V, L = 3, 6, 4, 5, 12

FEATURES: dict[str, dict] = {
    "causal": dict(),
    "full": dict(causal=False, scale=0.3),
    "all": dict(window=(20, -1), softcap=2.0, sinks=True, dlse=True),
}
"""name: the keywords of a call, and how to draw its tensors."""


@cache
def draw(documents: str, feature: str, key_tokens: int | None = None) -> Case:
    """The tensors of a call, fp64, the same in every process."""
    T, cu = DOCUMENTS[documents]
    keywords, rng = dict(FEATURES[feature]), torch.Generator().manual_seed(len(feature) + T)
    B, Tk = 2 if cu is None else 1, key_tokens or T

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    tensors = dict(q=normal(B, T, HEADS, N + R), latent=normal(B, Tk, L), k_rope=normal(B, Tk, R))
    tensors |= dict(w_uk=normal(HEADS, N, L) / L**0.5, w_uv=normal(HEADS, V, L) / L**0.5)
    if keywords.pop("sinks", False):
        tensors["sinks"] = normal(HEADS)
    dlse = normal(B, HEADS, T) * float(keywords.pop("dlse", False))
    return Case(tensors, keywords, normal(B, T, HEADS, V), dlse)


@cache
def truth(documents: str, feature: str, *more) -> dict[str, Tensor]:
    """o, lse and every gradient of a case on one device, by the dense reference."""
    return run(reference.mla, draw(documents, feature, *more), cu_seqlens=DOCUMENTS[documents][1])


def run(function, case: Case, **keywords) -> dict[str, Tensor]:
    """o, lse and every gradient of a call on one device."""
    leaves = {n: t.clone().requires_grad_() for n, t in case.tensors.items()}
    out = function(**leaves, **case.keywords, **keywords)
    loss = (out.o * case.do).sum() + (finite(out.lse) * case.dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(o=out.o.detach(), lse=out.lse.detach()) | {f"d{n}": g for n, g in zip(leaves, grads)}


def compare(layout, case: Case, want: dict[str, Tensor], dtype=torch.float64, **keywords) -> dict[str, float]:
    """Relative errors of one call under a layout, of this rank's part of everything."""
    keys = keywords.get("kv_layout", layout)
    split = dict(q=layout, latent=keys, k_rope=keys)
    split |= {f"d{n}": x for n, x in split.items()} | {"o": layout}
    local = {n: (split[n].shard(t) if n in split else t) for n, t in case.tensors.items()}
    local = {n: t.to(dtype).detach().clone().requires_grad_() for n, t in local.items()}
    out = ring_la.mla(**local, **case.keywords, layout=layout, output_latents=True, **keywords)
    loss = (out.o * layout.shard(case.do)).sum() + (finite(out.lse) * layout.shard(case.dlse, dim=2)).sum()
    grads = {f"d{n}": g for n, g in zip(local, torch.autograd.grad(loss, list(local.values())))}
    got = {"o": out.o, "lse": out.lse, "latents": out.latents}
    got |= {n: g if n in split else layout.cp.comm.all_reduce(g).wait() for n, g in grads.items()}
    parts = {n: split[n].shard(t) if n in split else t for n, t in want.items()}
    parts["lse"] = layout.shard(want["lse"], dim=2)
    parts["latents"] = torch.cat([case.tensors["latent"], case.tensors["k_rope"]], -1).to(dtype)
    assert all(g.dtype == dtype for g in grads.values())
    return {n: error(g, parts[n]) for n, g in got.items()}
