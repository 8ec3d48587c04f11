"""Tiny random models with refiners before their blocks, residuals between them, or two streams."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from diffusers import (
    CosmosControlNetModel,
    FluxControlNetModel,
    HunyuanDiT2DControlNetModel,
    HunyuanVideo15Transformer3DModel,
    LTX2VideoTransformer3DModel,
    MiniMaxH3Transformer3DModel,
    QwenImageControlNetModel,
    SanaControlNetModel,
    SD3ControlNetModel,
    WanAnimateTransformer3DModel,
    WanVACETransformer3DModel,
    ZImageControlNetModel,
    ZImageTransformer2DModel,
)
from torch import nn

from .cross_models import CROSS_CASES, cosmos
from .inputs import TEXT, B, Case, draw, latents, step
from .joint_models import JOINT_CASES, flux, qwen, sd3
from .linear_models import LINEAR_CASES


def z_image(refiners: int = 1) -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(in_channels=4, dim=32, n_layers=2, n_refiner_layers=refiners, n_heads=2, n_kv_heads=2, cap_feat_dim=12)
    model = ZImageTransformer2DModel(axes_dims=[4, 4, 8], axes_lens=[128, 16, 16], **sizes)
    inputs = dict(x=[draw(4, 1, 6, 10), draw(4, 1, 14, 10)], t=step() / 1000, cap_feats=[draw(TEXT, 12), draw(3, 12)])
    return model, inputs | dict(controlnet_block_samples={0: draw(B, 96, 32), 1: draw(B, 96, 32)})


def z_image_control() -> tuple[nn.Module, dict[str, object]]:
    """With the transformer's own refiners, between which it adds residuals."""
    places = dict(control_layers_places=[0, 1], control_refiner_layers_places=[0, 1])
    sizes = dict(control_in_dim=4, dim=32, n_refiner_layers=2, n_heads=2, n_kv_heads=2)
    model = ZImageControlNetModel(add_control_noise_refiner="control_noise_refiner", **places, **sizes)
    transformer, inputs = z_image(2)
    ZImageControlNetModel.from_transformer(model, transformer)
    model.gradient_checkpointing = False  # which the library asks for
    del inputs["controlnet_block_samples"]
    return model, inputs | dict(control_context=[draw(4, 1, 6, 10), draw(4, 1, 14, 10)], conditioning_scale=0.7)


def hunyuan15() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2)
    dims = dict(num_refiner_layers=1, text_embed_dim=12, text_embed_2_dim=8, image_embed_dim=6, rope_axes_dim=(4, 4, 8))
    masks = [torch.ones(B, n, dtype=torch.long) for n in (TEXT, 4)]
    masks[0][0, 2:], masks[1][1, 1:] = 0, 0
    inputs = latents(1, 3, 5) | dict(encoder_hidden_states_2=draw(B, 4, 8), image_embeds=draw(B, 3, 6))
    inputs |= dict(encoder_attention_mask=masks[0], encoder_attention_mask_2=masks[1])
    return HunyuanVideo15Transformer3DModel(**sizes, **dims), inputs


def ltx2(steps: bool = False) -> tuple[nn.Module, dict[str, object]]:
    video = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32)
    audio = dict(audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=8)
    more = dict(audio_cross_attention_dim=16, num_layers=2, caption_channels=12)
    if steps:
        more |= dict(rope_type="split", gated_attn=True, cross_attn_mod=True, audio_cross_attn_mod=True)
    model = LTX2VideoTransformer3DModel(**video, **audio, **more)
    inputs = dict(hidden_states=draw(B, 15, 4), audio_hidden_states=draw(B, 7, 4), timestep=step(), sigma=step())
    inputs |= dict(encoder_hidden_states=draw(B, TEXT, 12), audio_encoder_hidden_states=draw(B, TEXT, 12))
    if steps:
        inputs |= dict(timestep=torch.arange(B * 15).view(B, 15).double(), audio_timestep=step())
    return model, inputs | dict(num_frames=1, height=3, width=5, audio_num_frames=7)


def minimax() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1)
    dims = dict(ffn_dim=20, in_channels=4, audio_in_channels=4, patch_size=(1, 1, 1), text_dim=12, freq_dim=8)
    more = dict(time_embed_hidden_dim=8, time_embed_dim=8, rope_freq_dim=2)
    text, video, audio = torch.randperm(27).split([TEXT, 15, 7])
    tags = torch.zeros(27, dtype=torch.long)
    tags[text], tags[audio] = 1, 2
    inputs = dict(hidden_states=draw(1, 15, 4), audio_hidden_states=draw(1, 7, 4))
    inputs |= dict(encoder_hidden_states=draw(1, TEXT, 12), timestep=torch.tensor([0.3, 0.9]).double())
    inputs |= dict(timestep_indices=torch.arange(27) % 2, token_tags=tags, position_ids=torch.randn(27, 3))
    inputs |= dict(video_indices=video, audio_indices=audio, text_indices=text)
    return MiniMaxH3Transformer3DModel(**sizes, **dims, **more), inputs


def sana_control() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=2, attention_head_dim=8, num_attention_heads=2, in_channels=4)
    cross = dict(cross_attention_dim=16, num_cross_attention_heads=2, cross_attention_head_dim=8, caption_channels=12)
    model = SanaControlNetModel(sample_size=6, **sizes, **cross)
    return model, latents(5, 3) | dict(controlnet_cond=draw(B, 4, 5, 3))


def vace() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2)
    dims = dict(text_dim=12, freq_dim=16, ffn_dim=20, rope_max_seq_len=16, vace_layers=[0, 1], vace_in_channels=6)
    control = dict(control_hidden_states=draw(B, 6, 3, 6, 6), control_hidden_states_scale=torch.tensor([1.0, 0.5]))
    return WanVACETransformer3DModel(**sizes, **dims), latents(3, 6, 6) | control


def animate() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=12, latent_channels=4, out_channels=4)
    dims = dict(num_layers=2, text_dim=12, freq_dim=16, ffn_dim=20, rope_max_seq_len=16, image_dim=None)
    motion = dict(motion_encoder_size=4, motion_style_dim=6, motion_dim=3, motion_encoder_dim=6)
    motion |= dict(motion_encoder_channel_sizes={"4": 6, "8": 6}, face_encoder_hidden_dim=6, face_encoder_num_heads=2)
    model = WanAnimateTransformer3DModel(**sizes, **dims, **motion, inject_face_latents_blocks=1)
    inputs = latents(4, 6, 6) | dict(hidden_states=draw(1, 12, 4, 6, 6), encoder_hidden_states=draw(1, TEXT, 12))
    inputs |= dict(timestep=step()[:1], pose_hidden_states=draw(1, 4, 3, 6, 6), face_pixel_values=draw(1, 3, 9, 4, 4))
    return model, inputs


def flux_control() -> tuple[nn.Module, dict[str, object]]:

    sizes = dict(num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, in_channels=4)
    dims = dict(joint_attention_dim=12, pooled_projection_dim=6, guidance_embeds=True, axes_dims_rope=[4, 4, 8])
    model = FluxControlNetModel(**sizes, **dims, num_mode=3)
    inputs = flux()[1] | dict(controlnet_cond=draw(B, 15, 4), conditioning_scale=0.7)
    return model, inputs | dict(controlnet_mode=torch.tensor([[1]] * B))


def sd3_control() -> tuple[nn.Module, dict[str, object]]:

    sizes = dict(sample_size=6, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2)
    dims = dict(joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=6, pos_embed_max_size=6)
    return SD3ControlNetModel(**sizes, **dims), sd3()[1] | dict(controlnet_cond=draw(B, 4, 6, 6))


def qwen_control() -> tuple[nn.Module, dict[str, object]]:

    sizes = dict(in_channels=16, num_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=12)
    model = QwenImageControlNetModel(out_channels=4, axes_dims_rope=(4, 4, 8), **sizes)
    return model, qwen()[1] | dict(controlnet_cond=draw(B, 15, 16))


def with_residuals(name: str, argument: str, channels: int, count: int, tokens: int = 15) -> Case:
    """A transformer that is given a ControlNet's residuals."""

    def case() -> tuple[nn.Module, dict[str, object]]:

        model, inputs = (JOINT_CASES | LINEAR_CASES | CROSS_CASES)[name]()
        return model, inputs | {argument: [draw(B, tokens, channels) for _ in range(count)]}

    return case


def hunyuan_dit_control() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(
        num_attention_heads=2, attention_head_dim=8, hidden_size=16, in_channels=4, patch_size=2, sample_size=6
    )
    text = dict(cross_attention_dim=12, cross_attention_dim_t5=8, text_len=TEXT, text_len_t5=256)
    more = dict(use_style_cond_and_image_meta_size=False, pooled_projection_dim=8, activation_fn="gelu-approximate")
    model = HunyuanDiT2DControlNetModel(transformer_num_layers=6, **sizes, **text, **more)
    return model, CROSS_CASES["hunyuan dit"]()[1] | dict(controlnet_cond=draw(B, 4, 6, 6), conditioning_scale=0.7)


def cosmos_control() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=16, in_channels=7, latent_channels=6, model_channels=32)
    dims = dict(text_embed_dim=12, adaln_lora_dim=4, max_size=(4, 8, 8), mlp_ratio=1, n_controlnet_blocks=2)
    inputs = dict(controls_latents=draw(B, 4, 3, 6, 6), latents=draw(B, 4, 3, 6, 6), timestep=step())
    inputs |= dict(encoder_hidden_states=draw(B, TEXT, 12), condition_mask=draw(B, 1, 3, 6, 6))
    inputs |= dict(padding_mask=torch.zeros(1, 1, 6, 6).double(), conditioning_scale=[1.0, 0.7])
    library = sys.modules[CosmosControlNetModel.__module__]
    if not hasattr(library, "transforms"):  # torchvision's, of which it takes one function
        nearest = SimpleNamespace(resize=lambda x, size, interpolation: F.interpolate(x, size, mode=interpolation))
        library.transforms = SimpleNamespace(functional=nearest, InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    return CosmosControlNetModel(**sizes, **dims), inputs


def cosmos_residuals() -> tuple[nn.Module, dict[str, object]]:

    model, inputs = cosmos(controlnet_block_every_n=1)
    return model, inputs | dict(block_controlnet_hidden_states=[draw(B, 27, 32) for _ in range(2)])


CONTROL_CASES: dict[str, Case] = {
    "z-image": z_image,
    "z-image control": z_image_control,
    "hunyuan 1.5": hunyuan15,
    "ltx2": ltx2,
    "ltx2, steps": lambda: ltx2(True),
    "vace": vace,
    "animate": animate,
    "flux control": flux_control,
    "sd3 control": sd3_control,
    "qwen control": qwen_control,
    "flux, residuals": with_residuals("flux", "controlnet_single_block_samples", 32, 2),
    "sd3, residuals": with_residuals("sd3", "block_controlnet_hidden_states", 16, 1, 9),
    "minimax": minimax,
    "sana control": sana_control,
    "sana, residuals": with_residuals("sana", "controlnet_block_samples", 16, 1),
    "cosmos, residuals": cosmos_residuals,
    "cosmos control": cosmos_control,
    "hunyuan dit control": hunyuan_dit_control,
    "hunyuan dit, residuals": with_residuals("hunyuan dit", "controlnet_block_samples", 16, 1, 9),
    "qwen, residuals": with_residuals("qwen, masked", "controlnet_block_samples", 32, 2),
}
ROUNDED_CONTROL = ("z-image", "ltx2", "vace", "animate", "minimax")
"""Cases that round to fp32 inside."""
