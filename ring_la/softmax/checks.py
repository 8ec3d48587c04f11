"""What a call of softmax attention asks for besides its tensors, and the checks of both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import FLOATS, check_flag, check_scale, is_finite
from ..context import ATTENTION
from ..errors import ArgumentError, UnsupportedError, describe_tensor
from .backends import BACKENDS
from .core import Tensors


class Options(NamedTuple):
    """The keywords of a call that are no differentiable tensors, as the caller gave them."""

    causal: bool
    scale: float | None
    softcap: float
    window: tuple[int, int]
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: int | None
    joint: str
    strategy: str | None
    backend: str | None

    @property
    def bounds(self) -> tuple[int, int]:
        """How far a query sees to the left and right; −1: all the way."""
        return int(self.window[0]), 0 if self.causal else int(self.window[1])

    def scale_of(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    def seed(self) -> Tensor | None:
        """The seed of this call's dropout mask, on the CPU; None without dropout."""
        if not self.dropout_p:
            return None
        return torch.randint(2**62, ()) if self.dropout_seed is None else torch.tensor(self.dropout_seed)


def check_tensors(x: Tensors, joint: str, alibi_slopes: Tensor | None) -> None:
    """Refuse what is not a float tensor of the right shape, dtype and device."""
    for name, t in zip(Tensors._fields, x):
        if t is None and name not in ("q", "k", "v"):
            continue
        if not isinstance(t, Tensor) or t.dtype not in FLOATS:
            raise ArgumentError(name, "a tensor of fp16, bf16, fp32 or fp64", describe_tensor(t))
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
    _check_joint(x, joint)
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, Tensor) or list(alibi_slopes.shape) not in ([H], [B, H]):
            raise ArgumentError("alibi_slopes", f"[H] = [{H}] or [B, H] = [{B}, {H}]", describe_tensor(alibi_slopes))
        if alibi_slopes.requires_grad:
            raise UnsupportedError("alibi_slopes", "constants", "a tensor that requires a gradient", "Detach it")
    for name, t in (*zip(Tensors._fields, x), ("alibi_slopes", alibi_slopes)):
        if t is not None and t.device != x.q.device:
            raise ArgumentError(name, f"a tensor on {x.q.device}, where q is", t.device)


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


def check_options(o: Options) -> None:
    """Refuse keywords that are out of range."""
    check_flag("causal", o.causal)
    check_scale(o.scale)
    if not is_finite(o.softcap) or o.softcap < 0:
        raise ArgumentError("softcap", "a finite number ≥ 0", repr(o.softcap))
    pair = isinstance(o.window, (tuple, list)) and len(o.window) == 2 and all(isinstance(w, int) for w in o.window)
    if not pair or min(o.window) < -1:
        raise ArgumentError("window", "(left, right), two ints, each −1 or more", repr(o.window))
    if not is_finite(o.dropout_p) or not 0 <= o.dropout_p < 1:
        raise ArgumentError("dropout_p", "0 ≤ dropout_p < 1", repr(o.dropout_p))
    if o.dropout_seed is not None and (not isinstance(o.dropout_seed, int) or not 0 <= o.dropout_seed < 2**63):
        raise ArgumentError("dropout_seed", "None or an int from 0 to 2**63 − 1", repr(o.dropout_seed))
    if o.joint == "rear" and o.causal:
        raise UnsupportedError("joint", "'front' where causal", "'rear'", "No query sees keys after its own position")
    if o.strategy is not None and o.strategy not in ATTENTION:
        raise ArgumentError("strategy", f"None or one of {', '.join(ATTENTION)}", repr(o.strategy))
    if o.backend not in (None, "reference", *BACKENDS):
        raise ArgumentError("backend", f"None or one of {', '.join(BACKENDS)}, reference", repr(o.backend))
