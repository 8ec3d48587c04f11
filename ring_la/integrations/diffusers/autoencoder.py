"""An autoencoder that decodes by rows: every rank has its rows of the image, in all resolutions.

Convolutions get the rows they reach over their borders from the neighbours, group norms the other ranks' means and
variances, attention everybody's keys, linear attention the sum of everybody's states; the rest is row by row. The image
is the one of one process, to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...autograd import wanting
from ...context import ContextParallel, GridLayout
from ...errors import UnsupportedError
from .autoencoder_frames import BLOCKS, CONVOLUTIONS, attention_block, frames_attention, middle, repeating_conv
from .compare import InputComparison, WholeImage
from .processors import split_class, split_function
from .streams import Layouts

AUTOENCODERS = (
    *("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLWan", "AutoencoderKLQwenImage", "AutoencoderDC"),
    *("AutoencoderKLLTXVideo", "AutoencoderKLLTX2Video", "AutoencoderKLCogVideoX", "AutoencoderKLCosmos"),
    *("AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo15", "AutoencoderKLHunyuanImage"),
    *("AutoencoderKLHunyuanImageRefiner", "AutoencoderKLMagvit", "AutoencoderKLAllegro", "AutoencoderTiny"),
)
ROW_BY_ROW = (
    *("SiLU", "ReLU", "ReLU6", "Dropout", "Identity", "Linear", "RMSNorm", "LayerNorm", "PerChannelRMSNorm"),
    *("HunyuanVideo15RMS_norm", "HunyuanImageRefinerRMS_norm", "WanRMS_norm", "QwenImageRMS_norm"),
    *("DupUp3D", "CosmosUnpatcher3d"),
)
"""Modules without others inside that see a row at a time, by the names of their classes."""
PLACES = ("CosmosTemporalAttentionProcessor2_0",)
"""Processors whose attention is over the frames of one place."""
BORDERS = ("zeros", "reflect")
"""What convolutions may read beyond the image's border, by PyTorch's names."""


class RowDecoder:
    """What `parallelize(vae=True)` makes of an autoencoder's decoder.

    Attributes:
        grid: of the latents' rows in the call under way; None: it is whole on every rank.
        frames: of the attention under way, where it sees no later ones.
        comparison: of the latents that the ranks are given.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.layouts = cp, Layouts(cp)
        self.grid: GridLayout | None = None
        self.frames: int | None = None
        self.comparison: InputComparison

    def adopt(self, vae: Any, undo: ExitStack) -> None:
        """Replace forwards inside the decoder; `undo` takes the way back."""
        name = type(vae).__name__
        classes: dict[type, type] = {}
        if name not in AUTOENCODERS:
            expected = f"a pipeline with one of {', '.join(AUTOENCODERS)}"
            raise UnsupportedError("vae", expected, name, "vae=False decodes whole on every rank")
        inside: set[nn.Module] = set()
        for label, module in vae.decoder.named_modules():
            kind = type(module).__name__
            if module in inside:
                continue
            if kind in CONVOLUTIONS:
                inside.add(module.conv)
            if getattr(module, "per_channel_scale1", None) is not None:
                raise UnsupportedError("vae", "a decoder that draws no noise", f"decoder.{label}, a {kind}")
            replaced = _forward(module, kind)
            if replaced is not None:
                own = module.forward
                module.forward = functools.partial(replaced, self, module, own)
                undo.callback(_put_back, module, own)
            elif kind == "HunyuanVideoMidBlock3D":
                own = module.forward
                module.forward = functools.partial(middle(self, module), module)
                undo.callback(_put_back, module, own)
            elif kind.endswith("AttentionBlock"):
                own = module.forward
                module.forward = functools.partial(split_function(kind, type(module).forward, self.attend), module)
                undo.callback(_put_back, module, own)
            elif kind == "SanaMultiscaleLinearAttention":
                for way in ("apply_linear_attention", "apply_quadratic_attention"):  # the same but for rounding
                    setattr(module, way, functools.partial(_linear_attention, self, module, getattr(module, way)))
                    undo.callback(delattr, module, way)
            elif hasattr(module, "processor") and type(module.processor).__name__ not in PLACES:
                undo.callback(setattr, module, "processor", module.processor)
                processor = type(module.processor)
                classes[processor] = classes.get(processor) or split_class(processor, self.attend)
                module.processor = classes[processor]()
            elif not any(True for _ in module.children()) and not _row_by_row(module, kind):
                raise UnsupportedError("vae", "modules that are known to decode by rows", f"decoder.{label}, a {kind}")
        self.comparison = InputComparison(self.cp)
        own = vae.decoder.forward
        vae.decoder.forward = functools.partial(self.decode, own)
        undo.callback(_put_back, vae.decoder, own)

    def decode(self, own: Callable[..., Any], z: Tensor, *args, **keywords) -> Any:
        """The decoder of whole latents ``[B, C, ..., rows, columns]``, on every rank; the whole image. What it
        keeps for the next frames besides stays each rank's own."""
        if self.cp.size > 1:
            error = UnsupportedError("vae", "no gradients of what decodes by rows", "latents that want one")
            self.comparison.begin({"latents": z}, error if wanting(z) else None)
        try:
            if z.shape[-2] < self.cp.size or self.cp.size == 1:
                return own(z, *args, **keywords)
            self.grid = self.layouts.grid((z.shape[-2],))
            image, *kept = _several(own(self.grid.shard(z, -2), *args, **keywords))
            whole = WholeImage.apply(image, self.rows(image.shape[-2]), -2, 1, self.comparison)
            return (whole, *kept) if kept else whole
        finally:
            self.grid = self.frames = None

    def rows(self, local: int, each: int = 1) -> GridLayout:
        """The layout of an image of which this rank has `local` rows, with `each` tokens a row."""
        times = local // self.grid.local_length
        key = ("rows", self.grid.seq_len, times, each)
        shape, counts = (self.grid.seq_len * times, each), [n * times for n in self.grid.counts]
        return self.layouts.made(key, lambda: self.cp.grid(shape, counts))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attention ``[B, T, H, D]`` of the rows' tokens to all: keys are few here, and heads too large for a ring."""
        if self.frames is not None:
            return frames_attention(self, q, k, v, scale)
        if self.grid is not None:
            layout = self.rows(self.grid.local_length, q.shape[1] // self.grid.local_length)
            k, v = (layout.gather(x, 1) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def _row_by_row(module: nn.Module, kind: str) -> bool:
    """Whether a module without others inside sees a row at a time."""
    if isinstance(module, nn.Upsample):
        return module.mode.startswith("nearest")
    return kind in (*ROW_BY_ROW, "ModuleList")


def _forward(module: Any, kind: str) -> Callable[..., Tensor] | None:
    """What stands in place of a module's forward, where it reaches beyond its rows."""
    if isinstance(module, nn.GroupNorm):
        return _group_norm
    if kind in CONVOLUTIONS:
        return repeating_conv
    if kind in BLOCKS:
        return attention_block
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return _as_it_is if module.kernel_size[-2] == 1 else _conv if _padded(module) is None else _causal_conv
    return None


def _padded(module: Any) -> tuple[int, ...] | None:
    """What a convolution pads by itself, columns first; None: it has PyTorch's padding."""
    return getattr(module, "_padding", None) or getattr(module, "spatial_pad", None)


def _several(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def _as_it_is(rows: RowDecoder, module: nn.Module, own: Callable[..., Tensor], *args) -> Tensor:
    return own(*args)


def _conv(rows: RowDecoder, module: nn.Conv2d | nn.Conv3d, own: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A convolution of stride 1: its own padding's rows are cut off, which stand behind those of the neighbours."""
    width: Any = module.padding[-2]
    if rows.grid is None:
        return own(x)
    keeps = 2 * width == module.dilation[-2] * (module.kernel_size[-2] - 1)
    if module.stride[-2] != 1 or not keeps or module.padding_mode not in BORDERS:
        got = f"stride {module.stride}, padding {module.padding} of {module.padding_mode}"
        raise UnsupportedError("vae", f"convolutions of stride 1 that keep their size by {' or '.join(BORDERS)}", got)
    grid = rows.rows(x.shape[-2])
    before, after = grid.halo(x, -2, width).wait()
    wide = torch.cat([before, x, after], -2)
    if module.padding_mode == "reflect":
        wide = _reflected(wide, *grid.beyond(width))
    return own(wide)[..., width:-width, :]


def _reflected(x: Tensor, before: int, after: int) -> Tensor:
    """Rows whose first and last ones, beyond the image's border, become those behind the border."""
    rows = x.shape[-2]
    above, below = x.narrow(-2, before + 1, before).flip(-2), x.narrow(-2, rows - 1 - 2 * after, after).flip(-2)
    return torch.cat([above, x.narrow(-2, before, rows - before - after), below], -2)


def _causal_conv(
    rows: RowDecoder, module: Any, own: Callable[..., Tensor], x: Tensor, cache_x: Tensor | None = None
) -> Tensor:
    """The same over rows and columns, which it pads by itself; over frames it may have kept some of earlier ones."""
    width = _padded(module)[2]
    if rows.grid is None:
        return own(x) if cache_x is None else own(x, cache_x)
    kept = 0 if cache_x is None else cache_x.shape[2]
    x = x if cache_x is None else torch.cat([cache_x.to(x.device), x], 2)
    before, after = rows.rows(x.shape[-2]).halo(x, -2, width).wait()
    wide = torch.cat([before, x, after], -2)
    y = own(wide[:, :, kept:], wide[:, :, :kept]) if kept else own(wide)
    return y[..., width:-width, :]


def _linear_attention(
    rows: RowDecoder, module: nn.Module, own: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """SANA's, ``[B, heads, D, tokens]``: one sum of states over all ranks, in fp32."""
    if rows.grid is None:
        return own(q, k, v)
    wide = torch.promote_types(v.dtype, torch.float32)
    state = rows.cp.comm.all_reduce(F.pad(v.to(wide), (0, 0, 0, 1), value=1) @ k.to(wide).mT).wait()
    o = state @ q.to(wide)
    return (o[:, :, :-1] / (o[:, :, -1:] + module.eps)).to(v.dtype)


def _group_norm(rows: RowDecoder, module: nn.GroupNorm, own: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``x [B, C, ...]``: mean and variance of all ranks' rows, put together from theirs in fp32."""
    if rows.grid is None:
        return own(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    groups = x.to(wide).unflatten(1, (module.num_groups, -1)).flatten(2)
    variance, mean = torch.var_mean(groups, -1, correction=0)  # [B, G]
    came = rows.cp.comm.all_gather(torch.stack([mean, variance])).wait()
    share = torch.tensor(rows.grid.counts, dtype=wide, device=x.device).view(-1, 1, 1) / rows.grid.seq_len
    mean = (came[:, 0] * share).sum(0)
    variance = ((came[:, 1] + (came[:, 0] - mean) ** 2) * share).sum(0)
    scale = (variance + module.eps).rsqrt().repeat_interleave(x.shape[1] // module.num_groups, 1)
    shift = -mean.repeat_interleave(x.shape[1] // module.num_groups, 1) * scale
    if module.weight is not None:
        scale, shift = scale * module.weight.to(wide), shift * module.weight.to(wide) + module.bias.to(wide)
    shape = (*scale.shape, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x.to(wide), scale.view(shape)).to(x.dtype)


def _put_back(module: nn.Module, own: Callable[..., Tensor]) -> None:
    """A module's forward as it was."""
    if getattr(own, "__func__", None) is type(module).forward:
        del module.forward
    else:
        module.forward = own
