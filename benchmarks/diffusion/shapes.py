"""Transformers of published shapes with random weights, and the inputs of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Draw = Callable[..., Tensor]
Inputs = Callable[[Draw, tuple[int, ...], bool], dict[str, Any]]


class Shape(NamedTuple):
    """A model, and its inputs at a size.

    Attributes:
        model: the class in diffusers. config: its arguments where they are not the published ones by default.
        tiny: the same for a run without GPUs.
        inputs: from a size to the inputs, drawn by the function it is given; `tiny` says which widths.
        sizes: what a run takes that names none; small: without GPUs.
        depth: how many blocks the published model has, by the names in its config.
        kernel: whether its attention is softmax attention, whose kernel can be named.
    """

    model: str
    config: dict[str, Any]
    tiny: dict[str, Any]
    inputs: Inputs
    sizes: tuple[tuple[int, ...], ...]
    small: tuple[int, ...]
    depth: dict[str, int]
    kernel: bool = True

    def of_layers(self, layers: int) -> dict[str, int]:
        """The depths of a model of so many layers of its first kind, the others in proportion."""
        whole = next(iter(self.depth.values()))
        return {name: max(1, round(n * layers / whole)) for name, n in self.depth.items()}


def _flux(draw: Draw, size: tuple[int, ...], tiny: bool) -> dict[str, Any]:
    rows, columns = (n // 16 for n in size)
    channels, text, pooled, words = (4, 12, 6, 8) if tiny else (64, 4096, 768, 512)
    grid = torch.meshgrid(*(torch.arange(n) for n in (1, rows, columns)), indexing="ij")
    ids = torch.stack(grid, -1).reshape(-1, 3)
    like = draw(1)
    inputs = dict(hidden_states=draw(1, rows * columns, channels), encoder_hidden_states=draw(1, words, text))
    inputs |= dict(pooled_projections=draw(1, pooled), timestep=like.new_full((1,), 0.5), img_ids=ids.to(like))
    return inputs | dict(txt_ids=like.new_zeros(words, 3), guidance=like.new_full((1,), 3.5))


def _qwen(draw: Draw, size: tuple[int, ...], tiny: bool) -> dict[str, Any]:
    rows, columns = (n // 16 for n in size)
    channels, text, words = (16, 12, 8) if tiny else (64, 3584, 256)
    inputs = dict(hidden_states=draw(1, rows * columns, channels), encoder_hidden_states=draw(1, words, text))
    return inputs | dict(timestep=draw(1).new_full((1,), 0.5), img_shapes=[[(1, rows, columns)]])


def _ltx(draw: Draw, size: tuple[int, ...], tiny: bool) -> dict[str, Any]:
    frames, rows, columns = size[0], size[1] // 32, size[2] // 32
    channels, text, words = (4, 12, 8) if tiny else (128, 4096, 128)
    latents, embeds = draw(1, frames * rows * columns, channels), draw(1, words, text)
    inputs = dict(hidden_states=latents, encoder_hidden_states=embeds, timestep=latents.new_full((1,), 500.0))
    inputs |= dict(encoder_attention_mask=torch.ones(1, words, dtype=torch.int64, device=latents.device))
    return inputs | dict(num_frames=frames, height=rows, width=columns)


def _latents(channels: int, text: int, words: int, scale: int, tiny_text: int) -> Inputs:
    """Latents of a size (rows, columns), or (frames of latents, rows, columns); a prompt's embeddings."""

    def inputs(draw: Draw, size: tuple[int, ...], tiny: bool) -> dict[str, Any]:
        *frames, rows, columns = size
        shape = (1, 4 if tiny else channels, *frames, rows // scale, columns // scale)
        embeds = draw(1, 8 if tiny else words, tiny_text if tiny else text)
        return dict(hidden_states=draw(*shape), encoder_hidden_states=embeds, timestep=draw(1).new_full((1,), 500.0))

    return inputs


def _hunyuan(draw: Draw, size: tuple[int, ...], tiny: bool) -> dict[str, Any]:
    inputs = _latents(16, 4096, 256, 8, 12)(draw, size, tiny)
    like, words = inputs["hidden_states"], inputs["encoder_hidden_states"].shape[1]
    inputs |= dict(encoder_attention_mask=torch.ones(1, words, dtype=torch.int64, device=like.device))
    return inputs | dict(pooled_projections=draw(1, 6 if tiny else 768), guidance=like.new_full((1,), 6000.0))


HEADS = dict(num_attention_heads=4, attention_head_dim=16)
FOUR = dict(in_channels=4, out_channels=4)

SHAPES: dict[str, Shape] = {
    "flux": Shape(
        "FluxTransformer2DModel",
        dict(guidance_embeds=True),
        dict(in_channels=4, num_layers=1, num_single_layers=1, **HEADS)
        | dict(joint_attention_dim=12, pooled_projection_dim=6, guidance_embeds=True, axes_dims_rope=(4, 4, 8)),
        _flux,
        ((1024, 1024), (1008, 1008), (2048, 2048)),
        (64, 64),
        dict(num_layers=19, num_single_layers=38),
    ),
    "qwen": Shape(
        "QwenImageTransformer2DModel",
        {},
        dict(in_channels=16, out_channels=4, num_layers=1, joint_attention_dim=12, axes_dims_rope=(4, 4, 8), **HEADS),
        _qwen,
        ((1328, 1328),),
        (64, 64),
        dict(num_layers=60),
    ),
    "wan": Shape(
        "WanTransformer3DModel",
        {},
        dict(num_attention_heads=4, attention_head_dim=12, text_dim=12, freq_dim=16, **FOUR)
        | dict(ffn_dim=20, num_layers=1),
        _latents(16, 4096, 512, 8, 12),
        ((21, 480, 832), (21, 720, 1280)),
        (3, 64, 64),
        dict(num_layers=40),
    ),
    "hunyuan_video": Shape(
        "HunyuanVideoTransformer3DModel",
        {},
        dict(num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=1, **FOUR, **HEADS)
        | dict(text_embed_dim=12, pooled_projection_dim=6, rope_axes_dim=(4, 4, 8)),
        _hunyuan,
        ((33, 720, 1280),),
        (2, 32, 32),
        dict(num_layers=20, num_single_layers=40),
    ),
    "ltx": Shape(
        "LTXVideoTransformer3DModel",
        {},
        dict(cross_attention_dim=64, num_layers=1, caption_channels=12, **FOUR, **HEADS),
        _ltx,
        ((21, 512, 704),),
        (2, 128, 128),
        dict(num_layers=28),
    ),
    "sana": Shape(
        "SanaTransformer2DModel",
        dict(qk_norm=None),
        dict(num_layers=1, attention_head_dim=8, num_attention_heads=2, **FOUR)
        | dict(cross_attention_dim=16, num_cross_attention_heads=2, cross_attention_head_dim=8, caption_channels=12),
        _latents(32, 2304, 300, 32, 12),
        ((4096, 4096),),
        (256, 256),
        dict(num_layers=20),
        False,
    ),
    "sana_video": Shape(
        "SanaVideoTransformer3DModel",
        {},
        dict(num_layers=1, attention_head_dim=12, num_attention_heads=2, **FOUR)
        | dict(cross_attention_dim=24, num_cross_attention_heads=2, cross_attention_head_dim=12, caption_channels=12),
        _latents(16, 2304, 300, 8, 12),
        ((21, 480, 832),),
        (5, 32, 48),
        dict(num_layers=20),
        False,
    ),
}


def build(
    shape: Shape,
    layers: int | None,
    tiny: bool,
    device: torch.device,
    dtype: torch.dtype,
    kind: Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """The model, of the same random weights on all ranks; `kind` in place of its class."""
    import diffusers

    config = dict(shape.tiny if tiny else shape.config)
    if layers is not None:
        config |= shape.of_layers(layers)
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = (kind or getattr(diffusers, shape.model))(**config)
    finally:
        torch.set_default_dtype(before)
    return randomize(model, device)


def randomize(model: nn.Module, device: torch.device) -> nn.Module:
    """The same random weights on all ranks, without gradients."""
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        std = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.02
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
