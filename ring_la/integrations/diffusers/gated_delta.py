"""SANA-WM's bidirectional gated delta nets, a frame a step, over frames on all ranks.

A frame with keys K ``[S, D]``, values V, steps β and decay γ takes the state through

    S_t = γ (I - Kᵀ diag(β) K) S_(t-1) + Kᵀ diag(β) V

and reads the sum of what came from its own frame and all before, and from all frames behind it: two scans of affine
maps over ranks (`ContextParallel.scan`), fp32 whatever the tokens are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...context import GridLayout
from .linear import Running


def gated_delta(
    module: Any,
    running: Running,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    decay: Tensor,
    recall_gate: Tensor,
    num_frames: int,
    rotary_emb: Tensor | None = None,
    **masks: None,
) -> Tensor:
    """SanaWMBidirectionalGDNAttention: q, k and v ``[B, tokens, H, D]``, β ``[B, H, frames, S]``, γ ``[B, H, frames]``;
    o ``[B, tokens, H · D]``. Numerator of rotated q and k, denominator of plain ones."""
    grid, key = running.call.grid, _scaled(key, num_frames)
    wide = torch.promote_types(value.dtype, torch.float32)
    plain = [_by_frame(x.transpose(1, 2).to(wide), num_frames) for x in (query, key, value)]
    rotated = [x if rotary_emb is None else _rotate(x, rotary_emb) for x in (query, key)]
    q, k = (_by_frame(x.transpose(1, 2).to(wide), num_frames) for x in rotated)
    beta, decay = beta.to(wide).transpose(1, 2)[..., None], decay.to(wide).transpose(1, 2)[..., None, None]
    numerator = q @ _both_ways(grid, k, beta, decay, plain[2])
    ones = torch.ones_like(beta)
    denominator = plain[0] @ _both_ways(grid, plain[1], beta, decay, ones)
    o = (numerator / (denominator + module.eps)).to(value.dtype)
    return _by_token(o).transpose(1, 2).flatten(2)


def camera_gated_delta(
    module: Any,
    running: Running,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ray_transforms: tuple[Tensor, Tensor, Tensor, Tensor | None],
    beta: Tensor,
    decay: Tensor,
    num_frames: int,
    **masks: None,
) -> Tensor:
    """SanaWMBidirectionalGDNCamAttention: in the space of the camera's rays, without a denominator; where the way there
    makes keys longer, β is smaller."""
    from diffusers.models.transformers.transformer_sana_wm import _apply_ucpe_transform, _downscale_to_reference_rms

    grid, wide = running.call.grid, torch.promote_types(value.dtype, torch.float32)
    out, to_query, to_key, rotary = ray_transforms
    q, k, v = (x.transpose(1, 2) for x in (query, _scaled(key, num_frames), value))  # [B, H, tokens, D]

    def moved(x: Tensor, by: Tensor) -> Tensor:
        there = _apply_ucpe_transform(x, by, rotary)
        return _downscale_to_reference_rms(x.mT, there.mT).mT  # over dimension 2

    length = torch.linalg.vector_norm(k, dim=-1).clamp_min(1e-6)
    q, k, v = moved(q, to_query), moved(k, to_key), moved(v, to_key)
    grown = (torch.linalg.vector_norm(k, dim=-1).clamp_min(1e-6) / length) ** 2
    beta = beta / grown.unflatten(2, (num_frames, -1)).mean(-1, keepdim=True).clamp_min(1.0)
    beta, decay = beta.to(wide).transpose(1, 2)[..., None], decay.to(wide).transpose(1, 2)[..., None, None]
    q, k, v = (_by_frame(x.to(wide), num_frames) for x in (q, k, v))
    o = _by_token(q @ _both_ways(grid, k, beta, decay, v)).to(value.dtype)
    return _apply_ucpe_transform(o, out, rotary, inverse_rope=True).transpose(1, 2).flatten(2)


def _both_ways(grid: GridLayout, k: Tensor, beta: Tensor, decay: Tensor, v: Tensor) -> Tensor:
    """What each frame reads, ``[B, frames, H, D, V]``, of k and v ``[B, frames, H, S, D or V]``."""
    written = (k * beta).mT
    A = decay * (torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - written @ k)
    b, scan = written @ v, grid.cp.scan
    return scan(A, b, grid.slices) + scan(A, b, grid.slices, reverse=True, exclusive=True)


def _scaled(key: Tensor, num_frames: int) -> Tensor:
    return key * (key.shape[-1] ** -0.5 * (key.shape[1] // num_frames) ** -0.5)


def _by_frame(x: Tensor, frames: int) -> Tensor:
    """``[B, H, tokens, D]`` to ``[B, frames, H, S, D]``."""
    return x.unflatten(2, (frames, -1)).transpose(1, 2)


def _by_token(x: Tensor) -> Tensor:
    """The way back, to ``[B, H, tokens, D]``."""
    return x.transpose(1, 2).flatten(2, 3)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of channels of ``[B, tokens, H, D]`` turned by complex ``[1, 1, tokens, D / 2]``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    turned = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)).contiguous()) * angles.transpose(1, 2)
    return torch.view_as_real(turned).flatten(-2).type_as(x)
