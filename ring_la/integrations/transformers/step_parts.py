"""Parts of a step in fewer launches: the library's norms and recurrences by functions of ours.

A step at fixed addresses is a CUDA graph, whose time is that of its launches. Of those most are in what is small: an
RMS norm is ten of them, a token of a delta rule thirty. Whether a norm is one of ours is not read but measured: it is
put to random vectors, and what is not the same stays the library's.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...recurrences import gated_delta_rule, kda
from .norms import Form, form_of

SCALE = "_ring_la_scale"
"""The name under which a norm has what it multiplies by."""


def shorten(model: nn.Module, in_step: Callable[[], bool]) -> int:
    """Have the norms and recurrences of a model computed by ours where `in_step`; returns how many are.

    Weights of norms are read once: what is written into them later is not seen in steps.
    """
    count = 0
    for module in model.modules():
        ours = _norm(module) or _mixer(module)
        if ours is not None:
            changed: Any = module
            changed.forward = partial(_either, module.forward, ours, in_step)
            count += 1
    return count


def _either(
    own: Callable[..., Any], ours: Callable[..., Any], in_step: Callable[[], bool], *args: Any, **keywords: Any
):
    return (ours if in_step() else own)(*args, **keywords)


# -- norms -------------------------------------------------------------------------------------------------


def _norm(module: nn.Module) -> Callable[..., Tensor] | None:
    """Ours in place of a module's forward, if they are seen to be the same."""
    form = form_of(module)
    weight: Any = module._parameters.get("weight")
    if form is None or isinstance(weight, DTensor) or weight.is_meta:
        return None
    module.register_buffer(SCALE, form.scale(weight.detach()), persistent=False)  # which goes where the module goes
    return partial(_normed, module, form)


def _normed(module: nn.Module, form: Form, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    return form(hidden_states, getattr(module, SCALE), gate)


# -- recurrences -------------------------------------------------------------------------------------------


def _mixer(module: nn.Module) -> Callable[..., Any] | None:
    """A mixer's forward whose recurrence of one token is ours."""
    inner: Any = inspect.unwrap(type(module).forward)
    names = [name for name in RECURRENCES if name in getattr(getattr(inner, "__code__", None), "co_names", ())]
    if not names:
        return None
    scope = inner.__globals__ | {name: RECURRENCES[name] for name in names}
    forward = types.FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    forward.__kwdefaults__ = inner.__kwdefaults__
    return types.MethodType(forward, module)


def _token_of(rule: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A delta rule under the library's names: tensors ``[N, 1, H, ·]``, states ``[N, H, K, V]``."""

    def operator(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        return tuple(
            rule(
                *(query, key, value, g, beta),
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm=use_qk_l2norm_in_kernel,
            )
        )

    return operator


RECURRENCES = {
    "torch_recurrent_gated_delta_rule": _token_of(gated_delta_rule),
    "recurrent_kimi_delta_attention": _token_of(kda),
}
"""Names by which mixers call the recurrence of a token, in the versions of the library that are supported."""
