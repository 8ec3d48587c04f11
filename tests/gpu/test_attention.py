"""Softmax attention on one GPU: `pytest -m gpu tests/gpu/test_attention.py -n 8`.

Every backend installed here × head width × dtype × feature against the dense fp64 reference: outputs, lse and every
gradient. An error passes if it is at most twice that of an independent low-precision run (the reference's formula in
that dtype), or below a floor. What a backend refuses is skipped with its reason. Split calls: test_attention_split.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ring_la
from ring_la import reference
from ring_la.softmax import attention
from tests.support.attention_cases import error, finite

pytestmark = pytest.mark.gpu

FLOOR = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 3e-5}
FEATURES: dict[str, dict] = {
    "causal": dict(),
    "full": dict(causal=False),
    "gqa": dict(heads=(8, 2)),
    "window": dict(window=(100, -1)),
    "window both": dict(causal=False, window=(70, 90)),
    "packed": dict(cu=(0, 1, 1, 200, 330, 331, 700)),
    "packed gqa full": dict(cu=(0, 1, 1, 200, 330, 331, 700), heads=(8, 2), causal=False),
    "softcap": dict(softcap=5.0),
    "alibi": dict(alibi=True),
    "sinks": dict(sinks=True),
    "joint front": dict(joint="front"),
    "joint rear": dict(joint="rear", causal=False),
    "lse gradient": dict(dlse=True),
    "all": dict(window=(150, -1), softcap=5.0, alibi=True, sinks=True, joint="front", heads=(8, 2), dlse=True),
}
T, DEVICE = 700, "cuda"
JUDGES = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's kernels whose errors set the limits."""
BACKENDS, WIDTHS = ("cudnn", "flash", "flash_attn_2", "triton", "torch"), (64, 128, 256)


@cache
def draw(feature: str, D: int, dtype: torch.dtype) -> tuple[dict, dict, tuple | None, torch.Tensor, torch.Tensor]:
    """(tensors in fp64 as rounded to dtype, keywords, cu, do, dlse)."""
    how = dict(FEATURES[feature])
    (H, Hk), cu = how.pop("heads", (4, 4)), how.pop("cu", None)
    B, rng = 1 if cu else 2, torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=DEVICE).to(dtype).double()

    tensors = dict(q=normal(B, T, H, D), k=normal(B, T, Hk, D), v=normal(B, T, Hk, D))
    if how.pop("sinks", False):
        tensors["sinks"] = normal(H)
    if how.get("joint"):
        tensors |= dict(joint_k=normal(B, 33, Hk, D), joint_v=normal(B, 33, Hk, D))
    if how.pop("alibi", False):
        how["alibi_slopes"] = normal(H).abs() * 0.05
    dlse = normal(B, H, T) * float(how.pop("dlse", False))
    return tensors, how, cu, normal(B, T, H, D), dlse


@cache
def truth(feature: str, D: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """o, lse and every gradient by the dense reference."""
    tensors, how, cu, do, dlse = draw(feature, D, dtype)
    return run(reference.attention, tensors, do, dlse, **how, cu_seqlens=cu)


def run(function, tensors: dict, do: torch.Tensor, dlse: torch.Tensor, **keywords) -> dict[str, torch.Tensor]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    out = function(**leaves, **keywords)
    loss = (out.o * do.to(out.o.dtype)).sum()
    if dlse.any():
        loss = loss + (finite(out.lse) * dlse.to(out.lse.dtype)).sum()
    return dict(o=out.o.detach(), lse=out.lse.detach()) | {
        f"d{n}": g for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())))
    }


@cache
def budget(dtype: torch.dtype, D: int) -> float:
    """Twice the worst error of PyTorch's own attention in this dtype on a plain causal case, cuDNN's left out: it is
    one of those that are judged."""
    tensors, _, _, do, _ = draw("causal", D, dtype)
    want = truth("causal", D, dtype)
    leaves = [tensors[n].to(dtype).transpose(1, 2).detach().requires_grad_() for n in "qkv"]
    with sdpa_kernel(JUDGES):
        o = F.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad((o * do.to(dtype).transpose(1, 2)).sum(), leaves)
    got = [o.transpose(1, 2), *(g.transpose(1, 2) for g in grads)]
    worst = max(error(g, want[n]) for g, n in zip(got, ("o", "dq", "dk", "dv")))
    return max(FLOOR[dtype], 2 * worst)


@cache
def sinks_budget(dtype: torch.dtype, D: int) -> float:
    """Twice the worst error, over draws, of the sinks' gradient by its formula with o as PyTorch's own kernel gives it.

    The gradient is few numbers, each a sum over rows of ``do·o``: what o loses to its dtype is a larger share of it
    than of a tensor, and how large a share varies with the draw.
    """
    worst, rng = 0.0, torch.Generator(DEVICE).manual_seed(1)
    for _ in range(8):
        q, k, v, do = (torch.randn(2, 4, T, D, generator=rng, device=DEVICE).to(dtype) for _ in range(4))
        sinks = torch.randn(4, generator=rng, device=DEVICE).to(dtype).double()
        s = (q.double() @ k.double().mT * D**-0.5).masked_fill(
            torch.ones(T, T, device=DEVICE, dtype=torch.bool).triu(1), -torch.inf
        )
        keys = s.logsumexp(-1, keepdim=True)
        lse = torch.logaddexp(keys, sinks[:, None, None])
        share = (sinks[:, None, None] - lse).exp()
        whole = torch.exp(s - lse) @ v.double()
        with sdpa_kernel(JUDGES):
            low = F.scaled_dot_product_attention(q, k, v, is_causal=True).double() * torch.exp(keys - lse)
        want, got = (-(share * (do.double() * o).sum(-1, keepdim=True)).sum((0, 2, 3)) for o in (whole, low.to(dtype)))
        worst = max(worst, error(got.to(dtype), want))
    return 2 * worst


def limits(dtype: torch.dtype, D: int) -> dict[str, float]:
    """The largest error of each result; "" is any other."""
    return {"": budget(dtype, D), "dsinks": max(budget(dtype, D), sinks_budget(dtype, D))}


def one_device(backend: str, feature: str, D: int, dtype: torch.dtype) -> dict[str, float] | str:
    tensors, how, cu, do, dlse = draw(feature, D, dtype)
    cu = None if cu is None else torch.tensor(cu, device=DEVICE)
    how = how | dict(cu_seqlens=cu, backend=backend)
    try:
        got = run(attention, {n: t.to(dtype) for n, t in tensors.items()}, do, dlse, **how)
    except ring_la.UnsupportedError as e:
        return str(e)
    want = truth(feature, D, dtype)
    return {n: error(g, want[n]) for n, g in got.items()}


def dropout_like_torch(dtype: torch.dtype) -> dict[str, float]:
    """The Triton kernel's dropout mask is the PyTorch backend's."""
    tensors, _, _, do, dlse = draw("gqa", 64, dtype)
    how = dict(dropout_p=0.3, dropout_seed=2**61 + 12345, causal=True)
    got = run(attention, {n: t.to(dtype) for n, t in tensors.items()}, do, dlse, backend="triton", **how)
    want = run(attention, tensors, do, dlse, backend="torch", **how)
    return {n: error(g, want[n]) for n, g in got.items()}


def cases() -> list[tuple]:
    """(backend, feature, D, dtype); every feature in bf16 at 64 and 128, where compilers went wrong before."""
    out = []
    for D in WIDTHS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype == torch.float32 and D != 64:
                continue
            some = FEATURES if dtype == torch.bfloat16 and D < 256 else ("causal", "full", "gqa", "packed", "all")
            out += [(backend, feature, D, dtype) for backend in BACKENDS for feature in some]
    return out


def off(found: dict[str, float], dtype: torch.dtype, D: int) -> dict[str, tuple[float, float]]:
    """Errors that are not within their limits, with those."""
    limit = limits(dtype, D)
    return {n: (e, limit.get(n, limit[""])) for n, e in found.items() if not e <= limit.get(n, limit[""])}


def title(backend: str, feature: str, D: int, dtype: torch.dtype) -> str:
    return f"{backend}-{feature}-D{D}-{str(dtype)[6:]}"


@pytest.mark.parametrize(("backend", "feature", "D", "dtype"), [pytest.param(*c, id=title(*c)) for c in cases()])
def test_one_device(backend, feature, D, dtype, record_property):
    found = one_device(backend, feature, D, dtype)
    if isinstance(found, str):
        pytest.skip(found)
    record_property("errors", found)
    assert not off(found, dtype, D)


def test_dropout_like_torch(record_property):
    found = dropout_like_torch(torch.bfloat16)
    record_property("errors", found)
    assert not off(found, torch.bfloat16, 64)


OF_SUMS = [(D, dtype) for D in (16, 32, 64, 96, 128, 256) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("feature", ["causal", "window", "packed"])
@pytest.mark.parametrize(("D", "dtype"), [*OF_SUMS, (64, torch.float32)])
def test_forgetting(D, dtype, feature, record_property):
    """Sums as further channels: of heads that spans are for, and of others."""
    tensors, how, cu, do, _ = draw(feature, D, dtype)
    gates = torch.randn(*tensors["q"].shape[:3], generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    cu = None if cu is None else torch.tensor(cu, device=DEVICE)
    how = dict(window=how.get("window", (-1, -1))[0], cu_seqlens=cu)
    results = []
    for function, of in ((ring_la.forgetting_attention, dtype), (reference.forgetting_attention, torch.float64)):
        x = {n: t.to(of).requires_grad_() for n, t in tensors.items()}
        x["g"] = F.logsigmoid(gates + 3).to(torch.promote_types(of, torch.float32)).requires_grad_()
        out = function(**x, **how)
        loss = (out.o.double() * do).sum() + (out.lse.double() * do[..., 0].mT).sum()
        results.append([out.o, out.lse, *torch.autograd.grad(loss, list(x.values()))])
    found = dict(zip(("o", "lse", "dq", "dk", "dv", "dg"), map(error, *results)))
    record_property("errors", found)
    assert not off(found, dtype, D)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(("K", "V"), [(24, 5), (32, 16), (16, 40), (64, 16), (64, 24), (96, 24), (128, 16), (40, 128)])
def test_values_of_another_width(K, V, softcap, record_property):
    """Tiles of keys and of values of different widths: ptxas has lost addresses of narrow ones."""
    rng, dtype = torch.Generator(DEVICE).manual_seed(0), torch.bfloat16
    q, k, v, do = (torch.randn(2, T, 3, D, generator=rng, device=DEVICE).to(dtype).double() for D in (K, K, V, V))
    tensors, dlse, how = dict(q=q, k=k, v=v), do[..., 0].mT, dict(softcap=softcap)
    want = run(reference.attention, tensors, do, dlse, **how)
    got = run(attention, {n: t.to(dtype) for n, t in tensors.items()}, do, dlse, backend="triton", **how)
    found = {n: error(g, want[n]) for n, g in got.items()}
    record_property("errors", found)
    assert not off(found, dtype, 64)
