"""xDiT over ring_la: a layer with xFuserLongContextAttention's interface, and an entry for its attention registry.

Joint tensors are a diffusion model's text, the same on every rank. Unlike upstream's ring, gradients flow into joint
keys and values too: each rank gets the part of its queries and heads, which summed over the ranks is the whole.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, UnsupportedError, describe_tensor
from ..softmax import attention
from ..softmax.geometry import Run, Tokens
from ..softmax.tensors import Tensors
from . import yunchang
from .yunchang.call import Masks, UpstreamCall, checked, group_of, settled
from .yunchang.layers import attend


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
        joint = (joint_tensor_query, joint_tensor_key, joint_tensor_value)
        x, groups = Tensors(query, key, value), (group_of(self.ring_pg), group_of(self.ulysses_pg))
        masks = Masks(dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic)

        def make() -> UpstreamCall:
            if any(t is not None for t in joint):
                _check_joint(x, joint, joint_strategy, masks)
            elif joint_strategy != "none":
                raise ArgumentError("joint_strategy", "'none' without joint tensors", repr(joint_strategy))
            return checked(self.kind, x._replace(joint_k=joint[1], joint_v=joint[2]), masks, self.attn_type)

        call, met = settled(groups, (*x[:3], *joint), make, joint_strategy), None
        if joint_strategy != "none":
            q = torch.cat([joint[0], query] if joint_strategy == "front" else [query, joint[0]], 1)
            x = Tensors(q, key, value, joint_k=joint[1], joint_v=joint[2])
            met = _joint_tokens(x, groups[1].size)
        return attend(call, x, *groups, met)


def _check_joint(x: Tensors, joint, where: str, masks: Masks) -> None:
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


xFuserLongContextAttention = LongContextAttention
"""xDiT's own name of the layer."""


def _joint_tokens(x: Tensors, ulysses: int) -> tuple[Tokens, Tokens]:
    """Queries and joint keys of a call without positions: every query sees every joint key."""
    rows, count, device = x.q.shape[1] * ulysses, x.joint_k.shape[1], x.q.device
    return Tokens([Run(0, rows, 0, 0, 0)], rows, device), Tokens.joint(count, device, -count, 0)


SPARSE = ("spargeattn_", "use_spargeattn_", "vsa_", "use_vsa_")
"""How entries of `attention_kwargs` begin that tune xDiT's sparse kernels and say nothing about the result wanted."""

TENSORS = ("vsa_h3_gate", "vsa_h3_metadata")
"""Those among them that do: inputs of another attention."""


def attention_function(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """One block as xDiT's registry calls it (0.7): ``[B, H, T, D]`` tensors; returns (out, lse ``[B, H, T]``).

    Args:
        attention_kwargs: ``scale``; ``valid_kv_len``, from which on keys are padding and are left out, with
            or without the indices of the same keys (``indices_k``, ``cu_seqlens_k``, ``max_seqlen_k``). ``thw``, the
            grid of tokens, and what tunes sparse kernels (`SPARSE`) do not change exact attention. What else is set
            is another kernel's and is refused.

    Raises:
        ArgumentError, UnsupportedError: naming attention_kwargs and the entry.
    """
    given = {name: value for name, value in (attention_kwargs or {}).items() if value is not None}
    scale, valid = given.pop("scale", None), given.pop("valid_kv_len", None)
    given.pop("thw", None)
    given = {name: value for name, value in given.items() if not name.startswith(SPARSE) or name in TENSORS}
    if valid is not None:
        _check_padding(key, valid, given.pop("max_seqlen_k", valid))
        if is_causal and valid != query.shape[2]:
            raise UnsupportedError("attention_kwargs", "no valid_kv_len with is_causal", valid)
        key, value = key[:, :, :valid], value[:, :, :valid]
        given.pop("indices_k", None), given.pop("cu_seqlens_k", None)
    if given:
        expected = "no entry but 'scale', 'valid_kv_len', 'thw' and those of sparse kernels"
        raise UnsupportedError("attention_kwargs", expected, sorted(given), "Take xDiT's own backend for masks")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(q, k, v, causal=is_causal, dropout_p=dropout_p, scale=scale)
    return out.o.transpose(1, 2), out.lse


def _check_padding(key: Tensor, valid: object, longest: object) -> None:
    if not isinstance(valid, int) or not 0 < valid <= key.shape[2]:
        raise ArgumentError("attention_kwargs", f"valid_kv_len in 1 … {key.shape[2]}, the keys", repr(valid))
    if longest != valid:
        raise ArgumentError("attention_kwargs", f"max_seqlen_k of {valid}, as valid_kv_len", repr(longest))


def register(registry: MutableMapping[Any, Callable], key: Any = "SDPA_FLASH") -> Callable | None:
    """Enter `attention_function` in xDiT's ATTENTION_FUNCTION_REGISTRY under `key`; returns what stood there.

        taken = register(ATTENTION_FUNCTION_REGISTRY)                   # then --attention_backend sdpa_flash is ours
        ATTENTION_FUNCTION_REGISTRY[AttentionBackendType.SDPA_FLASH] = taken          # and is xDiT's again

    Args:
        registry: a mapping from members of an enumeration (xDiT 0.7, which selects by nothing else) or from names.
        key: a member, or its name in any case. The default is one that xDiT lets take part in ring attention.

    Raises:
        ArgumentError: `registry` has members for keys, none of that name.
    """
    kinds = {type(k) for k in registry if isinstance(k, enum.Enum)}
    if kinds and isinstance(key, str):
        members = {member.name: member for kind in kinds for member in kind}
        if key.upper() not in members:
            raise ArgumentError("key", f"one of {', '.join(members)}", repr(key), "xDiT selects by these alone")
        key = members[key.upper()]
    before = registry.get(key)
    registry[key] = attention_function
    return before


def install() -> Callable[[], None]:
    """Put ours where the models of xfuser 0.7 call: ring attention (`usp.ring_attn`), Ulysses' exchange and the Sana
    layer, whose keys and values then travel no more: one sum of states does. Returns what puts xDiT's own back.

        back = ring_la.integrations.xdit.install()  # before or after models are built
        ...
        back()

    Unlike `register`, which computes a block of xDiT's ring, the ring itself is ours.

    Raises:
        UnsupportedError: xfuser is not there, or is of a version without one of these.
    """
    from .xdit_models import put_into_models

    return put_into_models()
