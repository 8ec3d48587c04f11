"""A layer with xFuserLongContextAttention's interface.

Joint tensors are a diffusion model's text, the same on every rank. Unlike upstream's ring, gradients flow into joint
keys and values too: each rank gets the part of its queries and heads, which summed over the ranks is the whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, UnsupportedError, describe_tensor
from ...softmax.geometry import Run, Tokens
from ...softmax.tensors import Tensors, check_tensors
from .. import yunchang
from ..yunchang.call import Masks, UpstreamCall, checked, group_of, settled
from ..yunchang.layers import attend


class LongContextAttention(yunchang.LongContextAttention):
    """Ulysses × ring attention with joint tokens.

    The constructor takes xDiT's arguments. A kv cache (PipeFusion's) and descaling factors (FP8 kernels') are refused.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_kv_cache: bool = False,
        use_sync: bool = False,
        attn_type: object = None,
        attn_processor: nn.Module | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
    ) -> None:
        super().__init__(scatter_idx, gather_idx, ring_impl_type, use_pack_qkv, use_sync, attn_type, attn_processor)
        if use_kv_cache:
            raise UnsupportedError("use_kv_cache", "False", True, "Its cache lives in xDiT's own layer")
        for name, value in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
            if value is not None:
                raise UnsupportedError(name, "None", type(value).__name__, "No kernel here takes FP8")

    def forward(  # type: ignore[override]
        self,
        attn: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        joint_tensor_query: Tensor | None = None,
        joint_tensor_key: Tensor | None = None,
        joint_tensor_value: Tensor | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        joint_strategy: str = "none",
    ) -> Tensor:
        """Attention of this rank's tokens, and of the joint ones before ("front") or after ("rear") them.

        Args:
            attn: the layer that calls; only upstream's kv cache uses it.
        """
        joint: tuple[Any, ...] = (joint_tensor_query, joint_tensor_key, joint_tensor_value)
        x, groups = Tensors(query, key, value), (group_of(self.ring_pg), group_of(self.ulysses_pg))
        masks = Masks(dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic)

        make = partial(self._checked, x, joint, joint_strategy, masks, return_attn_probs)
        call, met = settled(groups, (*x.qkv, *joint), make, joint_strategy=joint_strategy), None
        if joint_strategy != "none":
            q = torch.cat([joint[0], query] if joint_strategy == "front" else [query, joint[0]], 1)
            x = Tensors(q, key, value, joint_k=joint[1], joint_v=joint[2])
            met = _joint_tokens(x.q, joint[1], groups[1].size)
        return attend(call, x, *groups, met)

    def _checked(
        self, x: Tensors, joint: tuple[Any, ...], where: str, masks: Masks, probabilities: bool
    ) -> UpstreamCall:
        """The call that the arguments describe, refused where they contradict each other."""
        if any(t is not None for t in joint):
            check_tensors(x, "none", None)
            _check_joint(x, joint, where, masks)
        elif where != "none":
            raise ArgumentError("joint_strategy", "'none' without joint tensors", repr(where))
        x = x._replace(joint_k=joint[1], joint_v=joint[2])
        return checked(self.kind, x, masks, self.attn_type, probabilities)


def _check_joint(x: Tensors, joint: tuple[Any, ...], where: str, masks: Masks) -> None:
    """Refuse joint tensors that are not whole, or come with what a query without a position has no part in."""
    if any(t is None for t in joint):
        raise ArgumentError("joint_tensor_query, joint_tensor_key, joint_tensor_value", "all three or none", "some")
    if where not in ("front", "rear"):
        raise ArgumentError("joint_strategy", "'front' or 'rear' with joint tensors", repr(where))
    windowed = masks.window_size not in ((-1, -1), [-1, -1])
    if masks.causal or windowed or masks.alibi_slopes is not None or masks.dropout_p:
        expected = "no causal, window_size, alibi_slopes or dropout_p with joint tensors"
        raise UnsupportedError("joint_strategy", expected, repr(where), "Joint queries have no position")
    q, query = joint[0], x.q
    if not isinstance(q, Tensor) or q.dtype != query.dtype or q.dim() != 4 or q[:, :0].shape != query[:, :0].shape:
        expected = f"[B, Tj, H, D] = {[len(query), 'Tj', *query.shape[2:]]}, {query.dtype}"
        raise ArgumentError("joint_tensor_query", expected, describe_tensor(q))


def _joint_tokens(q: Tensor, joint_k: Tensor, ulysses: int) -> tuple[Tokens, Tokens]:
    """Queries and joint keys of a call without positions: every query sees every joint key."""
    rows, count, device = q.shape[1] * ulysses, joint_k.shape[1], q.device
    return Tokens([Run(0, rows, 0, 0, 0)], rows, device), Tokens.joint(count, device, -count, 0)


xFuserLongContextAttention = LongContextAttention
"""xDiT's own name of the layer."""
