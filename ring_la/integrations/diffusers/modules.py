"""Modules that reach beyond a rank's own tokens: convolutions over rows or frames, recurrences over frames.

Each is a function of the module, of what knows the call under way, and of the module's own arguments, in place of its
forward. Weights, adapters (LoRA) and activations stay the module's: its layers are called, on more tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...context import Arrived, GridLayout, Halo
from ...errors import UnsupportedError
from .gated_delta import camera_gated_delta, gated_delta
from .linear import Running
from .processors import split_function
from .streams import bounds


class Attending(Running, Protocol):
    """That, and attention over the image's tokens."""

    def attend_image(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor: ...


def split_forward(kind: type[nn.Module], running: Attending) -> Callable[..., Tensor]:
    """What stands in place of the forward of modules of a class; its first argument is the module."""
    if kind.__name__ in SOFTMAX:
        return split_function(kind.__name__, kind.forward, running.attend_image)
    compute = SPLIT_MODULES[kind.__name__]

    def forward(module: nn.Module, *args, **keywords) -> Tensor:
        return compute(module, running, *args, **keywords)

    return forward


SAFE, WIDENED = 1 << 30, 8
"""Elements that a convolution takes at once, as the library has it (its kernels count in 32 bits); how many times more
channels it may have than the tokens."""


Neighbours = Callable[[], tuple[Tensor, Tensor]]
"""The slices before and after a rank's own, when they have come."""


def joined(x: Tensor, coming: Halo | Arrived, dim: int) -> Tensor:
    before, after = coming.wait()
    return torch.cat([before, x, after], dim)


def convolved(conv: nn.Module, x: Tensor, neighbours: Neighbours | None, width: int = 1) -> Tensor:
    """A convolution that reaches `width` slices of dimension 2 to both sides, ``[B, C, slices, …]``; None: there are no
    other slices. All of `x` is taken as it lies, while messages travel, and what its borders lack is made good behind
    it: with the neighbours' slices put around `x` it would be copied, and into another order of dimensions."""
    y = conv(x)
    if neighbours is None:
        return y
    before, after = neighbours()
    n, reach = min(width, x.shape[2]), 2 * width
    head = torch.cat([before, x[:, :, :reach], after], 2)[:, :, : reach + width]
    tail = torch.cat([before, x[:, :, -reach:], after], 2)[:, :, -reach - width :]
    first, last = conv(torch.cat([head, tail]))[:, :, width : width + n].chunk(2)
    y[:, :, :n], y[:, :, -n:] = first, last
    return y


def glu_conv(module: Any, running: Running, x: Tensor) -> Tensor:
    """SANA's GLUMBConv ``[B, C, rows, columns]``: its depthwise 3 x 3 convolution reaches one row up and down. Rows of
    the input travel while this rank's are widened and convolved, and are widened when they have come."""
    grid: GridLayout = running.call.grid
    residual, coming = x, None if grid.cp.size == 1 else grid.halo(x, 2)
    x = module.nonlinearity(module.conv_inverted(x))
    x = convolved(module.conv_depth, x, None if coming is None else functools.partial(_widened, module, grid, coming))
    x, gate = x.chunk(2, 1)
    x = module.conv_point(x * module.nonlinearity(gate))
    if module.norm_type == "rms_norm":
        x = module.norm(x.movedim(1, -1)).movedim(-1, 1)
    return x + residual if module.residual_connection else x


def _widened(module: Any, grid: GridLayout, coming: Halo | Arrived) -> tuple[Tensor, Tensor]:
    """The neighbours' rows; behind the image's border the convolution reads zeros."""
    edges = module.nonlinearity(module.conv_inverted(torch.cat(coming.wait(), 2)))
    rows = zip(edges.split(1, 2), grid.beyond())
    above, below = (torch.zeros_like(row) if outside else row for row, outside in rows)
    return above, below


def glu_temporal_conv(module: Any, running: Running, x: Tensor) -> Tensor:
    """SANA-Video's GLUMBTempConv ``[B, frames, rows, columns, C]``: whole frames, then a convolution over three."""
    parts = module.nonlinearity, module.conv_inverted, module.conv_depth, module.nonlinearity, module.conv_point
    y = _over_frames(running.call.grid, functools.partial(_spatial, *parts), module.conv_temp, x, 1)
    if module.norm_type == "rms_norm":
        y = module.norm(y.movedim(1, -1)).movedim(-1, 1)
    return y + x if module.residual_connection else y


def glu_conv_temporal(module: Any, running: Running, x: Tensor, HW: tuple[int, int, int]) -> Tensor:
    """SANA-WM's GLUMBConvTemp ``[B, tokens, C]``."""
    same = nn.Identity()  # its convolutions have their activations inside
    parts = same, module.inverted_conv, module.depth_conv, module.glu_act, module.point_conv
    frames = x.unflatten(1, HW)
    width = module.t_conv.kernel_size[0] // 2
    return _over_frames(running.call.grid, functools.partial(_spatial, *parts), module.t_conv, frames, width).flatten(
        1, 3
    )


def _spatial(
    act: nn.Module, widen: nn.Module, depth: nn.Module, gate_act: nn.Module, point: nn.Module, x: Tensor
) -> Tensor:
    """What happens inside frames: ``[B, frames, rows, columns, C]`` to ``[B, C, frames, rows · columns]``."""
    B, frames, rows, columns, channels = x.shape
    out = []
    for part in x.flatten(0, 1).split(max(1, SAFE // (WIDENED * channels * rows * columns))):
        y, gate = depth(act(widen(part.permute(0, 3, 1, 2)))).chunk(2, 1)
        out.append(point(y * gate_act(gate)))
    y = out[0] if len(out) == 1 else torch.cat(out)
    return y.reshape(B, frames, -1, rows * columns).transpose(1, 2)


def _over_frames(
    grid: GridLayout, spatial: Callable[[Tensor], Tensor], temporal: nn.Module, x: Tensor, width: int
) -> Tensor:
    """``y + temporal(y)`` for ``y = spatial(x)``, ``[B, frames, rows, columns, C]``. Frames at the ends travel while
    the convolution over this rank's runs."""
    y = spatial(x)
    y = y + convolved(temporal, y, None if grid.cp.size == 1 else grid.halo(y, 2, width).wait, width)
    return y.unflatten(3, x.shape[2:4]).permute(0, 2, 3, 4, 1)


def short_conv(module: Any, running: Running, x: Tensor, num_frames: int) -> Tensor:
    """SANA-WM's SanaWMTemporalShortConvolution ``[B, tokens, C]``: forwards and backwards over the frames."""
    width = module.kernel_size - 1
    frames = x.unflatten(1, (num_frames, -1))
    wide = joined(frames, running.call.grid.halo(frames, 1, width), 1)
    y = type(module).forward(module, wide.flatten(1, 2), num_frames + 2 * width)
    return y.unflatten(1, (num_frames + 2 * width, -1))[:, width : width + num_frames].flatten(1, 2)


def face_attention(
    module: nn.Module, running: Running, x: Tensor, motion: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Wan Animate's WanAnimateFaceBlockCrossAttention: a frame's tokens ``[B, tokens, C]`` look at its few of the face
    ``[B, frames, N, C]``. The rank's frames, of which it may not have all tokens, are filled up with zeros."""
    if attention_mask is not None:
        raise UnsupportedError("attention_mask", "None on a split sequence", type(attention_mask).__name__)
    streams = running.call.streams
    tokens = streams.sizes["image"] // motion.shape[1]
    start, stop = bounds(streams.sizes["image"], streams.rank, streams.ranks)
    first, behind = start // tokens, -(-stop // tokens)
    before = start - first * tokens
    wide = F.pad(x, (0, 0, before, behind * tokens - stop))
    return type(module).forward(module, wide, motion[:, first:behind])[:, before : before + x.shape[1]]


SOFTMAX = ("SanaWMSoftmaxAttention", "SanaWMSoftmaxCamAttention")
SPLIT_MODULES: dict[str, Callable[..., Tensor]] = {
    "GLUMBConv": glu_conv,
    "GLUMBTempConv": glu_temporal_conv,
    "GLUMBConvTemp": glu_conv_temporal,
    "SanaWMTemporalShortConvolution": short_conv,
    "SanaWMBidirectionalGDNAttention": gated_delta,
    "SanaWMBidirectionalGDNCamAttention": camera_gated_delta,
    "WanAnimateFaceBlockCrossAttention": face_attention,
}
"""By the name of the library's class."""
