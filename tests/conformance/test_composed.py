"""Recurrences made of others: outputs, final states and every gradient against the fp64 token loops, on one device and
split over P = 1 to 4 ranks by every scan."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch

import ring_la
from ring_la.define import KEY, QUERY, RATE, VALUE, Argument, Inputs, Recurrence, Rule, outer, read, recurrence
from ring_la.outputs import LinearAttentionOutput
from ring_la.testing.examples import make_arguments
from ring_la.testing.recurrences import TOLERANCE, Truth, check_recurrence, errors
from tests.support.pool import group
from tests.support.recurrence_cases import BY_NAME, COMPOSED, make_inputs

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


@pytest.mark.parametrize("name", COMPOSED)
def test_autocast_changes_nothing(name):
    inputs = make_inputs(name, 1, 26, dtype=torch.float32)
    leaves, results = [x for x in inputs.values() if isinstance(x, torch.Tensor)], []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = getattr(ring_la, name)(**inputs, output_final_state=True)
        results.append([out.o, *torch.autograd.grad(out.o.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


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


def ttt_in_two(rank: int) -> tuple[float, list[int]]:
    """The error of a call that goes on within a mini-batch, of whole results; bytes without and with final states."""
    given = make_arguments(BY_NAME["ttt_linear"], 1, 21)
    x = {n: t.detach() for n, t in given.items() if isinstance(t, torch.Tensor)}
    tokens = {n: t for n, t in x.items() if n not in BY_NAME["ttt_linear"].shared}
    cp = ring_la.ContextParallel(group())

    def call(a: int, b: int, **more: object) -> LinearAttentionOutput:
        layout = cp.layout(b - a)
        own = {n: layout.shard(t[:, a:b]) for n, t in tokens.items()}
        out = ring_la.ttt_linear(**{**x, **own}, mini_batch=4, layout=layout, **more)
        return out._replace(o=layout.gather(out.o))

    whole = ring_la.ttt_linear(**x, mini_batch=4, output_final_state=True)
    one = call(0, 10, output_final_state=True)
    two = call(10, 21, initial_state=one.final_state, first=10, output_final_state=True)
    pairs = [(torch.cat([one.o, two.o], 1), whole.o), *zip(two.final_state, whole.final_state)]
    sent = [cp.comm.bytes_sent]
    for final in (False, True):
        call(0, 21, output_final_state=final)
        sent.append(cp.comm.bytes_sent)
    with pytest.raises(ring_la.ArgumentError, match=r"^first: expected an int"):
        ring_la.ttt_linear(**x, first=(1, 2))
    return max(float((a - b).abs().max()) for a, b in pairs), [b - a for a, b in pairwise(sent)]


def test_ttt_goes_on_within_a_mini_batch_and_makes_no_states_unasked(ranks):
    for error, (without, having) in ranks.run(2, ttt_in_two):
        assert error < 1e-12
        assert without < having


@recurrence(paper="of one's own", arguments=dict(q=QUERY, k=KEY, v=VALUE, tau=Argument("H")))
def leaky(q, k, v, tau):
    """A decay a head, which fails of itself where it does not fit."""
    return Recurrence(Rule("additive", "scalar"), Inputs(q, k, v, -tau.exp().expand(v.shape[:3])))


def angles_of_another_width(rank: int) -> list[str]:
    """What Mamba-3 says where one rank's angles do not fit: on every rank, and before it sends anything."""
    layout, said = ring_la.ContextParallel(group(), timeout=60).layout(24), []
    for name in ("mamba3", "mamba3_mimo"):
        x = make_inputs(name, 1, layout.local_length)
        x["theta"] = x["theta"][..., : 2 if rank == 0 else 3]
        with pytest.raises(ring_la.RingLAError) as caught:
            getattr(ring_la, name)(**x, layout=layout)
        said.append(str(caught.value))
    q = torch.zeros(1, layout.local_length, 2, 4)
    with pytest.raises(ring_la.RingLAError, match=r"tau: expected \[H\] = \[2\], got \[3\]"):
        leaky(q, q, q, torch.zeros(3 if rank == 0 else 2), layout=layout)
    return said


def test_angles_that_do_not_fit_are_refused_on_every_rank(ranks):
    for said in ranks.run(2, angles_of_another_width):
        assert all("theta: expected an angle for two of the 6 channels of B, 3 last, got 2" in text for text in said)


def longhorn_token(S, q, k, v, beta):
    S = S + outer((beta / (1 + beta * (k * k).sum(-1)))[..., None] * k, v - read(S, k))
    return S, read(S, q)


@recurrence(paper="of one's own", arguments=dict(q=QUERY, k=KEY, v=VALUE, beta=RATE), token=longhorn_token)
def longhorn(q, k, v, beta):
    """How much is written goes by the length of k."""
    squares = (k * k).sum(-1).repeat_interleave(v.shape[2] // k.shape[2], 2)
    return Recurrence(Rule("delta", "none"), Inputs(q, k, v, None, beta / (1 + beta * squares)))


def longhorn_of_long_keys(rank: int, deterministic: bool) -> float:
    cp = ring_la.ContextParallel(group(), scan="ring", deterministic=deterministic)
    layout, rng = cp.layout(70), torch.Generator().manual_seed(0)
    x = [3 * torch.randn(1, 70, 2, 4, generator=rng, dtype=torch.float64) for _ in range(3)]
    x.append(torch.rand(1, 70, 2, generator=rng, dtype=torch.float64))
    want = longhorn(*x, use_qk_l2norm=True, backend="reference").o
    found = [longhorn(*x, use_qk_l2norm=True).o, torch.compile(longhorn, backend="eager")(*x, use_qk_l2norm=True).o]
    found.append(layout.gather(longhorn(*map(layout.shard, x), use_qk_l2norm=True, layout=layout).o))
    return max(float((o - want).abs().max()) for o in found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_description_that_reads_keys_gets_them_of_unit_length(ranks, deterministic):
    assert max(ranks.run(2, longhorn_of_long_keys, deterministic)) < 1e-12
    check_recurrence(longhorn, documents=("small packed",))
