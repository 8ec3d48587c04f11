"""Tiny random transformers of Diffusers, one or more a plan, and inputs: odd numbers of tokens, two rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn

Case = Callable[[], tuple[nn.Module, dict[str, object]]]
B, TEXT = 2, 5


def draw(*shape: int) -> Tensor:
    """A leaf in fp64; the caller has seeded."""
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def step() -> Tensor:
    return torch.tensor([7.0, 500.0], dtype=torch.float64)


def flux() -> tuple[nn.Module, dict[str, object]]:
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    ids = torch.stack(
        [torch.zeros(15), *(x.flatten() for x in torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij"))], 1
    )
    inputs = dict(hidden_states=draw(B, 15, 4), encoder_hidden_states=draw(B, TEXT, 12), pooled_projections=draw(B, 6))
    return model, inputs | dict(timestep=step() / 1000, guidance=step(), img_ids=ids, txt_ids=torch.zeros(TEXT, 3))


def flux2() -> tuple[nn.Module, dict[str, object]]:
    model = Flux2Transformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        timestep_guidance_channels=8,
        axes_dims_rope=(4, 4, 4, 4),
    )
    inputs = dict(hidden_states=draw(B, 15, 4), encoder_hidden_states=draw(B, TEXT, 12), timestep=step() / 1000)
    return model, inputs | dict(guidance=step(), img_ids=torch.randn(15, 4), txt_ids=torch.zeros(TEXT, 4))


def sd3() -> tuple[nn.Module, dict[str, object]]:
    model = SD3Transformer2DModel(
        sample_size=6,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=6,
        out_channels=4,
        pos_embed_max_size=6,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    inputs = dict(hidden_states=draw(B, 4, 6, 6), encoder_hidden_states=draw(B, TEXT, 12), timestep=step())
    return model, inputs | dict(pooled_projections=draw(B, 6))


def qwen(masked: bool = True, edit: bool = False) -> tuple[nn.Module, dict[str, object]]:
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(4, 4, 8),
        zero_cond_t=edit,
    )
    shapes = [(1, 3, 3), (1, 2, 3)] if edit else [(1, 3, 5)]
    mask = torch.ones(B, TEXT, dtype=torch.bool)
    mask[0, 3:], mask[1, 1] = False, False
    inputs = dict(hidden_states=draw(B, 15, 16), encoder_hidden_states=draw(B, TEXT, 12), timestep=step() / 1000)
    return model, inputs | dict(encoder_hidden_states_mask=mask if masked else None, img_shapes=[shapes] * B)


def cogvideox() -> tuple[nn.Module, dict[str, object]]:
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=12,
        num_layers=2,
        sample_width=4,
        sample_height=6,
        sample_frames=9,
        max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=True,
    )
    inputs = dict(hidden_states=draw(B, 3, 4, 6, 4), encoder_hidden_states=draw(B, TEXT, 12), timestep=step())
    return model, inputs | dict(image_rotary_emb=(torch.randn(18, 16), torch.randn(18, 16)))


def hunyuan() -> tuple[nn.Module, dict[str, object]]:
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=12,
        pooled_projection_dim=6,
        rope_axes_dim=(4, 4, 8),
    )
    mask = torch.ones(B, TEXT, dtype=torch.long)
    mask[0, 2:] = 0
    inputs = dict(hidden_states=draw(B, 4, 1, 3, 5), encoder_hidden_states=draw(B, TEXT, 12), timestep=step())
    return model, inputs | dict(encoder_attention_mask=mask, pooled_projections=draw(B, 6), guidance=step())


def wan(steps: bool = False, image: bool = False) -> tuple[nn.Module, dict[str, object]]:
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=20,
        num_layers=2,
        rope_max_seq_len=16,
        image_dim=10 if image else None,
        added_kv_proj_dim=24 if image else None,
    )
    text = 512 if image else TEXT  # the processor counts on it
    rows = B if steps or image else 1
    inputs = dict(hidden_states=draw(rows, 4, 3, 6, 6), encoder_hidden_states=draw(rows, text, 12))
    inputs["timestep"] = (
        torch.arange(B * 27).view(B, 27).double() if steps else torch.tensor([7.0]).expand(rows)
    )  # as a pipeline does
    return model, inputs | (dict(encoder_hidden_states_image=draw(B, 3, 10)) if image else {})


def ltx(steps: bool = False) -> tuple[nn.Module, dict[str, object]]:
    model = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=12,
    )
    mask = torch.ones(B, TEXT)
    mask[0, 3:] = 0
    inputs = dict(hidden_states=draw(B, 15, 4), encoder_hidden_states=draw(B, TEXT, 12), encoder_attention_mask=mask)
    inputs["timestep"] = torch.arange(B * 15).view(B, 15).double() if steps else step()
    return model, inputs | dict(num_frames=1, height=3, width=5)


CASES: dict[str, Case] = {
    "flux": flux,
    "flux2": flux2,
    "sd3": sd3,
    "qwen": lambda: qwen(False),
    "qwen, masked": qwen,
    "qwen, edit": lambda: qwen(False, True),
    "cogvideox": cogvideox,
    "hunyuan": hunyuan,
    "wan": wan,
    "wan, image": lambda: wan(image=True),
    "wan, steps": lambda: wan(True),
    "ltx": ltx,
    "ltx, steps": lambda: ltx(True),
}


def make(name: str) -> tuple[nn.Module, dict[str, object]]:
    """The model in fp64, every parameter drawn, and its inputs; the same on all ranks."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    model = model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model, inputs
