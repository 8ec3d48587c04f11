"""Attention calls every conformance test draws, and their dense fp64 truth."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la import reference

DOCUMENTS = {
    "dense": (72, None),
    "uneven": (67, None),
    "packed": (150, (0, 7, 7, 8, 70, 71, 150)),  # an empty document, one token long ones, one over many shards
    "many": (97, (0, 3, 5, 9, 14, 20, 27, 35, 44, 54, 65, 77, 90, 97)),
    "short": (3, None),
    "short packed": (3, (0, 1, 3)),
}
"""name: (tokens of the whole sequence, cu_seqlens or None for a batch of 2)."""

FEATURES: dict[str, dict] = {
    "causal": dict(),
    "full": dict(causal=False),
    "scale": dict(scale=0.3),
    "multi-query": dict(heads=(3, 1)),
    "two for one": dict(heads=(4, 2)),
    "values narrower": dict(widths=(8, 5)),
    "window": dict(window=(9, -1)),
    "window both sides": dict(causal=False, window=(5, 11)),
    "window ahead": dict(causal=False, window=(-1, 4)),
    "softcap": dict(softcap=1.5),
    "alibi": dict(alibi=True),
    "alibi of rows": dict(alibi="rows", causal=False),
    "sinks": dict(sinks=True),
    "joint front": dict(joint="front"),
    "joint rear": dict(joint="rear", causal=False),
    "lse gradient": dict(dlse=True),
    "all": dict(window=(20, -1), softcap=2.0, alibi=True, sinks=True, joint="front", heads=(4, 2), dlse=True),
    "all rear": dict(window=(20, 9), alibi=True, sinks=True, joint="rear", causal=False, widths=(8, 6), dlse=True),
}
"""name: the keywords of a call, and how to draw its tensors."""


class Case(NamedTuple):
    """A drawn call: tensors that want gradients, other keywords, and the gradients to send into o and lse."""

    tensors: dict[str, Tensor]
    keywords: dict
    do: Tensor
    dlse: Tensor


@cache
def draw(documents: str, feature: str, key_tokens: int | None = None, heads: tuple[int, int] | None = None) -> Case:
    """The tensors of a call, fp64, the same in every process."""
    T, cu = DOCUMENTS[documents]
    keywords = dict(FEATURES[feature])
    H, Hk = keywords.pop("heads", (2, 2)) if heads is None else (keywords.pop("heads", None), heads)[1]
    K, V = keywords.pop("widths", (8, 8))
    B, Tk, rng = 2 if cu is None else 1, key_tokens or T, torch.Generator().manual_seed(len(feature) + T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    tensors = dict(q=normal(B, T, H, K), k=normal(B, Tk, Hk, K), v=normal(B, Tk, Hk, V))
    if keywords.pop("sinks", False):
        tensors["sinks"] = normal(H)
    if keywords.get("joint"):
        tensors |= dict(joint_k=normal(B, 5, Hk, K), joint_v=normal(B, 5, Hk, V))
    alibi = keywords.pop("alibi", False)
    if alibi:
        keywords["alibi_slopes"] = (normal(B, H) if alibi == "rows" else normal(H)).abs() * 0.2
    dlse = normal(B, H, T) * float(keywords.pop("dlse", False))
    return Case(tensors, keywords, normal(B, T, H, V), dlse)


@cache
def truth(documents: str, feature: str, *more) -> dict[str, Tensor]:
    """o, lse and every gradient of a case on one device, by the dense reference."""
    case = draw(documents, feature, *more)
    leaves = {n: t.clone().requires_grad_() for n, t in case.tensors.items()}
    out = reference.attention(**leaves, **case.keywords, cu_seqlens=DOCUMENTS[documents][1])
    loss = (out.o * case.do).sum() + (finite(out.lse) * case.dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(o=out.o.detach(), lse=out.lse.detach()) | {f"d{n}": g for n, g in zip(leaves, grads)}


def finite(lse: Tensor) -> Tensor:
    """lse with rows that see nothing set to 0."""
    return torch.where(torch.isinf(lse), 0.0, lse)


def error(got: Tensor, want: Tensor) -> float:
    """Relative distance, with −∞ where it must be."""
    if got.shape != want.shape or not torch.equal(torch.isinf(got), torch.isinf(want)):
        return float("inf")
    got, want = finite(got).detach().double(), finite(want).detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-3)) if want.numel() else 0.0
