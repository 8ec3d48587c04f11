"""Ranks that differ, and peers that are lost: the same named error on all that are left."""

from __future__ import annotations

import os
import select
import signal
import time

import pytest
import torch

import ring_la
from ring_la import nn
from ring_la.models import HybridConfig, HybridLM
from tests.support.pool import group
from tests.support.recurrence_cases import make_inputs


def caught(f) -> str:
    try:
        f()
    except ring_la.RingLAError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing raised"


def check_disagreement(rank: int, validate: str) -> dict[str, str]:
    """Each entry: the error this rank gets where rank 1 differs."""
    odd = rank == 1
    out = {"settings": caught(lambda: ring_la.ContextParallel(group(), scan="ring" if odd else "doubling"))}
    cp = ring_la.ContextParallel(group(), scan="ring", validate=validate)
    out["length"] = caught(lambda: cp.layout(40 + odd))
    out["documents"] = caught(lambda: cp.layout(40, cu_seqlens=[0, 10 + odd, 40]))
    out["bad documents"] = caught(lambda: cp.layout(40, cu_seqlens=[0, 50, 40] if odd else [0, 10, 40]))
    layout = cp.layout(40)
    n = layout.local_length
    x = make_inputs("gla", 1, n, Hk=2, H=2)
    call = lambda **change: lambda: ring_la.gla(**(x | (change if odd else {})), layout=layout)  # noqa: E731
    out["shape"] = caught(call(v=torch.zeros(1, n, 2, 9, dtype=torch.float64)))
    out["dtype"] = caught(call(g=-torch.rand(1, n, 2, 6)))
    out["refused"] = caught(call(k=torch.zeros(1, n, 2, 7, dtype=torch.float64)))
    out["option"] = caught(call(output_final_state=True))
    out["device"] = caught(call(**{name: t.to("meta") for name, t in x.items()}))
    out["gradient"] = caught(call(q=x["q"].detach()))
    if validate == "always":
        out["gate"] = caught(call(g=x["g"] + 5))
        out["nan"] = caught(call(v=x["v"] * float("nan")))
        state = torch.full((1, 2, 6, 5), float("nan") if odd else 0.0)
        y, weight = torch.zeros(1, n, 6), torch.full((6, 3), float("nan") if odd else 0.0)
        out["nan in a convolution"] = caught(lambda: ring_la.short_conv(y, weight, layout=layout))
        out["nan in the state"] = caught(lambda: ring_la.gla(**x, initial_state=state, layout=layout))
    out["fine"] = caught(call())
    return out


@pytest.mark.parametrize("validate", ["first", "always"])
def test_ranks_that_differ_get_the_same_error(ranks, validate):
    results = ranks.run(3, check_disagreement, validate)
    for case in results[0]:
        messages = [r[case] for r in results]
        if case == "fine":
            assert messages == ["nothing raised"] * 3
            continue
        assert "nothing raised" not in messages, case
        assert "rank 1" in messages[0] or messages[0] == messages[1], case
        assert messages[0] == messages[2], case
        if messages[0].startswith("DisagreementError") and messages[1].startswith("DisagreementError"):
            assert messages[0] == messages[1], case
    ranks_say = [f"\n  rank {r}: output_final_state={r == 1}" for r in range(3)]  # what differs, and nothing else
    assert results[0]["option"].endswith("the arguments of gla:" + "".join(ranks_say))
    assert "rank 0: nothing refused\n  rank 1: refused: k: expected" in results[0]["refused"]


def check_late_disagreement(rank: int) -> tuple[str, float]:
    """A call compared before is wrong on one rank the second time."""
    cp = ring_la.ContextParallel(group(), scan="ring", timeout=60.0)
    layout = cp.layout(40, "contiguous")
    x = {n: layout.shard(t.detach()) for n, t in make_inputs("delta_rule", 1, 40).items()}
    ring_la.delta_rule(**x, layout=layout)
    start = time.monotonic()
    wrong = {"beta": x["beta"][:, :, :3]} if rank == 0 else {}
    return caught(lambda: ring_la.delta_rule(**(x | wrong), layout=layout)), time.monotonic() - start


def test_a_late_disagreement_ends_in_errors(ranks):
    results = ranks.run(2, check_late_disagreement)
    ranks.stop()  # half an exchange is left in the group
    assert results[0][0].startswith(
        "DisagreementError: the ranks of this group disagree on the arguments of delta_rule"
    )
    assert "rank 0: refused: beta: expected" in results[0][0]
    assert results[1][0] == results[0][0]
    assert all(seconds < 15 for _, seconds in results)


def check_absent(rank: int) -> tuple[str, float]:
    cp = ring_la.ContextParallel(group(), scan="ring", timeout=2.0)
    if rank == 1:
        time.sleep(40)
    start = time.monotonic()
    return caught(lambda: cp.layout(8)), time.monotonic() - start


def test_agreement_keeps_the_timeout(ranks):
    message, seconds = ranks.run(2, check_absent, dying=(1,))[0]
    assert "no sign of life from rank 1" in message
    assert seconds < 12


def check_flags(rank: int) -> list[str]:
    """Options that change numbers, different on rank 1, and moves of tokens that do not fit."""
    odd = rank == 1
    cp = ring_la.ContextParallel(group(), scan="ring")
    layout = cp.layout(20)
    n = layout.local_length
    x = make_inputs("delta_rule", 1, n)
    y = make_inputs("mamba2", 1, n) | {"dt_softplus": odd}
    return [
        caught(lambda: ring_la.delta_rule(**x, layout=layout, use_qk_l2norm=odd)),
        caught(lambda: ring_la.mamba2(**y, layout=layout)),
        caught(lambda: layout.gather(torch.ones(1, n, 3 + odd))),
        caught(lambda: layout.targets(torch.ones(1, n, dtype=torch.int64 if odd else torch.int32))),
    ]


def test_flags_and_moves_are_compared(ranks):
    results = ranks.run(2, check_flags)
    assert all(message.startswith("DisagreementError") for messages in results for message in messages)
    assert results[0] == results[1]


def check_names(rank: int) -> dict[str, str]:
    """What each function says where rank 1 brings another dtype, or tokens that need gradients."""
    cp, odd = ring_la.ContextParallel(group(), scan="ring"), rank == 1
    layout = cp.layout(20)
    n = layout.local_length
    x, heads = torch.ones(1, n, 16, dtype=torch.float64 if odd else torch.float32), torch.ones(1, n, 2, 8)
    state, needed = torch.zeros(1, 16, 3, requires_grad=odd), heads.clone().requires_grad_(odd)
    moe = nn.MixtureOfExperts(16, 16, experts=2, top_k=1)
    own = dict(causal=False, normalize=True, normalizer_q=needed, normalizer_k=heads)
    return {
        "layer": caught(lambda: nn.DeltaNet(16, num_heads=2).to(x.dtype)(x, layout=layout)),
        "moe": caught(lambda: moe.to(x.dtype)(x, layout=layout)),
        "convolution": caught(lambda: ring_la.short_conv(x, torch.ones(16, 4, dtype=x.dtype), layout=layout)),
        "state": caught(lambda: ring_la.short_conv(x.float(), torch.ones(16, 4), initial_state=state, layout=layout)),
        "recurrence": caught(lambda: ring_la.linear_attention(needed, heads, heads, layout=layout)),
        "attention": caught(lambda: ring_la.attention(needed, heads, heads, layout=layout)),
        "normalizer": caught(lambda: ring_la.linear_attention(heads, heads, heads, layout=layout, **own)),
        "gather": caught(lambda: layout.gather(x.mT, dim=2)),
    }


def test_what_ranks_differ_in_is_named(ranks):
    said = ranks.run(2, check_names)[0]
    of_x = ["x=shape [1, T, 16], dtype torch.float32, requires_grad False"]
    of_x += [of_x[0].replace("32", "64")]
    needed = [f"q=shape [1, T, 2, 8], dtype torch.float32, requires_grad {wanted}" for wanted in (False, True)]
    state = [f"initial_state=shape [1, 16, 3], dtype torch.float32, requires_grad {odd}" for odd in (False, True)]
    of_experts = ["dtype of x=torch.float32", "dtype of x=torch.float64"]
    expected = {"layer": of_x, "moe": of_experts, "convolution": of_x, "state": state}
    expected |= {"recurrence": needed, "attention": needed}
    expected["normalizer"] = [f"normalizer=({q[2:]}, {needed[0][2:]})" for q in needed]
    expected["gather"] = [line.replace("T, 16", "16, T") for line in of_x]
    for call, message in said.items():
        for rank, line in enumerate(expected[call]):
            assert f"\n  rank {rank}: {line}" in message, f"{call}: {message}"


def check_whole(rank: int) -> dict[str, str]:
    """The whole sequence where this rank's tokens are due."""
    cp = ring_la.ContextParallel(group(), scan="ring")
    layout = cp.layout(21)
    x, ids, heads = torch.ones(1, 21, 16), torch.ones(1, 21, dtype=torch.int64), torch.ones(1, 21, 2, 8)
    config = HybridConfig(vocab_size=8, dim=16, layers=["deltanet"], num_heads=2)
    model, mine = HybridLM(config), layout.shard(heads)
    return {
        "q of linear_attention": caught(lambda: ring_la.linear_attention(heads, heads, heads, layout=layout)),
        "q of attention": caught(lambda: ring_la.attention(heads, heads, heads, layout=layout)),
        "k of attention": caught(lambda: ring_la.attention(mine, heads, heads, layout=layout)),
        "x of short_conv": caught(lambda: ring_la.short_conv(x, torch.ones(16, 4), layout=layout)),
        "x of a layer": caught(lambda: nn.DeltaNet(16, num_heads=2)(x, layout=layout)),
        "x of an attention layer": caught(lambda: nn.Attention(16, num_heads=2)(x, layout=cp.layout(21, "striped"))),
        "x of experts": caught(lambda: nn.MixtureOfExperts(16, 16, experts=2, top_k=1)(x, layout=layout)),
        "ids of a model": caught(lambda: model(ids, layout=layout)),
        "ids of a loss": caught(lambda: model.loss(ids, layout=layout)),
        "x of gather": caught(lambda: layout.gather(x)),
    }


def test_a_whole_sequence_is_not_blamed_on_the_layout(ranks):
    for call, message in ranks.run(2, check_whole)[0].items():
        name = call.partition(" ")[0]
        assert message.startswith(f"ArgumentError: {name}: expected "), f"{call}: {message}"
        assert message.endswith("This is the whole sequence: layout.shard(x) first"), f"{call}: {message}"


def check_uneven(rank: int) -> list[str]:
    """An argument that all ranks refuse, of shards that are not as long as one another."""
    layout = ring_la.ContextParallel(group(), scan="ring").layout(21)
    x = make_inputs("gla", 1, layout.local_length, Hk=2, H=2)
    wrong = x["g"][..., :5]
    return [
        caught(lambda: ring_la.gla(**x | {"g": wrong}, layout=layout)),
        caught(lambda: ring_la.gla(**x | ({"g": wrong} if rank else {"k": x["k"][..., :5]}), layout=layout)),
    ]


def test_what_all_ranks_refuse_is_not_blamed_on_the_split(ranks):
    results = ranks.run(2, check_uneven)
    for rank, (same, _) in enumerate(results):
        assert same.startswith(f"ArgumentError: g: expected [1, {11 - rank}, 2, 6]"), same
    assert results[0][1] == results[1][1]
    for rank, name in enumerate("kg"):
        assert f"rank {rank}: refused: {name}: expected" in results[0][1]


def check_store(rank: int) -> tuple[str, list[str]]:
    """The way hosts agree under NCCL, here over the same store."""
    cp = ring_la.ContextParallel(group(), scan="ring", validate="never", timeout=30.0)
    for n in range(5):
        assert cp.comm.agreement.tell(f"{n} from {rank}") == [f"{n} from {r}" for r in range(cp.size)]
    other = ring_la.ContextParallel(group(), scan="ring", validate="never")
    return caught(lambda: cp.comm.agreement.agree("this", rank)), other.comm.agreement.tell(str(rank))


def test_agreement_through_the_store(ranks):
    results = ranks.run(3, check_store)
    assert all("disagree on this" in message for message, _ in results)
    assert all(values == ["0", "1", "2"] for _, values in results)


def forked(call) -> str:
    """What a call says in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, caught(call).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, closefd=True) as said:
        text = said.read() if select.select([said], [], [], 20)[0] else "nothing within 20 seconds"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return text


def check_fork(rank: int, validate: str) -> list[str]:
    cp = ring_la.ContextParallel(group(2), scan="ring", validate=validate, timeout=30)
    layout = cp.layout(8)
    x = torch.ones(1, layout.local_length, 1, 2)
    split = lambda: ring_la.linear_attention(x, x, x, layout=layout)  # noqa: E731
    split()
    whole = torch.arange(8.0)[None]
    said = [forked(call) for call in (split, lambda: cp.layout(9), lambda: layout.shard(whole))]
    return [*said, caught(lambda: torch.testing.assert_close(layout.gather(layout.shard(whole)), whole))]


@pytest.mark.parametrize("validate", ["first", "never"])
def test_a_fork_neither_calls_nor_disturbs_its_parents_calls(ranks, validate):
    """A loader's worker may cut sequences; a split call would wait for threads that the fork has not, and its entry in
    the log, which is memory of both, would be the parent's."""
    for split, made, cut, after in ranks.run(2, check_fork, validate):
        assert "group: expected a group of this process" in split
        assert validate == "never" or "group: expected a group of this process" in made
        assert "nothing" in cut
        assert "nothing" in after


def check_peer(rank: int, how: str, scan: str) -> tuple[str, float]:
    cp = ring_la.ContextParallel(group(), scan=scan, timeout=2.0, validate="never")
    layout = cp.layout(40, "contiguous")
    x = {n: layout.shard(t.detach()) for n, t in make_inputs("gla", 1, 40).items()}
    if rank == 1:
        if how == "dies":
            os._exit(1)
        time.sleep(40)
    start = time.monotonic()
    return caught(lambda: ring_la.gla(**x, layout=layout)), time.monotonic() - start


@pytest.mark.parametrize("scan", ["ring", "all_gather"])
@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_lost_peer_is_named(ranks, how, scan):
    results = ranks.run(3, check_peer, how, scan, dying=(1,))
    waiting = results[1:] if scan == "ring" else results  # rank 0 needs nobody in a ring
    for message, seconds in waiting:
        assert message.startswith("PeerError"), message
        assert "no sign of life from rank 1 (global rank 1)" in message
        assert seconds < 15


def check_gates(rank: int) -> list[str]:
    """Gates above zero, NaN and -inf on rank 1 alone."""
    layout = ring_la.ContextParallel(group(), scan="ring", validate="always").layout(8)
    q = torch.ones(1, layout.local_length, 1, 4)
    said = []
    for bad in (0.5, float("nan"), -float("inf")):
        g = torch.full((1, layout.local_length, 1), bad if rank == 1 else -0.5)
        said.append(caught(lambda: ring_la.simple_gla(q, q, q, g, layout=layout)))  # noqa: B023  called at once
    return said


def test_values_of_gates_are_checked_on_request(ranks):
    for above, nan, without_end in ranks.run(2, check_gates):
        assert "g: expected log-decays ≤ 0, got a largest value of 0.5" in above
        assert "NaN" in nan
        assert (
            "g: expected finite log-decays, got a smallest value of -inf. A gate of -100 forgets all, too"
            in without_end
        )
