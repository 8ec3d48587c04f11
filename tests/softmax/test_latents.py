"""Attention over latents, whole and split, against the dense fp64 reference: outputs, all gradients, every rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ring_la
from ring_la import reference
from ring_la.softmax.backends import cheaper_form
from tests.support.attention_cases import DOCUMENTS, error
from tests.support.latent_cases import FEATURES, compare, draw, run, truth
from tests.support.pool import group
from tests.support.split_attention import KINDS, STRATEGIES

FORMS = ("expanded", "absorbed")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature", FEATURES)
def test_one_device_is_the_reference(feature, form):
    for documents, key_tokens in (("dense", None), ("packed", None), ("uneven", 131), ("uneven", 20)):
        cu = DOCUMENTS[documents][1]
        case, want = draw(documents, feature, key_tokens), truth(documents, feature, key_tokens)
        got = run(ring_la.mla, case, cu_seqlens=None if cu is None else torch.tensor(cu), form=form)
        assert all(error(got[n], x) < 1e-9 for n, x in want.items()), documents


def test_the_reference_is_attention_to_keys_written_out():
    case = draw("packed", "all")
    x, cu = case.tensors, torch.tensor(DOCUMENTS["packed"][1])
    k = torch.cat(
        [torch.einsum("btl,hnl->bthn", x["latent"], x["w_uk"]), x["k_rope"][:, :, None].expand(-1, -1, 3, -1)], -1
    )
    v = torch.einsum("btl,hvl->bthv", x["latent"], x["w_uv"])
    want = reference.attention(x["q"], k, v, sinks=x["sinks"], **case.keywords, cu_seqlens=cu)
    got = reference.mla(**x, **case.keywords, cu_seqlens=cu)
    assert error(got.o, want.o) < 1e-12
    assert error(got.lse, want.lse) < 1e-12


def check(rank: int, P: int, strategy: str) -> list[str]:
    cp = ring_la.ContextParallel(group(P), scan="ring")
    bad = []
    for documents in ("uneven", "packed") if P < 4 else ("packed", "short packed"):
        T, cu = DOCUMENTS[documents]
        for kind in KINDS:
            layout = cp.layout(T, kind, cu_seqlens=cu)
            for feature, form in (("causal", None), ("full", "expanded"), ("all", "expanded"), ("all", "absorbed")):
                case, want = draw(documents, feature), truth(documents, feature)
                errors = compare(layout, case, want, strategy=strategy, form=form)
                bad += [f"{documents} {kind} {feature} {form} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


CALLS = [(1, "ring"), (2, "ulysses"), (3, "all_gather"), *((4, strategy) for strategy in STRATEGIES)]


@pytest.mark.parametrize(("P", "strategy"), CALLS)
def test_sharded_is_whole(ranks, P, strategy):
    bad = ranks.run(P, check, P, strategy)
    assert not any(bad), bad


def check_more(rank: int) -> list[str]:
    """Ulysses beside a ring; keys split in another way; keys expanded a few at a time; bf16."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    grid = ring_la.ContextParallel(mesh, scan="ring", attention="usp")
    cp = ring_la.ContextParallel(group(4), scan="ring")
    want, errors = truth("uneven", "all"), {}
    for form in FORMS:
        errors[f"usp {form}"] = compare(grid.layout(67), draw("uneven", "all"), want, form=form)
    for strategy in STRATEGIES:
        split = dict(kv_layout=cp.layout(131, "striped"), strategy=strategy)
        cross = draw("uneven", "all", 131), truth("uneven", "all", 131)
        errors[f"cross {strategy}"] = compare(cp.layout(67), *cross, **split)
        low = compare(cp.layout(67), draw("uneven", "all"), want, torch.bfloat16, strategy=strategy, form="expanded")
        errors[f"bf16 {strategy}"] = {n: e if e > 3e-2 else 0.0 for n, e in low.items() if n != "latents"}
    return [f"{what} {n} {e:.1e}" for what, of_call in errors.items() for n, e in of_call.items() if e > 1e-9]


def test_on_a_mesh_across_layouts_and_in_low_precision(ranks):
    bad = ranks.run(4, check_more)
    assert not any(bad), bad


def test_keys_are_expanded_some_at_a_time(monkeypatch):
    from ring_la.softmax.backends import latents

    case, want, sizes = draw("uneven", "all", 131), truth("uneven", "all", 131), []
    whole = latents.Expanded._expand

    def expand(self, latent, rotary):
        sizes.append(latent.shape[1])
        return whole(self, latent, rotary)

    monkeypatch.setattr(latents, "NUMBERS", 0)
    monkeypatch.setattr(latents.Expanded, "_expand", expand)
    got = run(ring_la.mla, case, form="expanded")
    assert all(error(got[n], x) < 1e-9 for n, x in want.items())
    assert max(sizes) <= 67
    assert sum(sizes) == 2 * (64 + 3 + 20)  # keys that a window of 20 shows to the last 67 queries, there and back


def check_bytes(rank: int) -> list[float]:
    """How many times as many bytes written-out keys send as DeepSeek's latents, both ways."""
    cp, found = ring_la.ContextParallel(group(), scan="ring"), []
    layout, H, L, R, N = cp.layout(24, "zigzag"), 16, 512, 64, 128
    n = layout.local_length
    shapes = (1, n, H, N + R), (1, n, L), (1, n, R), (H, N, L), (H, N, L)
    q, latent, k_rope, w_uk, w_uv = x = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for strategy in ("ring", "all_gather"):
        sent = []
        for name in ("latents", "keys"):
            before = cp.comm.bytes_sent
            if name == "latents":
                o = ring_la.mla(*x, layout=layout, form="expanded", strategy=strategy).o
            else:
                rotary = k_rope[:, :, None].expand(-1, -1, H, -1)
                k, v = (torch.einsum("btl,hnl->bthn", latent, w) for w in (w_uk, w_uv))
                o = ring_la.attention(q, torch.cat([k, rotary], -1), v, layout=layout, strategy=strategy).o
            torch.autograd.grad(o.sum(), x)
            sent.append(cp.comm.bytes_sent - before)
        found.append(sent[1] / sent[0])
    return found


@pytest.mark.parametrize("P", [2, 3, 4])
def test_latents_are_a_ninth_of_the_keys_they_make(ranks, P):
    for found in ranks.run(P, check_bytes):
        assert all(ratio > 8.8 for ratio in found), found


@pytest.mark.parametrize("form", FORMS)
def test_the_score_of_an_only_key_has_no_gradient(form):
    """In bf16, too: what Δ and its terms are rounded from is the same, and so each other's rounding is no gradient."""
    rng = torch.Generator().manual_seed(0)
    shapes = (1, 40, 3, 8), (1, 40, 16), (1, 40, 2), (3, 6, 16), (3, 5, 16), (1, 40, 3, 5)
    *x, do = (torch.randn(shape, generator=rng, dtype=torch.bfloat16) for shape in shapes)
    x = [t.requires_grad_() for t in x]
    o = ring_la.mla(*x, window=(0, -1), form=form).o
    dq, dk_rope, dw_uk = torch.autograd.grad(o, [x[0], x[2], x[3]], do)
    assert max(t.abs().max() for t in (dq, dk_rope, dw_uk)) < 1e-4


def test_few_queries_are_absorbed():
    up_k, up_v = torch.zeros(2, 128, 512), torch.zeros(2, 128, 512)
    assert [cheaper_form(n, up_k, up_v) for n in (1, 170, 171, 8192)] == [*["absorbed"] * 2, *["expanded"] * 2]


def test_deterministic_results_do_not_depend_on_ranks(ranks):
    bits = [ranks.run(P, forward_bits, P, kind)[0] for P in (1, 3) for kind in KINDS]
    assert all(torch.equal(b, bits[0]) for b in bits)


def forward_bits(rank: int, P: int, kind: str) -> torch.Tensor:
    cp = ring_la.ContextParallel(group(P), scan="ring", deterministic=True)
    layout, case = cp.layout(150, kind, cu_seqlens=DOCUMENTS["packed"][1]), draw("packed", "causal")
    x = {n: t.float() if n.startswith("w") else layout.shard(t.float()) for n, t in case.tensors.items()}
    return layout.gather(ring_la.mla(**x, layout=layout, form="expanded").o)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(latent=torch.zeros(2, 72, 3, 12)), "latent"),
        (dict(k_rope=torch.zeros(2, 71, 4)), "k_rope"),
        (dict(w_uk=torch.zeros(3, 7, 12)), "w_uk"),
        (dict(w_uk=None), "w_uk"),
        (dict(w_uv=torch.zeros(2, 5, 12)), "w_uv"),
        (dict(sinks=torch.zeros(2)), "sinks"),
        (dict(form="folded"), "form"),
        (dict(output_latents=1), "output_latents"),
    ],
)
def test_bad_input_is_refused_by_name(change, name):
    good = {n: t.float() for n, t in draw("dense", "causal").tensors.items()}
    with pytest.raises(ring_la.ArgumentError, match=f"^{name}: "):
        ring_la.mla(**good | change)
