"""Models of more streams than an image and a text: several texts, earlier frames, sound. Tiny, random, with inputs."""

from __future__ import annotations

import torch
from diffusers import HeliosTransformer3DModel, HiDreamImageTransformer2DModel, Kandinsky6Transformer3DModel
from torch import nn

from .inputs import TEXT, B, Case, draw, latents, step


def hidream(columns: int = 6) -> tuple[nn.Module, dict[str, object]]:
    """Two blocks of each kind, and a layer of Llama's for each. An image that is no square has a mask and is filled up;
    its tokens choose experts."""
    sizes = dict(num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2, in_channels=4)
    text = dict(caption_channels=[8, 12], text_emb_dim=6, llama_layers=[0, 1, 2, 3])
    experts = dict(num_routed_experts=2, num_activated_experts=1)
    model = HiDreamImageTransformer2DModel(
        patch_size=2, axes_dims_rope=(2, 4, 2), max_resolution=(8, 8), **sizes, **text, **experts
    )
    inputs = dict(hidden_states=draw(B, 4, 6, columns), timesteps=step(), pooled_embeds=draw(B, 6))
    texts = dict(encoder_hidden_states_t5=draw(B, TEXT, 8), encoder_hidden_states_llama3=draw(4, B, TEXT, 12))
    return model.train(columns == 6), inputs | texts  # experts have no gradient otherwise


def helios(history: bool = True, **more: object) -> tuple[nn.Module, dict[str, object]]:
    sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2)
    dims = dict(text_dim=12, freq_dim=16, ffn_dim=20, rope_dim=(4, 4, 4))
    inputs = latents(3, 6, 6)
    if history:
        inputs |= dict(latents_history_short=draw(B, 4, 1, 6, 6), latents_history_mid=draw(B, 4, 2, 6, 6))
        inputs |= dict(latents_history_long=draw(B, 4, 4, 6, 6), indices_hidden_states=torch.arange(7, 10)[None])
        frames = dict(short=[6], mid=[4, 5], long=[0, 1, 2, 3])
        inputs |= {f"indices_latents_history_{name}": torch.tensor([at]) for name, at in frames.items()}
    return HeliosTransformer3DModel(**sizes, **dims, **more), inputs


def kandinsky6(sound: bool = True) -> tuple[nn.Module, dict[str, object]]:
    dims = dict(in_visual_dim=4, in_text_dim=12, in_text_dim2=6, out_visual_dim=4, time_dim=8, model_dim=32, ff_dim=24)
    more = dict(in_audio_dim=3, out_audio_dim=3, model_dim_a=16, axes_dims_a=(4, 4, 8), visual_cond=False)
    flags = dict(ca_rope=True, cross_gates=True, fix_modulation=True, visual_token_type_num_embeddings=2)
    model = Kandinsky6Transformer3DModel(
        num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 4, 8), **dims, **more, **flags
    )
    mask = torch.ones(B, TEXT, dtype=torch.bool)
    mask[0, 3:] = False
    inputs = dict(hidden_states=draw(B, 1, 6, 10, 4), encoder_hidden_states=draw(B, TEXT, 12), timestep=step())
    inputs |= dict(pooled_projections=draw(B, 6), encoder_attention_mask=mask)
    inputs |= dict(visual_token_type_ids=torch.ones(B, 1, dtype=torch.long))
    return model, inputs | (dict(audio_hidden_states=draw(B, 7, 3)) if sound else {})


STREAM_CASES: dict[str, Case] = {
    "hidream": hidream,
    "hidream, wide": lambda: hidream(10),
    "helios": helios,
    "helios, amplified": lambda: helios(is_amplify_history=True, guidance_cross_attn=False),
    "helios, no history": lambda: helios(False),
    "kandinsky6": kandinsky6,
    "kandinsky6, silent": lambda: kandinsky6(False),
}
ROUNDED_STREAMS = ("hidream", "helios", "kandinsky6")
"""Cases that round to fp32 inside."""
