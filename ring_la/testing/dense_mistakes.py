"""Mistakes of split softmax attention, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from .cases import Case
from .dense import Looks, Sight, visible

Named = Iterator[tuple[str, Looks]]


def dense_mistakes(case: Case) -> Named:
    """All that could show in this case, the plainest first."""
    for group in (_of_masks, _of_ranks, _of_merging, _of_heads, _of_gradients):
        yield from group(case)


def _own(pairs: Sight) -> Tensor:
    return pairs.mine == pairs.theirs


def _mask(mask: Callable[[Case, Sight], Tensor]) -> Looks:
    return Looks(seen=mask)


def _of_masks(case: Case) -> Named:
    """Which keys are seen, on every rank alike."""
    options, everyone = dict(case.options), case.size > 1
    if everyone:
        yield "ranks see their own keys alone", _mask(lambda c, p: p.seen & _own(p))
    if case.cu_seqlens is not None:
        yield "document borders leak: queries see other documents", _mask(lambda c, p: visible(c, p.apart))
        leak = lambda c, p: visible(c, p.apart) & ((p.document == p.key_document) | ~_own(p))  # noqa: E731
        yield "document borders leak to the keys of other ranks", _mask(leak)
        within = lambda c, p: visible(c, p.apart) & ((p.document == p.key_document) | _own(p))  # noqa: E731
        yield "document borders leak inside shards", _mask(within)
    same = lambda p: p.document == p.key_document  # noqa: E731
    if options.get("causal", True):
        future = lambda c, p: same(p) & ((p.apart < 0) | p.seen)  # noqa: E731
        yield "queries see the future", _mask(future)
        yield "queries see the future on other ranks", _mask(lambda c, p: p.seen | same(p) & ~_own(p) & (p.apart < 0))
        yield "queries see the future on their own rank", _mask(lambda c, p: p.seen | same(p) & _own(p) & (p.apart < 0))
        yield (
            "the causal mask goes by the order of the ranks, not of the sequence",
            _mask(lambda c, p: same(p) & visible(c, p.place - p.key_place)),
        )
        yield "the causal mask goes by places on each rank", _mask(lambda c, p: same(p) & (p.local >= p.key_local))
        yield "queries do not see their own token", _mask(lambda c, p: p.seen & (p.apart != 0))
    if tuple(options.get("window", (-1, -1))) != (-1, -1):
        causal = lambda p: (p.apart >= 0) if options.get("causal", True) else p.seen | True  # noqa: E731
        far = lambda c, p: p.seen | (same(p) & causal(p) & ~_own(p))  # noqa: E731
        places = lambda c, p: same(p) & causal(p) & visible(c, p.local - p.key_local)  # noqa: E731
        yield "the window is ignored", _mask(lambda c, p: same(p) & causal(p))
        yield "the window is ignored for keys of other ranks", _mask(far)
        yield "the window counts by places on each rank", _mask(places)
        yield "the window is a token too narrow", _mask(lambda c, p: p.seen & visible(c, p.apart + 1))


def _of_ranks(case: Case) -> Named:
    """One rank that does not see another's keys."""
    for r in range(case.size):
        yield f"rank {r} sees its own keys alone", _mask(lambda c, p, r=r: p.seen & ((p.mine != r) | _own(p)))  # type: ignore[misc]
        to_it = lambda c, p, r=r: p.seen & ((p.theirs != r) | _own(p))  # noqa: E731
        yield f"nobody but rank {r} sees rank {r}'s keys", _mask(to_it)
        for s in range(case.size):
            if s != r:
                blind = lambda c, p, r=r, s=s: p.seen & ~((p.mine == r) & (p.theirs == s))  # noqa: E731
                yield f"rank {r} does not see the keys of rank {s}", _mask(blind)


def _of_merging(case: Case) -> Named:
    yield "parts of the ranks' keys are averaged, not weighted by their lse", Looks(merged="averaged")
    yield "parts of the ranks' keys are added, not weighted by their lse", Looks(merged="added")
    yield "the scores have no scale", Looks(scale=case.shapes.K**0.5)


def _of_heads(case: Case) -> Named:
    if case.shapes.Hk < case.shapes.H:
        yield "heads are grouped wrongly: query head h reads key head h mod Hk", Looks(key_head=lambda h, H, Hk: h % Hk)


def _of_gradients(case: Case) -> Named:
    """Right outputs whose gradients lack those of some pairs."""
    if case.size < 2:
        return
    yield "the gradients of k and v are those of the rank's own queries", Looks(flows=_own)
    yield "the gradient of q is that of the rank's own keys", Looks(flows_to_q=_own)
    for r in range(case.size):
        lost = lambda p, r=r: (p.mine != r) | _own(p)  # noqa: E731
        yield f"the gradients of k and v lack the queries of rank {r}", Looks(flows=lost)
        kept = lambda p, r=r: (p.theirs != r) | _own(p)  # noqa: E731
        yield f"rank {r}'s k and v get the gradients of its own queries alone", Looks(flows=kept)
        yield f"the gradient of q lacks the keys of rank {r}", Looks(flows_to_q=kept)
