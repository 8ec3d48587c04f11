"""Models whose text and image are one sequence, or two that meet in one attention: tiny, random, with inputs."""

from __future__ import annotations

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    BriaFibo2Transformer2DModel,
    BriaFiboTransformer2DModel,
    BriaTransformer2DModel,
    ChromaTransformer2DModel,
    CogVideoXTransformer3DModel,
    CogView3PlusTransformer2DModel,
    CogView4Transformer2DModel,
    ConsisIDTransformer3DModel,
    EasyAnimateTransformer3DModel,
    ErnieImageTransformer2DModel,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    FluxTransformer2DModel,
    GlmImageTransformer2DModel,
    HunyuanImageTransformer2DModel,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    JoyImageEditPlusTransformer3DModel,
    JoyImageEditTransformer3DModel,
    Krea2Transformer2DModel,
    LongCatImageTransformer2DModel,
    Lumina2Transformer2DModel,
    OvisImageTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import nn

from .inputs import TEXT, B, Case, draw, latents, step


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


def flux3() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(in_channels=4, cond_in_channels=4, num_layers=1, num_single_layers=2, axes_dims_rope=(4, 4, 4, 4))
    heads = dict(attention_head_dim=16, num_attention_heads=2, joint_attention_dim=12, timestep_channels=8)
    inputs = dict(hidden_states=draw(B, 15, 4), encoder_hidden_states=draw(B, TEXT, 12), timestep=step() / 1000)
    model = Flux3Transformer2DModel(**sizes, **heads)
    return model, inputs | dict(img_ids=torch.randn(15, 4), txt_ids=torch.zeros(TEXT, 4))


def fibo() -> tuple[nn.Module, dict[str, object]]:
    model, inputs = flux_like(BriaFiboTransformer2DModel, text_encoder_dim=10)
    return model, inputs | dict(text_encoder_layers=[draw(B, TEXT, 10) for _ in range(3)])


def fibo_masked() -> tuple[nn.Module, dict[str, object]]:
    """As the pipeline gives its mask."""
    model, inputs = fibo()
    mask = torch.ones(B, TEXT + 15, dtype=torch.bool)
    mask[0, 3:TEXT] = False
    return model, inputs | dict(joint_attention_kwargs=dict(attention_mask=mask[:, None, None]))


def fibo2() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(in_channels=4, dim=48, n_layers=2, n_refiner_layers=1, n_heads=2, cap_feat_dim=12)
    gist = dict(min_num_gist_tokens=2, max_num_gist_tokens=6, gist_step=2, gist_min_text_len=2, gist_max_text_len=8)
    more = dict(injection_layer_ids=(1,), perceiver_num_layers=1, axes_dims=(8, 8, 8), axes_lens=(32, 16, 16))
    model = BriaFibo2Transformer2DModel(**sizes, **gist, **more)
    inputs = dict(hidden_states=draw(B, 4, 6, 10), encoder_hidden_states=draw(B, 2, TEXT, 12), timestep=step() / 1000)
    return model, inputs | dict(context_latents=[draw(B, 4, 4, 6)])


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


def flux_like(kind: type, **more: object) -> tuple[nn.Module, dict[str, object]]:
    """Bria, LongCat-Image, Ovis-Image."""
    sizes = dict(num_layers=2, num_single_layers=1, attention_head_dim=16, num_attention_heads=2)
    model = kind(in_channels=4, joint_attention_dim=12, axes_dims_rope=(4, 4, 8), **sizes, **more)
    return model, {n: x for n, x in flux()[1].items() if n not in ("pooled_projections", "guidance")}


def chroma() -> tuple[nn.Module, dict[str, object]]:
    layers = dict(approximator_num_channels=8, approximator_hidden_dim=8, approximator_layers=1)
    model, inputs = flux_like(ChromaTransformer2DModel, **layers)
    mask = torch.ones(B, TEXT + 15, dtype=torch.bool)
    mask[0, 3:TEXT] = False
    return model, inputs | dict(attention_mask=mask)


def chroma_raised() -> tuple[nn.Module, dict[str, object]]:
    """As the pipeline gives its mask, whose products the library adds to the scores."""
    model, inputs = chroma()
    return model, inputs | dict(attention_mask=inputs["attention_mask"].double())


def cogview(kind: type, **more: object) -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=2, attention_head_dim=16, num_attention_heads=2, text_embed_dim=12, time_embed_dim=8)
    model = kind(in_channels=4, out_channels=4, condition_dim=4, pos_embed_max_size=8, sample_size=6, **sizes, **more)
    names = ("original_size", "target_size", "crop_coords")
    return model, latents(6, 10) | {n: torch.tensor([[6.0, 10.0]] * B, dtype=torch.float64) for n in names}


def auraflow() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=16, num_attention_heads=2)
    dims = dict(joint_attention_dim=12, caption_projection_dim=32, pos_embed_max_size=25)
    return AuraFlowTransformer2DModel(sample_size=6, in_channels=4, out_channels=4, **sizes, **dims), latents(6, 10)


def hunyuan_image() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=1, num_single_layers=1, num_refiner_layers=1, attention_head_dim=16, num_attention_heads=2)
    model = HunyuanImageTransformer2DModel(4, 4, patch_size=(1, 1), text_embed_dim=12, rope_axes_dim=(8, 8), **sizes)
    mask = torch.ones(B, TEXT, dtype=torch.long)
    mask[0, 2:] = 0
    return model, latents(3, 5) | dict(encoder_attention_mask=mask)


def krea2() -> tuple[nn.Module, dict[str, object]]:
    text = dict(text_hidden_dim=12, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2)
    depth = dict(text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, num_layers=2)
    sizes = dict(attention_head_dim=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24)
    model = Krea2Transformer2DModel(4, timestep_embed_dim=8, axes_dims_rope=(4, 4, 8), **sizes, **text, **depth)
    mask = torch.ones(B, TEXT, dtype=torch.bool)
    mask[0, 3:] = False
    inputs = dict(hidden_states=draw(B, 15, 4), encoder_hidden_states=draw(B, TEXT, 2, 12), timestep=step() / 1000)
    return model, inputs | dict(position_ids=torch.randn(TEXT + 15, 3), encoder_attention_mask=mask)


def lumina2() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=2, num_refiner_layers=1, hidden_size=24, num_attention_heads=2, num_kv_heads=1)
    rope = dict(axes_dim_rope=(4, 4, 4), axes_lens=(32, 8, 8), cap_feat_dim=12, multiple_of=8)
    mask = torch.ones(B, TEXT, dtype=torch.bool)
    mask[0, 3:] = False
    inputs = latents(6, 10) | dict(encoder_attention_mask=mask, timestep=step() / 1000)
    return Lumina2Transformer2DModel(sample_size=6, in_channels=4, **sizes, **rope), inputs


def easyanimate() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, patch_size=2)
    depth = dict(num_layers=2, mmdit_layers=1, time_embed_dim=8, text_embed_dim=12)
    return EasyAnimateTransformer3DModel(**sizes, **depth), latents(1, 6, 10)


def ernie() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=24, in_channels=4, out_channels=4)
    model = ErnieImageTransformer2DModel(text_in_dim=12, rope_axes_dim=(4, 4, 8), **sizes)
    inputs = dict(hidden_states=draw(B, 4, 3, 5), timestep=step(), text_bth=draw(B, TEXT, 12))
    return model, inputs | dict(text_lens=torch.tensor([3, TEXT]))


def consisid() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2)
    dims = dict(time_embed_dim=8, text_embed_dim=12, sample_width=4, sample_height=6, sample_frames=9)
    dims |= dict(max_text_seq_length=TEXT, use_rotary_positional_embeddings=True)
    faces = dict(is_train_face=True, cross_attn_interval=1, cross_attn_dim_head=8, cross_attn_num_heads=2)
    faces |= dict(LFE_id_dim=10, LFE_vit_dim=6, LFE_depth=2, LFE_num_scale=2, LFE_dim_head=4, LFE_num_heads=2)
    faces |= dict(LFE_num_id_token=2, LFE_num_querie=3, LFE_output_dim=21)
    inputs = dict(hidden_states=draw(B, 3, 4, 6, 4), encoder_hidden_states=draw(B, TEXT, 12), timestep=step())
    inputs |= dict(id_cond=draw(B, 10), id_vit_hidden=[draw(B, 5, 6), draw(B, 5, 6)])
    rotary = (torch.randn(18, 16), torch.randn(18, 16))
    return ConsisIDTransformer3DModel(**sizes, **dims, **faces), inputs | dict(image_rotary_emb=rotary)


def framepack() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=1)
    depth = dict(num_single_layers=1, num_refiner_layers=1, text_embed_dim=12, pooled_projection_dim=6)
    more = dict(rope_axes_dim=(4, 4, 8), has_image_proj=True, image_proj_dim=6, has_clean_x_embedder=True)
    mask = torch.ones(B, TEXT, dtype=torch.long)
    mask[0, 2:] = 0
    inputs = latents(1, 6, 6) | dict(encoder_attention_mask=mask, pooled_projections=draw(B, 6), guidance=step())
    inputs |= dict(image_embeds=draw(B, 3, 6), indices_latents=torch.tensor([7]))
    for n, (frames, name) in enumerate(((1, "clean"), (2, "history_2x"), (4, "history_4x"))):
        inputs |= {f"latents_{name}": draw(B, 4, frames, 6, 6), f"indices_latents_{name}": torch.arange(frames) + 7 * n}
    return HunyuanVideoFramepackTransformer3DModel(**sizes, **depth, **more), inputs


def glm_image() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=2, attention_head_dim=16, num_attention_heads=2, in_channels=4, out_channels=4)
    dims = dict(text_embed_dim=12, time_embed_dim=8, condition_dim=4, prior_vq_quantizer_codebook_size=8)
    prior = dict(prior_token_id=torch.arange(30).view(B, 15) % 8, prior_token_drop=torch.zeros(B, 15, dtype=torch.bool))
    size = {n: torch.tensor([[6.0, 10.0]] * B, dtype=torch.float64) for n in ("target_size", "crop_coords")}
    return GlmImageTransformer2DModel(**sizes, **dims), latents(6, 10) | prior | size


def joyimage(plus: bool = False) -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(hidden_size=32, num_attention_heads=2, num_layers=2, mlp_width_ratio=1.0, text_dim=12, in_channels=4)
    if not plus:
        return JoyImageEditTransformer3DModel(rope_dim_list=[4, 4, 8], rope_type="mrope", **sizes), latents(1, 6, 10)
    mask = torch.ones(B, TEXT, dtype=torch.bool)
    mask[0, 3:] = False
    inputs = dict(hidden_states=draw(B, 15, 4, 1, 2, 2), encoder_hidden_states=draw(B, TEXT, 12), timestep=step())
    inputs |= dict(encoder_hidden_states_mask=mask, shape_list=[[(1, 3, 5)], [(1, 2, 2), (1, 2, 4)]])
    return JoyImageEditPlusTransformer3DModel(rope_dim_list=[4, 4, 8], **sizes), inputs


JOINT_CASES: dict[str, Case] = {
    "flux": flux,
    "flux2": flux2,
    "flux3": flux3,
    "fibo": fibo,
    "fibo, masked": fibo_masked,
    "fibo 2": fibo2,
    "sd3": sd3,
    "qwen": lambda: qwen(False),
    "qwen, masked": qwen,
    "qwen, edit": lambda: qwen(False, True),
    "cogvideox": cogvideox,
    "hunyuan": hunyuan,
    "bria": lambda: flux_like(BriaTransformer2DModel),
    "longcat": lambda: flux_like(LongCatImageTransformer2DModel, pooled_projection_dim=6),
    "ovis": lambda: flux_like(OvisImageTransformer2DModel, out_channels=4),
    "chroma": chroma,
    "chroma, raised": chroma_raised,
    "cogview3": lambda: cogview(CogView3PlusTransformer2DModel),
    "cogview4": lambda: cogview(CogView4Transformer2DModel, rope_axes_dim=(8, 8)),
    "auraflow": auraflow,
    "hunyuan image": hunyuan_image,
    "krea2": krea2,
    "lumina2": lumina2,
    "ernie": ernie,
    "consisid": consisid,
    "framepack": framepack,
    "glm image": glm_image,
    "easyanimate": easyanimate,
    "joyimage": joyimage,
    "joyimage plus": lambda: joyimage(True),
}
