"""Latents, chosen keys, NSA and indexers split over ranks on GPUs, against loops in fp64: o, lse and every gradient.

    pytest -m gpu tests/gpu/test_chosen_split.py                        # a GPU a rank
    pytest -m gpu tests/gpu/test_chosen_split.py --gpu-ranks 4          # four ranks on the GPUs there are

fp64 by PyTorch's forms, within 1e-9; fp32 by the kernels that a call takes on a GPU, within what sums in fp32 leave.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la import indexers, reference
from tests.support import chosen_cases, latent_cases
from tests.support.attention_cases import DOCUMENTS, error
from tests.support.pool import group
from tests.support.split_attention import KINDS

pytestmark = pytest.mark.gpu
SIZES = (2, 3, 4)
LIMITS = {torch.float64: 1e-9, torch.float32: 3e-5}
NSA = dict(length=4, stride=2, block=4, topk=4, window=5)


def moved(x: Any, dtype: torch.dtype) -> Any:
    """A case's tensors on this rank's GPU, floats in `dtype`."""
    if isinstance(x, Tensor):
        return x.to("cuda", dtype if x.is_floating_point() else x.dtype)
    if isinstance(x, dict):
        return {n: moved(t, dtype) for n, t in x.items()}
    return x._replace(**moved(x._asdict(), dtype)) if hasattr(x, "_replace") else x


def bad(errors: dict[str, float], dtype: torch.dtype, *what: object) -> list[str]:
    return [f"{what} {n} {e:.1e}" for n, e in errors.items() if not e < LIMITS[dtype]]


def check_latents(rank: int, P: int, dtype: torch.dtype) -> list[str]:
    cp, out = ring_la.ContextParallel(group(P), scan="ring"), []
    T, cu = DOCUMENTS["packed"]
    want = moved(latent_cases.truth("packed", "all"), torch.float64)
    for kind in KINDS:
        for strategy in ("ring", "all_gather", "ulysses") if kind == "zigzag" else ("ring",):
            for form in ("expanded", "absorbed"):
                layout, case = cp.layout(T, kind, cu_seqlens=cu), moved(latent_cases.draw("packed", "all"), dtype)
                found = latent_cases.compare(layout, case, want, dtype, strategy=strategy, form=form)
                out += bad(found, dtype, kind, strategy, form)
    return out


def check_chosen(rank: int, P: int, dtype: torch.dtype) -> list[str]:
    cp, out = ring_la.ContextParallel(group(P), scan="ring"), []
    for feature in chosen_cases.FEATURES:
        case = moved(chosen_cases.draw(feature, True), dtype)
        want = moved(chosen_cases.truth(feature, True), torch.float64)
        for kind in KINDS:
            layout = cp.layout(chosen_cases.T, kind, cu_seqlens=chosen_cases.CU)
            for strategy in ("ring", "all_gather", "chosen") if kind == "zigzag" else ("auto",):
                found = chosen_cases.compare(layout, case, want, strategy=strategy)
                out += bad(found, dtype, feature, kind, strategy)
    return out


def nsa(function, x: dict[str, Tensor], **how: Any) -> dict[str, Tensor]:
    """o and the gradients of a call, whose maps weigh a block's tokens."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items() if n != "do"}

    def compress(blocks: Tensor, positions: Tensor) -> Tensor:
        return torch.einsum("bnlhd,l->bnhd", blocks, leaves["map"].to(blocks.dtype))

    out = function(leaves["q"], (leaves["k"],) * 3, (leaves["v"],) * 3, leaves["gates"], compress, compress, **how)
    grads = torch.autograd.grad((out.o * x["do"]).sum(), list(leaves.values()))
    return dict(o=out.o.detach()) | {f"d{n}": g for n, g in zip(leaves, grads)}


def check_nsa(rank: int, P: int, dtype: torch.dtype) -> list[str]:
    cp, out, rng = ring_la.ContextParallel(group(P), scan="ring"), [], torch.Generator().manual_seed(0)
    T, cu, shapes = 41, (0, 3, 3, 24, 25, 41), dict(q=(4, 8), k=(2, 8), v=(2, 8), gates=(4, 3), do=(4, 8))
    x = {n: torch.randn(1, T, *s, generator=rng, dtype=torch.float64) for n, s in shapes.items()}
    x["map"] = torch.rand(4, generator=rng, dtype=torch.float64)
    want = moved(nsa(reference.nsa, x, cu_seqlens=cu, **NSA), torch.float64)
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=cu)
        local = {n: t if n == "map" else layout.shard(t) for n, t in moved(x, dtype).items()}
        got = nsa(ring_la.nsa, local, layout=layout, **NSA)
        got["dmap"] = cp.comm.all_reduce(got["dmap"]).wait()
        found = {n: error(g, want[n] if n == "dmap" else layout.shard(want[n])) for n, g in got.items()}
        out += bad(found, dtype, kind)
    return out


def index_cases(x: dict[str, Tensor], **how: Any) -> dict[str, Tensor]:
    """What each indexer chooses, in order of places; and the loss and its gradients."""
    q, k, w, ak = (x[n] for n in ("q", "k", "w", "ak"))
    places = indexers.lightning_index(q, k, w, 5, **how).places
    found = dict(lightning=places, block=indexers.block_index(q, ak, 4, 3, **how).places)
    found |= dict(full=indexers.full_block_index(q, k, 4, 3, **how).places)
    found |= dict(best=indexers.best_key_index(q, k, 4, 3, **how).places)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, w)]
    loss = indexers.lightning_loss(*leaves, places, q, ak, **how)
    found = {n: p.sort(-1).values for n, p in found.items()} | dict(loss=loss.detach())
    return found | dict(zip(("dq", "dk", "dw"), torch.autograd.grad(loss, leaves)))


def check_indexers(rank: int, P: int, dtype: torch.dtype) -> list[str]:
    """Beside one process on a CPU in fp64, of numbers that fp32 keeps apart."""
    cp, out, rng = ring_la.ContextParallel(group(P), scan="ring"), [], torch.Generator().manual_seed(0)
    T, cu, shapes = 241, (0, 6, 6, 7, 130, 241), dict(q=(4, 16), k=(16,), w=(4,), ak=(2, 16))
    x = {n: torch.randn(1, T, *s, generator=rng).double() for n, s in shapes.items()}
    x["k"], x["w"] = x["k"].abs(), x["w"].abs()
    x["q"][:, :, 0] = x["q"][:, :, 0].abs() + 1  # no score is 0, as others might be too
    want = moved(index_cases(x, cu_seqlens=torch.tensor(cu)), torch.float64)
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=cu)
        got = index_cases({n: layout.shard(t) for n, t in moved(x, dtype).items()}, layout=layout)
        got["loss"] = cp.comm.all_reduce(got["loss"]).wait()
        mine = {n: t if n == "loss" else layout.shard(t) for n, t in want.items()}
        found = {n: float((g != mine[n]).any()) for n, g in got.items() if g.dtype == torch.int32}
        found |= {n: error(g, mine[n]) for n, g in got.items() if n not in found}
        out += bad(found, dtype, kind)
    return out


@pytest.mark.parametrize("dtype", LIMITS, ids=["fp64", "fp32"])
@pytest.mark.parametrize("check", [check_latents, check_chosen, check_nsa, check_indexers])
@pytest.mark.parametrize("P", SIZES)
def test_split_is_the_loop(P, check, dtype, gpu_ranks):
    if gpu_ranks.size < P:
        pytest.skip(f"needs {P} ranks, {gpu_ranks.size} are here")
    found = gpu_ranks.run(P, check, P, dtype)
    assert not any(found), found
