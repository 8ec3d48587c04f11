"""Native sparse attention, whole and split, against a loop over queries: outputs and all gradients on all ranks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la import reference
from ring_la.indexers import chosen
from tests.support.attention_cases import error
from tests.support.pool import group
from tests.support.split_attention import KINDS

T, CU = 41, (0, 3, 3, 24, 25, 41)
B, H, HK, K, V = 2, 4, 2, 4, 3
SIZES = dict(length=4, stride=2, block=4, topk=4, window=5)
OVERLAPPING = dict(length=6, stride=2, block=4, topk=3, initial=1, local=1, window=0, scale=0.7)


@cache
def tensors(rows: int) -> dict[str, Tensor]:
    """Everything that has a gradient, fp64, the same in every process: of tokens, then weights of the maps."""
    rng = torch.Generator().manual_seed(3)
    names = {f"k{i}": (HK, K) for i in range(3)} | {f"v{i}": (HK, V) for i in range(3)}
    out = {n: torch.randn(rows, T, *s, generator=rng, dtype=torch.float64) for n, s in {"q": (H, K), **names}.items()}
    out["gates"] = torch.rand(rows, T, H, 3, generator=rng, dtype=torch.float64)
    for name, D in (("map_k", K), ("map_v", V)):
        out[name] = torch.randn(6, D, D, generator=rng, dtype=torch.float64) / 3
    return out


SPLIT = ("q", *(f"{x}{i}" for x in "kv" for i in range(3)), "gates")


def do(rows: int) -> Tensor:
    return torch.randn(rows, T, H, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def call(function, x: dict[str, Tensor], **keywords):
    """`nsa` with maps that know the order in a block and where it stands."""

    def of(weight: Tensor):
        def compress(blocks: Tensor, positions: Tensor) -> Tensor:
            mixed = torch.einsum("bnlhd,lde->bnhe", blocks.double(), weight[: blocks.shape[2]])
            return torch.tanh(mixed) * torch.cos(positions.double() / 9)[:, None, None]

        return compress

    k, v = (tuple(x[f"{n}{i}"] for i in range(3)) for n in "kv")
    return function(x["q"], k, v, x["gates"], of(x["map_k"]), of(x["map_v"]), **keywords)


@cache
def truth(packed: bool, overlapping: bool) -> dict[str, Tensor]:
    """o, the choice in order, and every gradient by the loop."""
    rows = 1 if packed else B
    leaves = {n: t.clone().requires_grad_() for n, t in tensors(rows).items()}
    out = call(reference.nsa, leaves, cu_seqlens=CU if packed else None, **(OVERLAPPING if overlapping else SIZES))
    grads = torch.autograd.grad((out.o * do(rows)).sum(), list(leaves.values()))
    results = dict(o=out.o.detach(), chosen=out.chosen.sort(-1).values)
    return results | {f"d{n}": g for n, g in zip(leaves, grads)}


def errors(packed: bool, overlapping: bool, layout=None, **keywords) -> dict[str, float]:
    """Relative errors of one call, of this rank's part of everything."""
    rows, want = 1 if packed else B, truth(packed, overlapping)

    def mine(name: str, t: Tensor) -> Tensor:
        return t if layout is None or name not in SPLIT else layout.shard(t)

    leaves = {n: mine(n, t).detach().clone().requires_grad_() for n, t in tensors(rows).items()}
    cu = torch.tensor(CU) if packed and layout is None else None
    how = (OVERLAPPING if overlapping else SIZES) | keywords
    out = call(ring_la.nsa, leaves, layout=layout, cu_seqlens=cu, **how)
    grads = torch.autograd.grad((out.o * mine("q", do(rows))).sum(), list(leaves.values()))
    found = {"o": error(out.o, mine("q", want["o"]))}
    found["chosen"] = float((out.chosen.sort(-1).values != mine("q", want["chosen"])).any())
    for name, g in zip(leaves, grads):
        g = g if layout is None or name in SPLIT else layout.cp.comm.all_reduce(g).wait()
        found[f"d{name}"] = error(g, mine(name, want[f"d{name}"]))
    return found


def wrong(found: dict[str, float]) -> dict[str, str]:
    return {n: f"{e:.1e}" for n, e in found.items() if not e < 1e-9}


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_one_device_is_the_loop(packed, overlapping, monkeypatch):
    monkeypatch.setattr(chosen, "SCORES", 60)  # a few rows and blocks at a time
    monkeypatch.setattr(chosen, "CHUNK", 12)
    assert not wrong(errors(packed, overlapping))


def check(rank: int, P: int) -> list[str]:
    cp, bad = ring_la.ContextParallel(group(P), scan="ring"), []
    cases = [(False, "zigzag", True, "ring"), *((True, kind, False, "all_gather") for kind in KINDS)]
    for packed, kind, overlapping, strategy in cases if P < 4 else cases[:2]:
        layout = cp.layout(T, kind, cu_seqlens=CU if packed else None)
        found = wrong(errors(packed, overlapping, layout, strategy=strategy))
        bad += [f"{packed} {kind} {overlapping} {n} {e}" for n, e in found.items()]
    return bad


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_sharded_is_whole(ranks, P):
    bad = ranks.run(P, check, P)
    assert not any(bad), bad


def check_short(rank: int) -> list[float]:
    """Fewer tokens than a block has: nobody has a compressed key, and one rank has a token of its own at most."""
    layout = ring_la.ContextParallel(group(4), scan="ring").layout(3)
    x = {n: t[:, :3] if n in SPLIT else t for n, t in tensors(B).items()}
    want = call(reference.nsa, x, **SIZES).o
    local = {n: (layout.shard(t) if n in SPLIT else t).clone().requires_grad_() for n, t in x.items()}
    o = call(ring_la.nsa, local, layout=layout, **SIZES).o
    o.sum().backward()
    assert all(t.grad is not None for t in local.values())
    return [float((o - layout.shard(want)).abs().sum())]


def test_a_sequence_shorter_than_a_block(ranks):
    assert all(e < 1e-9 for (e,) in ranks.run(4, check_short))


def test_blocks_far_longer_than_the_sequence():
    """Nothing goes by their length: none is compressed, the one that is read ends with the sequence."""
    x, maps = tensors(B), [lambda blocks, positions: blocks.mean(2)] * 2
    k, v = (tuple(x[f"{n}{i}"] for i in range(3)) for n in "kv")
    sizes = (SIZES | dict(length=n, block=n) for n in (4 << 28, 64))
    long, whole = (ring_la.nsa(x["q"], k, v, x["gates"], *maps, **these).o for these in sizes)
    assert torch.equal(long, whole)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(length=5), "length"),
        (dict(topk=2), "topk"),
        (dict(window=-1), "window"),
        (dict(gates=torch.zeros(B, T, H, 2)), "gates"),
        (dict(k=torch.zeros(B, T, HK, K)), "k"),
        (dict(compress_k=lambda blocks, positions: blocks), "compress_k"),
        (dict(compress_v=3), "compress_v"),
        (dict(compress_v=lambda blocks, positions: blocks.mean(2)[..., :2]), "compress_v"),
        (dict(compress_k=lambda blocks, positions: blocks.mean(2).to("meta")), "compress_k"),
        (dict(q=torch.zeros(B, T, 0, K), gates=torch.zeros(B, T, 0, 3)), "q"),
    ],
)
def test_bad_input_is_refused_by_name(change, name):
    x = tensors(B)
    k, v = (tuple(x[f"{n}{i}"] for i in range(3)) for n in "kv")
    maps = {n: lambda blocks, positions: blocks.mean(2) for n in ("compress_k", "compress_v")}
    with pytest.raises(ring_la.ArgumentError, match=f"^{name}: "):
        ring_la.nsa(**dict(q=x["q"], k=k, v=v, gates=x["gates"], **maps, **SIZES) | change)
