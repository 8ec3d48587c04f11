"""Whether all ranks of a sequence have the same weights: otherwise results are plausible, and nobody's."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..comm import Group

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What the bits of an element are read as, by its bytes."""
IN_PARTS = ("_fsdp_flattened", "ds_id")
"""What FSDP1 and DeepSpeed leave at parameters of which a rank has a part, where no DTensor says it."""
HINT = (
    "Seed all ranks alike before a model or an adapter is made, or send rank 0's weights to the others;"
    " between steps ring_la.training.sum_gradients keeps them alike"
)

_met: WeakKeyDictionary[nn.Module, WeakSet[Group]] = WeakKeyDictionary()


def agree_on_weights(model: nn.Module, group: Group, validate: str = "first") -> None:
    """Let ranks compare the parameters that each has whole, the first time that a model comes to a group, or with
    validate="always" in every call. Collective; waits for the device.

    Raises:
        DisagreementError: they are not the same on all ranks.
    """
    if group.size == 1 or validate == "never" or torch.compiler.is_compiling():
        return
    known = _met.setdefault(model, WeakSet())
    if group not in known or validate == "always":
        group.agreement.agree("the weights, of which every rank must have the same", _facts(model), HINT)
        known.add(group)


def _whole(model: nn.Module) -> Iterator[Tensor]:
    """Plain tensors in memory, of which no rank has a part alone."""
    for p in model.parameters():
        plain = type(p.data) is Tensor and p.layout is torch.strided and not p.is_meta
        if plain and p.element_size() in INTEGERS and not any(hasattr(p, name) for name in IN_PARTS):
            yield p.data


def _facts(model: nn.Module) -> dict[str, object]:
    """What ranks compare, the plain things first."""
    found = list(_whole(model))
    dtypes = ", ".join(sorted({str(p.dtype) for p in found}))
    return {"parameters": len(found), "numbers": sum(p.numel() for p in found), "dtypes": dtypes, "bits": _sum(found)}


@torch.no_grad()
def _sum(parameters: list[Tensor]) -> int:
    """A number that goes by every bit of them, and by which parameter has it."""
    sums = [p.view(INTEGERS[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    by_device = {s.device: [t for t in sums if t.device == s.device] for s in sums}
    return hash(tuple(n for some in by_device.values() for n in torch.stack(some).tolist()))
