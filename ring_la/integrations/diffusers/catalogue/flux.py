"""Flux and the models built as it is: blocks of two kinds, text before the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
    StepPlan,
    TokenRows,
    WideLayer,
)

BOTH = {"hidden_states": TokenRows(IMAGE), "encoder_hidden_states": TokenRows(TEXT), "temb": SAME}

COMMON = ("hidden_states", "encoder_hidden_states", "timestep", "return_dict")
FLUX = BlockPlan(
    arguments=BOTH | {"image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)), "joint_attention_kwargs": SAME},
    attention={"attn": AttentionPlan(FRONT, ("FluxAttnProcessor",))},
    wide=WideLayer(),
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
_flux3_mode = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "temb_mod": TokenRows(IMAGE),
        "image_rotary_emb": (TokenRows(IMAGE, 0), TokenRows(IMAGE, 0)),
    },
    {"attn": AttentionPlan(IMAGE, ("Flux3AttnProcessor",))},
)
_flux3_single = BlockPlan(
    {
        "hidden_states": TokenRows(IMAGE),
        "encoder_hidden_states": TokenRows(TEXT),
        "temb_mod": TokenRows(IMAGE),
        "temb_mod_context": TokenRows(TEXT),
        "image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)),
    },
    {"attn": AttentionPlan(FRONT, ("Flux3AttnProcessor",))},
)


def step_layers(embedding: str, name: str) -> StepPlan:
    """Of blocks with one norm for each stream, of which `name` is the beginning of their classes' names."""
    both = f"{name}TransformerBlock", f"{name}SingleTransformerBlock"
    return StepPlan(embedding, {both[0]: ("norm1.linear", "norm1_context.linear"), both[1]: ("norm.linear",)})


def _like_flux(processor: str, keywords: str, given: KeyMask | None = SAME) -> BlockPlan:
    """Both kinds of Flux's blocks, under other names; `given`: what stands in `keywords`."""
    arguments: dict[str, Role] = {**BOTH, "image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0))}
    arguments[keywords] = given
    return BlockPlan(arguments, {"attn": AttentionPlan(FRONT, (processor,))}, wide=WideLayer())


def _flux_family(name: str, keywords: str, *inputs: str, embedding: str = "") -> ModelPlan:
    """A model built as Flux is, its parts called after `name`; `embedding`: its step's, if it changes no more."""
    kinds = {
        "transformer_blocks": f"{name}TransformerBlock",
        "single_transformer_blocks": f"{name}SingleTransformerBlock",
    }
    blocks = _like_flux(f"{name}AttnProcessor", keywords)
    plan = ModelPlan(kinds, dict.fromkeys(kinds.values(), blocks), (*COMMON, "img_ids", "txt_ids", *inputs))
    return replace(plan, steps=step_layers(embedding, name)) if embedding else plan


_KEYWORDS = "joint_attention_kwargs"
_chroma = {
    "temb": SAME,
    "image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)),
    "attention_mask": KeyMask(FRONT, raises=True),
    "joint_attention_kwargs": SAME,
}
_chroma_attention = {"attn": AttentionPlan(FRONT, ("FluxAttnProcessor",))}

FLUXES: Mapping[str, ModelPlan] = {
    "FluxTransformer2DModel": ModelPlan(
        {"transformer_blocks": "FluxTransformerBlock", "single_transformer_blocks": "FluxSingleTransformerBlock"},
        {"FluxTransformerBlock": FLUX, "FluxSingleTransformerBlock": FLUX},
        (*COMMON, "pooled_projections", "img_ids", "txt_ids", "guidance", "controlnet_blocks_repeat"),
        residuals=("controlnet_block_samples", "controlnet_single_block_samples"),
        steps=step_layers("time_text_embed", "Flux"),
    ),
    "Flux2Transformer2DModel": ModelPlan(
        {"transformer_blocks": "Flux2TransformerBlock", "single_transformer_blocks": "Flux2SingleTransformerBlock"},
        {"Flux2TransformerBlock": _flux2, "Flux2SingleTransformerBlock": _flux2_single},
        (*COMMON, "img_ids", "txt_ids", "guidance"),
        cuts_whole_text=True,
    ),
    # the text's own blocks run whole on every rank, as other models' refiners of text do
    "Flux3Transformer2DModel": ModelPlan(
        {
            "mode_blocks.image": "Flux3ModeTransformerBlock",
            "single_transformer_blocks": "Flux3SingleTransformerBlock",
            "norm_out": "Flux3AdaLayerNorm",
        },
        {
            "Flux3ModeTransformerBlock": _flux3_mode,
            "Flux3SingleTransformerBlock": _flux3_single,
            "Flux3AdaLayerNorm": BlockPlan({"hidden_states": TokenRows(IMAGE), "temb": TokenRows(IMAGE)}, {}),
        },
        (*COMMON, "img_ids", "txt_ids", "target_timestep"),
    ),
    "BriaTransformer2DModel": _flux_family("Bria", "attention_kwargs", "pooled_projections", "guidance"),
    "LongCatImageTransformer2DModel": _flux_family(
        "LongCatImage", "joint_attention_kwargs", "guidance", embedding="time_embed"
    ),
    "OvisImageTransformer2DModel": _flux_family("OvisImage", "joint_attention_kwargs", embedding="timestep_embedder"),
    # every block gets another layer of the text encoder beside what the last one made of the text
    "BriaFiboTransformer2DModel": ModelPlan(
        {
            "transformer_blocks": "BriaFiboTransformerBlock",
            "single_transformer_blocks": "BriaFiboSingleTransformerBlock",
        },
        {
            "BriaFiboTransformerBlock": _like_flux(
                "BriaFiboAttnProcessor", _KEYWORDS, KeyMask(FRONT, within="attention_mask")
            ),
            "BriaFiboSingleTransformerBlock": BlockPlan(
                {
                    "hidden_states": TokenRows(FRONT),
                    "temb": SAME,
                    "image_rotary_emb": (TokenRows(FRONT, 0), TokenRows(FRONT, 0)),
                    "joint_attention_kwargs": KeyMask(FRONT, within="attention_mask"),
                },
                {"attn": AttentionPlan(FRONT, ("BriaAttnProcessor",))},
                wide=WideLayer(),
            ),
        },
        (*COMMON, "text_encoder_layers", "pooled_projections", "img_ids", "txt_ids", *("guidance", _KEYWORDS)),
        outputs={"context_embedder": {0: TokenRows(TEXT)}, "caption_projection": {0: TokenRows(TEXT)}},
    ),
    "ChromaTransformer2DModel": ModelPlan(
        {"transformer_blocks": "ChromaTransformerBlock", "single_transformer_blocks": "ChromaSingleTransformerBlock"},
        {
            "ChromaTransformerBlock": BlockPlan(BOTH | _chroma, _chroma_attention),  # type: ignore[arg-type]
            "ChromaSingleTransformerBlock": BlockPlan(
                {"hidden_states": TokenRows(FRONT)} | _chroma,  # type: ignore[arg-type]
                _chroma_attention,
                wide=WideLayer(),
            ),
        },
        (*COMMON, "img_ids", "txt_ids", "attention_mask"),
    ),
}
