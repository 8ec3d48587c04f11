"""The plans of Diffusers' models. A new one is an entry here; its test is a case of tests/integrations/diffusers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...errors import UnsupportedError
from .plans import FRONT, IMAGE, REAR, SAME, TEXT, AttentionPlan, BlockPlan, KeyMask, ModelPlan, TimeSteps, TokenRows

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
    return BlockPlan(arguments, {"attn": AttentionPlan(REAR, ("HunyuanVideoAttnProcessor2_0",))})


_wan = BlockPlan(
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

_common = ("hidden_states", "encoder_hidden_states", "timestep", "return_dict")
PLANS: Mapping[str, ModelPlan] = {
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
        {
            "transformer_blocks": "HunyuanVideoTransformerBlock",
            "single_transformer_blocks": "HunyuanVideoSingleTransformerBlock",
        },
        {
            "HunyuanVideoTransformerBlock": _hunyuan("freqs_cis"),
            "HunyuanVideoSingleTransformerBlock": _hunyuan("image_rotary_emb"),
        },
        (*_common, "encoder_attention_mask", "pooled_projections", "guidance"),
    ),
    "WanTransformer3DModel": ModelPlan(
        {"blocks": "WanTransformerBlock"},
        {"WanTransformerBlock": _wan},
        (*_common, "encoder_hidden_states_image"),
        outputs={"condition_embedder": {0: TimeSteps(3), 1: TimeSteps(3)}},
    ),
    "LTXVideoTransformer3DModel": ModelPlan(
        {"transformer_blocks": "LTXVideoTransformerBlock"},
        {"LTXVideoTransformerBlock": _ltx},
        (
            *_common,
            "encoder_attention_mask",
            "num_frames",
            "height",
            "width",
            "rope_interpolation_scale",
            "video_coords",
        ),
        outputs={"time_embed": {0: TimeSteps(flat=True), 1: TimeSteps(flat=True)}},
    ),
}
"""By the name of the model's class."""


def find_plan(model: nn.Module) -> ModelPlan:
    """The entry of a model.

    Raises:
        UnsupportedError: it has none.
    """
    plan = PLANS.get(type(model).__name__)
    if plan is None or not type(model).__module__.startswith("diffusers."):
        expected = f"one of {', '.join(PLANS)}"
        raise UnsupportedError("transformer", expected, type(model).__name__, "Give a plan of its own (plan=)")
    return plan
