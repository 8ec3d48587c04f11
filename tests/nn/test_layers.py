"""Layers on one device: documents kept apart, token by token, bad arguments, and the published layers as oracles."""

from __future__ import annotations

import pytest
import torch

from ring_la import ArgumentError, UnsupportedError
from ring_la.indexers import lightning_index
from ring_la.nn import LAYERS, GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba2, MultiheadLatentAttention
from ring_la.nn.decoding import KVRows
from ring_la.nn.seats import Seats
from tests.nn.cases import DIM, NAMES, OPTIONS, RECURRENT, make, parts


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_is_the_whole(name):
    layer, x = make(name), random(2, 11, DIM)
    whole = layer(x, output_state=True)
    out, outputs = layer(x[:, :4], output_state=True), []
    for t in range(4, 11):
        out = layer(x[:, t : t + 1], state=out.state, output_state=True)
        outputs.append(out.o)
    close(torch.cat(outputs, 1), whole.o[:, 4:])
    for a, b in zip(parts(out.state), parts(whole.state), strict=True):
        close(a, b)
    assert layer(x).state is None


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_kept_apart_and_decoded_as_rows(name):
    layer, x, more = make(name), random(1, 13, DIM), random(3, 2, DIM)
    cu = torch.tensor([0, 4, 5, 13])
    packed = layer(x, cu_seqlens=cu, output_state=True)
    after = layer(more, state=packed.state)
    for n in range(3):
        alone = torch.cat([x[:, cu[n] : cu[n + 1]], more[n : n + 1]], 1)
        o = layer(alone).o
        close(packed.o[:, cu[n] : cu[n + 1]], o[:, :-2])
        close(after.o[n : n + 1], o[:, -2:])


def test_rows_at_several_places_of_a_mini_batch_go_on():
    """Documents of several lengths, packed, then rows of a batch: each at its own place of a mini-batch of 3."""
    layer, x, more = make("ttt"), random(1, 12, DIM), random(3, 5, DIM)
    cu = torch.tensor([0, 4, 5, 12])
    state, steps = layer(x, cu_seqlens=cu, output_state=True).state, []
    for t in range(5):
        out = layer(more[:, t : t + 1], state=state, output_state=True)
        state, steps = out.state, [*steps, out.o]
    for n in range(3):
        alone = torch.cat([x[:, cu[n] : cu[n + 1]], more[n : n + 1]], 1)
        close(torch.cat(steps, 1)[n : n + 1], layer(alone).o[:, -5:])


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_mode_is_chunk_mode(name):
    x = random(2, 9, DIM)
    close(make(name, mode="recurrent")(x).o, make(name, mode="chunk")(x).o)


def test_a_window_holds_while_decoding():
    layer, x = make("attention", window=3), random(2, 12, DIM)
    whole, out = layer(x).o, layer(x[:, :5], output_state=True)
    for t in range(5, 12):
        out = layer(x[:, t : t + 1], state=out.state, output_state=True)
        close(out.o[:, 0], whole[:, t])


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_runs(name):
    every = {"nsa": {"topk": 18}, "dsa": {"topk": 70}, "moba": {"topk": 24}}.get(name, {})  # another choice is no error
    layer, x = make(name, torch.float32, **every), random(1, 70, DIM).float()
    exact = layer(x).o
    with torch.autocast("cpu", torch.bfloat16):
        o = layer(x).o
    assert (o - exact).norm() < 0.05 * exact.norm()
    o = layer.to(torch.bfloat16)(x.bfloat16()).o
    assert o.dtype == torch.bfloat16
    assert (o - exact).norm() < 0.08 * exact.norm()


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_named_at_the_layer(name):
    layer, x = make(name), random(2, 5, DIM)
    for bad in (x[..., :-1], x[0], x.long(), None):
        with pytest.raises(ArgumentError, match="x: expected"):
            layer(bad)
    with pytest.raises(ArgumentError, match="cu_seqlens: expected to end at"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ArgumentError, match="cu_seqlens: expected None for a batch"):
        layer(x, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ArgumentError, match="state: expected a"):
        layer(x, state=x)
    for flag in ("output_state", "in_place"):
        with pytest.raises(ArgumentError, match=f"^{flag}: expected True or False"):
            layer(x, **{flag: "yes"})
    with pytest.raises(ArgumentError, match="layout: expected a layout made by"):
        layer(x, layout="zigzag")
    with pytest.raises(TypeError):
        layer(x, lay_out=None)


BAD_OPTIONS = [
    ("gdn", dict(dim=0), "dim"),
    ("gdn", dict(num_heads=2.0), "num_heads"),
    ("gdn", dict(conv_width=0), "conv_width"),
    ("gdn", dict(head_dim=0), "head_dim"),
    ("gdn", dict(num_value_heads=6), "num_value_heads: expected a multiple of num_heads = 4, got 6"),
    ("hgrn2", dict(num_heads=0), "num_heads"),
    ("mamba2", dict(num_heads=None, head_dim=0), "head_dim"),
    ("attention", dict(num_kv_heads=0), "num_kv_heads"),
    ("mla", dict(rope_dim=3), "rope_dim"),
    ("nsa", dict(length=24), "length"),
    ("dsa", dict(index_dim=1), "index_dim"),
    ("dsa", dict(index_loss=-1), "index_loss"),
    ("moba", dict(block=0), "block"),
    ("attention", dict(window=-5), "window"),
    ("attention", dict(head_dim=3), "head_dim"),  # rotation pairs channels
    ("retention", dict(head_dim=3), "head_dim"),
    ("lightning", dict(layer_idx=3, num_layers=3), "layer_idx"),
    ("rwkv7", dict(layer_idx=3, num_layers=3), "layer_idx"),
]


@pytest.mark.parametrize(("name", "options", "named"), BAD_OPTIONS)
def test_bad_options_are_named(name, options, named):
    with pytest.raises(ArgumentError, match=rf"^{named}\b"):
        LAYERS[name](**({"dim": DIM, "num_heads": 4} | options))


def test_a_cache_of_other_documents_or_heads_is_refused():
    layer, x = make("attention"), random(2, 6, DIM)
    state = layer(x, output_state=True).state
    with pytest.raises(ArgumentError, match="state: expected keys of 1 documents and 2 heads, got"):
        layer(x[:1], state=state)
    with pytest.raises(ArgumentError, match="state: expected keys of 2 documents and 1 heads, got"):
        make("attention", num_kv_heads=1)(x, state=state)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mla", "nsa", "dsa", "moba"])
def test_rows_of_several_lengths_share_memory(name):
    """As a server decodes: each sequence goes on by a token as it does alone."""
    layer, x = make(name), random(3, 12, DIM)
    before = [layer(x[n : n + 1, :length], output_state=True) for n, length in enumerate((9, 5, 11))]
    seats = Seats.of([9, 5, 11], torch.device("cpu"))
    rows = KVRows(Seats.of([], torch.device("cpu"))).moved((), [out.state for out in before], seats)
    out = layer(x[:, -1:], state=rows, output_state=True)
    for n, alone in enumerate(before):
        close(out.o[n : n + 1], layer(x[n : n + 1, -1:], state=alone.state).o)


def test_a_packed_continuation_of_a_cache_is_refused():
    layer, x = make("attention"), random(1, 6, DIM)
    state = layer(x, output_state=True).state
    with pytest.raises(UnsupportedError, match="as a batch row"):
        layer(x, state=state, cu_seqlens=torch.tensor([0, 6]))


# -- the published layers, weights copied ------------------------------------------------------------------


def copy(to: torch.nn.Module, source: torch.nn.Module, names: dict[str, list[str] | str]) -> None:
    """Load `to`'s parameters from `source`'s, concatenated where several become one."""
    theirs = dict(source.named_parameters())
    for name, parameter in to.named_parameters():
        given = names[name]
        joined = torch.cat([theirs.pop(n) for n in ([given] if isinstance(given, str) else given)])
        parameter.data = joined.detach().reshape(parameter.shape).to(parameter.dtype)
    assert not theirs, f"not copied: {list(theirs)}"


def test_gated_delta_net_is_qwen3_5s():
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = qwen.Qwen3_5TextConfig(
        hidden_size=DIM,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    theirs = qwen.Qwen3_5GatedDeltaNet(config, 0)
    ours = GatedDeltaNet(DIM, 2, head_dim=8, num_value_heads=4, value_dim=6)
    names = {
        "A_log": "A_log",
        "dt_bias": "dt_bias",
        "qkv_proj.weight": "in_proj_qkv.weight",
        "conv.weight": "conv1d.weight",
        "beta_proj.weight": "in_proj_b.weight",
        "decay_proj.weight": "in_proj_a.weight",
        "gate_proj.weight": "in_proj_z.weight",
        "norm.weight": "norm.weight",
        "out_proj.weight": "out_proj.weight",
    }
    copy(ours, theirs, names)
    x = random(2, 70, DIM).float()
    close(ours(x).o, theirs(x), 2e-5)


def test_kimi_delta_attention_is_kimi_linears():
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = kimi.KimiLinearConfig(
        hidden_size=DIM, linear_head_dim=8, linear_num_heads=2, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    torch.manual_seed(0)
    theirs = kimi.KimiLinearDeltaAttention(config, 0)
    torch.nn.init.uniform_(theirs.forget_gate.A_log, 0, 2)
    torch.nn.init.uniform_(theirs.forget_gate.dt_bias, -4, -2)
    ours = KimiDeltaAttention(DIM, 2, head_dim=8)
    names = {
        "A_log": "forget_gate.A_log",
        "dt_bias": "forget_gate.dt_bias",
        "qkv_proj.weight": ["q_proj.weight", "k_proj.weight", "v_proj.weight"],
        "conv.weight": "conv1d.weight",
        "beta_proj.weight": "b_proj.weight",
        "decay_proj.0.weight": "forget_gate.f_a_proj.weight",
        "decay_proj.1.weight": "forget_gate.f_b_proj.weight",
        "gate_proj.0.weight": "g_a_proj.weight",
        "gate_proj.1.weight": "g_b_proj.weight",
        "norm.weight": "o_norm.weight",
        "out_proj.weight": "o_proj.weight",
    }
    copy(ours, theirs, names)
    ours.norm.eps = theirs.layer_norm_epsilon
    x = random(2, 70, DIM).float()
    close(ours(x).o, theirs(x), 2e-5)


def test_multihead_latent_attention_is_deepseek_v3s():
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = deepseek.DeepseekV3Config(
        hidden_size=DIM, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=12, kv_lora_rank=10,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, num_hidden_layers=1, rope_interleave=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = deepseek.DeepseekV3Attention(config, 0)
    ours = MultiheadLatentAttention(DIM, 2, head_dim=6, rope_dim=4, value_dim=5, kv_rank=10, q_rank=12)
    up = theirs.kv_b_proj.weight.detach().view(2, 11, 10)  # of a head N, then V
    ours.k_up.data, ours.v_up.data = up[:, :6].clone(), up[:, 6:].clone()
    names = {
        "q_down.0.weight": "q_a_proj.weight",
        "q_down.1.weight": "q_a_layernorm.weight",
        "q_proj.weight": "q_b_proj.weight",
        "kv_down.weight": "kv_a_proj_with_mqa.weight",
        "kv_norm.weight": "kv_a_layernorm.weight",
        "out_proj.weight": "o_proj.weight",
    }
    for name, other in names.items():
        ours.get_parameter(name).data = theirs.get_parameter(other).detach().clone()
    x = random(2, 70, DIM).float()
    table = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(70)[None])
    mask = torch.full((70, 70), -torch.inf).triu(1)[None, None]
    close(ours(x).o, theirs(x, table, mask)[0], 2e-5)


def test_a_lightning_indexer_is_deepseek_v3_2s():
    deepseek = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    config = deepseek.DeepseekV32Config(
        hidden_size=DIM, num_attention_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5, num_hidden_layers=1, index_n_heads=5, index_head_dim=8, index_topk=9,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs, sizes = deepseek.DeepseekV32Indexer(config, 0), dict(head_dim=6, rope_dim=4, kv_rank=10, q_rank=12)
    ours = LAYERS["dsa"](DIM, 2, topk=9, index_heads=5, index_dim=8, **sizes).indexer
    names = {"q_proj.weight": "wq_b.weight", "k_proj.weight": "wk.weight", "w_proj.weight": "weights_proj.weight"}
    copy(ours, theirs, names | {name: name for name in ("k_norm.weight", "k_norm.bias")})
    x, source = random(2, 70, DIM).float(), random(2, 70, 12).float()
    table = deepseek.DeepseekV32RotaryEmbedding(config)(x, torch.arange(70)[None])
    mask = torch.full((70, 70), -torch.inf).triu(1)[None]
    got = lightning_index(*ours(source, x, torch.arange(70)), 9).places[:, 8:, 0]
    want = theirs(x, source, table, mask, position_ids=None)[:, 8:]
    assert torch.equal(got.sort().values, want.sort().values)


def test_lightning_attention_is_minimaxs():
    minimax = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = minimax.MiniMaxConfig(
        hidden_size=DIM, num_attention_heads=2, head_dim=8, num_hidden_layers=3, block_size=16
    )
    torch.manual_seed(0)
    theirs = minimax.MiniMaxLightningAttention(config, 1)
    ours = LightningAttention(DIM, 2, layer_idx=1, num_layers=3)
    close(-ours.log_decay, theirs.slope_rate.flatten(), 1e-6)
    copy(ours, theirs, {n: n.replace("gate_proj", "output_gate") for n, _ in ours.named_parameters()})
    weight = theirs.qkv_proj.weight.detach().view(2, 3, 8, DIM)  # their heads hold q, k and v side by side
    ours.qkv_proj.weight.data = weight.transpose(0, 1).reshape(-1, DIM).clone()
    x = random(2, 70, DIM).float()
    close(ours(x).o, theirs(x, None, None)[0], 2e-5)


def test_mamba2_is_transformers():
    theirs_of = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = theirs_of.Mamba2Config(
        hidden_size=DIM, num_heads=4, head_dim=8, state_size=5, n_groups=1, expand=2, num_hidden_layers=1, chunk_size=16
    )
    torch.manual_seed(0)
    theirs = theirs_of.Mamba2Mixer(config, 0)
    ours = Mamba2(DIM, 4, state_dim=5)
    names = {n: n.replace("conv.", "conv1d.") for n, _ in ours.named_parameters()}
    copy(ours, theirs, names)
    ours.norm.eps = theirs.norm.variance_epsilon
    x = random(2, 40, DIM).float()
    close(ours(x).o, theirs(x), 2e-5)


# -- the papers' equations, a token or a matrix at a time --------------------------------------------------


def test_rwkv7_is_the_papers_token_loop():
    layer, x, H = make("rwkv7"), random(2, 9, DIM), 4
    n = DIM // H
    low = lambda part, y, f: part.offset + f(y @ part.down) @ part.up  # noqa: E731
    S, before, outputs = x.new_zeros(2, H, n, n), x.new_zeros(2, DIM), []  # S [value, key]: the paper's orientation
    for t in range(9):
        xr, xw, xk, xv, xa, xg = (x[:, t] + (before - x[:, t]) * mu for mu in layer.mu)
        r, k, v = layer.r_proj(xr), layer.k_proj(xk), layer.v_proj(xv)
        decay = torch.exp(-torch.exp(torch.tensor(-0.5)).double() * torch.sigmoid(low(layer.decay, xw, torch.tanh)))
        a = torch.sigmoid(low(layer.rate, xa, lambda y: y))
        gate = torch.sigmoid(xg @ layer.gate.down) @ layer.gate.up
        kappa = torch.nn.functional.normalize((k * layer.xi).view(2, H, n), dim=-1)
        k = k * (1 + (a - 1) * layer.alpha)
        r, k, v, a, decay = (y.view(2, H, n) for y in (r, k, v, a, decay))
        G = torch.diag_embed(decay) - kappa[..., :, None] * (a * kappa)[..., None, :]
        S = S @ G + v[..., :, None] * k[..., None, :]
        o = (S @ r[..., None])[..., 0]
        o = torch.nn.functional.group_norm(
            o.reshape(2, DIM), H, layer.norm.weight.flatten(), layer.norm.bias.flatten(), layer.norm.eps
        )
        o = o + ((r * layer.rho * k).sum(-1, keepdim=True) * v).reshape(2, DIM)
        outputs.append(layer.out_proj(o * gate))
        before = x[:, t]
    close(layer(x).o, torch.stack(outputs, 1), 1e-5)  # l2norm has an ε inside the root


def test_retention_is_the_papers_parallel_form():
    layer, x, H, K = make("retention"), random(2, 9, DIM), 4, DIM // 4
    q, k, v, gate = (y.unflatten(-1, (H, -1)) for y in layer.qkvg_proj(x).split(layer.widths, -1))
    theta = 10000.0 ** -(torch.arange(K // 2, dtype=torch.float64) / (K // 2))
    turn = torch.polar(torch.ones(9, K // 2, dtype=torch.float64), torch.arange(9)[:, None] * theta)[:, None]
    q, k = (torch.complex(*y.chunk(2, -1)) * turn for y in (q, k))
    gap = torch.arange(9)[:, None] - torch.arange(9)
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    D = torch.where(gap >= 0, gamma[:, None, None] ** gap, 0.0)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.conj()).real * K**-0.5 * D
    o = layer.norm(torch.einsum("bhij,bjhd->bihd", scores, v))
    close(layer(x).o, layer.out_proj((torch.nn.functional.silu(gate) * o).flatten(2)))


def test_forgetting_attention_is_the_papers_equation():
    layer, x = make("fox", qk_norm=False, gated=False), random(2, 9, DIM)
    q, k, v = (y.unflatten(-1, (4, -1)) for y in layer.qkv_proj(x).chunk(3, -1))
    f = torch.sigmoid(layer.forget_proj(x))
    D = torch.full((2, 4, 9, 9), -torch.inf, dtype=torch.float64)
    for i in range(9):
        for j in range(i + 1):
            D[..., i, j] = f[:, j + 1 : i + 1].prod(1).log()
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) * (DIM // 4) ** -0.5 + D).softmax(-1)
    close(layer(x).o, layer.out_proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)))


def test_options_name_layers():
    assert set(OPTIONS) <= set(NAMES)


WRONG = [
    ("attention", {"rope_base": -1}),
    ("attention", {"rope_base": float("nan")}),
    ("attention", {"qk_norm": "no"}),
    ("attention", {"gated": 0}),
    ("mla", {"rope_base": 0}),
    ("moba", {"qk_norm": None}),
    ("retention", {"rope_base": "x"}),
    ("lightning", {"log_decay": 0.5}),
    ("gla", {"temperature": -1}),
    ("gla", {"gate_rank": 0}),
    ("gsa", {"temperature": 0}),
    ("hgrn2", {"lower_bound": None}),
    ("hgrn", {"lower_bound": "x"}),
    ("rwkv6", {"mix_rank": 0}),
    ("rwkv6", {"decay_rank": 1.5}),
    ("mamba2", {"expand": 0}),
    ("mamba2", {"state_dim": 0}),
    ("mamba2", {"dt_range": (0.1, 0.001)}),
    ("mamba3", {"expand": 1.5}),
    ("mamba3", {"turned": None}),
    ("mlstm", {"key_dim": 0}),
    ("ttt", {"rate": float("nan")}),
    ("gdn", {"negative_eigenvalues": "no"}),
    ("gdn", {"head_dim": True}),
    ("linear_attention", {"causal": None}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=lambda x: str(x))
def test_options_that_make_no_layer_are_refused(name, wrong):
    """Some made NaN, gates that grow, or a layer without channels; others were errors of the first call."""
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}: expected"):
        make(name, **wrong)
