"""One token of each sequence in few launches: the kernels against fp64, and blocks against what they do otherwise.

Interpreted without a GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ring_la import ArgumentError
from ring_la.models import HybridConfig, HybridLM, block
from ring_la.nn import Attention, GatedDeltaNet, KimiDeltaAttention, LayerState
from ring_la.nn.parts import rotate
from ring_la.serving import Engine, Hybrid, NoText
from tests.support.interpreter import compute_bf16, interpreted
from tests.support.serving import Timed

interpreted()
compute_bf16()

from ring_la.kernels.tokens import products as of_rows  # noqa: E402
from ring_la.kernels.tokens.gated_delta import Weights, fits, gated_delta_token  # noqa: E402
from ring_la.kernels.tokens.products import PreNorm  # noqa: E402
from ring_la.kernels.tokens.products_kernel import products  # noqa: E402
from ring_la.keystore.turned_kernel import turned_and_written  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("D", [200, 64])
def test_products_of_a_row(dtype, D):
    torch.manual_seed(0)
    x, weights = torch.randn(1, D), [torch.randn(n, D) / D**0.5 for n in (37, 5, 1, 130)]
    norm, added = torch.rand(D) + 0.5, torch.randn(1, 173)
    x, norm, added, *weights = (t.to(DEVICE, dtype) for t in (x, norm, added, *weights))
    wide = x.double()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    sides = [F.linear(y, w.double()) for w in weights]
    assert apart(products(x, weights, norm), torch.cat(sides, -1)) < CLOSE[dtype]
    assert apart(products(x, weights, norm, added=added), torch.cat(sides, -1) + added.double()) < CLOSE[dtype]
    assert apart(products(x, weights[:1]), F.linear(wide, weights[0].double())) < CLOSE[dtype]
    gate, up = sides[3].chunk(2, -1)
    assert apart(products(x, weights[3:], norm, swiglu=True), F.silu(gate) * up) < CLOSE[dtype]


@pytest.mark.parametrize("N", [1, 3])
def test_projections_of_some_rows(N, monkeypatch):
    torch.manual_seed(0)
    x, norm = torch.randn(N, 48, device=DEVICE), torch.rand(48, device=DEVICE)
    with torch.no_grad():
        a, b, back = (torch.nn.Linear(i, o, bias=False, device=DEVICE) for i, o in ((48, 20), (48, 6), (10, 48)))
        y = F.rms_norm(x, (48,), norm, 1e-6)
        monkeypatch.setattr(of_rows, "SMALL", 10)  # b's rows, and not a's
        for got, want in zip(of_rows.normed_products(x, PreNorm(norm, 1e-6), [a, b]), (a(y), b(y)), strict=True):
            assert apart(got, want) < 1e-6
        gate, up = a(y).chunk(2, -1)
        inner = of_rows.normed_swiglu(x, PreNorm(norm, 1e-6), a)
        assert apart(inner, F.silu(gate) * up) < 1e-6
        assert apart(of_rows.added_product(x, inner, back), x + back(inner)) < 1e-6


@pytest.mark.parametrize(("heads", "K", "V", "W"), [(2, 16, 16, 4), (4, 24, 40, 3), (2, 128, 128, 2)])
def test_a_token_of_a_gated_delta_net(heads, K, V, W):
    """Three tokens one after the other, with states and tails written over."""
    torch.manual_seed(0)
    options = dict(head_dim=K, num_value_heads=heads, value_dim=V, conv_width=W, negative_eigenvalues=heads > 2)
    layer, N = GatedDeltaNet(32, 2, **options).to(DEVICE), 3
    x = torch.randn(N, 3, 32, device=DEVICE)
    state = LayerState(
        torch.randn(N, heads, K, V, device=DEVICE), torch.randn(N, sum(layer.widths), W - 1, device=DEVICE)
    )
    before = LayerState(state.recurrent.double(), state.tail.double())
    with torch.no_grad():
        want = layer.double()(x.double(), state=before, output_state=True)
        layer.float()
        assert fits(x, state.recurrent)
        weights = Weights(layer.conv.weight, layer.A_log, layer.dt_bias, layer.norm.weight)
        for t in range(3):
            y = [m(x[:, t]) for m in (layer.qkv_proj, layer.beta_proj, layer.decay_proj, layer.gate_proj)]
            o = gated_delta_token(*y, weights, state.tail, state.recurrent, 2, beta_max=layer.beta_max)
            assert apart(layer.out_proj(o), want.o[:, t]) < 2e-6
    assert apart(state.recurrent, want.state.recurrent) < 2e-6
    assert apart(state.tail, want.state.tail) < 2e-6


@pytest.mark.parametrize("base", [1e4, 5e6, None])
def test_a_token_is_turned_and_written(base):
    torch.manual_seed(0)
    N, H, heads, K = 3, 6, 2, 24
    x = torch.randn(N, (H + 2 * heads) * K, device=DEVICE)
    keys, values = torch.zeros(2, 5, heads, 10, K, device=DEVICE)
    at, position = torch.tensor([3, 9, 0], device=DEVICE), torch.tensor([3, 1048575, 70000], device=DEVICE)
    q = turned_and_written(x, at, position, keys, values, base)
    parts = x[:, None].double().split([H * K, heads * K, heads * K], -1)
    want_q, want_k, want_v = (part.unflatten(-1, (-1, K)) for part in parts)
    if base is not None:
        want_q, want_k = (rotate(part, position[:, None], base) for part in (want_q, want_k))
    here = torch.arange(N, device=DEVICE)
    assert apart(q, want_q[:, 0]) < 1e-6
    assert apart(keys[here, :, at], want_k[:, 0]) < 1e-6
    assert apart(values[here, :, at], want_v[:, 0]) == 0
    assert int((keys != 0).any(-1).sum()) == N * heads


OPTIONS = {"attention": {"num_kv_heads": 1, "gated": True}, "gdn": {"num_value_heads": 4}}


def served(asked: list[tuple[list[int], int]], batch: int) -> list[list[int]]:
    torch.manual_seed(0)
    config = HybridConfig(19, 32, ["gdn", "attention", "kda", "gdn"], 2, mlp_dim=24, options=OPTIONS)
    model = HybridLM(config).to(DEVICE)
    jobs = [Timed(ids, n) for ids, n in asked]
    engine = Engine(Hybrid(model), NoText(), batch=batch, patience=60, capture=True)
    for job in jobs:
        engine.submit(job)
    engine.stop()
    engine.run()
    return [job.tokens for job in jobs]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_s_tokens_are_those_of_its_layers(batch, monkeypatch):
    """Of one sequence and of two, a layer without such a way among the others."""
    asked = [([3, 4, 5], 6), ([7] * 9, 4)]
    monkeypatch.setattr(block, "one_token", lambda *_, **__: False)
    want, steps, taken = served(asked, batch), [], []
    assert [len(tokens) for tokens in want] == [6, 4]

    def step(x, layout=None, in_place=False, **others) -> bool:
        steps.append(in_place and x.shape[1] == 1)
        return steps[-1]

    def noted(layer, x, norm, state):
        out = token[type(layer)](layer, x, norm, state)
        taken.extend([type(layer).__name__] if out is not None else [])
        return out

    token = {kind: kind.token for kind in (GatedDeltaNet, Attention)}
    for kind in token:
        monkeypatch.setattr(kind, "token", noted)
    monkeypatch.setattr(block, "one_token", step)
    assert served(asked, batch) == want
    assert sum(steps) >= 2 * 4  # of a graph the first two alone
    assert taken.count("GatedDeltaNet") == 2 * taken.count("Attention") == sum(steps) // 2


def test_which_layers_have_such_a_way():
    """Of what would be another result without a word: other modules, dtypes, hooks, a recurrence by PyTorch."""
    torch.manual_seed(0)
    norm, x = PreNorm(torch.ones(32, device=DEVICE), 1e-6), torch.randn(1, 1, 32, device=DEVICE)

    def state() -> LayerState:
        return LayerState(torch.zeros(1, 2, 16, 16, device=DEVICE), torch.zeros(1, 96, 3, device=DEVICE))

    def taken(layer: GatedDeltaNet) -> bool:
        with torch.no_grad():
            return layer.to(DEVICE).token(x, norm, state()) is not None

    assert taken(GatedDeltaNet(32, 2))
    assert not taken(GatedDeltaNet(32, 2, backend="torch"))
    assert not taken(GatedDeltaNet(32, 2).double())
    assert not taken(KimiDeltaAttention(32, 2))
    listened = GatedDeltaNet(32, 2)
    listened.out_proj.register_forward_hook(lambda *_: None)
    assert not taken(listened)
    other = GatedDeltaNet(32, 2)
    other.qkv_proj = torch.nn.Linear(32, 96)
    assert not taken(other)
    with pytest.raises(ArgumentError, match="x: expected 32 channels"):
        GatedDeltaNet(32, 2).to(DEVICE).token(torch.randn(1, 1, 48, device=DEVICE), norm, state())
