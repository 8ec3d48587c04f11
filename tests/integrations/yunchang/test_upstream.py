"""Interop with the installed yunchang both ways: Functions, attributes, signatures, layers, tables."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pathlib
import textwrap

import pytest
import torch

from ring_la.integrations import ring_flash_attn, yunchang
from ring_la.integrations.yunchang.ctx import remember
from ring_la.integrations.yunchang.packed import pad_lse, varlen_forward
from tests.support.attention_cases import error
from tests.support.pool import group
from tests.support.yunchang_cases import (
    DENSE,
    DOCUMENTS,
    D,
    H,
    T,
    draw,
    leaves_of,
    places,
    truth,
)


def exact_forward(q, k, v, dropout_p=0.0, softmax_scale=None, causal=True, **ignored):
    """A block kernel with upstream's signature: exact inside, results in the inputs' dtype, lse fp32."""
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * softmax_scale
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse[..., None]), v.double()).to(q.dtype), lse.float()


def exact_backward(dout, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, causal, *ignored, **more):
    dout, q, k, v, out, lse = (x.double() for x in (dout, q, k, v, out, lse))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1]), -torch.inf)
    p = torch.exp(s - lse[..., None])
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout, v) - (dout * out).sum(-1).transpose(1, 2)[..., None])
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, k) * softmax_scale)
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, q) * softmax_scale)
    dv.copy_(torch.einsum("bhij,bihd->bjhd", p, dout))


def upstream(kind: str):
    """(their module, their Function), on exact kernels."""
    names = {"contiguous": "ring_flash_attn", "zigzag": "zigzag_ring_flash_attn", "stripe": "stripe_flash_attn"}
    module = importlib.import_module(f"yunchang.ring.{names[kind]}")
    module.select_flash_attn_impl = lambda attn_type, stage, **more: (
        exact_forward if stage == "fwd-only" else exact_backward
    )
    return module, getattr(module, DENSE[kind][0].__name__)


def check_interop(rank: int, kind: str) -> list[float]:
    _, theirs = upstream(kind)
    from yunchang.kernels import AttnType

    ours, at, tensors, errors = DENSE[kind][0], places(kind, rank, 4), draw(dtype=torch.float16), []
    extra = (None,) if kind == "contiguous" else ()  # their zigzag and stripe take 13 inputs
    for forward, backward in ((ours, theirs), (theirs, ours)):
        mixed = type("Mixed", (torch.autograd.Function,), dict(
            forward=staticmethod(forward.forward), backward=staticmethod(backward.backward)
        ))  # fmt: skip
        leaves, do = leaves_of(tensors, at)
        out = mixed.apply(*leaves, 0.0, None, True, (-1, -1), 0.0, None, False, False, group(4), AttnType.FA, *extra)
        got = [out, None, *torch.autograd.grad((out * do).sum(), leaves)]
        limits = [2e-3, 0, 1e-2, 2e-3, 2e-3]  # their basic ring returns dq in bf16
        for g, w, limit in zip(got, truth(tensors, causal=True), limits):
            if g is not None:
                errors.append(error(g, w[:, at]) / limit)
    return errors


@pytest.mark.parametrize("kind", DENSE)
def test_forward_and_backward_mix_with_yunchang(ranks, kind):
    pytest.importorskip("yunchang")
    assert all(e < 1 for errors in ranks.run(4, check_interop, kind) for e in errors)


def exact_varlen_forward(
    q, k, v, cu_q, cu_k, longest_q, longest_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    """flash-attn 2.6's varlen block, whose lse is padded."""
    spans = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:])
    parts = [
        exact_forward(q[None, a:b], k[None, c:d], v[None, c:d], 0.0, softmax_scale, causal) for a, b, c, d in spans
    ]
    lse = torch.cat([lse[0] for _, lse in parts], 1)
    padded = pad_lse(lse, cu_q.tolist(), longest_q)
    return torch.cat([o[0] for o, _ in parts]), None, None, None, None, padded, None, None


def exact_varlen_backward(
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, longest_q, longest_k, dropout_p, softmax_scale, causal, *ignored,
    **more,
):  # fmt: skip
    spans = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:])
    for n, (a, b, c, d) in enumerate(spans):
        into = dq[None, a:b], dk[None, c:d], dv[None, c:d]
        rows = (dout[None, a:b], q[None, a:b], k[None, c:d], v[None, c:d], out[None, a:b], lse[None, n, :, : b - a])
        exact_backward(*rows, *into, 0.0, softmax_scale, causal)


def check_varlen_interop(rank: int, name: str, documents: tuple[int, ...]) -> list[float]:
    from yunchang.ring import utils

    module, ours = importlib.import_module(f"yunchang.ring.{name}"), VARLEN[name]
    module.HAS_FLASH_ATTN = True
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = exact_varlen_forward, exact_varlen_backward
    module.flatten_varlen_lse, module.unflatten_varlen_lse = utils.flatten_varlen_lse, utils.unflatten_varlen_lse
    rng = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, T, H, D, generator=rng, dtype=torch.float64).half() for _ in range(4)]
    at = torch.cat([places(ours.kind, rank, 4, b - a, a) for a, b in zip(documents, documents[1:])])
    cu, errors = torch.tensor(documents, dtype=torch.int32) // 4, []
    theirs = getattr(module, ours.__name__)
    for forward, backward in ((ours, theirs), (theirs, ours)):
        mixed = type("Mixed", (torch.autograd.Function,), dict(
            forward=staticmethod(forward.forward), backward=staticmethod(backward.backward)
        ))  # fmt: skip
        *leaves, do = (t[0, at].clone().requires_grad_() for t in whole)
        longest = int(cu.diff().max())
        out = mixed.apply(*leaves, cu, longest, 0.0, None, True, (-1, -1), 0.0, None, False, False, group(4))
        got = [out, None, *torch.autograd.grad((out * do).sum(), leaves)]
        limits = [2e-3, 0, 1e-2, 2e-3, 2e-3]  # their varlen ring returns dq in bf16
        for g, w, limit in zip(got, truth(whole, documents, causal=True), limits):
            if g is not None:
                errors.append(error(g[None], w[:, at]) / limit)
    return errors


@pytest.mark.parametrize("documents", [DOCUMENTS, (0, T)])
@pytest.mark.parametrize("name", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_varlen_forward_and_backward_mix_with_yunchang(ranks, name, documents):
    pytest.importorskip("yunchang")
    assert all(e < 1 for errors in ranks.run(4, check_varlen_interop, name, documents) for e in errors)


def attributes(function, target: str, store: bool) -> set[str]:
    """Attributes of `target` that a function's source stores or reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    kind = ast.Store if store else ast.Load
    return {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute)
        and isinstance(n.value, ast.Name)
        and n.value.id == target
        and isinstance(n.ctx, kind)
    }


VARLEN = {
    "ring_flash_attn_varlen": yunchang.RingFlashAttnVarlenFunc,
    "zigzag_ring_flash_attn_varlen": yunchang.ZigZagRingFlashAttnVarlenFunc,
}


@pytest.mark.parametrize(
    ("module", "ours"),
    [
        ("ring_flash_attn", yunchang.RingFlashAttnFunc),
        ("zigzag_ring_flash_attn", yunchang.ZigZagRingFlashAttnFunc),
        ("stripe_flash_attn", yunchang.StripeFlashAttnFunc),
        *VARLEN.items(),
    ],
)
def test_every_attribute_upstream_reads_is_written(module, ours):
    pytest.importorskip("yunchang")
    theirs = getattr(importlib.import_module(f"yunchang.ring.{module}"), ours.__name__)
    written = attributes(remember, "ctx", True) | {"saved_tensors", "needs_input_grad"}
    if module in VARLEN:
        written |= attributes(varlen_forward, "ctx", True) | {"half_index0", "half_index1"}
    read = attributes(theirs.backward, "ctx", False)
    assert read, "nothing found: the test is blind"
    assert read <= written
    inputs = [p for p in inspect.signature(theirs.forward).parameters if p != "ctx"]
    own = [p for p in inspect.signature(ours.forward).parameters if p != "ctx"]
    assert own[: len(inputs)] == inputs


def test_signatures_are_upstreams():
    pytest.importorskip("yunchang")
    theirs = importlib.import_module("yunchang.ring")
    for name in (n for n in dir(theirs) if n.endswith("_func") and hasattr(yunchang, n)):
        wanted = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(getattr(yunchang, name)).parameters)[: len(wanted)] == wanted, name


def test_signatures_are_ring_flash_attns():
    """Read from its source: the package cannot be imported without flash-attn."""
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None:
        pytest.skip("needs ring-flash-attn")
    files = pathlib.Path(found.submodule_search_locations[0]).glob("*_attn*.py")
    functions = [n for f in files for n in ast.parse(f.read_text()).body if isinstance(n, ast.FunctionDef)]
    public = {f.name: [a.arg for a in f.args.args] for f in functions if f.name.endswith("_func")}
    assert len(public) >= 18, "too few found: the test is blind"
    for name, wanted in public.items():
        assert list(inspect.signature(getattr(ring_flash_attn, name)).parameters)[: len(wanted)] == wanted, name


def check_their_layers(rank: int) -> list[float]:
    """Their layers over our functions, exchange of heads and split theirs."""
    import yunchang as theirs

    theirs.set_seq_parallel_pg(2, 2, rank, 4)
    uninstall, errors = yunchang.install(), []
    for impl in ("basic", "zigzag", "strip"):
        cut = theirs.EXTRACT_FUNC_DICT[impl]
        *leaves, do = (cut(t, rank, 4, rd=2, ud=2).clone().requires_grad_() for t in draw())
        want = [cut(t, rank, 4, rd=2, ud=2) for i, t in enumerate(truth(draw(), causal=True)) if i != 1]
        out = theirs.LongContextAttention(ring_impl_type=impl)(*leaves, causal=True)
        packed = theirs.LongContextAttentionQKVPacked(ring_impl_type=impl)(torch.stack(leaves, 2), causal=True)
        got = [out, *torch.autograd.grad((out * do).sum(), leaves), packed]
        errors += [error(g, w) for g, w in zip(got, [*want, want[0]])]
    uninstall()
    return errors


def test_their_layers_over_our_functions(ranks):
    pytest.importorskip("yunchang")
    assert all(e < 1e-9 for errors in ranks.run(4, check_their_layers) for e in errors)


def test_install_and_uninstall():
    pytest.importorskip("yunchang")
    from yunchang.hybrid import utils

    before = dict(utils.RING_IMPL_DICT)
    uninstall = yunchang.install()
    assert utils.RING_IMPL_DICT["zigzag"] is yunchang.zigzag_ring_flash_attn_func
    uninstall()
    assert before == utils.RING_IMPL_DICT
