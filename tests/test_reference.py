"""The reference against oracles it shares nothing with: numbers worked by hand, closed forms, and other libraries.

transformers' and fla-core's pure PyTorch functions compute in fp32, so they are held to a few fp32 roundings; all else
to fp64. fla-core's `naive.py` files are loaded one by one: its package imports Triton.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import ring_la
from ring_la import reference
from ring_la.errors import ArgumentError
from ring_la.testing.examples import make_arguments, make_states

B, T, HK, H, K, V = 2, 13, 2, 4, 5, 3
SINGLE = {"rtol": 3e-5, "atol": 3e-5}
DOUBLE = {"rtol": 1e-11, "atol": 1e-11}


def close(got, want, **tolerance):
    torch.testing.assert_close(got.double(), want.double(), **(tolerance or DOUBLE))


def rand(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + seed))


def gate(*shape, seed=0):
    return F.logsigmoid(rand(*shape, seed=seed))


def bench(B=B, T=T, HK=HK, H=H):
    """Inputs for every recurrence: arguments by name, gates that differ per head and token."""
    q, k, v = rand(B, T, HK, K), F.normalize(rand(B, T, HK, K, seed=1), dim=-1), rand(B, T, H, V)
    g, gk, beta = gate(B, T, H), gate(B, T, H, K), rand(B, T, H, seed=2).sigmoid()
    removal = F.normalize(rand(B, T, H, K, seed=3), dim=-1)
    ab = {"a": -removal, "b": removal * rand(B, T, H, K, seed=4).sigmoid()}
    A, D, dt_bias = -rand(H).exp(), rand(H, seed=5), rand(H, seed=6)
    return {
        "linear_attention": dict(q=q, k=k, v=v),
        "retention": dict(q=q, k=k, v=v),
        "lightning_attention": dict(q=q, k=k, v=v),
        "simple_gla": dict(q=q, k=k, v=v, g=g),
        "mamba2": dict(x=v, dt=g, A=A, B=k, C=q, D=D, dt_bias=dt_bias, dt_softplus=True),
        "gla": dict(q=q, k=k, v=v, g=gk),
        "hgrn2": dict(q=q, g=gk[:, :, :HK], v=v),
        "delta_rule": dict(q=q, k=k, v=v, beta=beta),
        "gated_delta_rule": dict(q=q, k=k, v=v, g=g, beta=beta),
        "kda": dict(q=q, k=k, v=v, g=gk, beta=beta),
        "dplr_delta_rule": dict(q=q, k=k, v=v, g=gk, **ab),
        "rwkv7": dict(r=q, w=gk, k=k, v=v, **ab),
    }


RECURRENCES = sorted(bench())
PER_TOKEN = {"q", "k", "v", "g", "beta", "a", "b", "r", "w", "x", "dt", "B", "C"}


def run(name, arguments, **keywords):
    return getattr(reference, name)(**arguments, **keywords)


def cut(arguments, tokens, rows=slice(None)):
    return {name: x[rows, tokens] if name in PER_TOKEN else x for name, x in arguments.items()}


def numbers(*values, shape=(-1,)):
    return torch.tensor(values, dtype=torch.float64).view(shape)


def scalars(*values):
    return numbers(*values, shape=(1, -1, 1, 1))


# ---- by hand -------------------------------------------------------------------------------------------------------

Q, KEY, VALUE = scalars(1, 2), scalars(2, 3), scalars(5, 7)
HALF = numbers(0.5, 0.5, shape=(1, 2, 1))


@pytest.mark.parametrize(
    ("name", "extra", "states"),
    [
        ("linear_attention", {}, [1 + 10, 11 + 21]),
        ("simple_gla", {"g": HALF.log()}, [0.5 + 10, 5.25 + 21]),
        ("gla", {"g": HALF.log()[..., None]}, [0.5 + 10, 5.25 + 21]),
        ("delta_rule", {"beta": HALF}, [(1 - 2) * 1 + 5, (1 - 4.5) * 4 + 10.5]),
        ("gated_delta_rule", {"beta": HALF, "g": HALF.log()}, [-0.5 + 5, -3.5 * 2.25 + 10.5]),
        ("kda", {"beta": HALF, "g": HALF.log()[..., None]}, [-0.5 + 5, -3.5 * 2.25 + 10.5]),
        (
            "dplr_delta_rule",
            {"a": scalars(1, 1), "b": scalars(3, 1), "g": HALF.log()[..., None]},
            [3.5 + 10, 1.5 * 13.5 + 21],
        ),
    ],
)
def test_one_wide_states_by_hand(name, extra, states):
    """K = V = 1, S0 = 1, q = (1, 2), k = (2, 3), v = (5, 7), β = exp g = 1/2; o = scale · q · S."""
    start = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    arguments = dict(q=Q, k=KEY, v=VALUE, **extra)
    out = run(name, arguments, scale=10.0, initial_state=start, output_final_state=True)
    close(out.o, scalars(10 * 1 * states[0], 10 * 2 * states[1]))
    close(out.final_state, start * states[1])


def test_dplr_reads_before_the_decay_and_writes_along_b():
    """S0 = (1, 2)ᵀ, exp g = (1/2, 1/4), a = (1, 10), b = (3, 5), k v = 0: S = (1/2, 1/2) + 21 · (3, 5)."""

    def row(*values):
        return numbers(*values, shape=(1, 1, 1, 2))

    start, want = row(1, 2).mT, row(63.5, 105.5).mT
    for name, q, g in (("dplr_delta_rule", "q", "g"), ("rwkv7", "r", "w")):
        arguments = {
            q: row(1, 0),
            "k": row(0, 0),
            "v": scalars(0),
            "a": row(1, 10),
            "b": row(3, 5),
            g: row(0.5, 0.25).log(),
        }
        out = run(name, arguments, initial_state=start, output_final_state=True)
        close(out.final_state, want)
        close(out.o.flatten(), numbers(63.5 * 2**-0.5))


def test_mamba2_by_hand():
    """dt + bias = (1, 2), A = log 1/2: decays 1/2 and 1/4, writes B Δ x = 10 and 42; D = 100; no 1/√K."""
    A, dt = numbers(0.5).log(), numbers(0, 1, shape=(1, 2, 1))
    out = reference.mamba2(VALUE, dt, A, KEY, Q, D=numbers(100), dt_bias=torch.ones(1))
    close(out.o, scalars(1 * 10 + 500, 2 * (2.5 + 42) + 700))
    assert out.final_state is None


def test_bidirectional_and_normalized_by_hand():
    both = reference.linear_attention(Q, KEY, VALUE, causal=False, output_final_state=True)
    close(both.o, scalars(31, 62))
    close(both.final_state.flatten(), numbers(31))
    mean = reference.linear_attention(Q, KEY, VALUE, normalize=True, output_final_state=True)
    close(mean.o, scalars(10 / (2 + 1e-10), 62 / (10 + 1e-10)))
    close(mean.final_state.flatten(), numbers(31, 5))
    resumed = reference.linear_attention(Q, KEY, VALUE, normalize=True, initial_state=mean.final_state)
    close(resumed.o, scalars(41 / 7, 124 / 20), rtol=1e-9, atol=0)


# ---- closed forms --------------------------------------------------------------------------------------------------


def parallel(q, k, v, log_decay, scale):
    """((q kᵀ) ⊙ exp(g (i − j)) for j ≤ i) v, with one static log decay a value head."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    ahead = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    decay = torch.exp(torch.as_tensor(log_decay)[:, None, None] * ahead).tril()
    return torch.einsum("bihk,bjhk,hij,bjhv->bihv", q, k, decay.double(), v) * scale


def test_default_decays_of_retention_and_lightning_attention():
    q, k, v = bench()["retention"].values()
    retnet = numbers(31 / 32, 63 / 64, 127 / 128, 255 / 256).log()
    close(reference.retention(q, k, v).o, parallel(q, k, v, retnet, K**-0.5))
    slopes = numbers(0, -2, -4, -6)
    close(reference.lightning_attention(q, k, v).o, parallel(q, k, v, slopes, K**-0.5))
    third = reference.lightning_attention(q, k, v, layer_idx=6, num_layers=24, scale=1.0)
    close(third.o, parallel(q, k, v, 0.75 * slopes, 1.0))


@pytest.mark.parametrize("name", ["retention", "lightning_attention"])
def test_static_decay_given_per_value_head_or_per_key_head(name):
    q, k, v = bench()["retention"].values()
    g = numbers(-0.1, -0.7)
    close(run(name, dict(q=q, k=k, v=v, g=g)).o, parallel(q, k, v, g.repeat_interleave(2), K**-0.5))


def test_hgrn2_keys_are_what_the_gate_lets_go():
    arguments = bench()["hgrn2"]
    k = 1 - arguments["g"].exp()
    close(run("hgrn2", arguments).o, reference.gla(arguments["q"], k, arguments["v"], arguments["g"]).o)


def test_simple_gla_without_a_gate_is_linear_attention():
    q, k, v = bench()["retention"].values()
    assert torch.equal(reference.simple_gla(q, k, v).o, reference.linear_attention(q, k, v).o)


def test_normalized_and_bidirectional_closed_forms():
    q, k, v = bench()["retention"].values()
    q, k = q.exp(), k.exp()
    wide_q, wide_k = (x.repeat_interleave(H // HK, dim=2) for x in (q, k))
    weights = torch.einsum("bihk,bjhk->bhij", wide_q, wide_k)
    for causal in (True, False):
        w = weights.tril() if causal else weights
        want = torch.einsum("bhij,bjhv->bihv", w / w.sum(-1, keepdim=True), v)
        close(reference.linear_attention(q, k, v, causal=causal, normalize=True).o, want, rtol=1e-8, atol=1e-8)
    want = torch.einsum("bhij,bjhv->bihv", weights, v) * K**-0.5
    close(reference.linear_attention(q, k, v, causal=False).o, want)


@pytest.mark.parametrize("name", ["delta_rule", "kda", "dplr_delta_rule", "rwkv7"])
def test_dense_transitions_unrolled(name):
    """S_T as a sum of matrix products over the K×K transitions, formed explicitly."""
    x = bench(B=1, HK=H)[name]
    start = rand(1, H, K, V)
    out = run(name, x, initial_state=start, output_final_state=True, scale=2.0)
    g = x.get("g", x.get("w", torch.zeros(1, T, H, K)))
    decay, k, v = torch.diag_embed(g.double().exp()), x["k"], x["v"]
    if "beta" in x:
        beta = x["beta"][..., None]
        A = (torch.eye(K) - torch.einsum("bthk,bthl->bthkl", beta * k, k)) @ decay
        k = beta * k
    else:
        A = decay + torch.einsum("bthk,bthl->bthkl", x["b"], x["a"])
    S = start
    for t in range(T):
        S = A[:, t] @ S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
    close(out.final_state, S)
    close(out.o[:, -1], 2.0 * torch.einsum("bhkv,bhk->bhv", S, x.get("q", x.get("r"))[:, -1]))


# ---- what all recurrences share ------------------------------------------------------------------------------------


def state_of(name):
    return rand(B, H, K, V)


@pytest.mark.parametrize("name", RECURRENCES)
def test_handing_the_state_over_at_any_token_equals_the_whole(name):
    x, start = bench(T=5)[name], state_of(name)
    whole = run(name, x, initial_state=start, output_final_state=True)
    for at in range(6):
        first = run(name, cut(x, slice(0, at)), initial_state=start, output_final_state=True)
        second = run(name, cut(x, slice(at, 5)), initial_state=first.final_state, output_final_state=True)
        close(torch.cat([first.o, second.o], dim=1), whole.o)
        close(second.final_state, whole.final_state)


@pytest.mark.parametrize("name", [*RECURRENCES, "bidirectional"])
def test_packed_documents_equal_separate_calls(name):
    keywords = {"causal": False} if name == "bidirectional" else {}
    name = "linear_attention" if name == "bidirectional" else name
    x, bounds = bench(B=1)[name], [0, 0, 4, 5, 5, 13]
    starts = rand(5, H, K, V)
    packed = run(name, x, initial_state=starts, output_final_state=True, cu_seqlens=torch.tensor(bounds), **keywords)
    for n, span in enumerate(pairwise(bounds)):
        tokens, start = slice(*span), starts[n : n + 1]
        alone = run(name, cut(x, tokens), initial_state=start, output_final_state=True, **keywords)
        close(packed.o[:, tokens], alone.o)
        close(packed.final_state[n : n + 1], alone.final_state)
    assert torch.equal(packed.final_state[[0, 3]], starts[[0, 3]])


@pytest.mark.parametrize("name", RECURRENCES)
def test_fewer_key_heads_equal_repeated_ones_and_batch_rows_are_independent(name):
    x = bench()[name]
    grouped = {"q", "k", "r", "B", "C"} | ({"g"} if name == "hgrn2" else set())
    repeated = {n: t.repeat_interleave(H // HK, dim=2) if n in grouped else t for n, t in x.items()}
    out = run(name, x)
    close(out.o, run(name, repeated).o)
    close(out.o[1:], run(name, cut(x, slice(None), rows=slice(1, 2))).o)
    assert out.o.shape == (B, T, H, V)
    assert out.final_state is None


@pytest.mark.parametrize("name", RECURRENCES)
def test_l2norm_and_scale(name):
    x = bench()[name]
    if name == "hgrn2":
        x = dict(q=x["q"], k=-torch.expm1(x["g"]), v=x["v"], g=x["g"].repeat_interleave(2, dim=2))
        want = run("gla", {**x, "q": unit(x["q"]), "k": unit(x["k"])}, scale=3.0)
        got = run("hgrn2", bench()["hgrn2"], scale=3.0, use_qk_l2norm=True)
    else:
        named = [n for n in x if n in {"q", "k", "r", "B", "C"}]
        want = run(name, {**x, **{n: unit(x[n]) for n in named}}, scale=3.0)
        got = run(name, x, scale=3.0, use_qk_l2norm=True)
    close(got.o, want.o)


def unit(x):
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("name", RECURRENCES)
def test_gradients_reach_every_input(name):
    x = {n: t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for n, t in bench(B=1, T=3)[name].items()}
    leaves = {n: t for n, t in x.items() if isinstance(t, torch.Tensor)}
    start = rand(1, H, K, V).requires_grad_()

    def function(start, *tensors):
        out = run(name, {**x, **dict(zip(leaves, tensors, strict=True))}, initial_state=start, output_final_state=True)
        return out.o, out.final_state

    assert torch.autograd.gradcheck(function, (start, *leaves.values()), fast_mode=True)
    grads = torch.autograd.grad(
        [o.square().sum() for o in function(start, *leaves.values())], [start, *leaves.values()]
    )
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_low_precision_inputs_are_computed_in_fp64():
    x = {n: t.bfloat16() for n, t in bench()["kda"].items()}
    out = run("kda", x, output_final_state=True)
    assert out.o.dtype == out.final_state.dtype == torch.float64
    close(out.o, run("kda", {n: t.double() for n, t in x.items()}).o)


# ---- other libraries -----------------------------------------------------------------------------------------------


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


# ---- softmax -------------------------------------------------------------------------------------------------------


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def sdpa(q, k, v, mask=None, **keywords):
    return F.scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=mask, enable_gqa=True, **keywords)


def bias_of(lengths, bias):
    """`bias(position of the query, position of the key)` as a matrix, aligned at the end."""
    Tq, Tk = lengths
    return torch.tensor([[bias(i + Tk - Tq, j) for j in range(Tk)] for i in range(Tq)], dtype=torch.float64)


@pytest.mark.parametrize("lengths", [(7, 7), (3, 7)])
@pytest.mark.parametrize(
    ("keywords", "visible"),
    [
        ({"causal": False}, lambda i, j: True),
        ({}, lambda i, j: j <= i),
        ({"window": (2, 5)}, lambda i, j: i - 2 <= j <= i),
        ({"causal": False, "window": (2, 1)}, lambda i, j: i - 2 <= j <= i + 1),
        ({"causal": False, "window": (-1, 0)}, lambda i, j: j <= i),
        ({"causal": False, "window": (1, -1)}, lambda i, j: j >= i - 1),
    ],
)
def test_attention_masks_against_pytorch(lengths, keywords, visible):
    q, k, v = rand(B, lengths[0], H, K), rand(B, lengths[1], HK, K, seed=1), rand(B, lengths[1], HK, V)
    mask = bias_of(lengths, visible).bool()
    out = reference.attention(q, k, v, scale=0.7, **keywords)
    close(out.o.transpose(1, 2), sdpa(q, k, v, mask, scale=0.7))
    logits = 0.7 * torch.einsum("bihk,bjhk->bhij", q, k.repeat_interleave(H // HK, dim=2))
    close(out.lse, torch.logsumexp(logits.masked_fill(~mask, -torch.inf), dim=-1))


def test_attention_softcap_alibi_and_sinks_in_closed_form():
    """One query, two keys: the cap first, then the slope times the distance, then the sink."""
    v = scalars(10, 20)
    scores = 4 * torch.tanh(numbers(6, 2) / 4) - 0.5 * numbers(1, 0)
    weights = scores.exp() / (scores.exp().sum() + numbers(1.5).exp())
    out = reference.attention(scalars(2), scalars(3, 1), v, softcap=4.0, alibi_slopes=numbers(0.5), sinks=numbers(1.5))
    close(out.o.flatten(), (weights * v.flatten()).sum()[None])
    close(out.lse.flatten(), torch.cat([scores, numbers(1.5)]).logsumexp(0)[None])


def test_alibi_slopes_per_head_and_per_batch_row():
    q, k, v, slopes = rand(B, T, H, K), rand(B, T, HK, K, seed=1), rand(B, T, HK, V), rand(B, H).abs()
    distance = bias_of((T, T), lambda i, j: -abs(i - j))
    out = reference.attention(q, k, v, causal=False, alibi_slopes=slopes)
    close(out.o.transpose(1, 2), sdpa(q, k, v, slopes[:, :, None, None] * distance))
    shared = reference.attention(q, k, v, causal=False, alibi_slopes=slopes[1])
    close(shared.o[1], out.o[1])
    assert not torch.allclose(shared.o[0], out.o[0])


def test_a_sink_is_a_key_with_no_value():
    """A first key that scores 0.3 against every query, through one more channel, and has value 0."""
    q, k, v = rand(1, T, 1, K), rand(1, T, 1, K, seed=1), rand(1, T, 1, V)
    sink_key = numbers(*[0.0] * K, 0.3, shape=(1, 1, 1, K + 1))
    wide_k = torch.cat([sink_key, F.pad(k, (0, 1))], dim=1)
    as_key = reference.attention(F.pad(q, (0, 1), value=1.0), wide_k, F.pad(v, (0, 0, 0, 0, 1, 0)), scale=1.0)
    out = reference.attention(q, k, v, scale=1.0, sinks=numbers(0.3))
    assert not torch.allclose(out.o, reference.attention(q, k, v, scale=1.0).o)
    close(out.o, as_key.o)
    close(out.lse, as_key.lse)


@pytest.mark.parametrize("causal", [True, False])
def test_joint_keys_are_concatenated(causal):
    q, k, v = rand(B, T, H, K), rand(B, T, HK, K, seed=1), rand(B, T, HK, V)
    jk, jv = rand(B, 4, HK, K, seed=2), rand(B, 4, HK, V, seed=2)
    joint = {"joint_k": jk, "joint_v": jv}
    front = reference.attention(q, k, v, causal=causal, joint="front", **joint)
    mask = torch.cat([torch.ones(T, 4), torch.ones(T, T).tril() if causal else torch.ones(T, T)], dim=1).bool()
    close(front.o.transpose(1, 2), sdpa(q, torch.cat([jk, k], 1), torch.cat([jv, v], 1), mask))
    if causal:
        with pytest.raises(ArgumentError, match="joint"):
            reference.attention(q, k, v, joint="rear", **joint)
        return
    rear = reference.attention(q, k, v, causal=False, joint="rear", window=(2, 2), **joint)
    wide = bias_of((T, T + 4), lambda i, j: abs(i - 4 - j) <= 2).bool()
    close(rear.o.transpose(1, 2), sdpa(q, torch.cat([k, jk], 1), torch.cat([v, jv], 1), wide))


def test_packed_attention_equals_separate_calls():
    q, k, v = rand(1, T, H, K), rand(1, T, HK, K, seed=1), rand(1, T, HK, V)
    joint = {"joint_k": rand(1, 2, HK, K), "joint_v": rand(1, 2, HK, V), "joint": "rear", "causal": False}
    for keywords in ({"window": (3, -1), "alibi_slopes": rand(H).abs()}, joint):
        bounds = [0, 0, 4, 5, 5, 13]
        packed = reference.attention(q, k, v, cu_seqlens=torch.tensor(bounds), **keywords)
        for start, end in pairwise(bounds):
            alone = reference.attention(q[:, start:end], k[:, start:end], v[:, start:end], **keywords)
            close(packed.o[:, start:end], alone.o)
            close(packed.lse[:, :, start:end], alone.lse)


def test_a_query_that_sees_no_key():
    q, k, v = (rand(1, n, 1, 2).requires_grad_() for n in (4, 2, 2))
    out = reference.attention(q, k, v)
    assert torch.equal(out.o[:, :2], torch.zeros(1, 2, 1, 2, dtype=torch.float64))
    assert out.lse[0, 0, :2].tolist() == [-torch.inf] * 2
    assert out.lse[0, 0, 2:].isfinite().all()
    (out.o.sum() + out.lse[:, :, 2:].sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert not q.grad[:, :2].any()
    sink = reference.attention(q, k, v, sinks=torch.tensor([0.5]))
    assert sink.lse[0, 0, :2].tolist() == [0.5, 0.5]
    assert not sink.o[:, :2].any()
    none = reference.attention(q, k[:, :0], v[:, :0], causal=False)
    assert not none.o.any()
    assert torch.isneginf(none.lse).all()


def test_attention_gradients():
    q, k, v, jk, jv = (rand(1, n, h, 2, seed=n).requires_grad_() for n, h in ((3, 2), (3, 1), (3, 1), (2, 1), (2, 1)))
    slopes, sinks = rand(2).abs().requires_grad_(), rand(2, seed=1).requires_grad_()

    def function(q, k, v, jk, jv, slopes, sinks):
        joint = {"joint_k": jk, "joint_v": jv, "joint": "front"}
        return reference.attention(q, k, v, softcap=2.0, alibi_slopes=slopes, sinks=sinks, window=(3, -1), **joint)

    assert torch.autograd.gradcheck(function, (q, k, v, jk, jv, slopes, sinks))


# ---- short_conv, token_shift, grouped_gemm -------------------------------------------------------------------------


@pytest.mark.parametrize("W", [1, 4])
@pytest.mark.parametrize("silu", [True, False])
def test_short_conv_against_pytorch(W, silu):
    x, weight, bias, start = rand(B, T, 6), rand(6, W), rand(6), rand(B, 6, W - 1)
    activation = "silu" if silu else None
    for initial in (None, start):
        seen = torch.cat([torch.zeros_like(start) if initial is None else start, x.mT], dim=-1)
        want = F.conv1d(seen, weight[:, None], bias, groups=6).mT
        keywords = {"activation": activation, "initial_state": initial, "output_final_state": True}
        out = reference.short_conv(x, weight, bias, **keywords)
        close(out.o, F.silu(want) if silu else want)
        assert torch.equal(out.final_state, seen[..., seen.shape[-1] - W + 1 :])
        heads = reference.short_conv(x.view(B, T, 2, 3), weight[:, None], bias, **keywords)
        assert torch.equal(heads.o, out.o.view(B, T, 2, 3))
        assert torch.equal(heads.final_state, out.final_state)


def test_short_conv_by_hand():
    out = reference.short_conv(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[100.0, 10.0, 1.0]]))
    assert out.o.flatten().tolist() == [1.0, 12.0, 123.0]
    assert out.final_state is None


def test_packed_short_conv_and_token_shift_equal_separate_calls():
    x, weight, bounds = rand(1, T, 6), rand(6, 4), [0, 0, 2, 3, 3, 13]
    tails, lasts = rand(5, 6, 3), rand(5, 6)
    for function, start in (
        (lambda x, **kw: reference.short_conv(x, weight, **kw), tails),
        (reference.token_shift, lasts),
    ):
        packed = function(x, initial_state=start, output_final_state=True, cu_seqlens=bounds)
        for n, (a, b) in enumerate(pairwise(bounds)):
            alone = function(x[:, a:b], initial_state=start[n : n + 1], output_final_state=True)
            assert torch.equal(packed.o[:, a:b], alone.o)
            assert torch.equal(packed.final_state[n : n + 1], alone.final_state)
        assert torch.equal(packed.final_state[[0, 3]], start[[0, 3]])
    tail = reference.short_conv(x, weight, initial_state=tails, output_final_state=True, cu_seqlens=bounds).final_state
    assert torch.equal(tail[2], torch.cat([tails[2, :, 1:], x[0, 2:3].mT], dim=-1))


def test_token_shift():
    x, start = rand(B, T, 6), rand(B, 6)
    out = reference.token_shift(x, initial_state=start, output_final_state=True)
    assert torch.equal(out.o, torch.cat([start[:, None], x[:, :-1]], dim=1))
    assert torch.equal(out.final_state, x[:, -1])
    assert not reference.token_shift(x).o[:, 0].any()
    assert torch.equal(reference.token_shift(x.view(B, T, 2, 3), initial_state=start).o.flatten(2), out.o)


def test_short_conv_and_token_shift_gradients():
    x, weight, bias, start = (rand(*s).requires_grad_() for s in ((1, 4, 2), (2, 3), (2,), (1, 2, 2)))

    def convolve(x, weight, bias, start):
        return reference.short_conv(x, weight, bias, activation="silu", initial_state=start, output_final_state=True)

    def shift(x, start):
        return reference.token_shift(x, initial_state=start, output_final_state=True)

    assert torch.autograd.gradcheck(convolve, (x, weight, bias, start))
    assert torch.autograd.gradcheck(shift, (x, start[..., 0]))


def test_grouped_gemm():
    a, b, sizes = rand(6, 3).requires_grad_(), rand(4, 3, 2).requires_grad_(), torch.tensor([2, 0, 3, 1])
    group = torch.repeat_interleave(torch.arange(4), sizes)
    close(reference.grouped_gemm(a, b, sizes), torch.einsum("mk,mkn->mn", a, b[group]))
    assert torch.autograd.gradcheck(lambda a, b: reference.grouped_gemm(a, b, sizes), (a, b))
    assert reference.grouped_gemm(a[:0], b, [0, 0, 0, 0]).shape == (0, 2)


# ---- bad arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"q": rand(B, T, HK, K + 1)}, "k"),
        ({"k": rand(B, T, HK + 1, K)}, "k"),
        ({"v": rand(B, T, 3, V)}, "v"),
        ({"g": gate(B, T, H)}, "g"),
        ({"beta": rand(B, T + 1, H)}, "beta"),
        ({"initial_state": rand(B, H, V, K)}, "initial_state"),
        ({"cu_seqlens": [0, T]}, "cu_seqlens"),
        ({"layout": object()}, "layout"),
        ({"mode": "fast"}, "mode"),
        ({"backend": "triton"}, "backend"),
    ],
)
def test_recurrences_name_the_bad_argument(keywords, name):
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        run("kda", {**bench()["kda"], **keywords})


@pytest.mark.parametrize("bounds", [[0], [1, T], [0, T - 1], [0, 5, 4, T]])
def test_offsets_must_span_the_tokens_in_order(bounds):
    x = bench(B=1)
    for call in (
        lambda: run("gla", x["gla"], cu_seqlens=bounds),
        lambda: reference.attention(rand(1, T, 1, 2), rand(1, T, 1, 2), rand(1, T, 1, 2), cu_seqlens=bounds),
        lambda: reference.token_shift(rand(1, T, 2), cu_seqlens=bounds),
        lambda: reference.short_conv(rand(1, T, 2), rand(2, 3), cu_seqlens=bounds),
    ):
        with pytest.raises(ArgumentError, match=r"^cu_seqlens: expected "):
            call()


def test_mamba2_and_rwkv7_name_their_own_arguments():
    mamba, rwkv = bench()["mamba2"], bench()["rwkv7"]
    for bad, name in (({"B": rand(B, T, 1, K)}, "B"), ({"A": rand(H + 1)}, "A"), ({"D": rand(H + 1)}, "D")):
        with pytest.raises(ArgumentError, match=f"^{name}: expected "):
            run("mamba2", {**mamba, **bad})
    with pytest.raises(ArgumentError, match=r"^w: expected "):
        run("rwkv7", {**rwkv, "w": rand(B, T, H, 1)})


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"window": (-2, 0)}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"sinks": rand(3)}, "sinks"),
        ({"alibi_slopes": rand(3)}, "alibi_slopes"),
        ({"joint": "front"}, "joint"),
        ({"joint_k": rand(1, 2, 1, 2), "joint_v": rand(1, 2, 1, 2)}, "joint"),
        ({"joint": "front", "joint_k": rand(1, 2, 1, 2), "joint_v": rand(1, 3, 1, 2)}, "joint_v"),
        ({"layout": object()}, "layout"),
    ],
)
def test_attention_names_the_bad_argument(keywords, name):
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        reference.attention(rand(1, 3, 2, 2), rand(1, 3, 1, 2), rand(1, 3, 1, 2), **keywords)


def test_other_bad_arguments():
    for bad, name in (
        (lambda: reference.lightning_attention(*bench()["retention"].values(), layer_idx=2, num_layers=2), "layer_idx"),
        (lambda: reference.retention(*bench()["retention"].values(), g=rand(3)), "g"),
        (lambda: reference.short_conv(rand(1, 3, 2), rand(3, 4)), "weight"),
        (lambda: reference.short_conv(rand(1, 3, 2), rand(2, 4), activation="relu"), "activation"),
        (lambda: reference.token_shift(rand(1, 3, 2), initial_state=rand(1, 3)), "initial_state"),
        (lambda: reference.grouped_gemm(rand(4, 3), rand(2, 3, 2), [2, 1]), "group_sizes"),
        (lambda: reference.grouped_gemm(rand(4, 3), rand(2, 4, 2), [2, 2]), "b"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: expected "):
            bad()
    with pytest.raises(TypeError, match=r"gla\(\).*head_first"):
        run("gla", bench()["gla"], head_first=True)


CHOICES = {"strategy", "kv_layout", "kv_comm_dtype", "dropout_seed", "in_place", "form", "output_latents"}
"""Arguments of public functions that choose how a result is made, not what it is."""


@pytest.mark.parametrize("name", [n for n in reference.__all__ if n != "grouped_gemm"])
def test_arguments_are_those_of_the_public_function(name):
    """In the same order and kind, so that a positional call means the same."""
    public, ours = (inspect.signature(getattr(of, name)).parameters for of in (ring_la, reference))
    shared = [(n, p.kind) for n, p in public.items() if n not in CHOICES]
    assert shared == [(n, p.kind) for n, p in ours.items() if n in public]
    assert ours.keys() - public.keys() <= {"backend"}
