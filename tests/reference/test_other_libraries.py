"""The reference against other libraries, with which it shares nothing.

transformers' and fla-core's pure PyTorch functions compute in fp32, so they are held to a few fp32 roundings; all else
to fp64. fla-core's `naive.py` files are loaded one by one: its package imports Triton.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch
import torch.nn.functional as F

import ring_la
from ring_la import reference
from ring_la.testing.examples import make_arguments, make_states

from .inputs import (
    HK,
    SINGLE,
    B,
    H,
    K,
    T,
    V,
    bench,
    close,
    rand,
    run,
)


@pytest.mark.parametrize("chunked", [True, False])
def test_gated_delta_rule_against_transformers(chunked):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    oracle = qwen.torch_chunk_gated_delta_rule if chunked else qwen.torch_recurrent_gated_delta_rule
    x, start = bench()["gated_delta_rule"], rand(B, H, K, V)
    single = {n: t.float() for n, t in x.items()}
    keywords = {"chunk_size": 4} if chunked else {}
    o, state = oracle(
        *single.values(),
        initial_state=start.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **keywords,
    )
    out = run("gated_delta_rule", x, initial_state=start, output_final_state=True, use_qk_l2norm=True)
    close(out.o, o, **SINGLE)
    close(out.final_state, state, **SINGLE)


@pytest.mark.parametrize("extras", [True, False])
def test_mamba2_against_transformers(extras):
    mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, start = bench()["mamba2"], rand(B, H, K, V)
    if not extras:
        x = {**x, "dt": x["dt"].abs(), "D": None, "dt_bias": None, "dt_softplus": False}
    single = {n: t.float() if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    y, state = mamba.mamba2_chunk_scan(
        *(single[n] for n in ("x", "dt", "A", "B", "C")),
        chunk_size=4,
        D=single["D"],
        dt_bias=single["dt_bias"],
        dt_softplus=single["dt_softplus"],
        initial_states=start.mT.float(),
        return_final_states=True,
    )
    out = run("mamba2", x, initial_state=start, output_final_state=True)
    close(out.o, y, **SINGLE)
    close(out.final_state, state.mT, **SINGLE)


def test_lightning_attention_with_the_slopes_of_a_released_model_against_transformers():
    minimax = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    size = dict(hidden_size=H * 6, num_attention_heads=H, head_dim=6, num_hidden_layers=4, block_size=4)
    torch.manual_seed(0)
    layer = minimax.MiniMaxLightningAttention(minimax.MiniMaxConfig(**size), layer_idx=1)
    heads = {}
    layer.norm.register_forward_pre_hook(lambda module, inputs: heads.update(o=inputs[0]))
    hidden = rand(B, T, H * 6).float()
    with torch.no_grad():
        layer(hidden, position_embeddings=None, attention_mask=None)
        qkv = F.silu(layer.qkv_proj(hidden)).view(B, T, H, 18)
    out = reference.lightning_attention(*qkv.split(6, dim=-1), g=-layer.slope_rate.flatten(), scale=1.0)
    close(out.o.flatten(2), heads["o"], **SINGLE)


def naive(path, name="naive"):
    """A `naive.py` of the installed fla-core, loaded without importing its package."""
    try:
        file = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{path}/{name}.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    pytest.importorskip("einops")
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("fla_naive", file))
    module.__spec__.loader.exec_module(module)
    return module


def single(*tensors, heads_first=False):
    """fp32, every tensor with H heads, as fla-core's references want them."""
    wide = [t.float().repeat_interleave(H // t.shape[2], dim=2) for t in tensors]
    return [t.transpose(1, 2) for t in wide] if heads_first else wide


def test_recurrences_with_heads_second_against_fla():
    start = rand(B, H, K, V)
    more = {"initial_state": start.float(), "output_final_state": True}
    for name, path, function, order in (
        ("simple_gla", "simple_gla", "naive_recurrent_simple_gla", "q k v g"),
        ("gla", "gla", "naive_recurrent_gla", "q k v g"),
        ("gated_delta_rule", "gated_delta_rule", "naive_recurrent_gated_delta_rule", "q k v beta g"),
        ("kda", "kda", "naive_recurrent_kda", "q k v g beta"),
        ("linear_attention", "linear_attn", "naive_recurrent_linear_attn", "q k v"),
    ):
        x = bench()[name]
        o, state = getattr(naive(path), function)(*single(*(x[n] for n in order.split())), **more)
        out = run(name, x, initial_state=start, output_final_state=True)
        close(out.o, o, **SINGLE)
        close(out.final_state, state, **SINGLE)


def as_fla(name, x, start):
    """Output and final state of FLA's naive function, given our arguments and states."""
    (state, *rest), more = [s.float() for s in start], {"output_final_state": True}
    if name == "gated_delta_product":
        steps = {n: x[n].flatten(1, 2) for n in ("k", "v", "beta")}
        fla = naive("gated_delta_product").naive_recurrent_gated_delta_product
        size = x["q"].shape[-1]
        return fla(**(x | steps), scale=size**-0.5, num_householder=2, initial_state=state, **more)
    if name.startswith("preconditioned"):
        fla = "precond_kda" if name.endswith("kda") else "precond_gated_delta_rule"
        names = {"h": "g_atk", "alpha": "beta_atk", "center": "log_atk_scale", "base": "x"}
        more |= {"initial_A_state": rest[0]}
        x = {names.get(n, n): t for n, t in x.items()}
        return getattr(naive(fla), f"naive_recurrent_{fla}")(**x, initial_state=state, **more)
    if name == "rwkv6":
        heads_first = {{"r": "q"}.get(n, n): t if n == "u" else t.transpose(1, 2) for n, t in x.items()}
        fla = naive("rwkv6", "recurrent_naive").naive_recurrent_rwkv6
        o, S = fla(**heads_first, initial_state=state, **more)
        return o.transpose(1, 2), S
    if name == "gated_slot_attention":
        o, S = naive("gsa").naive_recurrent_gsa(**x, initial_state=(state, *rest), **more)
        return (o, *S)
    if name == "comba":  # this one erases behind the decay, FLA's kernels before it
        x = x | {"p": x["p"] * torch.exp(-x["g"])[..., None]}
    return getattr(naive(name), f"naive_recurrent_{name}")(**x, initial_state=state, **more)


@pytest.mark.parametrize(
    "name",
    ["comba", "gdn2", "gated_delta_product", "preconditioned_gated_delta_rule", "preconditioned_kda",
     "gated_slot_attention", "hgrn", "rwkv6"],
)  # fmt: skip
def test_recurrences_with_their_own_definition_against_fla(name):
    definition = getattr(ring_la, name).definition
    x = make_arguments(definition, 2, 9, Hk=4, H=4, dtype=torch.float32)
    x = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    if name.startswith("preconditioned"):  # FLA's function brings q and k to unit length
        x |= {n: F.normalize(x[n], dim=-1) for n in ("q", "k")}
    start = make_states(definition, 2)
    o, *states = as_fla(name, x, start)
    out = run(name, x, initial_state=start if len(start) > 1 else start[0], output_final_state=True)
    close(out.o, o, **SINGLE)
    for got, want in zip(out.final_state if len(start) > 1 else [out.final_state], states, strict=True):
        close(got, want, **SINGLE)


def test_recurrences_with_heads_first_against_fla():
    start = rand(B, H, K, V)
    for name, path, function, order in (
        ("delta_rule", "delta_rule", "delta_rule_recurrence", "q k v beta"),
        ("dplr_delta_rule", "generalized_delta_rule/dplr", "dplr_recurrence", "q k v a b g"),
        ("rwkv7", "generalized_delta_rule/dplr", "dplr_recurrence", "r k v a b w"),
    ):
        x = bench()[name]
        o, state = getattr(naive(path), function)(*single(*(x[n] for n in order.split()), heads_first=True), start)
        out = run(name, x, initial_state=start, output_final_state=True)
        close(out.o, o.transpose(1, 2), **SINGLE)
        close(out.final_state, state, **SINGLE)


def test_retention_and_normalized_linear_attention_against_fla():
    x = bench()["retention"]
    o = naive("retention").naive_retention(*single(*x.values(), heads_first=True))
    close(run("retention", x).o, o.transpose(1, 2), **SINGLE)
    positive = {n: t.exp() for n, t in x.items()}
    fla = naive("linear_attn").naive_recurrent_linear_attn
    o, (state, total) = fla(*single(*positive.values()), normalize=True, output_final_state=True)
    out = run("linear_attention", positive, normalize=True, output_final_state=True)
    close(out.o, o, **SINGLE)
    close(out.final_state[..., :V], state, **SINGLE)
    close(out.final_state[..., V], total[:, 0], **SINGLE)


def test_attention_with_window_and_sinks_against_fla():
    q, k, v = rand(B, T, H, K), rand(B, T, HK, K, seed=1), rand(B, T, HK, V)
    sinks = rand(H)
    o, _ = naive("attn").naive_parallel_attn(q, k, v, window_size=4, sink_bias=sinks)
    close(reference.attention(q, k, v, window=(3, -1), sinks=sinks).o, o)
