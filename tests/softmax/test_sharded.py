"""Attention on split sequences against the dense fp64 reference: outputs, lse and every gradient on every rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ring_la
from ring_la.softmax import attention
from tests.support.attention_cases import DOCUMENTS, FEATURES, draw, truth
from tests.support.peak import peak
from tests.support.pool import group
from tests.support.split_attention import KINDS, STRATEGIES, compare


def check(
    rank: int, P: int, strategy: str, documents: str, features: tuple[str, ...], heads=None, head_groups=1
) -> list[str]:
    cp = ring_la.ContextParallel(group(P), validate="first", scan="ring", head_groups=head_groups)
    T, cu = DOCUMENTS[documents]
    bad = []
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=cu)
        for feature in features:
            errors = compare(
                layout, draw(documents, feature, None, heads), truth(documents, feature, None, heads), strategy
            )
            bad += [f"{kind} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_is_whole(ranks, strategy, documents, P):
    whole = (documents, P) in (("dense", 4), ("packed", 3))
    features = tuple(FEATURES) if whole else ("two for one", "full", "all", "all rear")
    bad = ranks.run(P, check, P, strategy, documents, features)
    assert not any(bad), bad


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 2), (5, 1), (1, 1), (6, 3)])
@pytest.mark.parametrize("P", [2, 3, 4])
def test_ulysses_where_heads_do_not_divide(ranks, P, heads):
    bad = ranks.run(P, check, P, "ulysses", "uneven", ("causal", "all", "all rear"), heads)
    assert not any(bad), bad


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_ulysses_in_groups_of_heads_is_whole(ranks, P):
    """Groups of several key heads, and of an even share of one's queries, which add up its gradients."""
    for heads, groups in (((8, 4), 2), ((6, 2), 5)):
        bad = ranks.run(P, check, P, "ulysses", "packed", ("all", "all rear"), heads, groups)
        assert not any(bad), (heads, groups, bad)


def bytes_held(rank: int, head_groups: int | str) -> list[float]:
    """The most that is held forward, what is kept, and the most backward, in units of this rank's queries: the least
    of several times, for gloo's threads may let go of a message late."""
    cp = ring_la.ContextParallel(group(2), scan="ring", head_groups=head_groups)
    layout = cp.layout(512)
    x = [torch.randn(1, 256, 16, 16, requires_grad=True) for _ in range(3)]
    found = []
    for _ in range(6):
        out, forward, kept = peak(lambda: attention(*x, layout=layout, strategy="ulysses").o)
        _, backward, _ = peak(lambda out=out: torch.autograd.grad(out, x, torch.ones_like(out)))
        found.append((forward, kept, backward))
    return [min(times) / x[0].nbytes for times in zip(*found)]


def test_groups_of_heads_hold_less_of_the_whole_sequence(ranks):
    """With "auto" there are 8: they hold an eighth, beside the results, and backward beside the gradients."""
    (forward, kept, backward), groups = (ranks.run(2, bytes_held, n)[0] for n in (1, "auto"))
    assert kept > 4, "q, k, v and o of the whole sequence"
    assert groups[1] < 1.1, "o and lse of this rank's tokens"
    assert groups[0] - groups[1] < 1.01 * forward / 8
    assert groups[2] - 4 < 1.01 * (kept + backward) / 8


def check_mesh(rank: int, axes: tuple[str, str], shape: tuple[int, int], heads) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    cp = ring_la.ContextParallel(mesh, scan="ring", attention="usp")
    grouped = ring_la.ContextParallel(mesh, scan="ring", attention="usp", head_groups=2)
    case, want = draw("uneven", "all", None, heads), truth("uneven", "all", None, heads)
    bad = [f"groups {n} {e:.1e}" for n, e in compare(grouped.layout(67), case, want, None).items() if e > 1e-9]
    for documents, features in (("dense", tuple(FEATURES)), ("packed", ("two for one", "all", "all rear"))):
        T, cu = DOCUMENTS[documents]
        for kind in KINDS:
            layout = cp.layout(T, kind, cu_seqlens=cu)
            for feature in features:
                case, want = draw(documents, feature, None, heads), truth(documents, feature, None, heads)
                errors = compare(layout, case, want, None)
                bad += [f"{documents} {kind} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


@pytest.mark.parametrize(
    ("axes", "shape", "heads"),
    [
        (("ulysses", "ring"), (2, 2), (4, 2)),
        (("ring", "ulysses"), (2, 2), (3, 3)),
        (("ring", "ulysses"), (1, 4), (4, 4)),
        (("ring", "ulysses"), (2, 2), (1, 1)),
    ],
)
def test_split_over_a_two_dimensional_mesh_is_whole(ranks, axes, shape, heads):
    bad = ranks.run(4, check_mesh, axes, shape, heads)
    assert not any(bad), bad


def check_cross(rank: int, P: int, strategy: str) -> list[str]:
    """Keys of another length, split in another way."""
    cp = ring_la.ContextParallel(group(P), scan="ring")
    bad = []
    for kinds in (("zigzag", "zigzag"), ("contiguous", "striped"), ("striped", "contiguous")):
        for Tk in (131, 20):
            layout, other = cp.layout(67, kinds[0]), cp.layout(Tk, kinds[1])
            for feature in ("causal", "all", "all rear"):
                case, want = draw("uneven", feature, Tk), truth("uneven", feature, Tk)
                errors = compare(layout, case, want, strategy, kv_layout=other)
                bad += [f"{kinds} {Tk} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_split_cross_attention_is_whole(ranks, strategy, P):
    bad = ranks.run(P, check_cross, P, strategy)
    assert not any(bad), bad


def check_subgroup(rank: int) -> list[str]:
    """Ranks 1 and 3 of 4: peers are group ranks, not global ones."""
    import torch.distributed as dist

    odd = dist.new_group([1, 3])
    if rank not in (1, 3):
        return []
    cp = ring_la.ContextParallel(odd, scan="ring")
    layout, bad = cp.layout(67), []
    for strategy in STRATEGIES:
        errors = compare(layout, draw("uneven", "all"), truth("uneven", "all"), strategy)
        bad += [f"{strategy} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


def test_groups_that_are_not_the_world(ranks):
    bad = ranks.run(4, check_subgroup)
    assert not any(bad), bad


def forward_bits(rank: int, P: int, kind: str, documents: str, feature: str) -> torch.Tensor:
    cp = ring_la.ContextParallel(group(P), scan="ring", deterministic=True)
    T, cu = 300, None if documents == "dense" else (0, 7, 7, 130, 131, 300)
    rng = torch.Generator().manual_seed(0)
    layout = cp.layout(T, kind, cu_seqlens=cu)
    q, k, v = (layout.shard(torch.randn(1, T, h, 16, generator=rng)) for h in (4, 2, 2))
    more = dict(FEATURES[feature])
    more = {n: more[n] for n in ("window", "softcap", "causal") if n in more}
    if "all" in feature:
        joint = torch.randn(2, 1, 5, 2, 16, generator=rng)
        more |= dict(joint=FEATURES[feature]["joint"], joint_k=joint[0], joint_v=joint[1], sinks=torch.ones(4))
    x = [t.requires_grad_() for t in (q, k, v)]
    out = attention(*x, layout=layout, dropout_p=0.1, dropout_seed=3, **more)
    do = torch.randn(1, T, 4, 16, generator=rng)
    grads = [] if "all" in feature else torch.autograd.grad((out.o * layout.shard(do)).sum(), x)
    whole = [layout.gather(t.detach()) for t in (out.o, *grads)]
    return torch.cat([t.flatten() for t in (*whole, layout.gather(out.lse.detach(), dim=2))])


@pytest.mark.parametrize("documents", ["dense", "packed"])
@pytest.mark.parametrize("feature", ["causal", "full", "all", "all rear"])
def test_deterministic_bits_do_not_depend_on_ranks(ranks, documents, feature):
    bits = [ranks.run(P, forward_bits, P, kind, documents, feature)[0] for P in (1, 2, 4) for kind in KINDS]
    assert all(torch.equal(b, bits[0]) for b in bits)


def gradient_bits(rank: int) -> bool:
    cp = ring_la.ContextParallel(group(3), scan="ring", deterministic=True)
    layout = cp.layout(300)
    x = [torch.randn(1, layout.local_length, 4, 16, requires_grad=True) for _ in range(3)]
    first, second = (torch.autograd.grad(attention(*x, layout=layout).o.sum(), x) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second))


def test_deterministic_gradients_are_repeatable(ranks):
    assert all(ranks.run(3, gradient_bits))


def check_low_precision(rank: int, dtype: torch.dtype, limit: float) -> list[str]:
    cp = ring_la.ContextParallel(group(3), scan="ring")
    layout, bad = cp.layout(67), []
    for strategy in STRATEGIES:
        for feature in ("two for one", "all"):
            errors = compare(layout, draw("uneven", feature), truth("uneven", feature), strategy, dtype)
            bad += [f"{strategy} {feature} {n} {e:.1e}" for n, e in errors.items() if e > limit]
    return bad


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_gradients_come_in_the_inputs_dtype(ranks, dtype, limit):
    bad = ranks.run(3, check_low_precision, dtype, limit)
    assert not any(bad), bad
