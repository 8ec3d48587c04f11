"""The decoders of HunyuanVideo, HunyuanVideo 1.5 and HunyuanImage's refiner by rows.

Their convolutions repeat the border's row. Where attention sees no later frames (the videos'), a rank's rows of frame f
attend to everybody's rows of the frames up to f, frame by frame, so that no mask of tokens by tokens is made.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...context import GridLayout
from ...errors import UnsupportedError

CONVOLUTIONS = ("HunyuanVideoCausalConv3d", "HunyuanVideo15CausalConv3d", "HunyuanImageRefinerCausalConv3d")
BLOCKS = ("HunyuanVideo15AttnBlock", "HunyuanImageRefinerAttnBlock")


class DecoderRows(Protocol):
    """What of a decoder by rows is asked.

    Attributes:
        grid: of the latents' rows in the call under way; None: it is whole on every rank.
        frames: of the attention under way, where it sees no later ones.
    """

    grid: GridLayout | None
    frames: int | None

    def rows(self, local: int, each: int = 1) -> GridLayout: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor: ...


def repeating_conv(rows: DecoderRows, module: Any, own: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A causal convolution ``[B, C, frames, rows, columns]`` that repeats the border's row: it gets the neighbours'
    rows, and what its own padding makes is cut off."""
    width = module.time_causal_padding[2]
    if rows.grid is None or not width:
        return own(x)
    if module.conv.stride[-2] != 1 or module.pad_mode != "replicate":
        got = f"stride {module.conv.stride}, {module.pad_mode}"
        raise UnsupportedError("vae", "causal convolutions of stride 1 that repeat the border", got)
    grid = rows.rows(x.shape[-2])
    before, after = grid.halo(x, -2, width).wait()
    above, below = grid.beyond(width)
    wide = torch.cat([before, x, after], -2).narrow(-2, above, x.shape[-2] + 2 * width - above - below)
    first, last = wide[..., :1, :], wide[..., -1:, :]
    wide = torch.cat([*[first] * above, wide, *[last] * below], -2)
    return own(wide)[..., width:-width, :]


def frames_attention(rows: DecoderRows, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention ``[B, tokens, H, D]`` of this rank's rows, frame after frame, to everybody's rows of no later frame."""
    assert rows.frames is not None
    q, k, v = (x.unflatten(1, (rows.frames, -1)) for x in (q, k, v))  # [B, frames, rows · columns, H, D]
    if rows.grid is not None:
        local = rows.grid.local_length
        layout = rows.rows(local, q.shape[2] // local)
        k, v = (layout.gather(x, 2) for x in (k, v))
    out = []
    for n in range(rows.frames):
        mine, keys, values = (x.transpose(1, 2) for x in (q[:, n], *(y[:, : n + 1].flatten(1, 2) for y in (k, v))))
        out.append(F.scaled_dot_product_attention(mine, keys, values, scale=scale).transpose(1, 2))
    return torch.cat(out, 1)


def middle(rows: DecoderRows, module: nn.Module) -> Callable[..., Tensor]:
    """HunyuanVideoMidBlock3D's forward, which asks for a mask of frames before its attention: noted, not made."""
    inner = type(module).forward

    def mask(frames: int, *args: Any, **keywords: Any) -> None:
        rows.frames = frames

    around = {**inner.__globals__, "prepare_causal_attention_mask": mask}
    return types.FunctionType(inner.__code__, around, inner.__name__, inner.__defaults__)


def attention_block(rows: DecoderRows, module: Any, own: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A block ``[B, C, frames, rows, columns]`` of one head; HunyuanVideo 1.5's sees no later frames."""
    if rows.grid is None:
        return own(x)
    normed = module.norm(x)
    rows.frames = x.shape[2] if hasattr(module, "prepare_causal_attention_mask") else None
    q, k, v = (layer(normed).flatten(2).mT[:, :, None] for layer in (module.to_q, module.to_k, module.to_v))
    o = rows.attend(q, k, v, None)[:, :, 0].mT.unflatten(2, x.shape[2:])
    return module.proj_out(o) + x
