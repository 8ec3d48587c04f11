"""Models whose text is part of the sequence."""

from __future__ import annotations

from collections.abc import Mapping

from ..plans import (
    FRONT,
    IMAGE,
    REAR,
    SAME,
    TEXT,
    AttentionPlan,
    BlockPlan,
    KeyMask,
    ModelPlan,
    Role,
    StepPlan,
    TokenRows,
    WideLayer,
)
from .flux import BOTH, COMMON, step_layers

SD3 = BlockPlan(
    arguments=BOTH | {"joint_attention_kwargs": SAME},
    attention={
        "attn": AttentionPlan(REAR, ("JointAttnProcessor2_0",)),
        "attn2": AttentionPlan(IMAGE, ("JointAttnProcessor2_0",)),
    },
)
_cogvideox = BlockPlan(
    arguments=BOTH | {"image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)), "attention_kwargs": SAME},
    attention={"attn1": AttentionPlan(FRONT, ("CogVideoXAttnProcessor2_0",))},
)
_consisid = BlockPlan(
    BOTH | {"image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0))},
    {"attn1": AttentionPlan(FRONT, ("CogVideoXAttnProcessor2_0",))},
)
QWEN = BlockPlan(
    arguments=BOTH
    | {
        "encoder_hidden_states_mask": KeyMask(TEXT),
        "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(TEXT, 0)),
        "joint_attention_kwargs": SAME,
        "modulate_index": TokenRows(IMAGE),
    },
    attention={"attn": AttentionPlan(FRONT, ("QwenDoubleStreamAttnProcessor2_0",))},
)


def _hunyuan(rotary: str) -> BlockPlan:
    arguments = BOTH | {"attention_mask": KeyMask(REAR), rotary: (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0))}
    attention = {"attn": AttentionPlan(REAR, ("HunyuanVideoAttnProcessor2_0",))}
    return BlockPlan(arguments, attention, wide=WideLayer())  # type: ignore[arg-type]


_cogview3 = BlockPlan(
    {"hidden_states": TokenRows(IMAGE), "encoder_hidden_states": TokenRows(TEXT), "emb": SAME},
    {"attn1": AttentionPlan(FRONT, ("CogVideoXAttnProcessor2_0",))},
)
_cogview4 = BlockPlan(
    BOTH
    | {
        "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
        "attention_mask": SAME,
        "attention_kwargs": SAME,
    },
    {"attn1": AttentionPlan(FRONT, ("CogView4AttnProcessor",))},
)
_glm_image = BlockPlan(
    {**_cogview4.arguments, "kv_cache": SAME}, {"attn1": AttentionPlan(FRONT, ("GlmImageAttnProcessor",))}
)
_easyanimate = BlockPlan(
    BOTH | {"image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0))},
    {"attn1": AttentionPlan(FRONT, ("EasyAnimateAttnProcessor2_0",))},
)
_joyimage = BlockPlan(
    BOTH
    | {
        "image_rotary_emb": (
            (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
            (TokenRows(TEXT, 0), TokenRows(TEXT, 0)),
        )
    },
    {"attn": AttentionPlan(REAR, ("JoyImageAttnProcessor",))},
)
_joyimage_plus = BlockPlan(
    BOTH | {"image_rotary_emb": (TokenRows(IMAGE), TokenRows(IMAGE)), "attention_mask": KeyMask(REAR)},
    {"attn": AttentionPlan(REAR, ("JoyImageEditPlusAttnProcessor",))},
)
_auraflow = {"attn": AttentionPlan(FRONT, ("AuraFlowAttnProcessor2_0",))}
_hunyuan_image = BlockPlan(
    BOTH | {"attention_mask": KeyMask(REAR), "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0))},
    {"attn": AttentionPlan(REAR, ("HunyuanImageAttnProcessor",))},
)

_hunyuan_video = (
    {
        "transformer_blocks": "HunyuanVideoTransformerBlock",
        "single_transformer_blocks": "HunyuanVideoSingleTransformerBlock",
    },
    {
        "HunyuanVideoTransformerBlock": _hunyuan("freqs_cis"),
        "HunyuanVideoSingleTransformerBlock": _hunyuan("image_rotary_emb"),
    },
)
# text and image are one tensor before the first block, and so one stream
_krea2 = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "temb": SAME,
        "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
        "attention_mask": KeyMask(IMAGE),
    },
    {"attn": AttentionPlan(IMAGE, ("Krea2AttnProcessor",))},
)
_ernie = BlockPlan(
    {
        "x": TokenRows(IMAGE, 0),
        "rotary_pos_emb": TokenRows(IMAGE),
        "temb": (TokenRows(IMAGE, 0),) * 6,
        "attention_mask": KeyMask(IMAGE),
    },
    {"self_attention": AttentionPlan(IMAGE, ("ErnieImageSingleStreamAttnProcessor",))},
)
# behind the image stand T5's text and two layers of Llama's, all of one length, of which the last is another in each
# block. The mask is multiplied with the image's keys
_HIDREAM = ("image", "text", "text", "text")


def _hidream(streams: tuple[str, ...]) -> BlockPlan:
    arguments: dict[str, Role] = {
        "hidden_states": TokenRows(streams),
        "hidden_states_masks": TokenRows(streams),
        "encoder_hidden_states": TokenRows(_HIDREAM[1:]),
        "temb": SAME,
        "image_rotary_emb": TokenRows(_HIDREAM),
    }
    return BlockPlan(arguments, {"attn1": AttentionPlan(_HIDREAM, ("HiDreamAttnProcessor",))})


JOINT: Mapping[str, ModelPlan] = {
    "SD3Transformer2DModel": ModelPlan(
        {"transformer_blocks": "JointTransformerBlock"},
        {"JointTransformerBlock": SD3},
        (*COMMON, "pooled_projections", "skip_layers"),
        residuals=("block_controlnet_hidden_states",),
        steps=StepPlan("time_text_embed", {"JointTransformerBlock": ("norm1.linear", "norm1_context.linear")}),
    ),
    "QwenImageTransformer2DModel": ModelPlan(
        {"transformer_blocks": "QwenImageTransformerBlock"},
        {"QwenImageTransformerBlock": QWEN},
        (*COMMON, "encoder_hidden_states_mask", "img_shapes", "guidance", "additional_t_cond"),
        residuals=("controlnet_block_samples",),
        steps=StepPlan("time_text_embed", {"QwenImageTransformerBlock": ("img_mod.1", "txt_mod.1")}),
    ),
    "HiDreamImageTransformer2DModel": ModelPlan(
        {
            "double_stream_blocks.*.block": "HiDreamImageTransformerBlock",
            "single_stream_blocks.*.block": "HiDreamImageSingleTransformerBlock",
        },
        {
            "HiDreamImageTransformerBlock": _hidream(IMAGE),
            "HiDreamImageSingleTransformerBlock": _hidream(_HIDREAM),
        },
        (
            *("hidden_states", "timesteps", "encoder_hidden_states_t5", "encoder_hidden_states_llama3"),
            *("pooled_embeds", "return_dict"),
        ),
        outputs={"caption_projection": {0: TokenRows(TEXT)}},
        last="final_layer",
    ),
    "CogVideoXTransformer3DModel": ModelPlan(
        {"transformer_blocks": "CogVideoXBlock"},
        {"CogVideoXBlock": _cogvideox},
        (*COMMON, "timestep_cond", "ofs", "image_rotary_emb"),
    ),
    "HunyuanVideoTransformer3DModel": ModelPlan(
        *_hunyuan_video,
        (*COMMON, "encoder_attention_mask", "pooled_projections", "guidance"),
        steps=step_layers("time_text_embed", "HunyuanVideo"),
    ),
    "CogView3PlusTransformer2DModel": ModelPlan(
        {"transformer_blocks": "CogView3PlusTransformerBlock"},
        {"CogView3PlusTransformerBlock": _cogview3},
        (*COMMON, "original_size", "target_size", "crop_coords"),
    ),
    "CogView4Transformer2DModel": ModelPlan(
        {"transformer_blocks": "CogView4TransformerBlock"},
        {"CogView4TransformerBlock": _cogview4},
        (*COMMON, "original_size", "target_size", "crop_coords", "image_rotary_emb"),
        steps=StepPlan("time_condition_embed", {"CogView4TransformerBlock": ("norm1.linear",)}),
    ),
    "AuraFlowTransformer2DModel": ModelPlan(
        {
            "joint_transformer_blocks": "AuraFlowJointTransformerBlock",
            "single_transformer_blocks": "AuraFlowSingleTransformerBlock",
        },
        {
            "AuraFlowJointTransformerBlock": BlockPlan(BOTH | {"attention_kwargs": SAME}, _auraflow),
            "AuraFlowSingleTransformerBlock": BlockPlan(
                {"hidden_states": TokenRows(FRONT), "temb": SAME, "attention_kwargs": SAME}, _auraflow
            ),
        },
        COMMON,
    ),
    "HunyuanImageTransformer2DModel": ModelPlan(
        {
            "transformer_blocks": "HunyuanImageTransformerBlock",
            "single_transformer_blocks": "HunyuanImageSingleTransformerBlock",
        },
        dict.fromkeys(("HunyuanImageTransformerBlock", "HunyuanImageSingleTransformerBlock"), _hunyuan_image),
        (
            *COMMON,
            "encoder_attention_mask",
            "timestep_r",
            "encoder_hidden_states_2",
            "encoder_attention_mask_2",
            "guidance",
        ),
        steps=step_layers("time_guidance_embed", "HunyuanImage"),
    ),
    "Krea2Transformer2DModel": ModelPlan(
        {"transformer_blocks": "Krea2TransformerBlock"},
        {"Krea2TransformerBlock": _krea2},
        (*COMMON, "position_ids", "encoder_attention_mask"),
        last="transformer_blocks",
        layers_behind=True,
    ),
    "GlmImageTransformer2DModel": ModelPlan(
        {"transformer_blocks": "GlmImageTransformerBlock"},
        {"GlmImageTransformerBlock": _glm_image},
        (*COMMON, "prior_token_id", "prior_token_drop", "target_size", "crop_coords", "image_rotary_emb"),
    ),
    "EasyAnimateTransformer3DModel": ModelPlan(
        {"transformer_blocks": "EasyAnimateTransformerBlock"},
        {"EasyAnimateTransformerBlock": _easyanimate},
        (*COMMON, "timestep_cond", "encoder_hidden_states_t5", "inpaint_latents", "control_latents"),
    ),
    "JoyImageEditTransformer3DModel": ModelPlan(
        {"double_blocks": "JoyImageTransformerBlock"},
        {"JoyImageTransformerBlock": _joyimage},
        COMMON,
    ),
    "JoyImageEditPlusTransformer3DModel": ModelPlan(
        {"double_blocks": "JoyImageEditPlusTransformerBlock"},
        {"JoyImageEditPlusTransformerBlock": _joyimage_plus},
        (*COMMON, "encoder_hidden_states_mask", "shape_list"),
    ),
    "ErnieImageTransformer2DModel": ModelPlan(
        {"layers": "ErnieImageSharedAdaLNBlock"},
        {"ErnieImageSharedAdaLNBlock": _ernie},
        ("hidden_states", "timestep", "text_bth", "text_lens", "return_dict"),
        last="final_linear",
        dim=0,
    ),
    "ConsisIDTransformer3DModel": ModelPlan(
        {"transformer_blocks": "ConsisIDBlock"},
        {"ConsisIDBlock": _consisid},
        (*COMMON, "timestep_cond", "image_rotary_emb", "id_cond", "id_vit_hidden"),
        last="transformer_blocks",
        returned=REAR,
        layers_behind=True,
    ),
    "HunyuanVideoFramepackTransformer3DModel": ModelPlan(
        *_hunyuan_video,
        (
            *(*COMMON, "encoder_attention_mask", "pooled_projections", "guidance", "image_embeds"),
            *("indices_latents", "latents_clean", "indices_latents_clean"),
            *("latents_history_2x", "indices_latents_history_2x"),
            *("latents_history_4x", "indices_latents_history_4x"),
        ),
        last="single_transformer_blocks",
        returned=REAR,
        layers_behind=True,
    ),
}
