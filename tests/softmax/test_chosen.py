"""Attention to chosen keys, whole and split, against a loop over queries: outputs and all gradients on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import ring_la
from ring_la import reference
from ring_la.kernels import gpu
from ring_la.layout import Layout
from ring_la.softmax import call
from ring_la.softmax.backends import Ask, QueryRows, choose_for_chosen, chosen, latents
from ring_la.softmax.geometry import Pair, Reach, Tokens
from ring_la.softmax.merging import Gradients
from ring_la.softmax.scores import Scores
from ring_la.softmax.strategies.choice import ChosenSizes, pick_for_chosen
from ring_la.softmax.strategies.chosen import pays
from ring_la.softmax.strategies.schedule import most_rounds
from ring_la.softmax.tensors import Tensors
from tests.support.attention_cases import Case, error
from tests.support.chosen_cases import CU, FEATURES, T, compare, draw, function_of, run, truth
from tests.support.file_memory import over_files
from tests.support.peak import PeakBytes
from tests.support.pool import group
from tests.support.split_attention import KINDS


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_one_device_is_the_loop(feature, packed, monkeypatch):
    monkeypatch.setattr(chosen, "NUMBERS", 2000)  # a few rows at a time
    monkeypatch.setattr(latents, "AT_ONCE", 10)
    case, want = draw(feature, packed), truth(feature, packed)
    got = run(function_of(case), case, cu_seqlens=torch.tensor(CU) if packed else None)
    assert all(error(got[n], x) < 1e-9 for n, x in want.items()), {n: error(got[n], x) for n, x in want.items()}


def test_all_keys_chosen_is_attention():
    case = draw("tokens", False)
    every = torch.arange(T, dtype=torch.int32).expand(2, T, 1, T)
    want = run(ring_la.attention, case._replace(keywords={}))
    got = run(ring_la.sparse_attention, case._replace(keywords=dict(chosen=every)))
    assert all(error(got[n], x) < 1e-9 for n, x in want.items())


def check(rank: int, P: int) -> list[str]:
    if P == 3:
        with patch.object(latents, "AT_ONCE", 4):  # of the 9 or 10 queries on latents that a rank has
            return compared(P)
    return compared(P)


def compared(P: int) -> list[str]:
    cp, bad = ring_la.ContextParallel(group(P), scan="ring"), []
    for packed, kind in ((False, "zigzag"), *((True, kind) for kind in KINDS[: P if P < 3 else None])):
        layout = cp.layout(T, kind, cu_seqlens=CU if packed else None)
        for feature in FEATURES:
            for strategy in ("ring", "all_gather", "chosen") if kind == "zigzag" else ("auto",):
                errors = compare(layout, draw(feature, packed), truth(feature, packed), strategy=strategy)
                bad += [f"{packed} {kind} {feature} {strategy} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


def test_which_kernel_is_taken(monkeypatch):
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    facts = {"latents": (16, 1, 576, 512), "keys": (16, 1, 64, 64), "blocks": (64, 4, 128, 128)}
    taken = {"latents": "triton_sorted", "keys": "triton", "blocks": "triton"}
    for name, numbers in facts.items():
        for device, repeatable, kernel in (
            ("cuda", False, taken[name]),
            ("cuda", True, "torch"),
            ("cpu", False, "torch"),
        ):
            ask = Ask(torch.device(device), torch.bfloat16, *numbers, repeatable=repeatable)
            assert choose_for_chosen(ask, None).name == kernel
    assert choose_for_chosen(Ask(torch.device("cuda"), torch.float64, 16, 1, 576, 512), None).name == "torch"


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_sharded_is_whole(ranks, P):
    bad = ranks.run(P, check, P)
    assert not any(bad), bad


def few(feature: str) -> Case:
    """A case whose queries read two keys at the start of the sequence and their own."""
    case = draw(feature, False)
    places = torch.arange(T, dtype=torch.int32)
    chosen = torch.stack([torch.zeros_like(places), torch.ones_like(places), places], -1)
    chosen = torch.where((torch.arange(3) < 2) & (places[:, None] < 2), -1, chosen)
    return case._replace(keywords=dict(chosen=chosen.expand(len(case.do), 1, T, 3).transpose(1, 2)))


def check_few(rank: int, feature: str) -> dict[str, tuple[float, int]]:
    """By strategy the largest error, and bytes that this rank sends in both passes."""
    cp, case, found = ring_la.ContextParallel(group(3), scan="ring"), few(feature), {}
    want = run(reference.mla if feature == "latents" else reference.sparse_attention, case)
    layout = cp.layout(T)
    for strategy in ("chosen", "all_gather"):
        before = cp.comm.bytes_sent
        errors = compare(layout, case, want, strategy=strategy)
        found[strategy] = max(errors.values()), cp.comm.bytes_sent - before
    return found


@pytest.mark.parametrize(("feature", "width"), [("tokens", 2 * (8 + 6)), ("latents", 16 + 4)])
def test_chosen_keys_alone_travel(ranks, feature, width):
    """Rank 0 has the two keys that the others read: it sends them in both passes and gets two gradients of each."""
    lengths, row, counts = (9, 10, 10), 2 * width * 8, 2 * 3 * 8  # fp64, two batch rows; to two others
    for rank, found in enumerate(ranks.run(3, check_few, feature)):
        assert all(apart < 1e-9 for apart, _ in found.values()), found
        asked = 2 * (counts + 4 * row) if rank == 0 else 2 * (counts + 2 * 4) + 2 * row
        gathered = 2 * 2 * max(lengths) * row + (T - lengths[rank]) * row
        assert found["all_gather"][1] - found["chosen"][1] == gathered - asked


def test_chosen_keys_travel_where_that_is_less():
    layout = SimpleNamespace(lengths=(4, 4), cp=SimpleNamespace(size=2, comm=SimpleNamespace(copies=False)))
    sizes = [ChosenSizes(4, choices, 0, 64, 0, 0) for choices in (8, 9, 4, 5)]
    taken = [pick_for_chosen("auto", layout, x, n, lambda: 1) for x, n in zip(sizes, (1, 1, 2, 2))]
    assert taken == ["chosen", "all_gather"] * 2
    assert pick_for_chosen("ring", layout, sizes[0], 1, lambda: 1) == "ring"
    assert pays([[5, 3], [3, 5]], [8, 8], 16)
    assert not pays([[5, 3], [7, 1]], [8, 8], 16)  # seven keys and what asks for them


GATHER = "all_gather"


def million(P: int, heads: int = 16, S: int = 2048, T: int = 2**20) -> ChosenSizes:
    """DeepSeek's latents in bf16, T tokens over P ranks."""
    layout = SimpleNamespace(lengths=(T // P,) * P, seq_len=T)
    shapes = dict(
        q=(1, 1, heads, 192), k=(1, 1, 1, 512), v=(1, 1, 1, 64), up_v=(heads, 128, 512), up_k=(heads, 128, 512)
    )
    x = {n: torch.empty(shape, dtype=torch.bfloat16, device="meta") for n, shape in shapes.items()}
    return ChosenSizes.of(Tensors(**x, chosen=torch.empty(1, 1, 1, S, dtype=torch.int32)), layout, layout)


def test_gpus_that_copy_gather_what_is_little_beside_their_queries():
    assert million(4) == (2**18, 2048, 4 * 16 * (192 + 128) + 4 * 2048, 2**20, 1152, 2304)
    rounds = {2: 1, 4: 2, 8: 3, 16: 5, 32: 9}  # of a copied ring behind the own block, where all see all
    assert [million(P).gathers(P, n) for P, n in rounds.items()] == [True, True, True, False, False]
    assert million(16, heads=128).gathers(16, 5)  # whose queries hold more
    assert not million(2, S=8).gathers(2, 1)  # through so few choices a round is soon done
    assert not million(4).gathers(4, 0)  # documents that lie within ranks: a ring moves nothing


def test_rounds_are_those_of_the_rank_that_has_most():
    def rounds(P: int, left: int | None = None, kind: str = "zigzag", cu: tuple[int, ...] | None = None) -> int:
        layouts = [Layout(1024, kind, P, r, cu_seqlens=cu) for r in range(P)]
        tokens = [Tokens.of_ranks(x, (r,), torch.device("cpu")) for r, x in enumerate(layouts)]
        return most_rounds(tokens, tokens, Reach(left, 0))

    assert [rounds(P) for P in (1, 2, 4, 8, 16)] == [0, 1, 2, 3, 5]
    assert rounds(4, left=10) == 1  # few keys: all in one
    assert rounds(4, kind="contiguous", cu=(0, 256, 512, 1024)) == 1  # the last document lies on two ranks
    assert rounds(4, kind="contiguous", cu=(0, 256, 512, 768, 1024)) == 0


def check_auto(rank: int, P: int, folder: str) -> tuple[set[str], list[str]]:
    """What `auto` takes where ranks copy, and what is wrong of it. Documents of 8 end where those of 4 ranks do."""
    (cp, files), taken, bad = over_files(P, folder), set(), []

    def spy(*arguments) -> str:
        taken.add(pick_for_chosen(*arguments))
        return pick_for_chosen(*arguments)

    with files, patch.object(call, "pick_for_chosen", spy):
        for packed, kind in ((False, "zigzag"), (True, "zigzag"), (True, "contiguous")):
            layout = cp.layout(T, kind, cu_seqlens=CU if packed else None)
            for feature in ("latents", "blocks of each head"):
                errors = compare(layout, draw(feature, packed), truth(feature, packed), strategy="auto")
                bad += [f"{packed} {kind} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return taken, bad


@pytest.mark.parametrize(("P", "takes"), [(1, {GATHER}), (2, {GATHER}), (3, {GATHER, "ring"}), (4, {"ring"})])
def test_auto_on_gpus_that_copy_is_whole(ranks, tmp_path, P, takes):
    """In fp64 keys of so few heads are much beside the queries of one of 4 ranks, or 3 where these choose few."""
    assert ranks.run(P, check_auto, P, str(tmp_path)) == [(takes, [])] * P


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(chosen=None), "chosen"),
        (dict(chosen=torch.zeros(2, T, 1, 3)), "chosen"),
        (dict(chosen=torch.zeros(2, T, 3, 3, dtype=torch.int32)), "chosen"),
        (dict(block=0), "block"),
        (dict(block=True), "block"),
        (dict(backend="flash"), "backend"),
    ],
)
def test_bad_input_is_refused_by_name(change, name):
    case = draw("tokens", False)
    with pytest.raises(ring_la.ArgumentError, match=f"^{name}: "):
        ring_la.sparse_attention(**case.tensors | case.keywords | change)


@pytest.mark.parametrize("feature", ["tokens", "latents"])
def test_blocks_longer_than_the_sequence_end_with_it(feature):
    """A block of 2^40 keys is no work for as many."""
    case = draw(feature, False)
    chosen = case.tensors | case.keywords
    function = ring_la.mla if feature == "latents" else ring_la.sparse_attention
    long, whole = (function(**chosen | {"block": n}).o for n in (1 << 40, T))
    assert torch.equal(long, whole)


def refused(rank: int) -> list[str]:
    names, case = [], draw("tokens", False)
    for how, more in ((dict(deterministic=True), {}), ({}, dict(strategy="ulysses"))):
        layout = ring_la.ContextParallel(group(2), scan="ring", **how).layout(T)
        local = {n: layout.shard(t) for n, t in (case.tensors | case.keywords).items()}
        with pytest.raises(ring_la.UnsupportedError) as error:
            ring_la.sparse_attention(**local, layout=layout, **more)
        names.append(error.value.name)
    return names


def test_what_does_not_go_with_a_choice_is_refused(ranks):
    assert ranks.run(2, refused) == [["chosen", "strategy"]] * 2


def test_compiled_it_is_one_node_and_the_same():
    case, want = draw("latents", False), truth("latents", False)
    got = run(torch.compile(ring_la.mla, fullgraph=True, backend="aot_eager"), case)
    assert all(error(got[n], x) < 1e-9 for n, x in want.items())


class Narrow(chosen.ChosenBackend):
    """A kernel's tensors without its numbers: gradients of queries in 16 bits, of keys wide, values' among them."""

    name = "narrow"

    def forward(self, q, k, v, scores, pair, out) -> None:
        out.add(q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(len(q), q.shape[2], q.shape[1], dtype=torch.float32))

    def backward(self, x, k, v, scores, pair, out) -> None:
        out.dq.add(torch.empty_like(x.q))
        out.dk.add(torch.empty_like(k, dtype=torch.float32))


def test_absorbed_queries_are_not_widened_on_the_way_back():
    """Bytes at once, in those of all queries on latents: q', o', do', dq' and what they are made of, in 16 bits."""

    def given(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    n, H, L, R, N = 4096, 16, 512, 64, 128
    tokens, sums = Tokens.whole(n, torch.device("meta")), given(1, H, n, dtype=torch.float32)
    rows = QueryRows(given(1, n, H, N + R), given(1, n, H, N), given(1, n, H, N), sums, sums)
    k, v, up = given(1, n, 1, L), given(1, n, 1, R), given(H, N, L)
    backend = latents.Absorbed(Narrow().of(given(1, n, 1, 8, dtype=torch.int32)), up, up)
    with patch.object(latents, "product", lambda x, y: x.new_empty(H, x.shape[1], y.shape[2])), PeakBytes() as counted:
        backend.backward(rows, k, v, Scores(1.0), Pair(tokens, tokens, Reach(None, 0)), Gradients.of(rows.q, k, v))
    assert counted.most < 6 * 2 * n * H * (L + R)
