"""fp32 and bf16 on split sequences: fp32 to 2e-5 of the fp64 truth, bf16 within twice an independent bf16 loop's error.

The budget for bf16 comes from `low_precision_loop`: the recurrence written out token by token with bf16 tensors, fp32
states and plain autograd: what rounding inputs, outputs and gradients to bf16 costs by itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ring_la
from tests.support.pool import group
from tests.support.recurrence_cases import DOCUMENTS, RECURRENCES, STATIC, error, make_inputs
from tests.support.split_recurrences import TOLERANCE, H, V, assert_close, check_sharded, truth


@pytest.mark.parametrize("name", RECURRENCES)
def test_split_fp32_is_near_fp64(ranks, name):
    for P, documents, kind in ((2, "dense", "zigzag"), (3, "packed", "zigzag"), (4, "uneven", "contiguous")):
        results = ranks.run(P, check_sharded, P, name, documents, kind, ("ring", "all_to_all"), torch.float32)
        assert_close(results, TOLERANCE[torch.float32])


def low_precision_loop(name: str, x: dict[str, Tensor], scale: float) -> Tensor:
    """o ``[B, T, H, V]`` in bf16 from bf16 tokens, one token at a time, with states in fp32."""
    x = {n: t.float() if isinstance(t, Tensor) else t for n, t in x.items()}
    if name == "mamba2":
        dt = torch.nn.functional.softplus(x["dt"] + x["dt_bias"])
        skip = x["D"][:, None] * x["x"]
        x = dict(q=x["C"], k=x["B"], v=(dt[..., None] * x["x"]).bfloat16().float(), g=dt * x["A"])
        scale = 1.0
    described = None if name in ("mamba2", "hgrn2", "retention") else getattr(ring_la, name).definition.describe(**x)
    if described is not None:
        x = {n: x[described.name(n)] for n in described.inputs._fields if described.name(n) in x}
    if name == "hgrn2":
        x = dict(q=x["q"], k=(1 - x["g"].exp()).bfloat16().float(), v=x["v"], g=x["g"])
    if name == "retention":
        x["g"] = torch.log1p(-(2.0 ** (-5 - torch.arange(H, dtype=torch.float32))))
    B, T = x["v"].shape[:2]
    tokens = {n: t.expand(B, T, -1) if t.dim() == 1 else t for n, t in x.items()}
    tokens = {n: t.repeat_interleave(H // t.shape[2], 2) for n, t in tokens.items()}
    S = torch.zeros(B, H, tokens["k"].shape[-1], V)
    out = []
    for t in range(T):
        q, k, v, g, beta, a, b = (
            tokens[n][:, t] if n in tokens else None for n in ("q", "k", "v", "g", "beta", "a", "b")
        )
        decay = 1.0 if g is None else g.exp()[..., None, None] if g.dim() == 2 else g.exp()[..., None]
        decayed = decay * S
        if beta is not None:
            erased = k if a is None else a
            v = beta[..., None] * (v - torch.einsum("bhk,bhkv->bhv", erased, decayed))
        if b is not None:
            decayed = decayed + b[..., None] * torch.einsum("bhk,bhkv->bhv", a, S)[..., None, :]
        S = decayed + k[..., None] * v[..., None, :]
        out.append(scale * torch.einsum("bhk,bhkv->bhv", q, S))
    o = torch.stack(out, 1).bfloat16()
    return (o.float() + skip).bfloat16() if name == "mamba2" else o


def check_bf16(rank: int, P: int, name: str) -> list[str]:
    """Errors above twice the loop's, of this rank's output and gradients."""
    T, cu = DOCUMENTS["dense"]
    tokens, _, do, *_ = truth(name, "dense", torch.bfloat16)
    # parameters stay in fp32, as in mixed-precision training
    inputs = {n: x.detach().float() if n in STATIC.get(name, ()) else x for n, x in tokens.items()}
    plain = {n: x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    o = low_precision_loop(name, plain, 6**-0.5)
    leaves = {n: x for n, x in plain.items() if isinstance(x, Tensor)}
    loop = dict(zip(leaves, torch.autograd.grad((o * do).sum(), list(leaves.values()))))
    exact = {n: x.detach().double().requires_grad_() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    truth_o = getattr(ring_la.reference, name)(**exact).o
    doubles = [x for x in exact.values() if isinstance(x, Tensor)]
    grads = dict(zip(leaves, torch.autograd.grad((truth_o * do.double()).sum(), doubles)))

    cp = ring_la.ContextParallel(group(P), scan="doubling")
    layout = cp.layout(T, "zigzag", cu_seqlens=cu)
    static = STATIC.get(name, ())
    local = {
        n: (x.detach() if n in static else layout.shard(x.detach())).clone().requires_grad_() for n, x in leaves.items()
    }
    flags = {n: x for n, x in inputs.items() if not isinstance(x, Tensor)}
    out = getattr(ring_la, name)(**local, **flags, layout=layout).o
    assert out.dtype == torch.bfloat16
    got = dict(zip(local, torch.autograd.grad((out * layout.shard(do)).sum(), list(local.values()))))
    bad = []
    pairs = {"o": (layout.gather(out), o, truth_o)}
    for n, d in got.items():
        whole = cp.comm.all_reduce(d.float()).wait() if n in static else layout.gather(d)
        pairs[f"d{n}"] = (whole, loop[n], grads[n])
    for n, (ours, theirs, exactly) in pairs.items():
        mine, budget = error(ours, exactly), 2 * error(theirs, exactly)
        if not mine <= budget:
            bad.append(f"{n}: {mine:.2e} above {budget:.2e}")
    return bad


@pytest.mark.parametrize("name", RECURRENCES)
def test_split_bf16_is_as_near_as_a_bf16_loop(ranks, name):
    for P in (1, 3):
        bad = ranks.run(P, check_bf16, P, name)
        assert not any(bad), bad


def test_loop_is_a_fair_budget():
    """The loop errs as bf16 does, no more: between a tenth of and ten times bf16's rounding, 2⁻⁹."""
    x = make_inputs("gated_delta_rule", 1, 60, H=H, V=V, dtype=torch.bfloat16)
    want = ring_la.reference.gated_delta_rule(**x).o
    assert 2**-9 / 10 < error(low_precision_loop("gated_delta_rule", x, 6**-0.5), want) < 10 * 2**-9
