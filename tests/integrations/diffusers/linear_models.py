"""Models with linear attention over the image: tiny, random, with inputs."""

from __future__ import annotations

import torch
from diffusers import (
    SanaTransformer2DModel,
    SanaVideoTransformer3DModel,
    SanaWMTransformer3DModel,
)
from torch import nn

from .inputs import TEXT, B, Case, draw, latents


def sana(layers: int = 2, rows: int = 5, columns: int = 3) -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=layers, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=4)
    cross = dict(cross_attention_dim=16, num_cross_attention_heads=2, cross_attention_head_dim=8, caption_channels=12)
    model = SanaTransformer2DModel(sample_size=6, qk_norm="rms_norm_across_heads", **sizes, **cross)
    mask = torch.ones(B, TEXT)
    mask[0, 3:] = 0
    return model, latents(rows, columns) | dict(encoder_attention_mask=mask)


def sana_video(steps: bool = False) -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=2, attention_head_dim=12, num_attention_heads=2, in_channels=4, out_channels=4)
    cross = dict(cross_attention_dim=24, num_cross_attention_heads=2, cross_attention_head_dim=12, caption_channels=12)
    model = SanaVideoTransformer3DModel(patch_size=(1, 2, 2), **sizes, **cross)
    inputs = latents(7, 4, 6)
    if steps:
        inputs["timestep"] = torch.arange(B * 42).view(B, 1, 7, 2, 3).double()
    return model, inputs


def sana_wm(softmax: int = 0) -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=2, linear_head_dim=16, in_channels=4, mlp_ratio=2.0)
    model = SanaWMTransformer3DModel(softmax_every_n=softmax, caption_channels=12, chunk_plucker_channels=6, **sizes)
    mask = torch.ones(B, TEXT)
    mask[0, 3:] = 0
    cameras = torch.eye(4).flatten().repeat(B, 5, 1)
    cameras = torch.cat([cameras + 0.1 * torch.randn(B, 5, 16), torch.tensor([3.0, 3.0, 1.5, 1.0]).expand(B, 5, 4)], 2)
    inputs = dict(hidden_states=draw(B, 4, 5, 2, 3), encoder_hidden_states=draw(B, 1, TEXT, 12), mask=mask)
    inputs |= dict(timestep=torch.arange(B * 5).view(B, 1, 5), camera_conditions=cameras.double())
    return model, inputs | dict(chunk_plucker=draw(B, 6, 5, 2, 3))


LINEAR_CASES: dict[str, Case] = {
    "sana": sana,
    "sana video": sana_video,
    "sana video, steps": lambda: sana_video(True),
    "sana wm": sana_wm,
    "sana wm, softmax": lambda: sana_wm(2),
}
