"""Models of several streams with outputs of their own: video and audio, which read each other's keys."""

from __future__ import annotations

from collections.abc import Mapping

from ..plans import IMAGE, SAME, AttentionPlan, BlockPlan, ModelPlan, TimeSteps, TokenRows
from .flux import COMMON

AUDIO = ("audio",)
_image_rotary, _audio_rotary = (TokenRows(IMAGE, -2),) * 2, (TokenRows(AUDIO, -2),) * 2
_text = ("encoder_hidden_states", "audio_encoder_hidden_states", "encoder_attention_mask")
_masks = ("self_attention_mask", "audio_self_attention_mask", "a2v_cross_attention_mask", "v2a_cross_attention_mask")
_flags = ("use_a2v_cross_attention", "use_v2a_cross_attention", "perturbation_mask", "all_perturbed")
_audio_steps = TimeSteps(stream="audio")
_processors = ("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor")
_ltx2 = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "audio_hidden_states": TokenRows(AUDIO),
        "temb": TimeSteps(),
        "temb_audio": _audio_steps,
        "temb_ca_scale_shift": TimeSteps(),
        "temb_ca_audio_scale_shift": _audio_steps,
        "temb_ca_gate": TimeSteps(),
        "temb_ca_audio_gate": _audio_steps,
        "video_rotary_emb": _image_rotary,
        "audio_rotary_emb": _audio_rotary,
        "ca_video_rotary_emb": _image_rotary,
        "ca_audio_rotary_emb": _audio_rotary,
        **dict.fromkeys((*_text, "audio_encoder_attention_mask", *_masks, *_flags), SAME),
        "temb_prompt": SAME,
        "temb_prompt_audio": SAME,
    },
    {
        "attn1": AttentionPlan(IMAGE, _processors),
        "audio_attn1": AttentionPlan(AUDIO, _processors),
        "attn2": AttentionPlan(None, _processors),
        "audio_attn2": AttentionPlan(None, _processors),
        "audio_to_video_attn": AttentionPlan(IMAGE, _processors, keys=AUDIO),
        "video_to_audio_attn": AttentionPlan(AUDIO, _processors, keys=IMAGE),
    },
)
_minimax = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "temb": SAME,
        "adaln_indices": TokenRows(IMAGE, 0),
        "rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
        "attention_mask": SAME,
    },
    {"attn": AttentionPlan(IMAGE, ("MiniMaxH3AttnProcessor",))},
)
_minimax_norm = {"hidden_states": TokenRows(IMAGE), "temb": SAME, "timestep_indices": TokenRows(IMAGE, 0)}
_kandinsky6 = BlockPlan(
    {
        "vis": TokenRows(IMAGE),
        "aud": TokenRows(AUDIO),
        "text_v": SAME,
        "text_a": SAME,
        "time_embed": SAME,
        "vis_rope": TokenRows(IMAGE, 0),
        "aud_rope": TokenRows(AUDIO, 0),
        "attn_mask": SAME,
    },
    {
        "video_dec_block.self_attention": AttentionPlan(IMAGE, ("Kandinsky6AttnProcessor",)),
        "video_dec_block.cross_attention": AttentionPlan(None, ("Kandinsky6AttnProcessor",)),
        "audio_dec_block.self_attention": AttentionPlan(AUDIO, ("Kandinsky6AttnProcessor",)),
        "audio_dec_block.cross_attention": AttentionPlan(None, ("Kandinsky6AttnProcessor",)),
        "va_cross_attention": AttentionPlan(IMAGE, ("Kandinsky6AttnProcessor",), keys=AUDIO),
        "av_cross_attention": AttentionPlan(AUDIO, ("Kandinsky6AttnProcessor",), keys=IMAGE),
    },
)
_flat, _flat_audio = TimeSteps(flat=True), TimeSteps(flat=True, stream="audio")

SEVERAL: Mapping[str, ModelPlan] = {
    "LTX2VideoTransformer3DModel": ModelPlan(
        {"transformer_blocks": "LTX2VideoTransformerBlock"},
        {"LTX2VideoTransformerBlock": _ltx2},
        (
            *(*COMMON, "audio_hidden_states", "audio_encoder_hidden_states", "audio_timestep", "sigma", "audio_sigma"),
            *("encoder_attention_mask", "audio_encoder_attention_mask", "num_frames", "height", "width", "fps"),
            *("audio_num_frames", "video_coords", "audio_coords", "isolate_modalities", "use_cross_timestep"),
            *("spatio_temporal_guidance_blocks", "perturbation_mask", "video_keyframes_mask"),
        ),
        outputs={"time_embed": {0: _flat, 1: _flat}, "audio_time_embed": {0: _flat_audio, 1: _flat_audio}},
        gathered={"audio_proj_out": "audio"},
    ),
    "Kandinsky6Transformer3DModel": ModelPlan(
        {"visual_transformer_blocks": "Kandinsky6FusedTransformerDecoderBlock"},
        {"Kandinsky6FusedTransformerDecoderBlock": _kandinsky6},
        (
            *(*COMMON, "pooled_projections", "audio_hidden_states", "visual_rope_pos", "encoder_attention_mask"),
            "visual_token_type_ids",
        ),
        last="visual_transformer_blocks",
        returned=("image", "audio"),
        layers_behind=True,
    ),
    # text, video and audio are one packed sequence, and both heads work on all of it
    "MiniMaxH3Transformer3DModel": ModelPlan(
        {"transformer_blocks": "MiniMaxH3TransformerBlock", "norm_out": "MiniMaxH3AdaLayerNormOut"},
        {"MiniMaxH3TransformerBlock": _minimax, "MiniMaxH3AdaLayerNormOut": BlockPlan(_minimax_norm, {})},
        (
            *(*COMMON, "audio_hidden_states", "timestep_indices", "token_tags", "position_ids"),
            *("video_indices", "audio_indices", "text_indices"),
        ),
        gathered={"audio_proj_out": "image"},
    ),
}
