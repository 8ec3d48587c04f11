"""The checks of a recurrence's arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import check_flag, check_nan, check_scale, check_split, is_floats
from ..context import ShardedLayout
from ..errors import ArgumentError, UnsupportedError, describe_tensor
from ..kernels import Inputs, check_choice, state_dtype
from .definition import CommonOptions, Recurrence


def check(r: Recurrence, options: CommonOptions) -> None:
    """Refuse wrong shapes, dtypes, devices and choices. No synchronisation unless the layout validates always."""
    B, T, H, K, V = check_tensors(r)
    check_choice(options.mode, options.backend)
    check_flag("causal", r.causal)
    for name in ("use_qk_l2norm", "output_final_state", "in_place"):
        check_flag(name, getattr(options, name))
    check_scale(options.scale)
    deterministic = isinstance(options.layout, ShardedLayout) and options.layout.cp.deterministic
    if deterministic and (options.mode == "recurrent" or not r.causal):
        got = "mode='recurrent'" if r.causal else "causal=False"
        raise UnsupportedError("layout", f"one without deterministic=True for {got}", "a deterministic one")
    if not r.causal and (options.mode == "recurrent" or options.backend == "triton"):
        got = f"mode={options.mode!r}, backend={options.backend!r}"
        raise UnsupportedError("causal", "True for mode='recurrent' and backend='triton'", got)
    documents = check_split(T, B, options.layout, options.cu_seqlens, r.inputs.q.device, r.name("q"))
    if options.layout is not None and options.backend == "reference":
        expected = "None, 'triton' or 'torch' with a layout"
        raise UnsupportedError("backend", expected, "'reference'", "It runs on one device")
    state = options.initial_state
    if state is not None:
        shape = [documents, H, K, V if r.normalizer is None else V + 1]
        if not is_floats(state) or list(state.shape) != shape:
            raise ArgumentError("initial_state", f"a float tensor [N, H, K, V] = {shape}", describe_tensor(state))
        if state.device != r.inputs.q.device:
            raise ArgumentError("initial_state", f"a tensor on {r.inputs.q.device}", state.device)
    if options.in_place:
        check_in_place(r, options)
    if options.layout is not None and options.layout.cp.validate == "always":
        check_values(r, state)


def check_in_place(r: Recurrence, options: CommonOptions) -> None:
    """Refuse to overwrite a state that is missing, shared between ranks, of another dtype, or part of a graph."""
    state, wanted = options.initial_state, state_dtype(*r.inputs)
    if options.backend == "reference":
        raise UnsupportedError("in_place", "False for backend='reference'", True)
    if options.layout is not None or not r.causal:
        raise UnsupportedError("in_place", "False under a layout and with causal=False", True)
    if state is None or state.dtype != wanted:
        raise ArgumentError("initial_state", f"a state of {wanted} for in_place=True", describe_tensor(state))
    present = [x for x in (*r.inputs, state) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in present):
        raise ArgumentError("in_place", "False where gradients are wanted", True, "Call it under torch.no_grad()")


def check_tensors(r: Recurrence) -> tuple[int, int, int, int, int]:
    """Refuse inputs that are not float tensors of the right shapes on one device, q, k and v of one dtype; returns
    B, T, H, K and V."""
    name = r.name
    present: dict[str, Any] = {f: x for f, x in zip(Inputs._fields, r.inputs) if x is not None or f in r.rule.inputs}
    for f, x in present.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(name(f), "a tensor", describe_tensor(x))
        if not is_floats(x):
            raise ArgumentError(name(f), "a dense tensor of fp16, bf16, fp32 or fp64", describe_tensor(x))
    sizes = check_shapes(r)
    q = r.inputs.q
    for f, x in present.items():
        if x.device != q.device:
            raise ArgumentError(name(f), f"a tensor on {q.device}, where {name('q')} is", x.device)
    for f in ("k", "v"):
        if present[f].dtype != q.dtype and not (r.wide_queries and q.dtype == torch.float32):
            raise ArgumentError(name(f), f"{q.dtype}, the dtype of {name('q')}", present[f].dtype)
    return sizes


def check_shapes(r: Recurrence) -> tuple[int, int, int, int, int]:
    """Refuse shapes that do not fit together; returns B, T, H, K and V."""
    name = r.name
    q, k, v = r.inputs.qkv
    for f, x in (("q", q), ("v", v)):
        if x.dim() != 4:
            raise ArgumentError(name(f), "four dimensions [B, T, H, D]", list(x.shape))
    if r.rule.reads == "values":  # q stands beside v, and nothing is shared between heads
        q, k = k, q
        if v.shape != k.shape or v.shape[:3] != q.shape[:3]:
            raise ArgumentError(name("q"), f"the shape of {name('v')}, with the heads of {name('k')}", list(k.shape))
        k = q
    B, T, Hk, K = shape = q.shape
    rows, tokens, H, V = v.shape
    if Hk < 1 or K < 1:
        raise ArgumentError(name("q"), "at least one head and one channel", list(shape))
    if k.shape != shape:
        raise ArgumentError(name("k"), f"the shape of {name('q')}, {[B, T, Hk, K]}", list(k.shape))
    if (rows, tokens) != (B, T):
        raise ArgumentError(name("v"), f"[B, T, H, V] with B={B}, T={T}", list(v.shape))
    if H < 1 or H % Hk:
        raise ArgumentError(name("v"), f"a number of heads that is a multiple of the {Hk} of {name('q')}", H)
    for f in ("g", "beta", "a", "b"):
        x = getattr(r.inputs, f)
        by_head = f == "beta" or (f == "g" and r.rule.decay != "diagonal") or (f == "a" and r.rule.write == "additive")
        tail = () if by_head else (K,)
        if x is not None and x.shape != (B, T, H, *tail) and x.shape != (B, T, Hk, *tail):
            raise ArgumentError(name(f), f"{[B, T, H, *tail]}", list(x.shape))
    return B, T, H, K, V


def check_values(r: Recurrence, state: Tensor | None) -> None:
    """Refuse gates above zero or without an end, and NaN anywhere, the initial state included; synchronises."""
    for f, x in (*r.inputs._asdict().items(), ("initial_state", state)):
        if x is None:
            continue
        name = r.name(f)
        x = x.detach()
        check_nan(name, x)
        if f == "g" and x.numel() and float(x.max()) > 0:
            raise ArgumentError(name, "log-decays ≤ 0", f"a largest value of {float(x.max()):g}")
        if f == "g" and x.numel() and float(x.min()) == -math.inf:
            hint = "A gate of -100 forgets all, too"
            raise ArgumentError(name, "finite log-decays", "a smallest value of -inf", hint)
