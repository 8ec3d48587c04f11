"""Recurrences of the reference against numbers worked by hand, closed forms, and themselves cut in two."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ring_la import reference
from tests.support.recurrence_cases import BY_NAME, make_inputs

from .inputs import (
    HK,
    RECURRENCES,
    B,
    H,
    K,
    T,
    V,
    bench,
    close,
    cut,
    numbers,
    rand,
    run,
    scalars,
)

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


class Made(TorchDispatchMode):
    """Counts the numbers of all tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.numbers += out.numel() if isinstance(out, torch.Tensor) else 0
        return out


@pytest.mark.parametrize("name", ["gla", "comba", "ttt_linear", "token_shift", "short_conv"])
def test_twice_the_tokens_take_twice_the_work(name):
    """Backward, too: no token's gradient is a tensor of all tokens."""
    made = []
    for length in (64, 128):
        if name in BY_NAME:
            x = make_inputs(name, 1, length, 1, 2, 2)
        else:
            x = {"x": rand(1, length, 2).requires_grad_()} | ({"weight": rand(2, 3)} if name == "short_conv" else {})
        o = getattr(reference, name)(**x).o
        with Made() as of:
            o.sum().backward()
        made.append(of.numbers)
    assert made[1] < 2.1 * made[0]
