"""Models whose image reads a text that is whole on every rank: tiny, random, with inputs."""

from __future__ import annotations

import torch
from diffusers import (
    AllegroTransformer3DModel,
    AnyFlowTransformer3DModel,
    ChronoEditTransformer3DModel,
    CosmosTransformer3DModel,
    DiTTransformer2DModel,
    HunyuanDiT2DModel,
    Kandinsky5Transformer3DModel,
    LTXVideoTransformer3DModel,
    LuminaNextDiT2DModel,
    PixArtTransformer2DModel,
    PRXTransformer2DModel,
    SkyReelsV2Transformer3DModel,
    StableAudioDiTModel,
    WanTransformer3DModel,
)
from torch import nn

from .inputs import TEXT, B, Case, draw, latents, step


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


def wan_like(kind: type) -> tuple[nn.Module, dict[str, object]]:
    """ChronoEdit, SkyReels-V2."""
    sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2)
    return kind(text_dim=12, freq_dim=16, ffn_dim=20, rope_max_seq_len=16, **sizes), latents(3, 6, 6)


def allegro() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2)
    dims = dict(cross_attention_dim=24, caption_channels=12, sample_height=6, sample_width=10, sample_frames=1)
    places = torch.meshgrid(*(torch.arange(n) for n in (1, 3, 5)), indexing="ij")
    tables = tuple((torch.randn(n, 4), torch.randn(n, 4)) for n in (1, 3, 5))
    rotary = (tables, tuple(x.reshape(1, -1) for x in places))
    return AllegroTransformer3DModel(**sizes, **dims), latents(1, 6, 10) | dict(image_rotary_emb=rotary)


def pixart() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2)
    model = PixArtTransformer2DModel(sample_size=6, cross_attention_dim=16, caption_channels=12, **sizes)
    mask = torch.ones(B, TEXT, dtype=torch.float64)
    mask[0, 3:] = 0
    return model, latents(6, 6) | dict(encoder_attention_mask=mask)


def dit() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2)
    model = DiTTransformer2DModel(sample_size=6, num_embeds_ada_norm=10, **sizes)
    return model.eval(), dict(hidden_states=draw(B, 4, 6, 6), timestep=step(), class_labels=torch.tensor([1, 3]))


def hunyuan_dit() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=8, hidden_size=16, in_channels=4, patch_size=2, num_layers=4)
    text = dict(cross_attention_dim=12, cross_attention_dim_t5=8, text_len=TEXT, text_len_t5=256)
    more = dict(use_style_cond_and_image_meta_size=False, pooled_projection_dim=8, activation_fn="gelu-approximate")
    inputs = latents(6, 6) | dict(text_embedding_mask=torch.ones(B, TEXT, dtype=torch.long))
    inputs |= dict(encoder_hidden_states_t5=draw(B, 256, 8), text_embedding_mask_t5=torch.ones(B, 256).long())
    return HunyuanDiT2DModel(sample_size=6, **sizes, **text, **more), inputs | dict(
        image_rotary_emb=(torch.randn(9, 8), torch.randn(9, 8))
    )


def kandinsky5() -> tuple[nn.Module, dict[str, object]]:
    dims = dict(in_visual_dim=4, in_text_dim=12, in_text_dim2=6, out_visual_dim=4, time_dim=8, model_dim=32, ff_dim=24)
    model = Kandinsky5Transformer3DModel(num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 4, 8), **dims)
    model.time_embeddings.in_layer.register_forward_pre_hook(lambda layer, args: (args[0].double(),))  # made in fp32
    inputs = dict(hidden_states=draw(B, 1, 6, 10, 4), encoder_hidden_states=draw(B, TEXT, 12), timestep=step())
    places = [torch.arange(n) for n in (1, 3, 5)]
    return model, inputs | dict(pooled_projections=draw(B, 6), visual_rope_pos=places, text_rope_pos=torch.arange(TEXT))


def cosmos(steps: bool = False, learned: bool = False, **more: object) -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, mlp_ratio=1)
    dims = dict(text_embed_dim=12, adaln_lora_dim=4, max_size=(4, 8, 8), concat_padding_mask=False)
    dims |= dict(extra_pos_embed_type="learnable" if learned else None)
    inputs = latents(3, 6, 6)
    if steps:
        inputs["timestep"] = torch.arange(B * 3).view(B, 1, 3, 1, 1).double()
    return CosmosTransformer3DModel(**sizes, **dims, **more), inputs


def stable_audio() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_layers=2, attention_head_dim=8, num_attention_heads=2, num_key_value_attention_heads=1)
    dims = dict(cross_attention_dim=8, time_proj_dim=8, global_states_input_dim=6, cross_attention_input_dim=12)
    model = StableAudioDiTModel(sample_size=14, in_channels=4, out_channels=4, **sizes, **dims)
    rotary = (torch.randn(15, 4), torch.randn(15, 4))
    return model, latents(14) | dict(global_hidden_states=draw(B, 1, 6), rotary_embedding=rotary)


def anyflow() -> tuple[nn.Module, dict[str, object]]:
    """Latents by frames; a step of time, and one where it goes, for each frame."""
    sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=12)
    model = AnyFlowTransformer3DModel(freq_dim=16, ffn_dim=20, num_layers=2, rope_max_seq_len=16, **sizes)
    steps = torch.arange(3.0).expand(B, 3).double()
    inputs = dict(hidden_states=draw(B, 3, 4, 6, 6), encoder_hidden_states=draw(B, TEXT, 12))
    return model, inputs | dict(timestep=500 - 40 * steps, r_timestep=300 - 40 * steps)


def prx() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(in_channels=4, patch_size=2, context_in_dim=12, hidden_size=32, num_heads=2, depth=2)
    mask = torch.ones(B, TEXT)
    mask[1, 3:] = 0
    given = latents(6, 10) | dict(attention_mask=mask.bool())
    return PRXTransformer2DModel(axes_dim=[8, 8], mlp_ratio=2.0, **sizes), given


def lumina_next() -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(sample_size=6, in_channels=4, hidden_size=32, num_layers=2, num_attention_heads=4, num_kv_heads=2)
    mask = torch.ones(B, TEXT)
    mask[0, 3:] = 0
    given = latents(6, 10) | dict(encoder_mask=mask, cross_attention_kwargs={})
    rotary = torch.polar(torch.ones(8, 8, 4), torch.randn(8, 8, 4))
    return LuminaNextDiT2DModel(cross_attention_dim=12, multiple_of=8, **sizes), given | dict(image_rotary_emb=rotary)


CROSS_CASES: dict[str, Case] = {
    "prx": prx,
    "wan": wan,
    "wan, image": lambda: wan(image=True),
    "wan, steps": lambda: wan(True),
    "ltx": ltx,
    "ltx, steps": lambda: ltx(True),
    "allegro": allegro,
    "anyflow": anyflow,
    "chronoedit": lambda: wan_like(ChronoEditTransformer3DModel),
    "skyreels": lambda: wan_like(SkyReelsV2Transformer3DModel),
    "pixart": pixart,
    "dit": dit,
    "hunyuan dit": hunyuan_dit,
    "kandinsky5": kandinsky5,
    "cosmos": cosmos,
    "cosmos, steps": lambda: cosmos(True),
    "cosmos, learned": lambda: cosmos(learned=True),
    "stable audio": stable_audio,
    "lumina next": lumina_next,
}
