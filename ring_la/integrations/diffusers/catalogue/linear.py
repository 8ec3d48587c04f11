"""Models with linear attention and convolutions over the image: a grid, split by whole rows or frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..plans import IMAGE, SAME, AttentionPlan, BlockPlan, ModelPlan, SliceCount, SliceRows, TimeSteps, TokenRows


def _patches(model: Any, x: Tensor) -> tuple[int, ...]:
    """The grid of an image's or a video's patches ``[B, C, (frames,) rows, columns]``."""
    sizes, patch = x.shape[2:], model.config.patch_size
    patch = (patch,) * len(sizes) if isinstance(patch, int) else patch
    return tuple(n // p for n, p in zip(sizes, patch))


_text = {"attention_mask": SAME, "encoder_hidden_states": SAME, "encoder_attention_mask": SAME}
_sana = BlockPlan(
    {"hidden_states": TokenRows(IMAGE), **_text, "timestep": SAME, "height": SliceCount(), "width": SAME},
    {
        "attn1": AttentionPlan(IMAGE, ("SanaLinearAttnProcessor2_0",)),
        "attn2": AttentionPlan(None, ("SanaAttnProcessor2_0",)),
    },
    {"ff": ("GLUMBConv",)},
)
_sana_video = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        **_text,
        "timestep": TimeSteps(3),
        "frames": SliceCount(),
        "height": SAME,
        "width": SAME,
        "rotary_emb": (TokenRows(IMAGE), TokenRows(IMAGE)),
    },
    {
        "attn1": AttentionPlan(IMAGE, ("SanaLinearAttnProcessor3_0",)),
        "attn2": AttentionPlan(None, ("SanaAttnProcessor2_0",)),
    },
    {"ff": ("GLUMBTempConv",)},
)
_convolutions = ("attn.conv_q", "attn.conv_k", "attn.conv_v", "attn.conv_q_cam", "attn.conv_k_cam", "attn.conv_v_cam")
_sana_wm = BlockPlan(
    {
        "x": TokenRows(IMAGE),
        "y": SAME,
        "t": SliceRows(2),
        "mask": SAME,
        "THW": (SliceCount(), SAME, SAME),
        "rotary_emb": TokenRows(IMAGE, 2),
        "block_mask": SAME,
        "camera_conditions": SliceRows(1),
        "ucpe_ray_transforms": (TokenRows(IMAGE), TokenRows(IMAGE), TokenRows(IMAGE), TokenRows(IMAGE, 2)),
        "plucker_emb": TokenRows(IMAGE),
        "frame_valid_mask": SAME,
        "chunk_size": SAME,
    },
    {"cross_attn": AttentionPlan(None, ("SanaWMCrossAttnProcessor",))},
    {
        **dict.fromkeys(_convolutions, ("SanaWMTemporalShortConvolution",)),
        "attn.attn": ("SanaWMBidirectionalGDNAttention", "SanaWMSoftmaxAttention"),
        "attn.cam_attn": ("SanaWMBidirectionalGDNCamAttention", "SanaWMSoftmaxCamAttention"),
        "mlp": ("GLUMBConvTemp",),
    },
)
_inputs = ("hidden_states", "encoder_hidden_states", "timestep", "guidance", "encoder_attention_mask", "return_dict")
_world = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "mask", "return_dict")

LINEAR: Mapping[str, ModelPlan] = {
    "SanaTransformer2DModel": ModelPlan(
        blocks={"transformer_blocks": "SanaTransformerBlock"},
        classes={"SanaTransformerBlock": _sana},
        inputs=_inputs,
        residuals=("controlnet_block_samples",),
        grid=_patches,
    ),
    "SanaControlNetModel": ModelPlan(
        blocks={"transformer_blocks": "SanaTransformerBlock"},
        classes={"SanaTransformerBlock": _sana},
        inputs=(*(n for n in _inputs if n != "guidance"), "controlnet_cond", "conditioning_scale"),
        last="",
        grid=_patches,
    ),
    "SanaVideoTransformer3DModel": ModelPlan(
        blocks={"transformer_blocks": "SanaVideoTransformerBlock"},
        classes={"SanaVideoTransformerBlock": _sana_video},
        inputs=_inputs,
        outputs={"time_embed": {0: TimeSteps(flat=True), 1: TimeSteps(flat=True)}},
        grid=_patches,
    ),
    "SanaWMTransformer3DModel": ModelPlan(
        blocks={"blocks": "SanaVideoMSCamCtrlBlock", "final_layer": "T2IFinalLayer"},
        classes={
            "SanaVideoMSCamCtrlBlock": _sana_wm,
            "T2IFinalLayer": BlockPlan({"x": TokenRows(IMAGE), "t": SliceRows(2)}, {}),
        },
        inputs=(*_world, "data_info", "camera_conditions", "chunk_plucker", "chunk_size"),
        last="final_layer",
        grid=_patches,
    ),
}
