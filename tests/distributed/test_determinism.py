"""Bits of a deterministic ContextParallel do not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la.scan import STRATEGIES
from tests.support.pool import group
from tests.support.recurrence_cases import BY_NAME, make_inputs


def check_deterministic(
    rank: int, P: int, name: str, documents: int, kind: str, T: int = 700
) -> tuple[torch.Tensor, ...]:
    """o, the final state and the gradients of all tokens."""
    cu = None if documents == 0 else (0, 100, 101, 450, 700)
    x = {
        n: t.detach() if isinstance(t, torch.Tensor) else t
        for n, t in make_inputs(name, 1, T, dtype=torch.float32).items()
    }
    cp = ring_la.ContextParallel(group(P), deterministic=True)
    layout = cp.layout(T, kind, cu_seqlens=cu)
    tokens = {n: layout.shard(t).requires_grad_() for n, t in x.items() if isinstance(t, torch.Tensor) and t.dim() > 1}
    out = getattr(ring_la, name)(**(x | tokens), layout=layout, output_final_state=True)
    do = torch.randn(1, T, *out.o.shape[2:], generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad((out.o * layout.shard(do)).sum(), list(tokens.values()))
    return layout.gather(out.o.detach()), out.final_state.detach(), *(layout.gather(d) for d in grads)


@pytest.mark.parametrize("name", ["retention", "gla", "gated_delta_rule", "kda", "rwkv7", "mamba2"])
def test_deterministic_bits_do_not_depend_on_P(ranks, name):
    for documents in (0, 1):
        for kind in ("contiguous", "zigzag"):
            one = ranks.run(1, check_deterministic, 1, name, documents, kind)[0]
            for P in (2, 4):
                for some in ranks.run(P, check_deterministic, P, name, documents, kind):
                    assert [torch.equal(a, b) for a, b in zip(one, some, strict=True)] == [True] * len(one)


@pytest.mark.parametrize(("name", "T", "P"), [("gated_delta_rule", 66, 2), ("gla", 130, 3)])
def test_deterministic_bits_with_a_short_last_shard(ranks, name, T, P):
    """A shard short enough to go token by token by itself still goes in chunks."""
    one = ranks.run(1, check_deterministic, 1, name, 0, "contiguous", T)[0]
    for some in ranks.run(P, check_deterministic, P, name, 0, "contiguous", T):
        assert [torch.equal(a, b) for a, b in zip(one, some, strict=True)] == [True] * len(one)


DOCUMENTS = (0, 70, 71, 171)


def all_of(rank: int, P: int, kind: str) -> dict[str, Any]:
    """Of every recurrence on packed documents with states: all results and gradients."""
    cp = ring_la.ContextParallel(group(P), deterministic=True)
    layout = cp.layout(DOCUMENTS[-1], kind, cu_seqlens=DOCUMENTS)
    return {name: results_of(name, layout) for name in BY_NAME}


def results_of(name: str, layout: Any) -> dict[str, Tensor]:
    kinds, function, rng = BY_NAME[name].arguments, getattr(ring_la, name), torch.Generator().manual_seed(3)
    x: dict[str, Any] = make_inputs(name, 1, layout.seq_len, dtype=torch.float32)
    x |= {"steps": 3} if "steps" in x else {}  # each is an exchange
    given = {n: t.detach() for n, t in x.items() if isinstance(t, Tensor)}
    leaves = {n: (t if kinds[n].shared else layout.shard(t)).requires_grad_() for n, t in given.items()}
    call: dict[str, Any] = dict(x | leaves, layout=layout, output_final_state=True)
    with torch.no_grad():
        like = function(**call).final_state
    parts = like if isinstance(like, tuple) else (like,)
    S = tuple(torch.rand(p.shape, generator=rng).requires_grad_() for p in parts)
    o, final = function(**call, initial_state=S if isinstance(like, tuple) else S[0])
    do = layout.shard(torch.randn(1, layout.seq_len, *o.shape[2:], generator=rng))
    loss = (o * do).sum()
    for part in final if isinstance(final, tuple) else (final,):
        loss = loss + (part * torch.randn(part.shape, generator=rng)).sum() * (layout.rank == 0)
    grads = dict(zip([*leaves, *range(len(S))], torch.autograd.grad(loss, [*leaves.values(), *S])))
    out = {"o": layout.gather(o.detach())} | {f"S{i}": p.detach() for i, p in enumerate(final)}
    for n, d in grads.items():
        if not isinstance(n, int):  # of a state it is whole
            d = layout.cp.comm.all_reduce(d).wait() if kinds[n].shared else layout.gather(d)
        out[f"d{n}"] = d
    return out


def test_every_recurrence_has_the_same_bits(ranks):
    one = ranks.run(1, all_of, 1, "contiguous")[0]
    for some in ranks.run(3, all_of, 3, "zigzag"):
        for name in one:
            assert not [n for n, t in one[name].items() if not torch.equal(t, some[name][n])], name


def operators(rank: int, P: int, kind: str) -> dict[str, Tensor]:
    """Of softmax attention of latents, and of what has no such bits: refused by name."""
    cp = ring_la.ContextParallel(group(P), deterministic=True)
    layout, rng = cp.layout(171, kind, cu_seqlens=DOCUMENTS), torch.Generator().manual_seed(3)
    shapes = dict(q=(1, 171, 3, 13), latent=(1, 171, 24), k_rope=(1, 171, 4), w_uk=(3, 9, 24), w_uv=(3, 5, 24))
    others = dict(fq=(1, 171, 3, 8), fk=(1, 171, 1, 8), fv=(1, 171, 1, 5), fg=(1, 171, 3))
    x = {n: torch.randn(s, generator=rng) for n, s in (shapes | others).items()}
    x = {n: (t if n[0] == "w" else layout.shard(t)).requires_grad_() for n, t in x.items()}
    own, x = {n[1:]: x[n] for n in others}, {n: x[n] for n in shapes}
    with pytest.raises(ring_la.UnsupportedError, match=r"^form: "):
        ring_la.mla(**x, form="absorbed", layout=layout)
    q, sinks = x["q"], torch.linspace(-1, 1, 3).requires_grad_()
    joint = torch.zeros(1, 2, 3, 13, requires_grad=True)
    other = cp.layout(171, kind)
    rows = other.shard(torch.zeros(1, 171, 3, 13))
    with pytest.raises(ring_la.UnsupportedError, match=r"^joint_k: .* wants no gradient"):
        ring_la.attention(rows, rows, rows, joint_k=joint, joint_v=joint, joint="front", layout=other)
    gates = dict(g=-q[..., 0].abs(), lam=q)
    with pytest.raises(ring_la.UnsupportedError, match="log_linear_attention"):
        ring_la.log_linear_attention(q, q, q, **gates, layout=layout)
    o = ring_la.mla(**x, layout=layout).o
    do, dlse = torch.randn(1, 171, 3, 5, generator=rng), torch.rand(1, 3, 171, generator=rng)
    forgot = ring_la.forgetting_attention(**own | {"g": -own["g"].abs()}, layout=layout)
    sunk = ring_la.attention(own["q"], own["k"], own["v"], sinks=sinks, layout=layout)
    loss = (forgot.o * layout.shard(do)).sum() + ((forgot.lse + sunk.lse) * layout.shard(dlse, 2)).sum()
    loss = loss + (sunk.o * layout.shard(do)).sum()
    x["w sinks"] = sinks
    x |= {f"forgetting {n}": t for n, t in own.items()}
    grads = torch.autograd.grad((o * layout.shard(do)).sum() + loss, list(x.values()))
    whole = [cp.comm.all_reduce(d).wait() if n[0] == "w" else layout.gather(d) for n, d in zip(x, grads)]
    outs = [layout.gather(o.detach()), layout.gather(forgot.o.detach())]
    return dict(zip(("o", "forgot", *x), [*outs, *whole]))


def test_latents_have_the_same_bits_and_what_has_not_is_refused(ranks):
    one = ranks.run(1, operators, 1, "contiguous")[0]
    for some in ranks.run(3, operators, 3, "zigzag"):
        assert not [n for n, t in one.items() if not torch.equal(t, some[n])]


def check_scans(rank: int, P: int) -> dict[str, Tensor]:
    """Results by each scan strategy that a deterministic `ContextParallel` takes; every other is refused by name."""
    found = {}
    for scan in ("auto", *STRATEGIES):
        if scan in ("auto", "ring"):
            layout = ring_la.ContextParallel(group(P), scan=scan, deterministic=True).layout(171, cu_seqlens=DOCUMENTS)
            found |= {f"{scan} {n}": t for n, t in results_of("gated_delta_rule", layout).items()}
        else:
            with pytest.raises(ring_la.ArgumentError, match=f'^scan: expected "auto" or "ring" .*{scan}'):
                ring_la.ContextParallel(group(P), scan=scan, deterministic=True)
    return found


def test_every_scan_has_the_same_bits_or_is_refused_by_name(ranks):
    one = ranks.run(1, check_scans, 1)[0]
    assert all(torch.equal(t, one[n.replace("auto", "ring")]) for n, t in one.items())
    for P in (2, 3, 4):
        for some in ranks.run(P, check_scans, P):
            assert not [n for n, t in one.items() if not torch.equal(t, some[n])], P


def check_deterministic_refusals(rank: int) -> None:
    cp = ring_la.ContextParallel(group(), deterministic=True)
    with pytest.raises(ring_la.ArgumentError, match=r"^multiple_of: expected"):
        cp.layout(200, multiple_of=1)
    layout = cp.layout(200)
    x = {n: layout.shard(t).requires_grad_() for n, t in make_inputs("linear_attention", 1, 200).items()}
    for keywords in (dict(mode="recurrent"), dict(causal=False)):
        with pytest.raises(ring_la.UnsupportedError, match="deterministic"):
            ring_la.linear_attention(**x, **keywords, layout=layout)


def test_deterministic_refuses_what_it_cannot_keep(ranks):
    ranks.run(2, check_deterministic_refusals)


def check_threads(rank: int) -> tuple[Tensor, Tensor]:
    """Results of one thread before and after ranks with several: alike they are taken, one beside three is refused."""
    x = {n: t.detach() for n, t in make_inputs("gated_delta_rule", 1, 66, dtype=torch.float32).items()}
    layout = ring_la.ContextParallel(group(), deterministic=True).layout(66)

    def call() -> Tensor:
        return ring_la.gated_delta_rule(**{n: layout.shard(t) for n, t in x.items()}, layout=layout).o

    first = layout.gather(call())
    try:
        torch.set_num_threads(3)
        ring_la.ContextParallel(group(), deterministic=True)
        torch.set_num_threads(1 + 2 * rank)
        ring_la.ContextParallel(group(), scan="ring")  # whose bits nobody promises
        with pytest.raises(ring_la.DisagreementError, match=r"threads \(torch.get_num_threads\(\)\)"):
            ring_la.ContextParallel(group(), deterministic=True)
    finally:
        torch.set_num_threads(1)
    return first, layout.gather(call())


def test_ranks_with_other_numbers_of_threads_are_refused(ranks):
    """Their number changes bits, of operators of one's own, too; one thread gives the same, whatever was before."""
    for before, after in ranks.run(2, check_threads):
        assert torch.equal(before, after)
