"""The tensors of a call that gradients flow into."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import is_floats
from ..errors import ArgumentError, UnsupportedError, describe_tensor


class Tensors(NamedTuple):
    """The tensors of a call that plans do not hold: the differentiable ones, and which keys each query has chosen.

    Attributes:
        k, v: what travels of each key: it and its value; or its latent ``[B, Tk, 1, L]`` and its rotary part
            ``[B, Tk, 1, R]``.
        up_k, up_v: where latents travel, what makes keys ``[H, N, L]`` and values ``[H, V, L]`` of them.
        chosen: where queries see chosen keys alone, places in the whole sequence, int ``[B, Tq, Hk or 1, S]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    joint_k: Tensor | None = None
    joint_v: Tensor | None = None
    up_k: Tensor | None = None
    up_v: Tensor | None = None
    chosen: Tensor | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """What every call has."""
        return self.q, self.k, self.v

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """All but the last."""
        return self[:-1]

    @property
    def latent(self) -> bool:
        """Whether latents travel."""
        return self.up_k is not None

    @property
    def value_width(self) -> int:
        """V."""
        return self.v.shape[3] if self.up_v is None else self.up_v.shape[1]

    @property
    def kind(self) -> tuple[torch.device, torch.dtype, int, int, int, int]:
        """Device and dtype of q, H, Hk, K and V of what kernels compute on: what a kernel is chosen by."""
        H, K = self.q.shape[2:]
        return self.q.device, self.q.dtype, H, H if self.latent else self.k.shape[2], K, self.value_width

    @property
    def moved(self) -> tuple[int, int]:
        """Numbers a query has, and half of those that travel of a key."""
        return prod(self.q.shape[2:]), (prod(self.k.shape[2:]) + prod(self.v.shape[2:])) // 2

    @property
    def names(self) -> tuple[str, ...]:
        """What the caller calls them."""
        return OF_LATENTS if self.latent else self._fields

    @property
    def names_by_token(self) -> tuple[str, str, str]:
        """What the caller calls q, k and v, or what stands in their places."""
        return ("q", "latent", "k_rope") if self.latent else ("q", "k", "v")

    def named(self) -> zip[tuple[str, Tensor | None]]:
        """Each with its name."""
        return zip(self.names, self)


OF_LATENTS = ("q", "latent", "k_rope", "sinks", "joint_k", "joint_v", "w_uk", "w_uv", "chosen")


def name_of(x: Tensors) -> str:
    """Of the function that was called."""
    return "mla" if x.latent else "attention" if x.chosen is None else "sparse_attention"


def check_tensors(x: Tensors, joint: str, alibi_slopes: Tensor | None) -> None:
    """Refuse what is not a float tensor of the right shape, dtype and device."""
    for name, t in x.named():
        if (t is None and name not in x.names_by_token) or name == "chosen":
            continue
        if not is_floats(t):
            raise ArgumentError(name, "a dense tensor of fp16, bf16, fp32 or fp64", describe_tensor(t))
    if x.latent:
        _check_latents(x)
    else:
        _check_shapes(x)
    if x.sinks is not None and list(x.sinks.shape) != [x.q.shape[2]]:
        raise ArgumentError("sinks", f"[H] = [{x.q.shape[2]}]", list(x.sinks.shape))
    _check_joint(x, joint)
    if x.chosen is not None:
        _check_chosen(x)
    if alibi_slopes is not None:
        B, H = x.q.shape[0], x.q.shape[2]
        if not is_floats(alibi_slopes) or list(alibi_slopes.shape) not in ([H], [B, H]):
            expected = f"a float tensor [H] = [{H}] or [B, H] = [{B}, {H}]"
            raise ArgumentError("alibi_slopes", expected, describe_tensor(alibi_slopes))
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


def _check_latents(x: Tensors) -> None:
    """`latent` and `k_rope` have got a dimension of one head here that the caller's do not have."""
    if x.q.dim() != 4:
        raise ArgumentError("q", "four dimensions [B, T, H, N + R]", list(x.q.shape))
    for name, t in (("latent", x.k), ("k_rope", x.v)):
        if t.dim() != 4 or t.shape[2] != 1:
            raise ArgumentError(name, "three dimensions [B, Tk, ·]", list(t.shape))
    for name, t in x.named():
        if t is not None and name not in ("sinks", "chosen") and t.dtype != x.q.dtype:
            raise ArgumentError(name, f"{x.q.dtype}, the dtype of q", t.dtype)
    (B, _, H, K), (Tk, L), R = x.q.shape, (x.k.shape[1], x.k.shape[3]), x.v.shape[3]
    if x.k.shape[0] != B or not L:
        raise ArgumentError("latent", f"[B, Tk, L] with B={B}, L ≥ 1", _without_head(x.k))
    if list(x.v.shape[:2]) != [B, Tk]:
        raise ArgumentError("k_rope", f"[B, Tk, R] with B={B}, Tk={Tk}", _without_head(x.v))
    N = K - R
    if N < 1 or list(x.up_k.shape) != [H, N, L]:
        expected = f"[H, N, L] with H={H}, L={L} and N = {N}, the {K} channels of q without the {R} of k_rope"
        raise ArgumentError("w_uk", expected, list(x.up_k.shape))
    if x.up_v.dim() != 3 or [x.up_v.shape[0], x.up_v.shape[2]] != [H, L]:
        raise ArgumentError("w_uv", f"[H, V, L] with H={H}, L={L}", list(x.up_v.shape))


def _check_chosen(x: Tensors) -> None:
    t, (B, Tq), Hk = x.chosen, x.q.shape[:2], x.k.shape[2]
    if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64) or t.layout is not torch.strided:
        raise ArgumentError("chosen", "a dense int32 or int64 tensor", describe_tensor(t))
    if t.dim() != 4 or list(t.shape[:2]) != [B, Tq] or t.shape[2] not in (1, Hk):
        heads = "1" if Hk == 1 else f"1 or {Hk}"
        raise ArgumentError("chosen", f"[B, Tq, heads, S] with B={B}, Tq={Tq}, {heads} heads", list(t.shape))


def check_choice(chosen: Tensor, block: int, tokens: int) -> None:
    """Refuse places that are none of the `tokens`, and blocks of a query that overlap; synchronises."""
    low, high = (int(x) for x in chosen.aminmax()) if chosen.numel() else (-1, -1)
    if low < -1 or high >= tokens:
        raise ArgumentError("chosen", f"places from 0 to {tokens - 1}, or −1", f"{low} to {high}")
    places = chosen.sort(-1).values
    if bool(((places.diff(dim=-1) < block) & (places[..., :-1] >= 0)).any()):
        raise ArgumentError("chosen", f"blocks of {block} that do not overlap", "a query with some that do")


def _without_head(t: Tensor) -> list[int]:
    return [*t.shape[:2], *t.shape[3:]]


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
