"""A ring by messages: only keys that a rank's queries see are sent to it, by their owner; over several hosts, where
many ranks see them, from hand to hand."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import ring_la
from ring_la.comm import Group
from ring_la.softmax.call import AttentionCall
from ring_la.softmax.geometry import Reach
from ring_la.softmax.options import AttentionOptions
from ring_la.softmax.strategies import choice
from ring_la.softmax.tensors import Tensors
from tests.support.attention_cases import DOCUMENTS, draw, truth
from tests.support.pool import group
from tests.support.split_attention import KINDS, compare
from tests.support.split_recurrences import TOLERANCE, assert_close, check_sharded

MASKS: dict[str, dict] = {
    "causal": dict(),
    "window": dict(window=(9, 0)),
    "both ways": dict(causal=False, window=(5, 7)),
}


def seen_elsewhere(layout, causal: bool = True, window: tuple[int, int] = (-1, -1)) -> int:
    """Keys × other ranks that see them, by a mask of all pairs."""
    every = torch.arange(layout.seq_len)
    owner, document = layout.owners_of(every)[0], layout.documents_of(every)
    apart, (left, right) = every[None] - every[:, None], window
    right = 0 if causal else right
    seen = document[:, None] == document[None]
    seen &= (apart <= right) if right >= 0 else True
    seen &= (apart >= -left) if left >= 0 else True
    by_rank = torch.stack([seen[owner == r].any(0) & (owner != r) for r in range(layout.world_size)])
    return int(by_rank.sum())


def check_sent(rank: int, P: int, documents: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """By layout and mask: bytes sent forward and with the backward pass, and of a key and its value, all ranks'."""
    T, cu = DOCUMENTS[documents]
    cp, out = ring_la.ContextParallel(group(P), scan="ring", attention="ring"), {}
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=cu)
        q, k, v = (torch.randn(1, layout.local_length, h, 8, requires_grad=True) for h in (4, 2, 2))
        for name, mask in MASKS.items():
            ring_la.attention(q, k, v, layout=layout, **mask)  # compared with the other ranks', once
            counts = [cp.comm.bytes_sent]
            o = ring_la.attention(q, k, v, layout=layout, **mask).o
            counts.append(cp.comm.bytes_sent)
            o.sum().backward()
            counts.append(cp.comm.bytes_sent)
            sent = torch.tensor([counts[1] - counts[0], counts[2] - counts[1]])
            forward, back = cp.comm.all_reduce(sent).wait().tolist()
            out[kind, name] = forward, back, seen_elsewhere(layout, **mask) * 2 * 2 * 8 * 4
    return out


@pytest.mark.parametrize(("P", "documents"), [(2, "packed"), (4, "many")])
def test_only_keys_that_are_seen_are_sent(ranks, P, documents):
    """The whole shards went from hand to hand, to all ranks up to the last that saw any."""
    for case, (forward, back, seen) in ranks.run(P, check_sent, P, documents)[0].items():
        assert (forward, back) == (seen, 2 * seen), case  # backward keys and their gradients


def check_hand_to_hand(rank: int, P: int) -> list[str]:
    bad = []
    with mock.patch.object(Group, "one_host", False):
        cp = ring_la.ContextParallel(group(P), scan="ring")
        for documents in ("uneven", "packed"):
            T, cu = DOCUMENTS[documents]
            layout = cp.layout(T, "zigzag", cu_seqlens=cu)
            for feature in ("two for one", "full", "all rear"):
                errors = compare(layout, draw(documents, feature), truth(documents, feature), "ring")
                bad += [f"{documents} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


@pytest.mark.parametrize("P", [2, 4])
def test_from_hand_to_hand_over_several_hosts(ranks, P):
    bad = ranks.run(P, check_hand_to_hand, P)
    assert not any(bad), bad


def check_balanced(rank: int, P: int) -> list[str]:
    cp, bad = ring_la.ContextParallel(group(P), scan="all_gather"), []
    for documents in ("many", "packed", "short"):
        T, cu = DOCUMENTS[documents]
        layout = cp.layout(T, "balanced", cu_seqlens=cu)
        for feature, strategy in (("two for one", "ring"), ("all rear", "all_gather"), ("window", "ulysses")):
            errors = compare(layout, draw(documents, feature), truth(documents, feature), strategy)
            bad += [f"{documents} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    T, _ = DOCUMENTS["uneven"]
    layout = cp.layout(T, "balanced", window=MASKS["window"]["window"][0])
    errors = compare(layout, draw("uneven", "window"), truth("uneven", "window"), "ring")
    return bad + [f"under a window {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_balanced_documents_are_whole(ranks, P):
    bad = ranks.run(P, check_balanced, P)
    assert not any(bad), bad


@pytest.mark.parametrize(("name", "P"), [("gated_delta_rule", 4), ("gla", 3)])
def test_states_pass_over_a_balanced_layout(ranks, name, P):
    results = ranks.run(P, check_sharded, P, name, "packed", "balanced", ("ring", "doubling"))
    assert_close(results, TOLERANCE[torch.float64])


def strategies_of(rank: int, P: int) -> dict[str, str]:
    """What "auto" takes, on messages, with heads that divide."""
    cp, out = ring_la.ContextParallel(group(P), attention="auto"), {}
    whole, packed = (cp.layout(96, cu_seqlens=cu) for cu in (None, range(0, 97, 12)))
    for name, layout, groups, more in (
        ("bidirectional", whole, 4, dict(causal=False)),
        ("causal", whole, 4, dict()),
        ("few key heads", whole, 1, dict(causal=False)),
        ("short documents, few key heads", packed, 1, dict()),
        ("a window", whole, 4, dict(window=(8, 8), causal=False)),
    ):
        q, k = (torch.zeros(1, layout.local_length, h, 8) for h in (8, groups))
        options = AttentionOptions(strategy="auto", **more)
        call = AttentionCall(options.scores(q), "none", None, layout=layout, kv_layout=layout, strategy="auto")
        moves = call.plan(Tensors(q, k, k))
        out[name] = moves.strategy.name if moves.heads is None else "ulysses"
    return out


def test_auto_goes_by_what_a_ring_sends(ranks):
    """Where few keys are seen by other ranks, a ring sends less than Ulysses; a gather sent all of them."""
    assert ranks.run(4, strategies_of, 4)[0] == {
        "bidirectional": "ulysses",
        "causal": "sent",
        "few key heads": "all_gather",
        "short documents, few key heads": "sent",
        "a window": "sent",
    }


def test_auto_goes_by_time_where_gpus_copy():
    """A ring hides its copies behind blocks that are long enough; of few tokens on many ranks Ulysses moves less."""

    def taken(P: int, T: int, heads: int = 32, causal: bool = False, groups: int | None = None, **more) -> str:
        comm, cu = SimpleNamespace(copies=True), more.pop("cu", None)
        cp = SimpleNamespace(**dict(deterministic=False, size=P, axes=None, comm=comm) | more)
        layout = SimpleNamespace(cp=cp, seq_len=T * P, cu_seqlens=cu or (0, T * P))
        keys = heads if groups is None else groups
        moved, share = (heads * 128, keys * 128), 0.75 if causal else 1.0
        reach = Reach(None, 0 if causal else None)
        return choice.pick("auto", (heads, keys), moved, layout, layout, lambda: share, reach)

    assert {taken(2, T, h, causal) for T in (64, 1152, 4096) for h in (2, 32) for causal in (True, False)} == {"ring"}
    rings = [(2, 256), (2, 16384), (4, 1152), (4, 4096), (8, 4096), (8, 16384)]
    assert {taken(*case) for case in rings} == {"ring"}
    assert {taken(*case) for case in [(4, 512), (8, 512), (8, 1152)]} == {"ulysses"}
    assert [taken(8, 1152, heads) for heads in (24, 9, 4)] == ["ulysses", "ring", "ring"]  # 9: one rank has two
    assert taken(8, 256, groups=8) == "ring"  # a quarter of the keys to send
    # the first length at which Ulysses' exchanges are no longer clearly less than what a ring cannot hide
    lengths = range(64, 4096, 64)
    first = {(P, c): next(T for T in lengths if taken(P, T, causal=c) == "ring") for P in (4, 8) for c in (False, True)}
    assert first == {(4, False): 1024, (4, True): 896, (8, False): 1920, (8, True): 2496}
    assert {taken(8, T, axes=(2, 4)) for T in (64, 16384)} == {"usp"}  # a mesh says itself how ranks meet
    assert {taken(8, T, deterministic=True) for T in (64, 16384)} == {"all_gather"}
