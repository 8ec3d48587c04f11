"""A model of softmax blocks is the one that PyTorch's own parts make of its weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ring_la.models import HybridConfig, HybridLM

D, H, HK = 24, 4, 2


def plain(model: HybridLM, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss, with rotary positions as complex numbers (halves paired)."""
    (B, T), K, x = ids.shape, D // H, F.embedding(ids, model.embedding.weight)
    angles = torch.outer(torch.arange(T).double(), 10000.0 ** -(torch.arange(0, K, 2).double() / K))
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(y: torch.Tensor) -> torch.Tensor:
        z = torch.complex(y[..., : K // 2].contiguous(), y[..., K // 2 :].contiguous()) * turn
        return torch.cat([z.real, z.imag], -1)

    for block in model.blocks:
        y = F.rms_norm(x, (D,), block.layer_norm.weight, 1e-6)
        q, k, v = (y @ block.layer.qkv_proj.weight.T).split([H * K, HK * K, HK * K], -1)
        q, k, v = (h.view(B, T, -1, K).transpose(1, 2) for h in (q, k, v))
        o = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + o.transpose(1, 2).reshape(B, T, D) @ block.layer.out_proj.weight.T
        gate, up = (F.rms_norm(x, (D,), block.mlp_norm.weight, 1e-6) @ block.mlp.up_proj.weight.T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ block.mlp.out_proj.weight.T
    logits = F.rms_norm(x, (D,), model.norm.weight, 1e-6) @ model.embedding.weight.T
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_loss_and_gradients_of_softmax_blocks():
    torch.manual_seed(0)
    model = HybridLM(HybridConfig(31, D, ["attention"] * 2, H, options={"attention": {"num_kv_heads": HK}})).double()
    ids = torch.randint(0, 31, (2, 37))
    losses, gradients = [], []
    for loss in (model.loss(ids), plain(model, ids)):
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for (name, _), ours, theirs in zip(model.named_parameters(), *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: {m}")  # noqa: B023
