"""Calls whose queries choose their keys, their truth by a loop, and a split call beside it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

import ring_la
from ring_la import reference
from tests.support.attention_cases import Case, error, finite

T, CU = 29, (0, 5, 5, 16, 17, 29)

FEATURES: dict[str, dict] = {
    "tokens": dict(choices=9, per_head=False),
    "blocks of each head": dict(choices=3, block=5, per_head=True, sinks=True, dlse=True),
    "latents": dict(choices=9, per_head=False, latent=True, sinks=True, dlse=True),
    "window": dict(choices=6, block=2, per_head=False, causal=False, window=(8, 3)),
}
"""name: the keywords of a call, and how to draw its tensors."""

SPLIT = ("q", "k", "v", "latent", "k_rope", "chosen")


@cache
def draw(feature: str, packed: bool) -> Case:
    """The tensors of a call, fp64, the same in every process. Some choices are nothing, or cannot be seen."""
    keywords, rng = dict(FEATURES[feature]), torch.Generator().manual_seed(len(feature))
    B, H, Hk, K, V = 1 if packed else 2, 4, 2, 8, 6

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    if latent := keywords.pop("latent", False):
        tensors = dict(q=normal(B, T, H, 10), latent=normal(B, T, 16), k_rope=normal(B, T, 4))
        tensors |= dict(w_uk=normal(H, 6, 16) / 4, w_uv=normal(H, V, 16) / 4)
    else:
        tensors = dict(q=normal(B, T, H, K), k=normal(B, T, Hk, K), v=normal(B, T, Hk, V))
    if keywords.pop("sinks", False):
        tensors["sinks"] = normal(H)
    block, S = keywords.get("block", 1), keywords.pop("choices")
    heads = Hk if keywords.pop("per_head") and not latent else 1
    starts = torch.arange(0, T, block)
    noise = torch.rand(B, T, heads, len(starts), generator=rng)
    chosen = starts[noise.topk(S, -1).indices]
    keywords["chosen"] = torch.where(torch.rand(chosen.shape, generator=rng) < 0.1, -1, chosen).int()
    dlse = normal(B, H, T) * float(keywords.pop("dlse", False))
    return Case(tensors, keywords, normal(B, T, H, V), dlse)


def run(function, case: Case, dtype=torch.float64, **keywords) -> dict[str, Tensor]:
    """o, lse and every gradient of a call on one device."""
    leaves = {n: t.to(dtype).clone().requires_grad_() for n, t in case.tensors.items()}
    out = function(**leaves, **case.keywords, **keywords)
    loss = (out.o * case.do).sum() + (finite(out.lse) * case.dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(o=out.o.detach(), lse=out.lse.detach()) | {f"d{n}": g for n, g in zip(leaves, grads)}


@cache
def truth(feature: str, packed: bool) -> dict[str, Tensor]:
    """o, lse and every gradient of a case on one device, by the loop."""
    case = draw(feature, packed)
    function = reference.mla if "latent" in case.tensors else reference.sparse_attention
    return run(function, case, cu_seqlens=CU if packed else None)


def function_of(case: Case):
    return ring_la.mla if "latent" in case.tensors else ring_la.sparse_attention


def compare(layout, case: Case, want: dict[str, Tensor], **keywords) -> dict[str, float]:
    """Relative errors of one call under a layout, of this rank's part of everything."""
    local = {n: layout.shard(t) if n in SPLIT else t for n, t in case.tensors.items()}
    local = {n: t.detach().clone().requires_grad_() for n, t in local.items()}
    how = case.keywords | dict(chosen=layout.shard(case.keywords["chosen"])) | keywords
    out = function_of(case)(**local, **how, layout=layout)
    loss = (out.o * layout.shard(case.do)).sum() + (finite(out.lse) * layout.shard(case.dlse, dim=2)).sum()
    grads = dict(zip(local, torch.autograd.grad(loss, list(local.values()))))
    got = {"o": out.o, "lse": out.lse}
    got |= {f"d{n}": g if n in SPLIT else layout.cp.comm.all_reduce(g).wait() for n, g in grads.items()}
    parts = {n: layout.shard(t) if n == "o" or n[1:] in SPLIT else t for n, t in want.items()}
    parts["lse"] = layout.shard(want["lse"], dim=2)
    return {n: error(g, parts[n]) for n, g in got.items()}
