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

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...kernels.fused.rms_norm import rms_norm
from ...recurrences import gated_delta_rule, kda

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""How far a norm may be from ours, relative to its size, and still be rounding; of other dtypes `CLOSE_OTHERWISE`."""
CLOSE_OTHERWISE = 0.01
SCALE = "_ring_la_scale"
"""The name under which a norm has what it multiplies by."""
PROBES = 4
"""Random vectors that a norm is tried on."""


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
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = list(inspect.signature(module.forward).parameters)
    if weight is None or weight.dim() != 1 or isinstance(weight, DTensor) or weight.is_meta or len(names) not in (1, 2):
        return None
    if not isinstance(eps, float) or "Norm" not in type(module).__name__:
        return None
    dice = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(PROBES, len(weight), generator=dice).to(weight) for _ in range(2))
    given = (x, gate)[: len(names)]
    with torch.no_grad():
        want = module(*given)
        for scale in (weight.detach(), 1 + weight.detach().float()):
            for silu in (True, False)[: len(names)]:
                got = _rms_norm(scale, silu, eps, *given)
                if isinstance(want, Tensor) and want.shape == x.shape and _same(got, want):
                    module.register_buffer(SCALE, scale, persistent=False)  # which goes where the module goes
                    return partial(_normed, module, silu, eps)
    return None


def _normed(module: nn.Module, silu: bool, eps: float, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    return _rms_norm(getattr(module, SCALE), silu, eps, hidden_states, gate)


def _rms_norm(scale: Tensor, silu: bool, eps: float, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    x = hidden_states.contiguous()
    return rms_norm(x, scale, None if gate is None else gate.contiguous(), silu=silu, eps=eps)


def _same(got: Tensor, want: Tensor) -> bool:
    apart = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    return got.dtype == want.dtype and apart <= CLOSE.get(want.dtype, CLOSE_OTHERWISE)


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
