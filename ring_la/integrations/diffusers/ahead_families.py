"""The library's attention processors taken apart, by families: what makes keys, what makes queries, what follows.

They are written again here, layer by layer, because the library's own compute q, k and v in one go. What they give is
the library's, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Rotary = Any
"""Of the rank's tokens, as the library has it."""


class KeysFirst(NamedTuple):
    """A class of processors, taken apart.

    Attributes:
        keys: k and v of an attention, its tokens, the text's (None: there are none apart), rotary embedding, and how
            many tokens of text stand behind the others where they are one tensor.
        queries: q of the first four.
        out: of the attention's result ``[B, T, C]``, its tokens, and the text's, what the processor returns.
    """

    keys: Callable[[Any, Tensor, Tensor | None, Rotary, int], tuple[Tensor, Tensor]]
    queries: Callable[[Any, Tensor, Tensor | None, Rotary], Tensor]
    out: Callable[[Any, Tensor, Tensor | None], Any]


def _heads(attn: Any, x: Tensor) -> Tensor:
    return x.unflatten(-1, (attn.heads, -1))


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    from diffusers.models.embeddings import apply_rotary_emb

    rotate: Any = apply_rotary_emb
    return x if rotary is None else rotate(x, rotary, sequence_dim=1)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


# -- Flux and those built as it is: text before the image, one rotary embedding for both -----------------------


def _flux_keys(attn: Any, x: Tensor, text: Tensor | None, rotary: Rotary, behind: int) -> tuple[Tensor, Tensor]:
    k, v = attn.norm_k(_heads(attn, attn.to_k(x))), _heads(attn, attn.to_v(x))
    if attn.added_kv_proj_dim is not None:
        k = torch.cat([attn.norm_added_k(_heads(attn, attn.add_k_proj(text))), k], dim=1)
        v = torch.cat([_heads(attn, attn.add_v_proj(text)), v], dim=1)
    return rotated(k, rotary), v


def _flux_queries(attn: Any, x: Tensor, text: Tensor | None, rotary: Rotary) -> Tensor:
    q = attn.norm_q(_heads(attn, attn.to_q(x)))
    if attn.added_kv_proj_dim is not None:
        q = torch.cat([attn.norm_added_q(_heads(attn, attn.add_q_proj(text))), q], dim=1)
    return rotated(q, rotary)


def _flux_out(attn: Any, o: Tensor, text: Tensor | None) -> Any:
    if text is None:
        return o
    of_text, of_image = o.split_with_sizes([text.shape[1], o.shape[1] - text.shape[1]], dim=1)
    return attn.to_out[1](attn.to_out[0](of_image.contiguous())), attn.to_add_out(of_text.contiguous())


# -- Qwen-Image: text before the image, each with its own rotary embedding -------------------------------------


def _qwen_joint(attn: Any, names: tuple[str, str, str, str], x: Tensor, text: Tensor | None, rotary: Rotary) -> Tensor:
    """Queries or keys, by the names of the image's layer and norm and of the text's."""
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    rotate: Any = apply_rotary_emb_qwen
    layer, norm, text_layer, text_norm = (getattr(attn, name) for name in names)
    parts = [_normed(norm, _heads(attn, layer(x))), _normed(text_norm, _heads(attn, text_layer(text)))]
    if rotary is not None:
        parts = [rotate(part, freqs, use_real=False) for part, freqs in zip(parts, rotary)]
    return torch.cat([parts[1], parts[0]], dim=1)


def _qwen_keys(attn: Any, x: Tensor, text: Tensor | None, rotary: Rotary, behind: int) -> tuple[Tensor, Tensor]:
    k = _qwen_joint(attn, ("to_k", "norm_k", "add_k_proj", "norm_added_k"), x, text, rotary)
    return k, torch.cat([_heads(attn, attn.add_v_proj(text)), _heads(attn, attn.to_v(x))], dim=1)


def _qwen_queries(attn: Any, x: Tensor, text: Tensor | None, rotary: Rotary) -> Tensor:
    return _qwen_joint(attn, ("to_q", "norm_q", "add_q_proj", "norm_added_q"), x, text, rotary)


# -- HunyuanVideo: the image before text, which has no rotary embedding ----------------------------------------


def _hunyuan_rotated(x: Tensor, rotary: Rotary, behind: int) -> Tensor:
    if not behind or rotary is None:
        return rotated(x, rotary)
    return torch.cat([rotated(x[:, :-behind], rotary), x[:, -behind:]], dim=1)


def _hunyuan_tokens(attn: Any, x: Tensor, text: Tensor | None, behind: int) -> tuple[Tensor, int]:
    """What the image's layers are given, and how much of it is text."""
    if attn.add_q_proj is None and text is not None:
        return torch.cat([x, text], dim=1), text.shape[1]
    return x, behind


def _hunyuan_keys(attn: Any, x: Tensor, text: Tensor | None, rotary: Rotary, behind: int) -> tuple[Tensor, Tensor]:
    x, behind = _hunyuan_tokens(attn, x, text, behind)
    k = _hunyuan_rotated(_normed(attn.norm_k, _heads(attn, attn.to_k(x))), rotary, behind)
    v = _heads(attn, attn.to_v(x))
    if attn.add_q_proj is not None and text is not None:
        k = torch.cat([k, _normed(attn.norm_added_k, _heads(attn, attn.add_k_proj(text)))], dim=1)
        v = torch.cat([v, _heads(attn, attn.add_v_proj(text))], dim=1)
    return k, v


def _hunyuan_queries(attn: Any, x: Tensor, text: Tensor | None, rotary: Rotary) -> Tensor:
    x, behind = _hunyuan_tokens(attn, x, text, 0)
    q = _hunyuan_rotated(_normed(attn.norm_q, _heads(attn, attn.to_q(x))), rotary, behind)
    if attn.add_q_proj is not None and text is not None:
        q = torch.cat([q, _normed(attn.norm_added_q, _heads(attn, attn.add_q_proj(text)))], dim=1)
    return q


def _hunyuan_out(attn: Any, o: Tensor, text: Tensor | None) -> Any:
    if text is None:
        return o, None
    of_image, of_text = o[:, : -text.shape[1]], o[:, -text.shape[1] :]
    if getattr(attn, "to_out", None) is not None:
        of_image = attn.to_out[1](attn.to_out[0](of_image))
    if getattr(attn, "to_add_out", None) is not None:
        of_text = attn.to_add_out(of_text)
    return of_image, of_text


FLUX = KeysFirst(_flux_keys, _flux_queries, _flux_out)
FAMILIES: dict[str, KeysFirst] = {
    **dict.fromkeys(("FluxAttnProcessor", "OvisImageAttnProcessor", "LongCatImageAttnProcessor"), FLUX),
    "Flux2AttnProcessor": FLUX,
    "BriaAttnProcessor": FLUX,
    "QwenDoubleStreamAttnProcessor2_0": KeysFirst(_qwen_keys, _qwen_queries, _flux_out),
    "HunyuanVideoAttnProcessor2_0": KeysFirst(_hunyuan_keys, _hunyuan_queries, _hunyuan_out),
}
"""By the name of the library's class of processors."""
