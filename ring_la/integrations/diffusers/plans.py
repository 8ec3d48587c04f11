"""What of each model is split: the arguments of its blocks, and the attention inside them.

A model that is not here is refused, and so is one whose blocks take an argument or hold an attention that its plan
does not name. A new model is an entry in `PLANS`; its tests are the cases of tests/integrations/diffusers/models.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IMAGE, TEXT = ("image",), ("text",)
FRONT, REAR = ("text", "image"), ("image", "text")
"""Streams of tokens, in the order in which a model puts them together."""


@dataclass(frozen=True)
class Rows:
    """A tensor with the tokens of `streams` along `dim`; or several, one after the other."""

    streams: tuple[str, ...]
    dim: int = 1


@dataclass(frozen=True)
class Mask:
    """Which tokens of `streams` are keys, 1 or True: ``[B, tokens]``, or with dimensions of size 1 between. The other
    streams are all keys."""

    streams: tuple[str, ...]


@dataclass(frozen=True)
class Steps:
    """Steps of time: a row for each token of the image along dimension 1, or one for all.

    Attributes:
        dims: the tensor's dimensions where it has a row a token.
        flat: batch and tokens are one dimension, the first.
    """

    dims: int = 3
    flat: bool = False


SAME = None
"""An argument that is the same for all tokens."""

Role = Rows | Mask | Steps | tuple | None


@dataclass(frozen=True)
class Attention:
    """An attention of a block.

    Attributes:
        streams: whose tokens are its queries and keys; None: its keys are whole on every rank (cross-attention).
        processors: names of the classes of processors whose attention function can be replaced.
    """

    streams: tuple[str, ...] | None
    processors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """One class of blocks: the role of every argument of its forward, and its attention by attribute."""

    arguments: Mapping[str, Role]
    attention: Mapping[str, Attention]


@dataclass(frozen=True)
class Plan:
    """A model.

    Attributes:
        blocks: its lists of blocks, in the order of their calls, and what their blocks are called.
        classes: these blocks.
        inputs: arguments of its forward that may be given; others must be left as they are by default.
        outputs: roles of what other modules of it return, by name and index.
        last: the layer whose output, the image's tokens, is gathered.
        cuts_whole_text: behind the last block, the model takes off as many tokens as the whole text has.
    """

    blocks: Mapping[str, str]
    classes: Mapping[str, Block]
    inputs: tuple[str, ...]
    outputs: Mapping[str, Mapping[int, Role]] = field(default_factory=dict)
    last: str = "proj_out"
    cuts_whole_text: bool = False


_both = {"hidden_states": Rows(IMAGE), "encoder_hidden_states": Rows(TEXT), "temb": SAME}

_flux = Block(
    arguments=_both | {"image_rotary_emb": (Rows(FRONT, 0), Rows(FRONT, 0)), "joint_attention_kwargs": SAME},
    attention={"attn": Attention(FRONT, ("FluxAttnProcessor",))},
)
_flux2 = Block(
    arguments={
        "hidden_states": Rows(IMAGE),
        "encoder_hidden_states": Rows(TEXT),
        "temb_mod_img": SAME,
        "temb_mod_txt": SAME,
        "image_rotary_emb": (Rows(FRONT, 0), Rows(FRONT, 0)),
        "joint_attention_kwargs": SAME,
    },
    attention={"attn": Attention(FRONT, ("Flux2AttnProcessor",))},
)
_flux2_single = Block(
    arguments={
        "hidden_states": Rows(FRONT),
        "encoder_hidden_states": Rows(TEXT),
        "temb_mod": SAME,
        "image_rotary_emb": (Rows(FRONT, 0), Rows(FRONT, 0)),
        "joint_attention_kwargs": SAME,
        "split_hidden_states": SAME,
        "text_seq_len": SAME,
    },
    attention={"attn": Attention(FRONT, ("Flux2ParallelSelfAttnProcessor",))},
)
_sd3 = Block(
    arguments=_both | {"joint_attention_kwargs": SAME},
    attention={
        "attn": Attention(REAR, ("JointAttnProcessor2_0",)),
        "attn2": Attention(IMAGE, ("JointAttnProcessor2_0",)),
    },
)
_cogvideox = Block(
    arguments=_both | {"image_rotary_emb": (Rows(IMAGE, 0), Rows(IMAGE, 0)), "attention_kwargs": SAME},
    attention={"attn1": Attention(FRONT, ("CogVideoXAttnProcessor2_0",))},
)
_qwen = Block(
    arguments=_both
    | {
        "encoder_hidden_states_mask": Mask(TEXT),
        "image_rotary_emb": (Rows(IMAGE, 0), Rows(TEXT, 0)),
        "joint_attention_kwargs": SAME,
        "modulate_index": Rows(IMAGE),
    },
    attention={"attn": Attention(FRONT, ("QwenDoubleStreamAttnProcessor2_0",))},
)


def _hunyuan(rotary: str) -> Block:
    arguments = _both | {"attention_mask": Mask(REAR), rotary: (Rows(IMAGE, 0), Rows(IMAGE, 0))}
    return Block(arguments, {"attn": Attention(REAR, ("HunyuanVideoAttnProcessor2_0",))})


_wan = Block(
    arguments={
        "hidden_states": Rows(IMAGE),
        "encoder_hidden_states": SAME,
        "temb": Steps(4),
        "rotary_emb": (Rows(IMAGE, 1), Rows(IMAGE, 1)),
    },
    attention={"attn1": Attention(IMAGE, ("WanAttnProcessor",)), "attn2": Attention(None, ("WanAttnProcessor",))},
)
_ltx = Block(
    arguments={
        "hidden_states": Rows(IMAGE),
        "encoder_hidden_states": SAME,
        "temb": Steps(3),
        "image_rotary_emb": (Rows(IMAGE, 1), Rows(IMAGE, 1)),
        "encoder_attention_mask": SAME,
    },
    attention={
        "attn1": Attention(IMAGE, ("LTXVideoAttnProcessor",)),
        "attn2": Attention(None, ("LTXVideoAttnProcessor",)),
    },
)

_common = ("hidden_states", "encoder_hidden_states", "timestep", "return_dict")
PLANS: Mapping[str, Plan] = {
    "FluxTransformer2DModel": Plan(
        {"transformer_blocks": "FluxTransformerBlock", "single_transformer_blocks": "FluxSingleTransformerBlock"},
        {"FluxTransformerBlock": _flux, "FluxSingleTransformerBlock": _flux},
        (*_common, "pooled_projections", "img_ids", "txt_ids", "guidance"),
    ),
    "Flux2Transformer2DModel": Plan(
        {"transformer_blocks": "Flux2TransformerBlock", "single_transformer_blocks": "Flux2SingleTransformerBlock"},
        {"Flux2TransformerBlock": _flux2, "Flux2SingleTransformerBlock": _flux2_single},
        (*_common, "img_ids", "txt_ids", "guidance"),
        cuts_whole_text=True,
    ),
    "SD3Transformer2DModel": Plan(
        {"transformer_blocks": "JointTransformerBlock"},
        {"JointTransformerBlock": _sd3},
        (*_common, "pooled_projections"),
    ),
    "QwenImageTransformer2DModel": Plan(
        {"transformer_blocks": "QwenImageTransformerBlock"},
        {"QwenImageTransformerBlock": _qwen},
        (*_common, "encoder_hidden_states_mask", "img_shapes", "guidance", "additional_t_cond"),
    ),
    "CogVideoXTransformer3DModel": Plan(
        {"transformer_blocks": "CogVideoXBlock"},
        {"CogVideoXBlock": _cogvideox},
        (*_common, "timestep_cond", "ofs", "image_rotary_emb"),
    ),
    "HunyuanVideoTransformer3DModel": Plan(
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
    "WanTransformer3DModel": Plan(
        {"blocks": "WanTransformerBlock"},
        {"WanTransformerBlock": _wan},
        (*_common, "encoder_hidden_states_image"),
        outputs={"condition_embedder": {0: Steps(3), 1: Steps(3)}},
    ),
    "LTXVideoTransformer3DModel": Plan(
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
        outputs={"time_embed": {0: Steps(flat=True), 1: Steps(flat=True)}},
    ),
}
"""By the name of the model's class."""
