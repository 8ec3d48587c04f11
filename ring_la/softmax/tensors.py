"""The tensors of a call that gradients flow into."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import FLOATS
from ..errors import ArgumentError, UnsupportedError, describe_tensor


class Tensors(NamedTuple):
    """The differentiable tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    joint_k: Tensor | None = None
    joint_v: Tensor | None = None

    @property
    def kind(self) -> tuple[torch.device, torch.dtype, int, int, int, int]:
        """Device and dtype of q, H, Hk, K and V: what a kernel is chosen by."""
        (H, K), (Hk, V) = self.q.shape[2:], self.v.shape[2:]
        return self.q.device, self.q.dtype, H, Hk, K, V

    def named(self) -> zip[tuple[str, Tensor | None]]:
        """Each with its name."""
        return zip(self._fields, self)


def check_tensors(x: Tensors, joint: str, alibi_slopes: Tensor | None) -> None:
    """Refuse what is not a float tensor of the right shape, dtype and device."""
    for name, t in x.named():
        if t is None and name not in ("q", "k", "v"):
            continue
        if not isinstance(t, Tensor) or t.dtype not in FLOATS:
            raise ArgumentError(name, "a tensor of fp16, bf16, fp32 or fp64", describe_tensor(t))
    _check_shapes(x)
    _check_joint(x, joint)
    if alibi_slopes is not None:
        B, H = x.q.shape[0], x.q.shape[2]
        if not isinstance(alibi_slopes, Tensor) or list(alibi_slopes.shape) not in ([H], [B, H]):
            raise ArgumentError("alibi_slopes", f"[H] = [{H}] or [B, H] = [{B}, {H}]", describe_tensor(alibi_slopes))
        if alibi_slopes.requires_grad:
            raise UnsupportedError("alibi_slopes", "constants", "a tensor that requires a gradient", "Detach it")
    for name, t in (*x.named(), ("alibi_slopes", alibi_slopes)):
        if t is not None and t.device != x.q.device:
            raise ArgumentError(name, f"a tensor on {x.q.device}, where q is", t.device)


def _check_shapes(x: Tensors) -> None:
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v)):
        if t.dim() != 4:
            raise ArgumentError(name, "four dimensions [B, T, H, D]", list(t.shape))
        if t.dtype != x.q.dtype:
            raise ArgumentError(name, f"{x.q.dtype}, the dtype of q", t.dtype)
    B, _, H, K = x.q.shape
    Tk, Hk = x.k.shape[1:3]
    if list(x.k.shape) != [B, Tk, Hk, K]:
        raise ArgumentError("k", f"[B, Tk, Hk, K] with B={B}, K={K}", list(x.k.shape))
    if list(x.v.shape[:3]) != [B, Tk, Hk]:
        raise ArgumentError("v", f"[B, Tk, Hk, V] with B={B}, Tk={Tk}, Hk={Hk}", list(x.v.shape))
    if K == 0:
        raise ArgumentError("q", "K ≥ 1 channels a head", list(x.q.shape))
    if Hk == 0 or H % Hk:
        raise ArgumentError("q", f"a number of heads that is a multiple of the {Hk} of k", H)
    if x.sinks is not None and list(x.sinks.shape) != [H]:
        raise ArgumentError("sinks", f"[H] = [{H}]", list(x.sinks.shape))


def _check_joint(x: Tensors, joint: str) -> None:
    given = x.joint_k is not None, x.joint_v is not None
    if joint not in ("none", "front", "rear"):
        raise ArgumentError("joint", "'front', 'rear' or 'none'", repr(joint))
    if given != ((joint != "none"),) * 2:
        expected = "'front' or 'rear' with joint_k and joint_v, 'none' without"
        raise ArgumentError("joint", expected, f"{joint!r}, joint_k given: {given[0]}, joint_v given: {given[1]}")
    if joint == "none":
        return
    (B, _, Hk, K), V = x.k.shape, x.v.shape[3]
    Tj = x.joint_k.shape[1] if x.joint_k.dim() > 1 else 0
    for name, t, D in (("joint_k", x.joint_k, K), ("joint_v", x.joint_v, V)):
        if list(t.shape) != [B, Tj, Hk, D]:
            raise ArgumentError(name, f"[B, Tj, Hk, D] with B={B}, Tj={Tj}, Hk={Hk}, D={D}", list(t.shape))
        if t.dtype != x.q.dtype:
            raise ArgumentError(name, f"{x.q.dtype}, the dtype of q", t.dtype)
