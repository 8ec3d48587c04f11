"""The kit itself: what is right it calls right, and every planted mistake it calls by its name."""

from __future__ import annotations

import functools
import os
from functools import partial

import pytest
import torch

import ring_la
from ring_la.testing import Call, Subject, check_recurrence, judge
from ring_la.testing.processes import Processes
from ring_la.testing.rank import RankAnswer
from tests.support.pool import group
from tests.testing import planted

SMALL = dict(tokens=24, key_dim=4, value_dim=3)


class Pool:
    """The suite's ranks, as the kit asks for them."""

    def __init__(self, ranks, size: int) -> None:
        self.ranks, self.size = ranks, size

    def run(self, task, *args) -> list[RankAnswer]:
        return self.ranks.run(self.size, in_rank, task, args)


def in_rank(rank: int, task, args) -> RankAnswer:
    return task(rank, group(), torch.device("cpu"), *args)


ONE, TWO_ROWS, INSIDE, BORDERS = (
    "one sequence",
    "two rows",
    "documents that break inside shards",
    "documents that begin where shards do",
)
PLANTED = [
    ("nothing crosses", ONE, "contiguous", "no state crosses from rank to rank"),
    ("no decay", ONE, "contiguous", "states pass a rank without its decay (its transition is left out)"),
    ("neighbour", ONE, "contiguous", "a rank takes what the rank before it wrote, without what entered there"),
    ("off by one", ONE, "contiguous", "each segment takes the state of the segment 2 before it, not of the one before"),
    ("rank 2 takes rank 0's", ONE, "contiguous", "rank 2 takes the state of rank 0, not of rank 1"),
    ("rank order", ONE, "zigzag", "segments are chained in the order of the ranks, not of the sequence"),
    ("scrambled", ONE, "zigzag", "segments are chained in the order of the ranks, not of the sequence"),
    ("scrambled", INSIDE, "zigzag", "each rank's tokens are taken for a run of the sequence, which they are not"),
    ("leak", INSIDE, "zigzag", "document borders leak: states go on into the next document"),
    ("leak at borders", BORDERS, "zigzag", "document borders leak where a document begins at a shard's first token"),
    ("heads", "groups of heads", "contiguous", "heads are grouped wrongly: value head h reads key head h mod Hk"),
    ("clamped", "hard gates", "contiguous", "g is clamped at -10"),
    ("cut", TWO_ROWS, "contiguous", "no gradient goes back from rank to rank"),
    ("own gradient", ONE, "contiguous", "no gradient goes back from rank to rank"),
    ("no gate gradient", ONE, "zigzag", "gradients miss what a rank's tokens do to a state that passes through it"),
    ("gradient of rank 0's gate alone", ONE, "contiguous", "the gradient of g is zero"),
    ("another document's", "states of documents", "contiguous", "final states are those of the documents before"),
    (
        "empty shard",
        "states, fewer tokens than ranks",
        "contiguous",
        "a rank without tokens gives zero as the final state",
    ),
    ("many ranks", "states", "contiguous", "the gradient of the initial state is missing"),
    ("no initial", "states", "contiguous", "the initial state is ignored"),
    ("own final state", "states", "contiguous", "each rank gives the state after its own tokens as the final state"),
    ("final state twice", "states", "contiguous", "the gradient of the final state is counted 3 times"),
    (
        "initial gradient",
        "states",
        "contiguous",
        "the gradient of the initial state is each rank's own part, not summed",
    ),
]
PLANTED_IN_ATTENTION = [
    ("leak", INSIDE, "zigzag", "document borders leak: queries see other documents"),
    ("future", ONE, "contiguous", "queries see the future"),
    ("local places", ONE, "zigzag", "the causal mask goes by places on each rank"),
    ("one rank blind", ONE, "zigzag", "rank 1 does not see the keys of rank 0"),
    ("averaged", ONE, "contiguous", "parts of the ranks' keys are averaged, not weighted by their lse"),
    ("heads", "groups of heads", "contiguous", "heads are grouped wrongly: query head h reads key head h mod Hk"),
    ("own gradient", TWO_ROWS, "zigzag", "the gradients of k and v are those of the rank's own queries"),
]


@pytest.mark.parametrize(("mistake", "case", "kind", "words"), PLANTED)
def test_a_planted_mistake_of_a_recurrence_is_named(ranks, mistake, case, kind, words):
    subject = Subject(functools.partial(planted.recurrence, mistake=mistake), "simple_gla", (kind,), **SMALL)
    report = judge(subject, sizes=(3,), only=(case,), ranks=Pool(ranks, 3))
    assert report.words == (words,), report
    assert not report.ok


def test_a_shorter_shard_that_drops_its_last_token_is_found(ranks):
    """Without a name for it."""
    subject = Subject(functools.partial(planted.recurrence, mistake="last token"), "simple_gla", **SMALL)
    report = judge(subject, sizes=(3,), only=(ONE, "an uneven length"), ranks=Pool(ranks, 3))
    assert [f.verdict for f in report.findings] == ["right", "wrong"], report


@pytest.mark.parametrize(("mistake", "case", "kind", "words"), PLANTED_IN_ATTENTION)
def test_a_planted_mistake_of_attention_is_named(ranks, mistake, case, kind, words):
    subject = Subject(functools.partial(planted.attention, mistake=mistake), "attention", (kind,), **SMALL)
    report = judge(subject, sizes=(3,), only=(case,), ranks=Pool(ranks, 3))
    assert report.words == (words,), report


@pytest.mark.parametrize(("run", "operation"), [(planted.recurrence, "simple_gla"), (planted.attention, "attention")])
def test_what_is_right_is_called_right(ranks, run, operation):
    report = judge(Subject(run, operation, ("zigzag",), **SMALL), sizes=(3,), ranks=Pool(ranks, 3))
    assert {f.verdict for f in report.findings} == {"right"}, report
    assert len(report.findings) >= 9
    report.check()


def own(call: Call, operation: str) -> object:
    """ring_la's own call."""
    cp = ring_la.ContextParallel(call.group, scan="ring")
    layout = cp.layout(call.seq_len, call.kind, cu_seqlens=call.cu_seqlens)
    more = dict(output_final_state=True) if call.output_final_state else {}
    return getattr(ring_la, operation)(**call.tensors, **call.options, **more, layout=layout)


@pytest.mark.parametrize("operation", ["gated_delta_rule", "short_conv"])
def test_ring_la_is_right(ranks, operation):
    report = judge(
        Subject(functools.partial(own, operation=operation), operation, ("zigzag",), **SMALL),
        sizes=(2,), only=(INSIDE, "states of documents", "groups of heads", "hard gates"), ranks=Pool(ranks, 2),
    )  # fmt: skip
    assert {f.verdict for f in report.findings} == {"right"}, report


def fails(call: Call, how: str) -> torch.Tensor:
    """An implementation that gives no answer on rank 1, in one way or another."""
    if how == "refuses":
        raise ValueError("not divisible")
    if call.rank == 1 and how == "raises alone":
        raise KeyError("rank 1 alone")
    if call.rank == 1 and how == "dies":
        os._exit(3)
    if call.rank == 0 and how == "hangs":
        torch.distributed.all_reduce(torch.zeros(1))
    return call.tensors["v"]


def failing(how: str, ranks=None):
    subject = Subject(functools.partial(fails, how=how), "linear_attention", **SMALL)
    report = judge(subject, sizes=(2,), only=(ONE,), ranks=ranks, timeout=4.0)
    assert not report.ok, "nothing is right"
    return report.findings[0]


def test_a_refusal_of_all_ranks_is_no_fault_and_one_of_a_single_rank_is(ranks):
    refused, alone = failing("refuses", Pool(ranks, 2)), failing("raises alone", Pool(ranks, 2))
    assert (refused.verdict, refused.words) == ("refused", ("ValueError: not divisible",))
    assert alone.verdict == "uneven refusal"
    assert "rank 1 alone" in alone.words[1]


@pytest.mark.distributed
def test_ranks_share_a_gpu_where_that_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("cuda", "cuda:0"):
        Processes(1, device)
    Processes(4, "cuda:0")
    for size, device, words in (
        (2, "cuda", 'size: expected at most 1, the number of GPUs, got 2. With device="cuda:0" ranks share a GPU'),
        (2, "cuda:1", "device: expected one of cpu, cuda, cuda:0, got 'cuda:1'"),
        (2, "mps", "device: expected one of cpu, cuda, cuda:0, got 'mps'"),
    ):
        with pytest.raises(ring_la.ArgumentError) as caught:
            Processes(size, device)
        assert str(caught.value) == words


def test_ranks_that_hang_or_die_are_told_apart():
    """In the kit's own processes."""
    hangs, dies = failing("hangs"), failing("dies")
    assert hangs.verdict == dies.verdict == "silent"
    assert "all_reduce" in hangs.words[0], hangs
    assert "exit code 3" in dies.words[1], dies


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("subject", lambda: judge(None)),
        ("sizes", lambda: judge(Subject(print, "gla"), sizes=2)),
        ("sizes", lambda: judge(Subject(print, "gla"), sizes=(0,))),
        ("run", lambda: judge(Subject(lambda call: None, "gla"))),
        ("run", lambda: Subject("print", "gla")),
        ("kinds", lambda: Subject(print, "gla", kinds=("zig",))),
        ("kinds", lambda: Subject(print, "gla", kinds="zigzag")),
        ("kinds", lambda: Subject(print, "gla", kinds=3)),
        *((n, partial(Subject, print, "gla", **{n: v})) for n, v in (
            ("options", {"scale": 1.0}), ("options", None), ("dtype", []), ("tolerance", 0), ("states", "no"),
            ("heads", 4.0), ("heads", None), ("key_dim", "6"), ("tokens", 0), ("unit", True))),
        *((n, partial(judge, Subject(print, "gla"), **{n: v})) for n, v in (
            ("only", "packed"), ("only", 3), ("timeout", 0), ("timeout", "60"), ("seed", 1.5), ("show", None),
            ("sizes", (True,)))),
        *((n, partial(check_recurrence, ring_la.hgrn, **{n: v})) for n, v in (
            ("documents", "packed"), ("documents", None), ("kinds", "zigzag"), ("kinds", ("zig",)), ("scans", 3),
            ("dtype", None), ("dtype", torch.bfloat16))),
    ],
)  # fmt: skip
def test_what_no_rank_can_be_given_is_named(name, call):
    with pytest.raises(ring_la.ArgumentError, match=f"^{name}: expected"):
        call()
