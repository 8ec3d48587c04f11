"""Recurrences made of others: outputs, final states and every gradient against the fp64 token loops, on one device and
split over P = 1 to 4 ranks by every scan."""

from __future__ import annotations

import functools

import pytest
import torch

import ring_la
from ring_la.testing.examples import make_arguments
from ring_la.testing.recurrences import TOLERANCE, Truth, check_recurrence, errors
from tests.support.pool import group
from tests.support.recurrence_cases import BY_NAME, COMPOSED

SPLITS = {
    1: (("small packed", "zigzag", "ring"),),
    2: (("small", "contiguous", "ring"), ("small packed", "zigzag", "doubling")),
    3: (("small packed", "contiguous", "all_gather"), ("small", "zigzag", "all_to_all")),
    4: (("small packed", "zigzag", "pipelined"), ("small", "contiguous", "doubling")),
}
"""By P: documents that start and end inside shards, uneven lengths, a sequence shorter than its segments."""


@functools.lru_cache
def truth(name: str, documents: str) -> Truth:
    return Truth(BY_NAME[name], documents)


@pytest.mark.parametrize("name", COMPOSED)
def test_one_device_is_the_reference(name):
    check_recurrence(getattr(ring_la, name), documents=("small", "small packed"))


def split(rank: int, name: str, cases: list[tuple[Truth, str, str]]) -> list[dict[str, float]]:
    return [
        errors(getattr(ring_la, name), true, ring_la.ContextParallel(group(), scan=scan), kind)
        for true, kind, scan in cases
    ]


@pytest.mark.parametrize("name", COMPOSED)
def test_split_is_whole(ranks, name):
    bad = []
    for P, cases in SPLITS.items():
        found = ranks.run(P, split, name, [(truth(name, documents), kind, scan) for documents, kind, scan in cases])
        for rank, by_case in enumerate(found):
            for case, worst in zip(cases, by_case):
                bad += [f"P {P} rank {rank} {case} {n}: {e:.1e}" for n, e in worst.items()
                        if not e <= TOLERANCE[torch.float64]]  # fmt: skip
    assert not bad, bad[:12]


SPLIT_SUMS = ("mlstm", "mamba3", "mamba3_mimo", "ttt_linear")
"""Their sums over tokens, or products of runs of tokens, depend on the split in the last bits."""


def deterministic(rank: int, name: str) -> list[torch.Tensor]:
    """o of the whole sequence; two ranks must agree with one, bit for bit."""
    given = make_arguments(BY_NAME[name], 2, 131, dtype=torch.float32)
    x = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    whole = {n for n, t in x.items() if n in BY_NAME[name].shared or not isinstance(t, torch.Tensor)}
    cp = ring_la.ContextParallel(group(), deterministic=True)
    layout = cp.layout(131, "contiguous")
    local = {n: t if n in whole else layout.shard(t) for n, t in x.items()}
    if name in SPLIT_SUMS:
        with pytest.raises(ring_la.UnsupportedError, match=r"^layout: expected one without deterministic"):
            getattr(ring_la, name)(**local, layout=layout)
        return []
    return [layout.gather(getattr(ring_la, name)(**local, layout=layout).o)]


@pytest.mark.parametrize("name", ["gated_delta_product", "rwkv6", "gated_oja_rule", *SPLIT_SUMS])
def test_deterministic_or_refused(ranks, name):
    one, (two, _) = ranks.run(1, deterministic, name)[0], ranks.run(2, deterministic, name)
    assert all(map(torch.equal, one, two))
