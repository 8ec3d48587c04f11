"""Log-linear attention against the fp64 loop over a Fenwick tree: whole, packed, split, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ring_la
from ring_la import reference
from ring_la.testing.examples import error
from tests.support.pool import group

T, CU = 150, (0, 0, 7, 8, 140, 150)
LEVELS = 9


def tokens(B: int, T: int = T) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    x = {"q": draw(B, T, 1, 3), "k": draw(B, T, 1, 3), "v": draw(B, T, 2, 4)}
    x |= {"g": 0.1 * F.logsigmoid(draw(B, T, 2)), "lam": draw(B, T, 2, LEVELS)}
    return {n: t.requires_grad_() for n, t in x.items()}


def both_ways(function, x, do, dS=None, **keywords):
    """Outputs and gradients, with `dS` those of the levels before and after documents, too."""
    out, given = function(**x, output_final_state=dS is not None, **keywords), list(x.values())
    if dS is None:
        return [out.o, *torch.autograd.grad(out.o, given, do)]
    given.append(keywords["initial_state"])
    return [*out, *torch.autograd.grad(out, given, (do, dS))]


def levels_before(cu):
    """Levels before documents, those without tokens drawn too, and what is asked of those after."""
    rng = torch.Generator().manual_seed(2)
    state, dS = torch.randn(2, 2 if cu is None else len(cu) - 1, 2, LEVELS, 3, 4, generator=rng, dtype=torch.float64)
    return dict(initial_state=state.requires_grad_(), first=5 if cu is None else (3, 0, 6, 1, 11)), dS


@pytest.mark.parametrize("cu", [None, CU])
def test_one_device_is_the_token_loop(cu):
    x = tokens(1 if cu else 2)
    do, (states, dS) = torch.randn_like(x["v"]), levels_before(cu)
    keywords = dict(scale=0.3, cu_seqlens=None if cu is None else torch.tensor(cu))
    for more in (keywords, keywords | states | {"dS": dS}):
        got = both_ways(ring_la.log_linear_attention, x, do, **more)
        assert max(map(error, got, both_ways(reference.log_linear_attention, x, do, **more))) < 1e-12


def test_equal_weights_are_a_decayed_sum():
    """With all λ one, levels no longer matter; several doublings of chunks."""
    x = {n: t.detach() for n, t in tokens(1, 900).items()}
    x["lam"] = torch.ones(1, 900, 2, 11, dtype=torch.float64)
    o = ring_la.log_linear_attention(**x).o
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ring_la.log_linear_attention(**x).o, o)
    del x["lam"]
    assert error(o, ring_la.simple_gla(**x).o) < 1e-12


def split(rank: int, T: int, kind: str, cu: tuple[int, ...] | None, scan: str) -> list[float]:
    cp = ring_la.ContextParallel(group(), scan=scan)
    layout = cp.layout(T, kind, cu_seqlens=cu)
    x = tokens(1 if cu else 2, T)
    do = torch.randn(x["v"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    local = {n: layout.shard(t.detach()).requires_grad_() for n, t in x.items()}
    states, dS = levels_before(cu)
    errors = []
    for more in ({}, states | {"dS": dS}):
        want = both_ways(reference.log_linear_attention, x, do, cu_seqlens=cu, **more)
        more |= {"dS": dS / cp.size} if more else {}  # what comes in on ranks is summed
        got = both_ways(ring_la.log_linear_attention, local, layout.shard(do), layout=layout, **more)
        mine = [b.detach() if a.shape == b.shape else layout.shard(b.detach()) for a, b in zip(got, want)]
        errors += [error(a, b) for a, b in zip(got, mine) if a.numel()]
    return errors


@pytest.mark.parametrize(
    ("P", "T", "kind", "cu", "scan"),
    [(1, T, "zigzag", CU, "ring"), (2, T, "contiguous", None, "ring"), (3, T, "zigzag", CU, "all_gather"),
     (3, 5, "zigzag", None, "ring"), (4, T, "zigzag", None, "ring"), (4, T, "contiguous", CU, "ring")],
)  # fmt: skip
def test_split_is_whole(ranks, P, T, kind, cu, scan):
    assert max(map(max, filter(None, ranks.run(P, split, T, kind, cu, scan)))) < 1e-11


def refused(rank: int) -> None:
    layout = ring_la.ContextParallel(group(), timeout=60).layout(T)
    x = {n: layout.shard(t.detach()) for n, t in tokens(1).items()}
    few = x | {"lam": x["lam"][..., :8]}
    with pytest.raises(ring_la.RingLAError, match="lam"):
        ring_la.log_linear_attention(**(few if rank == 0 else x), layout=layout)


def test_tensors_elsewhere_are_named():
    x = {n: t.detach() for n, t in tokens(1).items()}
    state = torch.zeros(1, x["v"].shape[2], x["lam"].shape[3], x["k"].shape[3], x["v"].shape[3], device="meta")
    others = [(n, t.to("meta")) for n, t in x.items() if n != "q"]
    for name, bad in [*others, ("initial_state", state), ("v", x["v"][:, :, :0]), ("k", x["k"].to_sparse())]:
        with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected" if bad.numel() else "^k: expected"):
            ring_la.log_linear_attention(**(x | {name: bad}))


def test_too_few_levels_are_refused_on_every_rank(ranks):
    ranks.run(2, refused)
