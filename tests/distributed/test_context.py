"""ContextParallel among real ranks: groups, training machinery, memory, bytes, settings."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import ring_la
from ring_la import reference
from ring_la.algebra import Affine
from ring_la.comm.members import Members
from ring_la.errors import PeerError
from ring_la.scan import STRATEGIES, Chain
from tests.support.pool import group
from tests.support.recurrence_cases import DOCUMENTS, error, make_inputs

H, K, V = 4, 6, 5


def shard(layout, x):
    return {n: layout.shard(t.detach()).requires_grad_() for n, t in x.items()}


ENDING = """
import atexit, pathlib, time

def threads():
    return [t.read_text().strip() for t in pathlib.Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop")

atexit.register(lambda: print("left", threads()))  # runs last
import torch, torch.distributed as dist, ring_la
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
cp = ring_la.ContextParallel()
layout = cp.layout(8)
layout.gather(layout.shard(torch.ones(1, 8, 1)))
dist.all_reduce(torch.ones(1))
began = time.monotonic()
while threads() < 2 and time.monotonic() - began < 60:  # gloo's, which have a name once they run
    time.sleep(0.01)
assert threads() == 2
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_destroyed_group_ends_before_the_interpreter_does():
    """A thread of gloo's that gives a tensor back later aborts a process whose work is done (2 of 48 quick starts)."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "left 0\n"), done.stderr


def check_alone(rank: int) -> None:
    """Rank 1 makes no ContextParallel."""
    pair = dist.new_group(
        [0, 1], timeout=timedelta(seconds=1)
    )  # by all ranks of the pool, whose next groups count on it
    if rank == 0:
        with pytest.raises(PeerError, match="waited for others to make this group"):
            ring_la.ContextParallel(pair)


def test_who_makes_a_group_alone_is_told(ranks):
    ranks.run(4, check_alone)


# -- groups ------------------------------------------------------------------------------------------------


def check_subgroup(rank: int) -> float:
    """Ranks 1 and 3 split one sequence, ranks 0 and 2 another, at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cp = ring_la.ContextParallel(groups[rank % 2])
    assert (cp.rank, cp.size) == (rank // 2, 2)
    return run_once(cp, seed=rank % 2)


def check_mesh(rank: int) -> float:
    """The context axis of a data × context mesh."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data", "context"))
    with pytest.raises(ring_la.ArgumentError, match=r"^group: expected a one-dimensional"):
        ring_la.ContextParallel(mesh)
    return run_once(ring_la.ContextParallel(mesh["context"]), seed=rank // 2)


def run_once(cp: ring_la.ContextParallel, seed: int, name: str = "kda", **keywords) -> float:
    """Worst error of the output and the gradients of one packed call on `cp`."""
    T, cu = DOCUMENTS["packed"]
    x = make_inputs(name, 1, T, H=H, K=K, V=V, seed=seed)
    want = getattr(reference, name)(**x, cu_seqlens=cu).o
    grads = torch.autograd.grad(want.square().sum(), list(x.values()))
    layout = cp.layout(T, "zigzag", cu_seqlens=cu)
    local = shard(layout, x)
    out = getattr(ring_la, name)(**local, layout=layout, **keywords).o
    got = torch.autograd.grad(out.square().sum(), list(local.values()))
    pairs = [(out, want), *zip(got, grads)]
    return max(error(a, layout.shard(b)) for a, b in pairs)


@pytest.mark.parametrize("check", [check_subgroup, check_mesh])
def test_groups_that_are_not_the_world(ranks, check):
    assert max(ranks.run(4, check)) < 1e-10


def check_recurrent(rank: int) -> float:
    cp = ring_la.ContextParallel(group(), scan="ring")
    names = ("linear_attention", "simple_gla", "gla", "gated_delta_rule", "dplr_delta_rule")
    return max(run_once(cp, 0, name, mode="recurrent") for name in names)


def test_split_recurrent_mode_is_whole(ranks):
    assert max(ranks.run(3, check_recurrent)) < 1e-10


def check_bidirectional(rank: int, causal: bool, normalize: bool, documents: str) -> float:
    T, cu = DOCUMENTS[documents]
    B = 2 if cu is None else 1
    N = B if cu is None else len(cu) - 1
    x = {n: t.detach().abs() for n, t in make_inputs("linear_attention", B, T, H=H, K=K, V=V).items()}
    rng = torch.Generator().manual_seed(2)
    x["initial_state"] = torch.rand(N, H, K, V + normalize, dtype=torch.float64, generator=rng)
    whole = {n: t.clone().requires_grad_() for n, t in x.items()}
    flags = dict(causal=causal, normalize=normalize, output_final_state=True)
    want = reference.linear_attention(**whole, **flags, cu_seqlens=cu)
    grads = torch.autograd.grad(want.o.square().sum() + want.final_state.sum(), list(whole.values()))
    cp = ring_la.ContextParallel(group(), scan="all_gather")
    worst = 0.0
    for kind in ("contiguous", "zigzag"):
        layout = cp.layout(T, kind, cu_seqlens=cu)
        local = {n: t.clone() if n == "initial_state" else layout.shard(t) for n, t in x.items()}
        local = {n: t.requires_grad_() for n, t in local.items()}
        out = ring_la.linear_attention(**local, **flags, layout=layout)
        loss = out.o.square().sum() + out.final_state.sum() / cp.size
        got = torch.autograd.grad(loss, list(local.values()))
        pairs = [(out.o, layout.shard(want.o)), (out.final_state, want.final_state)]
        pairs += [(d, g if n == "initial_state" else layout.shard(g)) for n, d, g in zip(local, got, grads)]
        worst = max([worst, *(error(a, b) for a, b in pairs if b.numel())])
    return worst


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_split_bidirectional_and_normalised_linear_attention_is_whole(ranks, causal, normalize):
    for documents in ("dense", "packed", "short"):
        assert max(ranks.run(4, check_bidirectional, causal, normalize, documents)) < 1e-10


# -- training machinery ------------------------------------------------------------------------------------


def check_checkpoint(rank: int) -> None:
    """Activation checkpointing replays the exchange in backward, with the same gradients."""
    cp = ring_la.ContextParallel(group(), scan="ring")
    T = 90
    layout = cp.layout(T)
    x = shard(layout, make_inputs("gated_delta_rule", 2, T, H=H, K=K, V=V))

    def layer(*tensors):
        return ring_la.gated_delta_rule(*tensors, layout=layout).o

    plain = torch.autograd.grad(layer(*x.values()).square().sum(), list(x.values()))
    for reentrant in (False, True):
        out = checkpoint(layer, *x.values(), use_reentrant=reentrant)
        if reentrant:
            out.square().sum().backward()
            again = [t.grad for t in x.values()]
        else:
            again = torch.autograd.grad(out.square().sum(), list(x.values()))
        assert all(torch.equal(a, b) for a, b in zip(plain, again))


def check_autocast(rank: int) -> None:
    """Under autocast a layer's bf16 projections go in; states, gates and what maps of states do stay fp32."""
    cp = ring_la.ContextParallel(group(), scan="ring")
    layout = cp.layout(64)
    torch.manual_seed(0)
    x = layout.shard(torch.randn(1, 64, 8))
    weight = torch.randn(8, 24)
    g = layout.shard(-torch.rand(1, 64, 2))
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 4)).unbind(2)
        assert q.dtype == torch.bfloat16
        out = ring_la.simple_gla(q, k, v, g, layout=layout, output_final_state=True)
    assert out.o.dtype == torch.bfloat16
    assert out.final_state.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        plain = ring_la.simple_gla(q, k, v, g, layout=layout, output_final_state=True)
    assert torch.equal(out.o, plain.o)
    assert torch.equal(out.final_state, plain.final_state)
    for name in ("simple_gla", "gated_delta_rule"):
        results = []
        for enabled in (False, True):
            inputs = shard(layout, make_inputs(name, 1, 64, dtype=torch.float32))
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                o = getattr(ring_la, name)(**inputs, layout=layout).o
                grads = torch.autograd.grad(o.square().sum(), [x for x in inputs.values() if x.requires_grad])
            results.append([o, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results)), name


def check_second_derivative(rank: int) -> None:
    cp = ring_la.ContextParallel(group(), scan="ring")
    layout = cp.layout(20)
    x = shard(layout, make_inputs("gla", 1, 20))
    out = ring_la.gla(**x, layout=layout).o
    (grad,) = torch.autograd.grad(out.square().sum(), x["q"], create_graph=True)
    with pytest.raises(ring_la.SecondDerivativeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("check", [check_checkpoint, check_autocast, check_second_derivative])
def test_split_calls_work_with_torch_s_training_machinery(ranks, check):
    ranks.run(3, check)


# -- memory and bytes --------------------------------------------------------------------------------------


def check_memory(rank: int, P: int) -> int:
    """Bytes held for the backward by one layer's graph on this rank."""
    cp = ring_la.ContextParallel(group(P), scan="ring")
    layout = cp.layout(2048)
    x = shard(layout, make_inputs("gated_delta_rule", 1, 2048, H=2, Hk=2, K=16, V=16, dtype=torch.float32))
    held = 0

    def pack(t):
        nonlocal held
        held += t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ring_la.gated_delta_rule(**x, layout=layout)
    return held


def test_memory_falls_with_ranks(ranks):
    held = {P: max(ranks.run(P, check_memory, P)) for P in (1, 2, 4)}
    assert held[2] < 0.6 * held[1]
    assert held[4] < 0.6 * held[2]


def check_bytes(rank: int, name: str, kind: str) -> dict[str, tuple[int, ...]]:
    """By strategy: bytes this rank sent forward and back, and what the strategy says of the busiest rank."""
    sent = {}
    for scan in STRATEGIES:
        cp = ring_la.ContextParallel(group(), scan=scan, validate="never")
        layout = cp.layout(64, kind)
        x = make_inputs(name, 1, 64, Hk=4, H=4, K=6, V=8, dtype=torch.float32)
        x = {n: layout.shard(t.detach()).requires_grad_() for n, t in x.items()}
        counts = [cp.comm.bytes_sent]
        o = getattr(ring_la, name)(**x, layout=layout).o
        counts.append(cp.comm.bytes_sent)
        o.sum().backward()
        counts.append(cp.comm.bytes_sent)
        rule = {"linear_attention": "identity", "simple_gla": "scalar", "gla": "diagonal", "gated_delta_rule": "dense"}
        like = Affine(rule[name], None, torch.empty(1, 4, 6, 8, device="meta"))
        costs = STRATEGIES[scan].cost(Chain.of(layout), like), STRATEGIES[scan].cost_back(Chain.of(layout), like)
        sent[scan] = counts[1] - counts[0], counts[2] - counts[1], *(cost.received for cost in costs)
    return sent


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", ["linear_attention", "simple_gla", "gla", "gated_delta_rule"])
def test_bytes_sent_are_what_strategies_say(ranks, name, kind):
    """The busiest rank sends what the busiest rank is said to receive (chains are symmetric)."""
    by_rank = ranks.run(4, check_bytes, name, kind)
    for scan in STRATEGIES:
        forward, back = (max(r[scan][n] for r in by_rank) for n in (0, 1))
        assert (forward, back) == by_rank[0][scan][2:], scan
        assert 0 < back <= forward, scan


# -- settings ------------------------------------------------------------------------------------------


def check_striped(rank: int) -> None:
    cp = ring_la.ContextParallel(group(), scan="ring")
    striped, zigzag = cp.layout(40, "striped"), cp.layout(40)
    x = make_inputs("gla", 1, 40)
    local = {n: striped.shard(t.detach()) for n, t in x.items()}
    with pytest.raises(ring_la.UnsupportedError, match=r"layout.*convert"):
        ring_la.gla(**local, layout=striped)
    with pytest.raises(ring_la.ArgumentError, match=r"^layout: expected one with .* tokens on this rank"):
        ring_la.gla(**local, layout=cp.layout(44))
    with pytest.raises(ring_la.ArgumentError, match=r"^cu_seqlens: expected None with a layout"):
        ring_la.gla(**local, layout=zigzag, cu_seqlens=torch.tensor([0, 20]))
    moved = {n: striped.convert(t, zigzag) for n, t in local.items()}
    assert error(ring_la.gla(**moved, layout=zigzag).o, zigzag.shard(reference.gla(**x).o)) < 1e-10


def test_striped_is_refused_and_convert_helps(ranks):
    ranks.run(2, check_striped)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (dict(scan="star"), "scan"),
        (dict(attention="none"), "attention"),
        (dict(transport="mpi"), "transport"),
        (dict(validate="maybe"), "validate"),
        (dict(timeout=0), "timeout"),
        (dict(timeout="5"), "timeout"),
        (dict(timeout=float("inf")), "timeout"),
        (dict(deterministic="no"), "deterministic"),
        (dict(group="world"), "group"),
    ],
)
def test_bad_settings_are_named(ranks, arguments, name):
    ranks.run(1, check_bad_setting, arguments, name)


def check_bad_setting(rank: int, arguments: dict, name: str) -> None:
    with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected"):
        ring_la.ContextParallel(**({"group": group()} | arguments))


def check_handles(rank: int) -> None:
    layout = ring_la.ContextParallel(group(), scan="ring").layout(9)
    for handle in (layout, layout.cp):
        assert copy.copy(handle) is copy.deepcopy(handle) is handle  # as in a copy of a model that holds it
        with pytest.raises(ring_la.UnsupportedError, match=rf"^{type(handle).__name__}: expected one that stays"):
            pickle.dumps(handle)
    ids = layout.shard(torch.arange(9, dtype=torch.int8), 0)
    for index in ("none", -1000):
        with pytest.raises(ring_la.ArgumentError, match=r"^ignore_index: expected an int that torch.int8 holds"):
            layout.targets(ids, index)


def test_handles_are_copied_as_themselves_and_never_pickled(ranks):
    ranks.run(1, check_handles)


def check_destroyed(rank: int) -> list[str]:
    """What calls say whose group is gone."""
    made = dist.new_group([0, 1])
    cp = ring_la.ContextParallel(made, scan="ring", timeout=30)
    layout = cp.layout(8)
    x = torch.ones(1, layout.local_length, 1, 2)
    dist.destroy_process_group(made)
    said = []
    for call in (ring_la.linear_attention, ring_la.attention):
        try:
            call(x, x, x, layout=layout)
        except ring_la.RingLAError as e:
            said.append(str(e))
    return said


def test_a_group_that_is_gone_is_named(ranks):
    message = "group: expected a process group that is there, got one that was destroyed"
    said = ranks.run(2, check_destroyed)
    ranks.stop()  # other ranks of the pool have made one group less: new ones would wait for each other
    assert said == [[message] * 2] * 2


def check_unnamed(rank: int) -> list[str]:
    """Where messages are, of groups of a job that has GPUs: PyTorch calls a backend that nobody named "undefined"."""
    found = []
    for name, config in (("undefined", "cuda:nccl"), ("undefined", "cpu:gloo"), ("gloo", "cpu:gloo,cuda:gloo")):
        with (
            mock.patch.object(dist, "get_backend", return_value=name),
            mock.patch.object(dist, "get_backend_config", return_value=config),
            mock.patch.object(torch.cuda, "current_device", return_value=0),
        ):
            found.append(str(Members(group(), timedelta(seconds=9)).device))
    return found


def test_a_backend_that_nobody_named_is_found(ranks):
    assert ranks.run(1, check_unnamed) == [["cuda:0", "cpu", "cpu"]]


def test_without_torch_distributed():
    with pytest.raises(ring_la.ArgumentError, match=r"^group: expected an initialised"):
        ring_la.ContextParallel()
