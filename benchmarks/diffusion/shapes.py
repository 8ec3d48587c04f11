"""Transformers of published shapes with random weights, and the inputs of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Shape(NamedTuple):
    """A model, and its inputs at a size.

    Attributes:
        model: the class in diffusers. config: its arguments where they are not the published ones by default.
        tiny: the same for a run without GPUs.
        inputs: from a size to the inputs, drawn by the function it is given; `tiny` says which widths.
        size: what a run takes that names none; small: without GPUs.
    """

    model: str
    config: dict[str, Any]
    tiny: dict[str, Any]
    inputs: Callable[[Callable[..., Tensor], tuple[int, ...], bool], dict[str, Any]]
    size: tuple[int, ...]
    small: tuple[int, ...]


def _flux(draw: Callable[..., Tensor], size: tuple[int, ...], tiny: bool) -> dict[str, Any]:
    rows, columns = (n // 16 for n in size)
    channels, text, pooled, words = (4, 12, 6, 8) if tiny else (64, 4096, 768, 512)
    grid = torch.meshgrid(*(torch.arange(n) for n in (1, rows, columns)), indexing="ij")
    ids = torch.stack(grid, -1).reshape(-1, 3)
    like = draw(1)
    inputs = dict(hidden_states=draw(1, rows * columns, channels), encoder_hidden_states=draw(1, words, text))
    inputs |= dict(pooled_projections=draw(1, pooled), timestep=like.new_full((1,), 0.5), img_ids=ids.to(like))
    return inputs | dict(txt_ids=like.new_zeros(words, 3), guidance=like.new_full((1,), 3.5))


def _latents(channels: int, text: int, words: int, scale: int, tiny_text: int) -> Callable[..., dict[str, Any]]:
    """Latents of a size (rows, columns), or (frames of latents, rows, columns); a prompt's embeddings."""

    def inputs(draw: Callable[..., Tensor], size: tuple[int, ...], tiny: bool) -> dict[str, Any]:
        *frames, rows, columns = size
        shape = (1, 4 if tiny else channels, *frames, rows // scale, columns // scale)
        embeds = draw(1, words, tiny_text if tiny else text)
        return dict(hidden_states=draw(*shape), encoder_hidden_states=embeds, timestep=draw(1).new_full((1,), 500.0))

    return inputs


SHAPES: dict[str, Shape] = {
    "flux": Shape(
        "FluxTransformer2DModel",
        dict(guidance_embeds=True),
        dict(in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4)
        | dict(joint_attention_dim=12, pooled_projection_dim=6, guidance_embeds=True, axes_dims_rope=(4, 4, 8)),
        _flux,
        (1024, 1024),
        (64, 64),
    ),
    "wan": Shape(
        "WanTransformer3DModel",
        {},
        dict(num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=12, freq_dim=16)
        | dict(ffn_dim=20, num_layers=1),
        _latents(16, 4096, 512, 8, 12),
        (21, 720, 1280),
        (3, 64, 64),
    ),
    "sana": Shape(
        "SanaTransformer2DModel",
        dict(qk_norm=None),
        dict(num_layers=1, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=4)
        | dict(cross_attention_dim=16, num_cross_attention_heads=2, cross_attention_head_dim=8, caption_channels=12),
        _latents(32, 2304, 300, 32, 12),
        (4096, 4096),
        (256, 256),
    ),
    "sana_video": Shape(
        "SanaVideoTransformer3DModel",
        {},
        dict(num_layers=1, attention_head_dim=12, num_attention_heads=2, in_channels=4, out_channels=4)
        | dict(cross_attention_dim=24, num_cross_attention_heads=2, cross_attention_head_dim=12, caption_channels=12),
        _latents(16, 2304, 300, 8, 12),
        (21, 480, 832),
        (5, 32, 48),
    ),
}


def build(shape: Shape, layers: int | None, tiny: bool, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model, of the same random weights on all ranks."""
    import diffusers

    config = dict(shape.tiny if tiny else shape.config)
    if layers is not None:
        config["num_layers"] = layers
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = getattr(diffusers, shape.model)(**config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.02
        parameter.data.normal_(0.0, std, generator=generator)
    return model.eval().requires_grad_(False)


def draw_inputs(
    shape: Shape, size: tuple[int, ...], tiny: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The same on all ranks."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*dims: int) -> Tensor:
        return torch.randn(*dims, device=device, dtype=dtype, generator=generator)

    return shape.inputs(draw, size, tiny)
