"""What reaches a few tokens or none: the short convolution, the shift, the matmul by groups."""

from __future__ import annotations

import torch

import ring_la
from ring_la import reference

from .case import Case
from .problem import Here, Numbers, Problem, Tensors


def short_conv(case: Case) -> Problem:
    return _local(case, "short_conv", case.how["W"])


def token_shift(case: Case) -> Problem:
    return _local(case, "token_shift", 2)


def _local(case: Case, name: str, W: int) -> Problem:
    numbers, how = Numbers(case), case.how
    D, conv = case.H * case.V, name == "short_conv"
    shape = (case.H, case.V) if how.get("heads") else (D,)
    tokens, shared, replicated = {"x": numbers.normal(case.B, case.T, *shape)}, {}, {}
    if conv:
        shared["weight"] = numbers.normal(D, W)
    if conv and how.get("bias"):
        shared["bias"] = numbers.normal(D)
    if how.get("initial"):
        replicated["initial_state"] = numbers.normal(case.documents, D, *((W - 1,) if conv else ()))
    options = {"output_final_state": how.get("final", False)}
    if conv and how.get("silu"):
        options["activation"] = "silu"

    def named(out) -> Tensors:
        return {"o": out.o} | ({} if out.final_state is None else {"final_state": out.final_state})

    def truth(x: Tensors) -> Tensors:
        return named(getattr(reference, name)(**x, **options, cu_seqlens=case.cu))

    def ours(x: Tensors, here: Here) -> Tensors:
        return named(getattr(ring_la, name)(**x, **options, layout=here.layout))

    where = {"o": 1} | ({"final_state": None} if how.get("final") else {})
    dtypes = dict.fromkeys(shared, case.dtype_of("gates", case.torch_dtype))
    dtypes |= dict.fromkeys(replicated, case.dtype_of("states", case.torch_dtype))
    return Problem(truth, ours, where, tokens, shared, replicated, dtypes=dtypes)


def grouped_gemm(case: Case) -> Problem:
    """No tokens are split: every rank would do the same."""
    numbers, sizes = Numbers(case), case.how["sizes"]
    given = {"a": numbers.normal(sum(sizes), case.K), "b": numbers.normal(len(sizes), case.K, case.V)}

    def truth(x: Tensors) -> Tensors:
        return {"c": reference.grouped_gemm(x["a"], x["b"], sizes)}

    def ours(x: Tensors, here: Here) -> Tensors:
        return {"c": ring_la.grouped_gemm(x["a"], x["b"], torch.tensor(sizes))}

    return Problem(truth, ours, {"c": None}, shared=given)
