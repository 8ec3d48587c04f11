"""ControlNets, whose output is residuals for between another model's blocks, and models with such blocks inside."""

from __future__ import annotations

from collections.abc import Mapping

from ..plans import IMAGE, SAME, AttentionPlan, BlockPlan, ModelPlan, TimeSteps, TokenRows
from .cross import COSMOS, HUNYUAN_DIT, HUNYUAN_DIT_INPUTS, WAN
from .flux import COMMON, FLUX
from .joint import QWEN, SD3

_control = ("controlnet_cond", "conditioning_scale")
_vace = BlockPlan({**WAN.arguments, "control_hidden_states": TokenRows(IMAGE)}, WAN.attention)
_face = BlockPlan(
    {"hidden_states": TokenRows(IMAGE), "encoder_hidden_states": SAME, "attention_mask": SAME},
    {"": AttentionPlan(None, ("WanAnimateFaceBlockAttnProcessor",))},
    {"": ("WanAnimateFaceBlockCrossAttention",)},
)
_steps = {"condition_embedder": {0: TimeSteps(3), 1: TimeSteps(3)}}

CONTROL: Mapping[str, ModelPlan] = {
    "FluxControlNetModel": ModelPlan(
        {"transformer_blocks": "FluxTransformerBlock", "single_transformer_blocks": "FluxSingleTransformerBlock"},
        {"FluxTransformerBlock": FLUX, "FluxSingleTransformerBlock": FLUX},
        (*COMMON, *_control, "controlnet_mode", "pooled_projections", "img_ids", "txt_ids", "guidance"),
        last="",
    ),
    "SD3ControlNetModel": ModelPlan(
        {"transformer_blocks": "JointTransformerBlock"},
        {"JointTransformerBlock": SD3},
        (*COMMON, *_control, "pooled_projections"),
        last="",
    ),
    "QwenImageControlNetModel": ModelPlan(
        {"transformer_blocks": "QwenImageTransformerBlock"},
        {"QwenImageTransformerBlock": QWEN},
        (*COMMON, *_control, "encoder_hidden_states_mask", "img_shapes"),
        last="",
    ),
    "HunyuanDiT2DControlNetModel": ModelPlan(
        {"blocks": "HunyuanDiTBlock"}, {"HunyuanDiTBlock": HUNYUAN_DIT}, (*HUNYUAN_DIT_INPUTS, *_control), last=""
    ),
    "CosmosControlNetModel": ModelPlan(
        {"control_blocks": "CosmosTransformerBlock"},
        {"CosmosTransformerBlock": COSMOS},
        (
            *("controls_latents", "latents", "timestep", "encoder_hidden_states", "condition_mask"),
            *("conditioning_scale", "padding_mask", "attention_mask", "fps", "return_dict"),
        ),
        latents="latents",
        last="",
    ),
    "WanVACETransformer3DModel": ModelPlan(
        {"vace_blocks": "WanVACETransformerBlock", "blocks": "WanTransformerBlock"},
        {"WanVACETransformerBlock": _vace, "WanTransformerBlock": WAN},
        (*COMMON, "encoder_hidden_states_image", "control_hidden_states", "control_hidden_states_scale"),
    ),
    "WanAnimateTransformer3DModel": ModelPlan(
        {"blocks": "WanTransformerBlock", "face_adapter": "WanAnimateFaceBlockCrossAttention"},
        {"WanTransformerBlock": WAN, "WanAnimateFaceBlockCrossAttention": _face},
        (
            *(*COMMON, "encoder_hidden_states_image", "pose_hidden_states", "face_pixel_values"),
            "motion_encode_batch_size",
        ),
        outputs=_steps,
    ),
}
