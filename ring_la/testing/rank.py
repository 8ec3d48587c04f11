"""One rank of a case: what it is given, what it runs, and what it sends back."""

from __future__ import annotations

import io
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .cases import Case, Numbers, numbers
from .operations import find
from .outcome import Tensors
from .subject import Call, Refused, Subject


@dataclass(frozen=True)
class RankAnswer:
    """What came of a rank: its tensors, or why there are none.

    Attributes:
        saved: the tensors by name, fp64, as `torch.save` writes them; None: it failed.
        error: the last line of what it raised. trace: all of it.
        refused: whether the subject says that it is not meant for the case, before anything was sent.
        silent: whether no answer came in time, or the process died; the trace then says where it stands.
    """

    saved: bytes | None = None
    error: str = ""
    trace: str = ""
    refused: bool = False
    silent: bool = False

    @property
    def tensors(self) -> Tensors:
        """By name; a gradient that is None is not among them."""
        if self.saved is None:
            return {}
        return torch.load(io.BytesIO(self.saved), weights_only=True)


def answer(rank: int, group: dist.ProcessGroup, device: torch.device, subject: Subject, case: Case) -> RankAnswer:
    """Run a rank's part of a case, forward and backward. Raises nothing that the subject raises."""
    drawn = numbers(case)
    leaves = _leaves(case, drawn, rank, device)
    shown = (case.size, group, device, case.kind)
    call = Call(rank, *shown, leaves, case.shapes.T, case.cu_seqlens, dict(case.options), case.states)
    try:
        with torch.enable_grad():
            o, final = _fields(subject.run(call))
            tensors = _tensors(case, drawn, rank, o, final, leaves)
    except Refused as error:
        return RankAnswer(error=f"refused: {error}", refused=True)
    except Exception as error:
        return RankAnswer(error=f"{type(error).__name__}: {str(error).strip()}", trace=traceback.format_exc())
    file = io.BytesIO()
    torch.save({n: x.detach().double().cpu() for n, x in tensors.items()}, file)
    return RankAnswer(file.getvalue())


def _leaves(case: Case, drawn: Numbers, rank: int, device: torch.device) -> dict[str, Tensor]:
    shared, split = find(case.operation).shared, case.split
    local = {n: x if n in shared else split.local(x, rank) for n, x in drawn.inputs.items()}
    if drawn.initial_state is not None:
        local["initial_state"] = drawn.initial_state
    return {n: x.to(device, copy=True).contiguous().requires_grad_() for n, x in local.items()}


def _fields(given: Any) -> tuple[Tensor, Tensor | None]:
    """The output and final state in what a subject gives."""
    if isinstance(given, Tensor):
        return given, None
    if hasattr(given, "o"):
        return given.o, getattr(given, "final_state", None)
    o, final = given
    return o, final


def _tensors(case: Case, drawn: Numbers, rank: int, o: Tensor, final: Tensor | None, leaves: dict) -> Tensors:
    """The output, the final state, and the gradients of a loss that the ranks share."""
    do = case.split.local(drawn.do, rank).to(o.device)
    if o.shape != do.shape:
        return {"o": o}
    loss = (o.double() * do).sum()
    tensors = {"o": o}
    if drawn.dfinal is not None and final is not None:
        tensors["final_state"] = final
        if final.shape == drawn.dfinal.shape:  # each rank's loss has a P-th of what flows into a state that all have
            loss = loss + (final.double() * drawn.dfinal.to(o.device)).sum() / case.size
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return tensors | {f"d{n}": g for n, g in zip(leaves, grads) if g is not None}
