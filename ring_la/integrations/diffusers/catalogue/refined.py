"""Models that refine image and text by blocks of their own before both are one sequence.

The image's refiners are split. The text's run whole on every rank: they are as many blocks over few tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..plans import (
    IMAGE,
    REAR,
    SAME,
    TEXT,
    AttentionPlan,
    BlockPlan,
    KeyMask,
    ModelPlan,
    RefinerPlan,
    Role,
    StepPlan,
    TokenRows,
)
from .flux import BOTH, COMMON

NOISE = ("noise",)
"""The image's tokens as long as they are a sequence of their own."""


def _lumina2(streams: tuple[str, ...]) -> BlockPlan:
    arguments: dict[str, Role] = {
        "hidden_states": TokenRows(streams),
        "attention_mask": KeyMask(streams),
        "image_rotary_emb": TokenRows(streams),
        "temb": SAME,
    }
    return BlockPlan(arguments, {"attn": AttentionPlan(streams, ("Lumina2AttnProcessor2_0",))})


def _modulated(streams: tuple[str, ...]) -> dict[str, Role]:
    """Arguments of Z-Image's blocks, and the first of those that Bria's have."""
    return {
        "x": TokenRows(streams),
        "attn_mask": KeyMask(streams),
        "freqs_cis": TokenRows(streams),
        "adaln_input": SAME,
        "noise_mask": TokenRows(streams),
        "adaln_noisy": SAME,
        "adaln_clean": SAME,
    }


def _z_image(streams: tuple[str, ...]) -> BlockPlan:
    return BlockPlan(_modulated(streams), {"attention": AttentionPlan(streams, ("ZSingleStreamAttnProcessor",))})


def _fibo2(streams: tuple[str, ...]) -> BlockPlan:
    arguments = _modulated(streams) | {"encoder_hidden_states": SAME, "encoder_attention_mask": SAME}
    attention = {"attention": AttentionPlan(streams, ("BriaFibo2AttnProcessor",))}
    return BlockPlan(arguments, attention | {"cross_attention": AttentionPlan(None, ("BriaFibo2AttnProcessor",))})


# its tokens follow those of earlier blocks, which are stacked. The refiners are the transformer's, and split by it
_z_control = BlockPlan(
    {
        "c": TokenRows(IMAGE, -2),
        "x": TokenRows(IMAGE),
        "attn_mask": KeyMask(IMAGE),
        "freqs_cis": TokenRows(IMAGE),
        "adaln_input": SAME,
    },
    {"attention": AttentionPlan(IMAGE, ("ZSingleStreamAttnProcessor",))},
)
_z_final = {"x": TokenRows(IMAGE), "c": SAME, "noise_mask": TokenRows(IMAGE), "c_noisy": SAME, "c_clean": SAME}
_hunyuan_video15 = BlockPlan(
    {
        **BOTH,
        "attention_mask": KeyMask(TEXT, read=True),
        "freqs_cis": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
    },
    {"attn": AttentionPlan(REAR, ("HunyuanVideo15AttnProcessor2_0",))},
)

REFINED: Mapping[str, ModelPlan] = {
    "Lumina2Transformer2DModel": ModelPlan(
        {"layers": "Lumina2TransformerBlock"},
        {"Lumina2TransformerBlock": _lumina2(IMAGE)},
        (*COMMON, "encoder_attention_mask"),
        refiners={"noise_refiner": RefinerPlan("Lumina2TransformerBlock", _lumina2(NOISE))},
        last="layers",
        layers_behind=True,
    ),
    "BriaFibo2Transformer2DModel": ModelPlan(
        {"layers": "BriaFibo2TransformerBlock"},
        {"BriaFibo2TransformerBlock": _fibo2(IMAGE)},
        (*COMMON, "encoder_attention_mask", "context_latents"),
        refiners={"noise_refiner": RefinerPlan("BriaFibo2TransformerBlock", _fibo2(NOISE))},
        last="layers",
        layers_behind=True,
    ),
    "ZImageTransformer2DModel": ModelPlan(
        {"layers": "ZImageTransformerBlock", "all_final_layer": "FinalLayer"},
        {"ZImageTransformerBlock": _z_image(IMAGE), "FinalLayer": BlockPlan(_z_final, {})},
        ("x", "t", "cap_feats", "return_dict", "patch_size", "f_patch_size"),
        refiners={"noise_refiner": RefinerPlan("ZImageTransformerBlock", _z_image(NOISE), added=True)},
        residuals=("controlnet_block_samples",),
        latents="x",
        last="all_final_layer",
    ),
    "ZImageControlNetModel": ModelPlan(
        {"control_layers": "ZImageControlTransformerBlock"},
        {"ZImageControlTransformerBlock": _z_control},
        ("x", "t", "cap_feats", "control_context", "conditioning_scale", "patch_size", "f_patch_size"),
        latents="x",
        last="control_layers",
        dim=-2,
    ),
    "HunyuanVideo15Transformer3DModel": ModelPlan(
        {"transformer_blocks": "HunyuanVideo15TransformerBlock"},
        {"HunyuanVideo15TransformerBlock": _hunyuan_video15},
        (
            *(*COMMON, "encoder_attention_mask", "timestep_r", "encoder_hidden_states_2", "encoder_attention_mask_2"),
            "image_embeds",
        ),
        steps=StepPlan("time_embed", {"HunyuanVideo15TransformerBlock": ("norm1.linear", "norm1_context.linear")}),
    ),
}
