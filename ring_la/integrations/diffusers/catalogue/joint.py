"""Models whose text is part of the sequence."""

from __future__ import annotations

from collections.abc import Mapping

from ..plans import FRONT, IMAGE, REAR, SAME, TEXT, AttentionPlan, BlockPlan, KeyMask, ModelPlan, TokenRows

_both = {"hidden_states": TokenRows(IMAGE), "encoder_hidden_states": TokenRows(TEXT), "temb": SAME}

_flux = BlockPlan(
    arguments=_both | {"image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)), "joint_attention_kwargs": SAME},
    attention={"attn": AttentionPlan(FRONT, ("FluxAttnProcessor",))},
)
_flux2 = BlockPlan(
    arguments={
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": TokenRows(TEXT),
        "temb_mod_img": SAME,
        "temb_mod_txt": SAME,
        "image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)),
        "joint_attention_kwargs": SAME,
    },
    attention={"attn": AttentionPlan(FRONT, ("Flux2AttnProcessor",))},
)
_flux2_single = BlockPlan(
    arguments={
        "hidden_states": TokenRows(FRONT),
        "encoder_hidden_states": TokenRows(TEXT),
        "temb_mod": SAME,
        "image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)),
        "joint_attention_kwargs": SAME,
        "split_hidden_states": SAME,
        "text_seq_len": SAME,
    },
    attention={"attn": AttentionPlan(FRONT, ("Flux2ParallelSelfAttnProcessor",))},
)
_sd3 = BlockPlan(
    arguments=_both | {"joint_attention_kwargs": SAME},
    attention={
        "attn": AttentionPlan(REAR, ("JointAttnProcessor2_0",)),
        "attn2": AttentionPlan(IMAGE, ("JointAttnProcessor2_0",)),
    },
)
_cogvideox = BlockPlan(
    arguments=_both | {"image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)), "attention_kwargs": SAME},
    attention={"attn1": AttentionPlan(FRONT, ("CogVideoXAttnProcessor2_0",))},
)
_consisid = BlockPlan(
    _both | {"image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0))},
    {"attn1": AttentionPlan(FRONT, ("CogVideoXAttnProcessor2_0",))},
)
_qwen = BlockPlan(
    arguments=_both
    | {
        "encoder_hidden_states_mask": KeyMask(TEXT),
        "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(TEXT, 0)),
        "joint_attention_kwargs": SAME,
        "modulate_index": TokenRows(IMAGE),
    },
    attention={"attn": AttentionPlan(FRONT, ("QwenDoubleStreamAttnProcessor2_0",))},
)


def _hunyuan(rotary: str) -> BlockPlan:
    arguments = _both | {"attention_mask": KeyMask(REAR), rotary: (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0))}
    return BlockPlan(arguments, {"attn": AttentionPlan(REAR, ("HunyuanVideoAttnProcessor2_0",))})  # type: ignore[arg-type]


def _like_flux(processor: str, keywords: str) -> BlockPlan:
    """Both kinds of Flux's blocks, under other names."""
    arguments = _both | {"image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)), keywords: SAME}
    return BlockPlan(arguments, {"attn": AttentionPlan(FRONT, (processor,))})


def _flux_family(name: str, keywords: str, *inputs: str) -> ModelPlan:
    """A model built as Flux is, its parts called after `name`."""
    kinds = {
        "transformer_blocks": f"{name}TransformerBlock",
        "single_transformer_blocks": f"{name}SingleTransformerBlock",
    }
    blocks = _like_flux(f"{name}AttnProcessor", keywords)
    return ModelPlan(kinds, dict.fromkeys(kinds.values(), blocks), (*_common, "img_ids", "txt_ids", *inputs))


_chroma = {
    "temb": SAME,
    "image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)),
    "attention_mask": KeyMask(FRONT),
    "joint_attention_kwargs": SAME,
}
_chroma_attention = {"attn": AttentionPlan(FRONT, ("FluxAttnProcessor",))}
_cogview3 = BlockPlan(
    {"hidden_states": TokenRows(IMAGE), "encoder_hidden_states": TokenRows(TEXT), "emb": SAME},
    {"attn1": AttentionPlan(FRONT, ("CogVideoXAttnProcessor2_0",))},
)
_cogview4 = BlockPlan(
    _both
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
    _both | {"image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0))},
    {"attn1": AttentionPlan(FRONT, ("EasyAnimateAttnProcessor2_0",))},
)
_joyimage = BlockPlan(
    _both
    | {
        "image_rotary_emb": (
            (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
            (TokenRows(TEXT, 0), TokenRows(TEXT, 0)),
        )
    },
    {"attn": AttentionPlan(REAR, ("JoyImageAttnProcessor",))},
)
_joyimage_plus = BlockPlan(
    _both | {"image_rotary_emb": (TokenRows(IMAGE), TokenRows(IMAGE)), "attention_mask": KeyMask(REAR)},
    {"attn": AttentionPlan(REAR, ("JoyImageEditPlusAttnProcessor",))},
)
_auraflow = {"attn": AttentionPlan(FRONT, ("AuraFlowAttnProcessor2_0",))}
_hunyuan_image = BlockPlan(
    _both | {"attention_mask": KeyMask(REAR), "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0))},
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
_lumina2 = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "attention_mask": KeyMask(IMAGE),
        "image_rotary_emb": TokenRows(IMAGE),
        "temb": SAME,
    },
    {"attn": AttentionPlan(IMAGE, ("Lumina2AttnProcessor2_0",))},
)

_common = ("hidden_states", "encoder_hidden_states", "timestep", "return_dict")
JOINT: Mapping[str, ModelPlan] = {
    "FluxTransformer2DModel": ModelPlan(
        {"transformer_blocks": "FluxTransformerBlock", "single_transformer_blocks": "FluxSingleTransformerBlock"},
        {"FluxTransformerBlock": _flux, "FluxSingleTransformerBlock": _flux},
        (*_common, "pooled_projections", "img_ids", "txt_ids", "guidance"),
    ),
    "Flux2Transformer2DModel": ModelPlan(
        {"transformer_blocks": "Flux2TransformerBlock", "single_transformer_blocks": "Flux2SingleTransformerBlock"},
        {"Flux2TransformerBlock": _flux2, "Flux2SingleTransformerBlock": _flux2_single},
        (*_common, "img_ids", "txt_ids", "guidance"),
        cuts_whole_text=True,
    ),
    "SD3Transformer2DModel": ModelPlan(
        {"transformer_blocks": "JointTransformerBlock"},
        {"JointTransformerBlock": _sd3},
        (*_common, "pooled_projections", "skip_layers"),
    ),
    "QwenImageTransformer2DModel": ModelPlan(
        {"transformer_blocks": "QwenImageTransformerBlock"},
        {"QwenImageTransformerBlock": _qwen},
        (*_common, "encoder_hidden_states_mask", "img_shapes", "guidance", "additional_t_cond"),
    ),
    "CogVideoXTransformer3DModel": ModelPlan(
        {"transformer_blocks": "CogVideoXBlock"},
        {"CogVideoXBlock": _cogvideox},
        (*_common, "timestep_cond", "ofs", "image_rotary_emb"),
    ),
    "HunyuanVideoTransformer3DModel": ModelPlan(
        *_hunyuan_video,
        (*_common, "encoder_attention_mask", "pooled_projections", "guidance"),
    ),
    "BriaTransformer2DModel": _flux_family("Bria", "attention_kwargs", "pooled_projections", "guidance"),
    "LongCatImageTransformer2DModel": _flux_family("LongCatImage", "joint_attention_kwargs", "guidance"),
    "OvisImageTransformer2DModel": _flux_family("OvisImage", "joint_attention_kwargs"),
    "ChromaTransformer2DModel": ModelPlan(
        {"transformer_blocks": "ChromaTransformerBlock", "single_transformer_blocks": "ChromaSingleTransformerBlock"},
        {
            "ChromaTransformerBlock": BlockPlan(_both | _chroma, _chroma_attention),  # type: ignore[arg-type]
            "ChromaSingleTransformerBlock": BlockPlan({"hidden_states": TokenRows(FRONT)} | _chroma, _chroma_attention),  # type: ignore[arg-type]
        },
        (*_common, "img_ids", "txt_ids", "attention_mask"),
    ),
    "CogView3PlusTransformer2DModel": ModelPlan(
        {"transformer_blocks": "CogView3PlusTransformerBlock"},
        {"CogView3PlusTransformerBlock": _cogview3},
        (*_common, "original_size", "target_size", "crop_coords"),
    ),
    "CogView4Transformer2DModel": ModelPlan(
        {"transformer_blocks": "CogView4TransformerBlock"},
        {"CogView4TransformerBlock": _cogview4},
        (*_common, "original_size", "target_size", "crop_coords", "image_rotary_emb"),
    ),
    "AuraFlowTransformer2DModel": ModelPlan(
        {
            "joint_transformer_blocks": "AuraFlowJointTransformerBlock",
            "single_transformer_blocks": "AuraFlowSingleTransformerBlock",
        },
        {
            "AuraFlowJointTransformerBlock": BlockPlan(_both | {"attention_kwargs": SAME}, _auraflow),
            "AuraFlowSingleTransformerBlock": BlockPlan(
                {"hidden_states": TokenRows(FRONT), "temb": SAME, "attention_kwargs": SAME}, _auraflow
            ),
        },
        _common,
    ),
    "HunyuanImageTransformer2DModel": ModelPlan(
        {
            "transformer_blocks": "HunyuanImageTransformerBlock",
            "single_transformer_blocks": "HunyuanImageSingleTransformerBlock",
        },
        dict.fromkeys(("HunyuanImageTransformerBlock", "HunyuanImageSingleTransformerBlock"), _hunyuan_image),
        (
            *_common,
            "encoder_attention_mask",
            "timestep_r",
            "encoder_hidden_states_2",
            "encoder_attention_mask_2",
            "guidance",
        ),
    ),
    "Krea2Transformer2DModel": ModelPlan(
        {"transformer_blocks": "Krea2TransformerBlock"},
        {"Krea2TransformerBlock": _krea2},
        (*_common, "position_ids", "encoder_attention_mask"),
        last="transformer_blocks",
        layers_behind=True,
    ),
    "Lumina2Transformer2DModel": ModelPlan(
        {"layers": "Lumina2TransformerBlock"},
        {"Lumina2TransformerBlock": _lumina2},
        (*_common, "encoder_attention_mask"),
        last="layers",
        layers_behind=True,
    ),
    "GlmImageTransformer2DModel": ModelPlan(
        {"transformer_blocks": "GlmImageTransformerBlock"},
        {"GlmImageTransformerBlock": _glm_image},
        (*_common, "prior_token_id", "prior_token_drop", "target_size", "crop_coords", "image_rotary_emb"),
    ),
    "EasyAnimateTransformer3DModel": ModelPlan(
        {"transformer_blocks": "EasyAnimateTransformerBlock"},
        {"EasyAnimateTransformerBlock": _easyanimate},
        (*_common, "timestep_cond", "encoder_hidden_states_t5", "inpaint_latents", "control_latents"),
    ),
    "JoyImageEditTransformer3DModel": ModelPlan(
        {"double_blocks": "JoyImageTransformerBlock"},
        {"JoyImageTransformerBlock": _joyimage},
        _common,
    ),
    "JoyImageEditPlusTransformer3DModel": ModelPlan(
        {"double_blocks": "JoyImageEditPlusTransformerBlock"},
        {"JoyImageEditPlusTransformerBlock": _joyimage_plus},
        (*_common, "encoder_hidden_states_mask", "shape_list"),
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
        (*_common, "timestep_cond", "image_rotary_emb", "id_cond", "id_vit_hidden"),
        last="transformer_blocks",
        returned=REAR,
        layers_behind=True,
    ),
    "HunyuanVideoFramepackTransformer3DModel": ModelPlan(
        *_hunyuan_video,
        (
            *(*_common, "encoder_attention_mask", "pooled_projections", "guidance", "image_embeds"),
            *("indices_latents", "latents_clean", "indices_latents_clean"),
            *("latents_history_2x", "indices_latents_history_2x"),
            *("latents_history_4x", "indices_latents_history_4x"),
        ),
        last="single_transformer_blocks",
        returned=REAR,
        layers_behind=True,
    ),
}
