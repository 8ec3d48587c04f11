"""Models that read their text, whole on every rank, by cross-attention; or that have none."""

from __future__ import annotations

from collections.abc import Mapping

from ..plans import (
    FRONT,
    IMAGE,
    SAME,
    TEXT,
    AttentionPlan,
    BlockPlan,
    KeyMask,
    ModelPlan,
    Role,
    TimeSteps,
    TokenCount,
    TokenRows,
)
from .flux import COMMON

WAN = BlockPlan(
    arguments={
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": SAME,
        "temb": TimeSteps(4),
        "rotary_emb": (TokenRows(IMAGE, 1), TokenRows(IMAGE, 1)),
    },
    attention={
        "attn1": AttentionPlan(IMAGE, ("WanAttnProcessor",)),
        "attn2": AttentionPlan(None, ("WanAttnProcessor",)),
    },
)
_anyflow = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": SAME,
        "temb": TimeSteps(4),
        "rotary_emb": {"query": TokenRows(IMAGE, 2), "key": TokenRows(IMAGE, 2)},
        "attention_mask": SAME,
        "kv_cache": SAME,
        "kv_cache_flag": SAME,
    },
    {
        "attn1": AttentionPlan(IMAGE, ("AnyFlowAttnProcessor",)),
        "attn2": AttentionPlan(None, ("AnyFlowCrossAttnProcessor",)),
    },
)
_skyreels = BlockPlan(
    arguments={**WAN.arguments, "temb": SAME, "attention_mask": SAME},
    attention={
        "attn1": AttentionPlan(IMAGE, ("SkyReelsV2AttnProcessor",)),
        "attn2": AttentionPlan(None, ("SkyReelsV2AttnProcessor",)),
    },
)
_ltx = BlockPlan(
    arguments={
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": SAME,
        "temb": TimeSteps(3),
        "image_rotary_emb": (TokenRows(IMAGE, 1), TokenRows(IMAGE, 1)),
        "encoder_attention_mask": SAME,
    },
    attention={
        "attn1": AttentionPlan(IMAGE, ("LTXVideoAttnProcessor",)),
        "attn2": AttentionPlan(None, ("LTXVideoAttnProcessor",)),
    },
)


def _basic(*processors: str, attn2: bool = True) -> BlockPlan:
    """The library's BasicTransformerBlock."""
    names = ("attention_mask", "encoder_hidden_states", "encoder_attention_mask", "timestep", "cross_attention_kwargs")
    arguments = {"hidden_states": TokenRows(IMAGE)} | dict.fromkeys((*names, "class_labels", "added_cond_kwargs"), SAME)
    cross = {"attn2": AttentionPlan(None, processors)} if attn2 else {}
    return BlockPlan(arguments, {"attn1": AttentionPlan(IMAGE, processors)} | cross)


_allegro = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": SAME,
        "temb": SAME,
        "attention_mask": SAME,
        "encoder_attention_mask": SAME,
        "image_rotary_emb": (SAME, (TokenRows(IMAGE),) * 3),
    },
    {
        "attn1": AttentionPlan(IMAGE, ("AllegroAttnProcessor2_0",)),
        "attn2": AttentionPlan(None, ("AllegroAttnProcessor2_0",)),
    },
)
HUNYUAN_DIT = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": SAME,
        "temb": SAME,
        "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
        "skip": TokenRows(IMAGE),
    },
    {
        "attn1": AttentionPlan(IMAGE, ("HunyuanAttnProcessor2_0",)),
        "attn2": AttentionPlan(None, ("HunyuanAttnProcessor2_0",)),
    },
)
_kandinsky5 = BlockPlan(
    {
        "visual_embed": TokenRows(IMAGE),
        "text_embed": SAME,
        "time_embed": SAME,
        "rope": TokenRows(IMAGE),
        "sparse_params": SAME,
    },
    {
        "self_attention": AttentionPlan(IMAGE, ("Kandinsky5AttnProcessor",)),
        "cross_attention": AttentionPlan(None, ("Kandinsky5AttnProcessor",)),
    },
)
COSMOS = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": SAME,
        "embedded_timestep": TimeSteps(3),
        "temb": TimeSteps(3),
        "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
        "extra_pos_emb": TokenRows(IMAGE),
        "attention_mask": SAME,
        "controlnet_residual": TokenRows(IMAGE),
        "latents": TokenRows(IMAGE),
        "block_idx": SAME,
    },
    {
        "attn1": AttentionPlan(IMAGE, ("CosmosAttnProcessor2_0",)),
        "attn2": AttentionPlan(None, ("CosmosAttnProcessor2_0",)),
    },
)
_cosmos_norm = {"hidden_states": TokenRows(IMAGE), "embedded_timestep": TimeSteps(3), "temb": TimeSteps(3)}
_stable_audio = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "attention_mask": SAME,
        "encoder_hidden_states": SAME,
        "encoder_attention_mask": SAME,
        "rotary_embedding": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
    },
    {
        "attn1": AttentionPlan(IMAGE, ("StableAudioAttnProcessor2_0",)),
        "attn2": AttentionPlan(None, ("StableAudioAttnProcessor2_0",)),
    },
)

# the image reads text and image in one attention, of which the text's keys are split, too
_prx = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": TokenRows(TEXT),
        "temb": SAME,
        "image_rotary_emb": TokenRows(IMAGE, 2),
        "attention_mask": KeyMask(TEXT),
    },
    {"attention": AttentionPlan(IMAGE, ("PRXAttnProcessor2_0",), keys=FRONT)},
)
_lumina_next = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "attention_mask": KeyMask(IMAGE, read=True),
        "image_rotary_emb": TokenRows(IMAGE),
        "encoder_hidden_states": SAME,
        "encoder_mask": SAME,
        "temb": SAME,
        "cross_attention_kwargs": SAME,
    },
    {
        "attn1": AttentionPlan(IMAGE, ("LuminaAttnProcessor2_0",)),
        "attn2": AttentionPlan(None, ("LuminaAttnProcessor2_0",)),
    },
)

# earlier frames stand before the video's in one sequence
HISTORY = ("history", "image")
_helios_tokens: dict[str, Role] = {
    "hidden_states": TokenRows(HISTORY),
    "temb": TokenRows(HISTORY),
    "original_context_length": TokenCount("image"),
}
_helios = BlockPlan(
    _helios_tokens | {"encoder_hidden_states": SAME, "rotary_emb": TokenRows(HISTORY)},
    {
        "attn1": AttentionPlan(HISTORY, ("HeliosAttnProcessor",)),
        "attn2": AttentionPlan(None, ("HeliosAttnProcessor",)),
    },
)
HUNYUAN_DIT_INPUTS = (
    *(*COMMON, "text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5"),
    *("image_meta_size", "style", "image_rotary_emb"),
)
CROSS: Mapping[str, ModelPlan] = {
    "WanTransformer3DModel": ModelPlan(
        {"blocks": "WanTransformerBlock"},
        {"WanTransformerBlock": WAN},
        (*COMMON, "encoder_hidden_states_image"),
        outputs={"condition_embedder": {0: TimeSteps(3), 1: TimeSteps(3)}},
    ),
    "LTXVideoTransformer3DModel": ModelPlan(
        {"transformer_blocks": "LTXVideoTransformerBlock"},
        {"LTXVideoTransformerBlock": _ltx},
        (
            *COMMON,
            "encoder_attention_mask",
            "num_frames",
            "height",
            "width",
            "rope_interpolation_scale",
            "video_coords",
        ),
        outputs={"time_embed": {0: TimeSteps(flat=True), 1: TimeSteps(flat=True)}},
    ),
    "ChronoEditTransformer3DModel": ModelPlan(
        {"blocks": "WanTransformerBlock"},
        {"WanTransformerBlock": WAN},
        (*COMMON, "encoder_hidden_states_image"),
        outputs={"condition_embedder": {0: TimeSteps(3), 1: TimeSteps(3)}},
    ),
    "AnyFlowTransformer3DModel": ModelPlan(
        {"blocks": "AnyFlowTransformerBlock"},
        {"AnyFlowTransformerBlock": _anyflow},
        (*COMMON, "r_timestep", "encoder_hidden_states_image"),
        outputs={"condition_embedder": {0: TimeSteps(3), 1: TimeSteps(3)}},
    ),
    "PixArtTransformer2DModel": ModelPlan(
        {"transformer_blocks": "BasicTransformerBlock"},
        {"BasicTransformerBlock": _basic("AttnProcessor2_0")},
        (*COMMON, "encoder_attention_mask", "added_cond_kwargs"),
    ),
    "DiTTransformer2DModel": ModelPlan(
        {"transformer_blocks": "BasicTransformerBlock"},
        {"BasicTransformerBlock": _basic("AttnProcessor2_0", attn2=False)},
        ("hidden_states", "timestep", "class_labels", "return_dict"),
        last="proj_out_2",
    ),
    "HunyuanDiT2DModel": ModelPlan(
        {"blocks": "HunyuanDiTBlock"},
        {"HunyuanDiTBlock": HUNYUAN_DIT},
        HUNYUAN_DIT_INPUTS,
        residuals=("controlnet_block_samples",),
    ),
    "Kandinsky5Transformer3DModel": ModelPlan(
        {"visual_transformer_blocks": "Kandinsky5TransformerDecoderBlock"},
        {"Kandinsky5TransformerDecoderBlock": _kandinsky5},
        (*COMMON, "pooled_projections", "visual_rope_pos", "text_rope_pos", "scale_factor"),
        last="visual_transformer_blocks",
        layers_behind=True,
    ),
    "CosmosTransformer3DModel": ModelPlan(
        {"transformer_blocks": "CosmosTransformerBlock", "norm_out": "CosmosAdaLayerNorm"},
        {"CosmosTransformerBlock": COSMOS, "CosmosAdaLayerNorm": BlockPlan(_cosmos_norm, {})},  # type: ignore[arg-type]
        (*COMMON, "attention_mask", "fps", "condition_mask", "padding_mask"),
        residuals=("block_controlnet_hidden_states",),
    ),
    "StableAudioDiTModel": ModelPlan(
        {"transformer_blocks": "StableAudioDiTBlock"},
        {"StableAudioDiTBlock": _stable_audio},
        (*COMMON, "global_hidden_states", "rotary_embedding", "encoder_attention_mask"),
        layers_behind=True,
    ),
    "SkyReelsV2Transformer3DModel": ModelPlan(
        {"blocks": "SkyReelsV2TransformerBlock"},
        {"SkyReelsV2TransformerBlock": _skyreels},
        (*COMMON, "encoder_hidden_states_image", "fps"),
    ),
    "PRXTransformer2DModel": ModelPlan(
        {"blocks": "PRXBlock"}, {"PRXBlock": _prx}, (*COMMON, "attention_mask"), last="final_layer"
    ),
    "AllegroTransformer3DModel": ModelPlan(
        {"transformer_blocks": "AllegroTransformerBlock"},
        {"AllegroTransformerBlock": _allegro},
        (*COMMON, "encoder_attention_mask", "image_rotary_emb"),
    ),
    "LuminaNextDiT2DModel": ModelPlan(
        {"layers": "LuminaNextDiTBlock"},
        {"LuminaNextDiTBlock": _lumina_next},
        (*COMMON, "encoder_mask", "image_rotary_emb"),
        last="norm_out",
    ),
    "HeliosTransformer3DModel": ModelPlan(
        {"blocks": "HeliosTransformerBlock", "norm_out": "HeliosOutputNorm"},
        {"HeliosTransformerBlock": _helios, "HeliosOutputNorm": BlockPlan(_helios_tokens, {})},
        (
            *(*COMMON, "indices_hidden_states", "indices_latents_history_short", "indices_latents_history_mid"),
            *("indices_latents_history_long", "latents_history_short", "latents_history_mid", "latents_history_long"),
        ),
    ),
}
