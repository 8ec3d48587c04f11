"""ring_la where the models of xfuser 0.7 call: `install` replaces three things of its modules.

    usp.ring_attn                     a ring over RING_PG that takes xDiT's attention function a block: ours, whole
    usp._sdpa_all_to_all_single       Ulysses' exchange over ULYSSES_PG, one of our messages
    xFuserSanaLinearLongContextAttention.forward
                                      linear attention: one sum of states over the sequence-parallel ranks, instead of
                                      all tokens by all-to-all and a ring of keys and values

Everything else of `usp.USP` (heads split, joint text, padding) is xDiT's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...checks import is_floats
from ...context import ContextParallel, ShardedLayout
from ...errors import ArgumentError, RingLAError, UnsupportedError, describe_tensor
from ...recurrences import linear_attention
from ...softmax import attention
from ...softmax.door import refuse
from ..yunchang.call import group_of
from .registry import check_heads_first, entries

USP = "xfuser.model_executor.layers.usp"
SANA = "xfuser.core.long_ctx_attention.hybrid.attn_layer"
PARALLEL = "xfuser.core.distributed"


def install() -> Callable[[], None]:
    """Put ours where the models of xfuser 0.7 call: ring attention (`usp.ring_attn`), Ulysses' exchange and the Sana
    layer, whose keys and values then travel no more: one sum of states does. Returns what puts xDiT's own back.

        back = ring_la.integrations.xdit.install()  # before or after models are built
        ...
        back()

    Unlike `register`, which computes a block of xDiT's ring, the ring itself is ours.

    Raises:
        UnsupportedError: xfuser is not there, finds no GPU, or is of a version without one of these.
    """
    usp, sana, parallel = (_module(name) for name in (USP, SANA, PARALLEL))
    layer = _there(sana, "xFuserSanaLinearLongContextAttention")
    contexts = Contexts()
    new = {
        (usp, "ring_attn"): ring_attention(usp, contexts),
        (usp, "_sdpa_all_to_all_single"): ulysses_exchange(usp),
        (layer, "forward"): sana_forward(parallel, contexts),
    }
    before = {(owner, name): _there(owner, name) for owner, name in new}
    for (owner, name), ours in new.items():
        setattr(owner, name, ours)

    def back() -> None:
        for (owner, name), theirs in before.items():
            setattr(owner, name, theirs)

    return back


LAYOUTS = 64
"""As many are kept of a group."""


class Contexts:
    """Layouts of process groups, and a ContextParallel for each group, made when they are first met. Collective over
    the group."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[dist.ProcessGroup, ContextParallel] = WeakKeyDictionary()
        self._layouts: WeakKeyDictionary[dist.ProcessGroup, dict[int, ShardedLayout]] = WeakKeyDictionary()

    def layout(self, group: dist.ProcessGroup, tokens: int) -> ShardedLayout:
        """The layout of a sequence of which each rank of `group` has `tokens` tokens, in order."""
        if group not in self._made:
            self._made[group], self._layouts[group] = ContextParallel(group, scan="ring"), {}
        cp, kept = self._made[group], self._layouts[group]
        if tokens not in kept:
            if len(kept) == LAYOUTS:
                del kept[next(iter(kept))]
            kept[tokens] = cp.layout(cp.size * tokens, "contiguous")
        return kept[tokens]


def ring_attention(usp: ModuleType, contexts: Contexts) -> Callable[..., Tensor]:
    """In place of `usp.ring_attn`: ``[B, H, T, D]`` of the ring's ranks, which have equally many tokens. With joint
    keys the query may have joint tokens more, which every rank has whole; all of them see all keys."""

    def ring_attn(
        attention_function: Callable,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        joint_attn_kwargs: dict[str, Any] | None = None,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_heads_first(name, x)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        layout, keys = (contexts.layout(usp.PROCESS_GROUP.RING_PG, x.shape[1]) for x in (q, k))
        how: dict[str, Any] = dict(causal=is_causal, dropout_p=dropout_p, layout=layout)
        try:
            how |= {"scale": _scale(attention_kwargs, key)} | _joint(joint_attn_kwargs)
            if keys is not layout and ("joint" not in how or is_causal):
                got = f"{k.shape[1]}{', causal' if is_causal else ''}"
                raise UnsupportedError("key", f"as many tokens as query, {q.shape[1]}", got)
        except RingLAError as error:
            refuse("attention", error, layout)
        how |= {} if keys is layout else {"kv_layout": keys}
        return attention(q, k, v, **how).o.transpose(1, 2)

    return ring_attn


def _scale(attention_kwargs: dict[str, Any] | None, key: Tensor) -> float | None:
    """The scale of a call, after refusing what is no exact attention over all keys."""
    given = entries("attention_kwargs", attention_kwargs)
    scale, valid = given.pop("scale", None), given.pop("valid_kv_len", key.shape[2])
    if given or valid != key.shape[2]:
        got = sorted(given) or f"valid_kv_len {valid} of {key.shape[2]} keys"
        raise UnsupportedError("attention_kwargs", "all of a rank's keys in a ring", got)
    return scale


def _joint(joint_attn_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Joint keys and values of a call, as `attention` takes them; none where there are none."""
    given = entries("joint_attn_kwargs", joint_attn_kwargs)
    k: Any = given.get("joint_key")
    v: Any = given.get("joint_value")
    if k is None and v is None:
        return {}
    for name, x in (("joint_key", k), ("joint_value", v)):
        check_heads_first(name, x)
    if given.get("joint_strategy") not in ("front", "rear"):
        raise ArgumentError("joint_strategy", "'front' or 'rear' with joint keys", repr(given.get("joint_strategy")))
    return dict(joint_k=k.transpose(1, 2), joint_v=v.transpose(1, 2), joint=given["joint_strategy"])


def ulysses_exchange(usp: ModuleType) -> Callable[[Tensor], Tensor]:
    """In place of `usp._sdpa_all_to_all_single`: equal parts of the first dimension to each rank."""

    def _sdpa_all_to_all_single(x: Tensor) -> Tensor:
        group = group_of(usp.PROCESS_GROUP.ULYSSES_PG)
        if not isinstance(x, Tensor) or x.numel() % group.size:
            raise ArgumentError("x", f"a number of elements that {group.size} ranks divide", describe_tensor(x))
        raw = x.contiguous().view(group.size, -1)
        return group.all_to_all(raw.view(torch.uint8)).wait().view(x.dtype).view(x.shape)

    return _sdpa_all_to_all_single


def sana_forward(parallel: ModuleType, contexts: Contexts) -> Callable[..., Tensor]:
    """In place of the Sana layer's forward: q, k and v ``[B, T_local, H, D]``; o ``[B, T_local, H · D]``."""

    def forward(self: Any, attn: Any, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        for name, x in given.items():
            if isinstance(x, Tensor) or x not in (None, 0.0, False, "none", (-1, -1)):
                raise UnsupportedError(name, "its default in linear attention", x)
        if getattr(self, "use_kv_cache", False) and parallel.get_pipeline_parallel_world_size() > 1:
            raise UnsupportedError("use_kv_cache", "no PipeFusion", "a pipeline of several ranks")
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not is_floats(x, 4):
                raise ArgumentError(name, "a float tensor [B, T, H, D]", describe_tensor(x))
        layout = contexts.layout(parallel.get_sp_group().device_group, query.shape[1])
        how: dict[str, Any] = dict(
            causal=False, normalize=True, scale=1.0, eps=torch.finfo(torch.float32).eps, layout=layout
        )
        return linear_attention(F.relu(query), F.relu(key), value, **how).o.flatten(2)

    return forward


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, NotImplementedError) as error:  # the second of xfuser itself, where it finds no GPU
        raise UnsupportedError("xfuser", "0.7, installed", f"{name}: {error}") from error


def _there(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise UnsupportedError("xfuser", "version 0.7", f"{getattr(owner, '__name__', owner)} without {name}")
    return getattr(owner, name)
