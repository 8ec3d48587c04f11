"""An entry for xDiT's attention registry: one block of its ring by our kernels."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from ...checks import is_floats
from ...errors import ArgumentError, UnsupportedError, describe_tensor
from ...softmax import attention

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
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_heads_first(name, x)
    given = entries("attention_kwargs", attention_kwargs)
    scale, valid = given.pop("scale", None), given.pop("valid_kv_len", None)
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


def check_heads_first(name: str, x: object) -> None:
    """Refuse what is no tensor as xDiT has them."""
    if not is_floats(x, 4):
        raise ArgumentError(name, "a float tensor [B, H, T, D]", describe_tensor(x))


def entries(name: str, given: object) -> dict[str, Any]:
    """What is set in a mapping of xDiT's, but for what says nothing about the result."""
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        raise ArgumentError(name, "a mapping by names, or None", describe_tensor(given))
    kept = {key: value for key, value in (given or {}).items() if value is not None and key != "thw"}
    return {key: value for key, value in kept.items() if not key.startswith(SPARSE) or key in TENSORS}


def _check_padding(key: Tensor, valid: object, longest: object) -> None:
    if isinstance(longest, Tensor) and longest.numel() == 1:
        longest = int(longest)
    if not isinstance(valid, int) or isinstance(valid, bool) or not 0 < valid <= key.shape[2]:
        raise ArgumentError("attention_kwargs", f"valid_kv_len in 1 … {key.shape[2]}, the keys", repr(valid))
    if not isinstance(longest, int) or longest != valid:
        raise ArgumentError("attention_kwargs", f"max_seqlen_k of {valid}, as valid_kv_len", repr(longest))


def register(registry: MutableMapping[Any, Callable], key: Any = "SDPA_FLASH") -> Callable | None:
    """Enter `attention_function` in xDiT's ATTENTION_FUNCTION_REGISTRY under `key`; returns what stood there.

        taken = register(ATTENTION_FUNCTION_REGISTRY)                   # then --attention_backend sdpa_flash is ours
        ATTENTION_FUNCTION_REGISTRY[AttentionBackendType.SDPA_FLASH] = taken          # and is xDiT's again

    Args:
        registry: a mapping from members of an enumeration (xDiT 0.7, which selects by nothing else) or from names.
        key: a member, or its name in any case. The default is one that xDiT lets take part in ring attention.

    Raises:
        ArgumentError: no registry; it has members for keys, and `key` is none of them.
    """
    if not isinstance(registry, MutableMapping):
        raise ArgumentError("registry", "xDiT's ATTENTION_FUNCTION_REGISTRY, a mapping", type(registry).__name__)
    kinds = {type(k) for k in registry if isinstance(k, enum.Enum)}
    if kinds and isinstance(key, str):
        members = {member.name: member for kind in kinds for member in kind}
        if key.upper() not in members:
            raise ArgumentError("key", f"one of {', '.join(members)}", repr(key), "xDiT selects by these alone")
        key = members[key.upper()]
    if not isinstance(key, tuple(kinds) or Hashable) or key is None:
        raise ArgumentError("key", "a member of xDiT's enumeration, or a name", repr(key))
    before = registry.get(key)
    registry[key] = attention_function
    return before
