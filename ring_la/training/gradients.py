"""The sum of gradients over context ranks, for a loop without FSDP2 or DDP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..context import ContextParallel
from ..errors import ArgumentError, DisagreementError

BUCKET = 1 << 25
"""Numbers in one message."""
USED_UP = "What model.parameters() returns can be gone through once: call it again"


def sum_gradients(parameters: Iterable[nn.Parameter], cp: ContextParallel) -> None:
    """Replace each gradient by the sum over the ranks: from this rank's part to that of one process. Collective.

    A rank without a gradient counts as zero; where no rank has one there is none. Gradients of one dtype travel
    together. Of weights cut by tensor parallelism this rank's parts are summed: the ranks of `cp` have the same ones.

    Raises:
        ArgumentError: a sparse gradient, or no parameters. DisagreementError: the ranks bring other parameters.
    """
    given = parameters_of(parameters)
    if not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel", type(cp).__name__)
    if cp.size == 1:
        return
    wanted = [p for p in given if p.requires_grad]
    for p in wanted:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ArgumentError("parameters", "dense gradients", p.grad.layout)
    wanted = [p for p, there in zip(wanted, _somewhere(wanted, cp)) if there]
    for bucket in _buckets(wanted):
        for p in bucket:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        parts = [_local(p.grad) for p in bucket]
        whole = cp.comm.all_reduce(torch.cat([g.reshape(-1) for g in parts])).wait()
        for part, grad in zip(parts, whole.split([g.numel() for g in parts])):
            part.copy_(grad.view(part.shape))


def parameters_of(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters as a list, of which there is one at least."""
    expected = "parameters, such as model.parameters()"
    if isinstance(parameters, (nn.Module, Tensor)) or not isinstance(parameters, Iterable):  # its rows have no gradient
        raise ArgumentError("parameters", expected, type(parameters).__name__)
    found = list(parameters)
    if not found:
        raise ArgumentError("parameters", "at least one", "none", USED_UP)
    for p in found:
        if not isinstance(p, Tensor):
            raise ArgumentError("parameters", expected, f"a {type(p).__name__} among them")
    return found


def _somewhere(parameters: list[nn.Parameter], cp: ContextParallel) -> list[bool]:
    """Of each parameter whether a rank has a gradient. The hosts tell each other: none waits for its device."""
    kinds = hashlib.blake2b(str([(*p.shape, p.dtype) for p in parameters]).encode(), digest_size=8).hexdigest()
    try:
        told = cp.comm.agreement.tell(f"{kinds} " + "".join("01"[p.grad is not None] for p in parameters))
    except RuntimeError as error:
        raise cp.comm.watch.error("comparing gradients", error) from error
    of_ranks = [said.split(" ") for said in told]
    if any(of_rank != kinds for of_rank, _ in of_ranks):
        lines = [f"\n  rank {r}: {len(bits)}, hash {of_rank}" for r, (of_rank, bits) in enumerate(of_ranks)]
        about = "the parameters that want gradients: their number, shapes, dtypes or order"
        raise DisagreementError(f"the ranks of this group disagree on {about}:{''.join(lines)}")
    return ["1" in there for there in zip(*(bits for _, bits in of_ranks))]


def _local(x: Tensor | None) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    assert x is not None
    return x.to_local() if isinstance(x, DTensor) else x


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype, in order, of about BUCKET numbers together."""
    out: list[list[nn.Parameter]] = []
    size: dict[torch.dtype, tuple[int, list[nn.Parameter]]] = {}
    for p in parameters:
        numbers, bucket = size.get(p.dtype, (BUCKET, []))
        if numbers >= BUCKET:
            numbers, bucket = 0, []
            out.append(bucket)
        bucket.append(p)
        size[p.dtype] = (numbers + p.numel(), bucket)
    return out
