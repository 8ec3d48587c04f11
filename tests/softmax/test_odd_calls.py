"""Odd calls of `mla`, `sparse_attention` and `nsa` on a split sequence: what fits gives what one process gives, what
does not is refused by its name, on all ranks and at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from ring_la import reference
from tests.support.attention_cases import error
from tests.support.pool import group

T, B, H, HK, K, V, L, R, N = 23, 2, 4, 2, 8, 6, 12, 4, 5
SIZES = dict(length=4, stride=2, block=4, topk=3, initial=1, local=1, window=5)
SPLIT = ("q", "k", "v", "latent", "k_rope", "gates", "chosen")
Call = dict[str, Any]


def mean(blocks: Tensor, positions: Tensor) -> Tensor:
    return blocks.mean(2)


def calls(tokens: int = T, rows: int = B) -> dict[str, Call]:
    """A call of each function on the whole sequence, fp64. Of choices some are nothing, behind the end, or doubled."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    latents = dict(q=normal(rows, tokens, H, N + R), latent=normal(rows, tokens, L), k_rope=normal(rows, tokens, R))
    latents |= dict(w_uk=normal(H, N, L), w_uv=normal(H, V, L))
    sparse = dict(q=normal(rows, tokens, H, K), k=normal(rows, tokens, HK, K), v=normal(rows, tokens, HK, V))
    chosen = torch.randint(-2, tokens + 2, (rows, tokens, 1, 6), generator=rng).int()
    nsa = sparse | dict(gates=normal(rows, tokens, H, 3), compress_k=mean, compress_v=mean, **SIZES)
    out = {"mla": latents, "mla of chosen": latents | dict(chosen=chosen)}
    return out | {"sparse_attention": sparse | dict(chosen=chosen), "nsa": nsa}


def run(name: str, given: Call, of: Any = ring_la, **more: Any) -> Any:
    if name == "nsa":
        given = given | {n: (given[n],) * 3 for n in "kv" if isinstance(given[n], Tensor)}
    return getattr(of, name.split()[0])(**given, **more)


# -- what is refused ---------------------------------------------------------------------------------------


def wrong(name: str, given: Call) -> Iterator[tuple[str, Any]]:
    """An argument and a value that it may not have."""
    for n, t in given.items():
        if isinstance(t, Tensor):
            yield from ((n, x) for x in (3, t.tolist(), t.to(torch.int16), t[0], t.to("meta"), t.to_sparse()))
            if n != "q":  # whose rows the others are to have
                yield n, t[:1]
            if n not in ("w_uk", "w_uv", "latent"):  # the last: what stands beside it does not fit then
                yield n, t[:, :-1]
            if n != "chosen" or name == "sparse_attention":
                yield n, None
    others: dict[str, list] = dict(scale=["a", float("nan"), 2.0], strategy=["rings", 4, ["ring"], "all_gather"])
    others |= dict(backend=["flashy", 4, ["torch"], "reference"], layout=["zigzag"], cu_seqlens=[torch.tensor([0, T])])
    if name == "nsa":
        others |= {n: [-1, 2.5, None, 100] for n in SIZES}
        others |= dict(compress_k=[None, lambda b, p: b, lambda b, p: b.mean(2)[..., 1:]], k=[[], (given["k"],) * 2])
        others |= dict(compress_v=[None, lambda b, p: b.mean(2)[:, 1:], lambda b, p: b.mean(2)[..., 1:]])
    else:
        others |= dict(causal=[1, None, False], window=[(1,), (-2, 0), (1.5, 2), None], kv_layout=["a"])
        others |= dict(sinks=[3, torch.zeros(H + 1, dtype=torch.float64)], block=[0, 2.0, None])
    if name.startswith("mla"):
        others |= dict(softcap=[-1.0, None], form=["folded", ["absorbed"]], output_latents=[1, None])
    yield from ((n, x) for n, values in others.items() for x in values)


def check_refusals(rank: int, name: str) -> list[str]:
    """What rank 1 alone does wrong. `layout` is wrong on both: without one a rank is by itself."""
    missed, whole = [], calls()[name]
    first = ring_la.ContextParallel(group(2), scan="ring").layout(T, "zigzag")
    given = {n: first.shard(t) if n in SPLIT else t for n, t in whole.items()}
    for argument, value in wrong(name, given):
        dist.barrier(group(2))
        layout = ring_la.ContextParallel(group(2), scan="ring", timeout=60.0).layout(T, "zigzag")
        began, mine = time.monotonic(), {argument: value} if rank == 1 or argument == "layout" else {}
        try:
            run(name, {"layout": layout} | given | mine)
            missed.append(f"{argument}={value!r:.40} is taken")
        except (ring_la.ArgumentError, ring_la.DisagreementError) as e:
            if argument not in str(e) or time.monotonic() - began > 30.0:
                missed.append(f"{argument}={value!r:.40}: {time.monotonic() - began:.1f} s, {e!s:.200}")
        except Exception as e:
            missed.append(f"{argument}={value!r:.40}: {type(e).__name__} {e!s:.200}")
    return missed


@pytest.mark.parametrize("name", list(calls()))
def test_what_one_rank_does_wrong_all_refuse_by_name(ranks, name):
    assert ranks.run(2, check_refusals, name) == [[], []]


def check_values(rank: int) -> list[str]:
    """Where values are looked at, choices behind the end and blocks that overlap are refused, too."""
    layout = ring_la.ContextParallel(group(2), scan="ring", validate="always").layout(T)
    given = {n: layout.shard(t) for n, t in calls()["sparse_attention"].items()}
    found = []
    for places, block in (([0, 1, T], 1), ([0, 0, -1], 1), ([5, 0, 10], 5), ([0, 4, 8], 4), ([-1, -1, -2], 1)):
        chosen = torch.tensor(places if rank else [0, 8, -1], dtype=torch.int32).expand(B, layout.local_length, 1, 3)
        try:
            ring_la.sparse_attention(**given | dict(chosen=chosen), block=block, layout=layout)
            found.append("taken")
        except (ring_la.ArgumentError, ring_la.DisagreementError) as e:
            found.append("refused" if "chosen: " in str(e) else str(e))
    return found


def test_values_of_a_choice_are_refused_where_they_are_looked_at(ranks):
    assert ranks.run(2, check_values) == [["refused", "refused", "taken", "taken", "refused"]] * 2


def test_no_tokens_are_refused_by_name_and_no_rows_are_not():
    empty = calls(0)["nsa"]
    with pytest.raises(ring_la.ArgumentError, match=r"^q: "):
        run("nsa", empty)
    with pytest.raises(ring_la.ArgumentError, match=r"^q: "):
        ring_la.indexers.block_index(empty["q"], empty["k"], 2, 2)
    assert run("nsa", calls(rows=0)["nsa"]).o.shape == (0, T, H, V)


# -- what is right -----------------------------------------------------------------------------------------


def apart(x: Tensor) -> Tensor:
    """The same numbers with others between them, channels not side by side."""
    out = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7, dtype=x.dtype)
    out[..., ::2] = x
    return out[..., ::2]


def check_odd(rank: int, tokens: int, P: int) -> list[str]:
    """Few tokens, empty documents, odd strides, and gradients of one argument or of none."""
    cp, bad = ring_la.ContextParallel(group(P), scan="ring"), []
    for cu in (None, [0, 0, 1, tokens, tokens]):
        for name, whole in calls(tokens, 1).items():
            layout = cp.layout(tokens, "zigzag", cu_seqlens=cu)
            local = {n: apart(layout.shard(t)) if n in SPLIT else t for n, t in whole.items()}
            for wanted in (None, "q", "latent" if name.startswith("mla") else "v"):
                results = []
                for given, of, more in ((local, ring_la, {"layout": layout}), (whole, reference, {"cu_seqlens": cu})):
                    leaf = None if wanted is None else given[wanted].detach().requires_grad_()
                    out = run(name, given if wanted is None else given | {wanted: leaf}, of, **more).o
                    results.append(out)
                    if leaf is not None:
                        results.append(torch.autograd.grad(out.square().sum(), leaf)[0])
                    elif out.requires_grad:
                        bad.append(f"{name} wants a gradient that nobody asked for")
                half = len(results) // 2
                errors = [error(a, layout.shard(b)) for a, b in zip(results[:half], results[half:])]
                bad += [f"{name} {cu} d{wanted} {e:.1e}" for e in errors if not e < 1e-9]
    return bad


@pytest.mark.parametrize(("tokens", "P"), [(3, 4), (T, 3)])
def test_odd_calls_are_the_loop(ranks, tokens, P):
    assert not any(bad := ranks.run(P, check_odd, tokens, P)), bad
