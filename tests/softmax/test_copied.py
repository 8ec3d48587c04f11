"""Keys copied into the memory of those who need them, and gradients back: order of copies, flags and places in the
mailbox, on files shared by the ranks in place of symmetric memory. The GPUs' own check is
tests/gpu/test_attention_split.py."""

from __future__ import annotations

import os
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ring_la
from ring_la.comm.memory import GroupMemory, Memory
from ring_la.errors import PeerError
from ring_la.layout import Layout
from ring_la.softmax.backends import BACKENDS, LatentBackend
from ring_la.softmax.geometry import Reach, Tokens
from ring_la.softmax.strategies import STRATEGIES, Copied
from ring_la.softmax.strategies.copied import SHORT
from ring_la.softmax.strategies.mailbox import Mailbox
from ring_la.softmax.strategies.schedule import Schedule, needs_of
from tests.support.attention_cases import DOCUMENTS, draw, truth
from tests.support.file_memory import over_files
from tests.support.split_attention import KINDS, compare


def check_copied(rank: int, P: int, folder: str, documents: str, features: tuple[str, ...], kernels: bool) -> list[str]:
    if kernels:
        os.environ["TRITON_INTERPRET"] = "1"
    cp, patch = over_files(P, folder, kernels)
    T, cu = DOCUMENTS[documents]
    bad = []
    with patch, mock.patch.object(STRATEGIES["copied"], "two_streams", P == 4):
        for kind in KINDS:
            layout = cp.layout(T, kind, cu_seqlens=cu)
            for feature in features:
                for strategy in ("ring", "ulysses"):
                    errors = compare(layout, draw(documents, feature), truth(documents, feature), strategy)
                    bad += [f"{kind} {feature} {strategy} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


@pytest.mark.parametrize(
    ("P", "documents", "features"),
    [
        (2, "short", ("causal", "two for one")),
        (3, "uneven", ("causal", "all", "values narrower", "window")),
        (4, "packed", ("two for one", "all rear", "window both sides")),
        (4, "uneven", ("causal",)),
        (4, "many", ("causal", "full")),
    ],
)
def test_copied_is_whole(ranks, tmp_path, P, documents, features):
    bad = ranks.run(P, check_copied, P, str(tmp_path), documents, features, False)
    assert not any(bad), bad


@pytest.mark.parametrize(
    ("asked", "captured", "tokens", "two"),
    [
        (None, True, SHORT, True),
        (None, True, SHORT + 1, False),
        (None, False, SHORT, False),
        (True, False, SHORT + 1, True),
        (False, True, SHORT, False),
    ],
)
def test_two_streams_where_they_were_faster(asked, captured, tokens, two):
    """In a CUDA graph of short shards, as measured on two H200; or as one asks for."""
    q = mock.Mock(is_cuda=True, shape=(1, tokens, 32, 128))
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=captured):
        assert Copied(asked).overlaps(mock.Mock(backend=BACKENDS["torch"]), q) is two
        assert not Copied(asked).overlaps(mock.Mock(backend=mock.Mock(spec=LatentBackend)), q)


class Opened:
    """Memory that knows its size alone."""

    def __init__(self, members: object, size: int) -> None:
        self.size = size

    def late(self) -> list[int]:
        return []


def test_memory_of_a_graph_lives_when_a_larger_one_takes_its_place():
    memory, capturing = GroupMemory(mock.Mock(on_cuda=True), mock.Mock()), mock.Mock(return_value=False)
    cuda = dict(is_current_stream_capturing=capturing, synchronize=mock.Mock())
    with mock.patch.object(Memory, "open", Opened), mock.patch.multiple(torch.cuda, **cuda):
        small = weakref.ref(memory.of(1 << 20))
        capturing.return_value = True
        larger = weakref.ref(memory.of(2 << 20))
        assert small() is None
        memory.of(3 << 20)
        assert larger() is not None
        memory.release()
        assert larger() is None


def rounds_of(T: int, P: int, reach: Reach, cu=None) -> list[list[int]]:
    """For each rank, how many owners' keys each of its rounds has."""
    layout = Layout(T, "zigzag", P, cu_seqlens=cu)
    tokens = tuple(Tokens.of_ranks(layout, [r], torch.device("cpu")) for r in range(P))
    schedule = Schedule(mock.Mock(keys=tokens), needs_of(tokens, tokens, reach))
    return [[len({s.owner for s in spans}) for spans in rounds] for rounds in schedule.spans]


@pytest.mark.parametrize("P", [4, 8])
@pytest.mark.parametrize("kind", ["zigzag", "balanced"])
@pytest.mark.parametrize("cu", [None, (0, 7, 90, 91, 512)])
def test_keys_of_several_owners_stand_in_order(P, kind, cu):
    """Owners' segments lie between each other's: only keys by document and position are kernels' spans of keys."""
    layout = Layout(512, kind, P, cu_seqlens=cu)
    tokens = tuple(Tokens.of_ranks(layout, [r], torch.device("cpu")).fewest_runs()[0] for r in range(P))
    schedules = [Schedule(mock.Mock(keys=tokens), needs_of(tokens, tokens, Reach(None, 0))) for _ in range(P)]
    rounds = [x for rank, schedule in enumerate(schedules) for x in schedule.rounds(rank)]
    assert all(x.keys.rising for x in rounds)
    assert any(len(x.spans) > len({s.owner for s in x.spans}) for x in rounds)
    for owner, inbox in enumerate(schedules[0].letters(owner) for owner in range(P)):
        letters = [x for r in rounds for x in r.letters if x.owner == owner]
        assert sorted(i for x in letters for i in range(x.place, x.place + len(x))) == list(range(sum(map(len, inbox))))


def test_few_keys_come_in_one_round():
    """Of a window a rank sees keys of two neighbours: a call for each took longer to start than to run."""
    assert rounds_of(256, 4, Reach(None, 0)) == [[1, 2]] * 4
    assert rounds_of(256, 4, Reach(16, 0)) == [[1], [2], [2], [1]]
    assert rounds_of(256, 8, Reach(None, 0), cu=tuple(range(0, 257, 8))) == [[]] * 8


@pytest.mark.parametrize(("reach", "shards"), [(Reach(None, 0), 4.5), (Reach(None, None), 6.0)])
def test_a_rank_of_many_keys_has_few_letters(reach, shards):
    """Of four ranks in causal order one sees three shards of keys and is sent one and a half of gradients, another the
    reverse: no rank's memory holds the most of both."""
    layout, P, T = Layout(1024, "zigzag", 4), 4, 256
    tokens = tuple(Tokens.of_ranks(layout, [r], torch.device("cpu")) for r in range(P))
    schedule, k = Schedule(mock.Mock(keys=tokens), needs_of(tokens, tokens, reach)), torch.zeros(1, T, 2, 8)
    asked = []
    for rank in range(P):
        job = mock.Mock(rank=rank)
        job.group.memory = mock.Mock(of=lambda size: asked.append(size) or mock.MagicMock())
        Mailbox(job, schedule, k, k, torch.float32)
    assert asked == [shards * 2 * k.nbytes] * P


def test_flags_by_the_kernels(ranks, tmp_path):
    pytest.importorskip("triton")
    bad = ranks.run(3, check_copied, 3, str(tmp_path), "packed", ("two for one",), True)
    assert not any(bad), bad


def check_late(rank: int, P: int, folder: str, strategy: str) -> str:
    """Rank 1 never sends; the others give up at once."""
    os.environ["TRITON_INTERPRET"] = "1"
    cp, patch = over_files(P, folder, by_kernels=True)
    layout = cp.layout(24, "zigzag")
    q, k, v = (torch.randn(1, 12, 2, 8, requires_grad=True) for _ in range(3))
    with patch:
        ring_la.attention(q, k, v, layout=layout, strategy=strategy)
        dist.barrier(cp.comm.group)
        message = ""
        if rank != 1:
            memory = cp.comm.memory.current
            memory._patience = 0
            try:
                if strategy == "ring":  # Ulysses uses the memory twice a call
                    assert ring_la.attention(q, k, v, layout=layout, strategy=strategy).o.isnan().any()
                ring_la.attention(q, k, v, layout=layout, strategy=strategy)
            except PeerError as error:
                message = str(error)
            assert memory.late() == [1]
        dist.barrier(cp.comm.group)
    return message


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_late_peer_is_named(ranks, tmp_path, strategy):
    """What it should have brought is NaN at once, and the next use says who is missing. It was a CUDA error that names
    nobody."""
    pytest.importorskip("triton")
    messages = ranks.run(2, check_late, 2, str(tmp_path), strategy)
    assert "no message from rank 1 (global rank 1) in time" in messages[0]
