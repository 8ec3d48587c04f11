"""Split recurrences of FLA, and FlashQLA's on one rank; on GPUs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.peers.fla_tuning import settle_for_the_first
from ring_la.testing import Call, Refused


@functools.cache
def settle() -> None:
    """Once a process. FLA's guard of its issue #640, which refuses Triton 3.4 to 3.7.0 on Hopper since a gradient is
    wrong there, is off: what is wrong on one rank, too, is no finding about its context parallelism."""
    import fla.ops.common.chunk_o as chunk_o

    settle_for_the_first()
    chunk_o.TRITON_ABOVE_3_7_1 = True


def _context(call: Call, taps: int | None = None):
    settle()
    from fla.ops.cp import build_cp_context

    cu = torch.tensor(call.cu_seqlens or (0, call.seq_len), dtype=torch.int64, device=call.device)
    return build_cp_context(cu, call.group, conv1d_kernel_size=taps, layout=call.kind)


def _one_row(call: Call) -> None:
    if next(iter(call.tensors.values())).shape[0] > 1:
        raise Refused("FLA's context parallelism takes one row")


def gated_delta_rule(call: Call) -> Tensor:
    """FLA's chunk_gated_delta_rule with a cp_context."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    _one_row(call)
    x, context = call.tensors, _context(call)
    return chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], cu_seqlens=context.cu_seqlens, cp_context=context
    )[0]


def flash_qla(call: Call) -> tuple[Tensor, Tensor | None]:
    """FlashQLA's chunk_gated_delta_rule on one GPU, between whose multiprocessors it cuts a sequence by itself. What it
    does over ranks is timed (`benchmarks.peers.scan`), and not judged."""
    from flash_qla import chunk_gated_delta_rule

    if call.size > 1:
        raise Refused("FlashQLA is judged on one rank")
    x, cu = dict(call.tensors), call.cu_seqlens
    x |= {n: x[n].float() for n in ("g", "beta", "initial_state") if n in x}  # what its own benchmark gives it
    given = dict(initial_state=x.get("initial_state"), output_final_state=call.output_final_state)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32, device=call.device)
    scale = call.options.get("scale") or x["k"].shape[-1] ** -0.5
    o, final = chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], scale=scale, cu_seqlens=offsets, **given
    )
    return o, final


def kda(call: Call) -> Tensor:
    """FLA's chunk_kda with a cp_context."""
    from fla.ops.kda import chunk_kda

    _one_row(call)
    x, context = call.tensors, _context(call)
    return chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], cu_seqlens=context.cu_seqlens, cp_context=context)[0]


def dplr(call: Call) -> Tensor:
    """FLA's chunk_dplr_delta_rule with a cp_context."""
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    _one_row(call)
    x, context = call.tensors, _context(call)
    return chunk_dplr_delta_rule(
        x["q"], x["k"], x["v"], x["a"], x["b"], x["g"], cu_seqlens=context.cu_seqlens, cp_context=context
    )[0]


def short_conv(call: Call) -> Tensor:
    """FLA's causal_conv1d with a cp_context."""
    from fla.modules.causal_conv1d import causal_conv1d

    _one_row(call)
    x, weight = call.tensors["x"], call.tensors["weight"]
    context = _context(call, weight.shape[1])
    return causal_conv1d(x, weight, cu_seqlens=context.cu_seqlens, cp_context=context)[0]


def token_shift(call: Call) -> Tensor:
    """FLA's token_shift_cp, which gives the difference to the token before."""
    from fla.modules.token_shift_cp import token_shift_cp

    _one_row(call)
    x, context = call.tensors["x"], _context(call, 2)
    return x + token_shift_cp(x, context, cu_seqlens=context.cu_seqlens)
