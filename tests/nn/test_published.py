"""Layers beside what they are named after: published ones, weights copied, and the papers' equations."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ring_la import kda
from ring_la.errors import ArgumentError
from ring_la.indexers import lightning_index
from ring_la.nn import LAYERS, GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba2, MultiheadLatentAttention
from ring_la.nn.layer import LayerCall
from tests.nn.cases import DIM, make


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


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


def test_kimi_delta_attention_with_a_bound_is_bailings():
    bailing = pytest.importorskip("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    config = bailing.BailingHybridConfig(hidden_size=DIM, linear_head_dim=8, linear_num_heads=2, kda_lower_bound=-3.0)
    torch.manual_seed(0)
    theirs = bailing.BailingHybridForgetGate(config)
    torch.nn.init.uniform_(theirs.A_log, 0, 2)
    torch.nn.init.uniform_(theirs.dt_bias, -2, 2)
    ours = KimiDeltaAttention(DIM, 2, head_dim=8, lower_bound=-3.0)
    with torch.no_grad():  # their projection, of full rank
        ours.decay_proj = theirs.f_proj
        ours.A_log.copy_(theirs.A_log), ours.dt_bias.copy_(theirs.dt_bias)
    x, seen = random(2, 70, DIM).float(), []
    with mock.patch(
        "ring_la.nn.delta.kda", side_effect=lambda *x, **how: (seen.append((x[3], how)), kda(*x, **how))[1]
    ):
        ours(x)
    [(g, how)] = seen
    assert how["lower_bound"] == -3.0
    close(g, theirs(x), 1e-6)


def test_both_gates_of_kimi_delta_attention_decay_alike_at_first():
    gates = []
    for bound in (None, -5.0):
        torch.manual_seed(0)
        layer = KimiDeltaAttention(DIM, 2, head_dim=8, lower_bound=bound)
        torch.nn.init.zeros_(layer.decay_proj[1].weight)
        gates.append(layer.decay(torch.zeros(1, 1, DIM), LayerCall(None, None, False)))
    close(gates[1], gates[0], 1e-5)
    with pytest.raises(ArgumentError, match="lower_bound: expected a number below 0"):
        KimiDeltaAttention(DIM, 2, lower_bound=5.0)


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
