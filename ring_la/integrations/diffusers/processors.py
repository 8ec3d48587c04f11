"""The library's attention processors, whose attention function is ours."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ...errors import UnsupportedError

Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""q, k and v ``[B, T, H, D]`` and the scale; the output."""


def split_class(kind: type, attend: Attend) -> type:
    """The same class of processors, which calls `attend` where it called the library's or PyTorch's attention.

    Raises:
        UnsupportedError: it calls neither (another version of the library).
    """
    call = split_function(kind.__name__, kind.__call__, attend)
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "ring_la": True})


def split_function(name: str, function: Callable, attend: Attend) -> Callable:
    """A copy of a function of `name` that calls `attend` where it called the library's or PyTorch's attention."""
    inner = inspect.unwrap(function)
    if "dispatch_attention_fn" in inner.__code__.co_names:
        scope = {"dispatch_attention_fn": _dispatch(name, attend)}
        if "F" in inner.__code__.co_names:
            scope["F"] = _Functional(name, attend)  # type: ignore[assignment]
    elif {"F", "scaled_dot_product_attention"} <= set(inner.__code__.co_names):
        scope = {"F": _Functional(name, attend)}  # type: ignore[dict-item]
    else:
        expected = "processors that call dispatch_attention_fn or F.scaled_dot_product_attention"
        raise UnsupportedError("transformer", expected, f"one with {name}")
    code = inner.__code__.replace()  # a copy: torch.compile finds its graphs by the code, whose globals are others here
    around = {**inner.__globals__, **scope}
    del around["__name__"]  # by which torch.compile would look into the library's own globals instead
    call = types.FunctionType(code, around, inner.__name__, inner.__defaults__)
    call.__kwdefaults__, call.__annotations__ = inner.__kwdefaults__, inner.__annotations__
    return call


def _dispatch(name: str, attend: Attend) -> Callable:
    """In place of the library's dispatcher."""

    def dispatch_attention_fn(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
        attention_kwargs=None,
        *,
        backend=None,
        parallel_config=None,
    ):
        given = dict(
            attention_kwargs=attention_kwargs, parallel_config=parallel_config
        )  # the kernel is taken elsewhere
        _refuse(name, attn_mask, dropout_p, is_causal, **given)
        return attend(query, key, value, scale)

    return dispatch_attention_fn


class _Functional:
    """torch.nn.functional with our attention."""

    def __init__(self, name: str, attend: Attend) -> None:
        self._name, self._attend = name, attend

    def __getattr__(self, name: str) -> object:
        return getattr(F, name)

    def pad(self, x, *args, **keywords):
        return x if isinstance(x, EveryKey) else F.pad(x, *args, **keywords)

    def scaled_dot_product_attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        """Its tensors are ``[B, H, T, D]``, or of one head ``[B, T, D]``."""
        _refuse(self._name, attn_mask, dropout_p, is_causal)
        if query.dim() == 3:
            return self._attend(query[:, :, None], key[:, :, None], value[:, :, None], scale)[:, :, 0]
        out = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale)
        return out.transpose(1, 2)


class EveryKey:
    """In place of a mask that a processor works on before it gives it to attention, which knows the mask otherwise."""

    shape = (0, 0)

    def bool(self) -> EveryKey:
        return self

    def view(self, *shape: int) -> EveryKey:
        return self

    repeat = expand = transpose = __and__ = view


def _refuse(name: str, attn_mask, dropout_p, is_causal, **others: object) -> None:
    """Masks are taken where they come into a block; no model here has the rest."""
    given = dict(attn_mask=attn_mask, dropout_p=dropout_p or None, is_causal=is_causal or None) | others
    for argument, value in given.items():
        if value is not None and not isinstance(value, EveryKey):
            raise UnsupportedError(argument, "attention without it on a split sequence", f"it is given in {name}")
