"""Split softmax attention in fp64, every score in plain sight: right, and with the mistakes that `Looks` describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case, Numbers
from .outcome import Whole


@dataclass(frozen=True)
class Sight:
    """What is known of every pair of a query (rows) and a key (columns), of the whole sequence.

    Attributes:
        mine, theirs: the ranks that hold the query ``[T, 1]`` and the key ``[1, T]``.
        document, key_document: their documents. apart: tokens the key stands before the query (negative: after it).
        place, key_place: their places in the order of ranks: rank 0's tokens, then rank 1's, …
        local, key_local: their places among their rank's tokens.
        seen: whether the query sees the key.
    """

    mine: Tensor
    theirs: Tensor
    document: Tensor
    key_document: Tensor
    apart: Tensor
    place: Tensor
    key_place: Tensor
    local: Tensor
    key_local: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Looks:
    """What is done wrong; the defaults are right.

    Attributes:
        seen: pairs that see each other, given the case and what is known of them.
        flows: pairs whose keys and values get the query's gradient; None: all.
        flows_to_q: pairs that give the query a gradient; None: all.
        merged: how parts by the keys' rank are put together: "weighted" (right), "averaged" or "added".
        key_head: the key head that query head h reads, given (h, H, Hk).
        scale: multiplies the scores.
    """

    seen: Callable[[Case, Sight], Tensor] | None = None
    flows: Callable[[Sight], Tensor] | None = None
    flows_to_q: Callable[[Sight], Tensor] | None = None
    merged: str = "weighted"
    key_head: Callable[[int, int, int], int] = lambda h, H, Hk: h // (H // Hk)
    scale: float = 1.0


def sight(case: Case) -> Sight:
    """All pairs of a case."""
    T, split = case.shapes.T, case.split
    cu = torch.tensor((0, T) if case.cu_seqlens is None else case.cu_seqlens)
    at = torch.arange(T)
    document = torch.searchsorted(cu[1:], at, right=True)
    rank, place, local = torch.empty(T, dtype=torch.int64), torch.empty(T, dtype=torch.int64), torch.empty_like(at)
    for r, tokens in enumerate(split.tokens):
        rank[tokens], local[tokens] = r, torch.arange(len(tokens))
    place[torch.cat(split.tokens)] = at
    apart = at[:, None] - at[None]
    seen = (document[:, None] == document[None]) & visible(case, apart)
    pairs = [side for x in (rank, document, place, local) for side in (x[:, None], x[None])]
    return Sight(*pairs[:4], apart, *pairs[4:], seen)  # type: ignore[call-arg]


def visible(case: Case, apart: Tensor) -> Tensor:
    """Which keys at these distances a query sees, documents aside."""
    options = dict(case.options)
    left, right = options.get("window", (-1, -1))
    right = 0 if options.get("causal", True) else right
    return ((apart <= left) | (left < 0)) & ((apart >= -right) | (right < 0))


def run_dense(case: Case, numbers: Numbers, looks: Looks = Looks()) -> Whole:
    """The output and gradients of a case, with these mistakes."""
    x = {n: t.double().clone().requires_grad_() for n, t in numbers.inputs.items()}
    pairs = sight(case)
    seen = pairs.seen if looks.seen is None else looks.seen(case, pairs)
    H, Hk = case.shapes.H, case.shapes.Hk
    heads = [looks.key_head(h, H, Hk) for h in range(H)]
    k, v = x["k"][:, :, heads], x["v"][:, :, heads]
    scores = _scores(case, x["q"], k, looks, pairs)
    if looks.merged == "weighted":
        weights = _weights(scores, seen)
    else:
        parts = [_weights(scores, seen & (pairs.theirs == r)) for r in range(case.size)]
        weights = torch.stack(parts).sum(0)
        if looks.merged == "averaged":
            weights = weights / case.size
    o = torch.einsum("bhij,bjhd->bihd", weights, v)
    if looks.flows is not None:
        flows = looks.flows(pairs).to(weights)
        fixed = torch.einsum("bhij,bjhd->bihd", weights * (1 - flows), v.detach())
        o = torch.einsum("bhij,bjhd->bihd", weights * flows, v) + fixed
    grads = torch.autograd.grad((o * numbers.do).sum(), list(x.values()))
    return Whole({"o": o.detach()} | {f"d{n}": g for n, g in zip(x, grads)}, [], {})


def _scores(case: Case, q: Tensor, k: Tensor, looks: Looks, pairs: Sight) -> Tensor:
    """Biased scores ``[B, H, T, T]``; where gradients do not flow, they are numbers alone."""
    options = dict(case.options)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    scores = looks.scale * scale * torch.einsum("bihd,bjhd->bhij", q, k)
    for flows, with_q, with_k in ((looks.flows, q, k.detach()), (looks.flows_to_q, q.detach(), k)):
        if flows is not None:
            other = looks.scale * scale * torch.einsum("bihd,bjhd->bhij", with_q, with_k)
            scores = torch.where(flows(pairs), scores, other)
    softcap = options.get("softcap", 0.0)
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _weights(scores: Tensor, seen: Tensor) -> Tensor:
    """softmax over the keys that are seen; zero where none is."""
    blind = ~seen.any(-1, keepdim=True)
    return scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0).softmax(-1).masked_fill(~seen, 0.0)
