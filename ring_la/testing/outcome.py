"""What a rank gives, by name: output, final state, gradients; how it is cut from the whole; how far two are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Case
from .operations import find
from .split import Split

Tensors = dict[str, Tensor]
"""A rank's tensors by name: "o", "final_state", and the gradients as "dq" and so on, fp64 on the CPU."""

FLOOR = 1e-2
"""A head counts as at least this much of an average one, so that nothing is divided by zero."""


class Whole(NamedTuple):
    """The tensors of the whole sequence: those with tokens whole, those that ranks share by rank of origin.

    Attributes:
        tokens: "o" and gradients of tokens, ``[B, T, …]``.
        final_states: what each rank gives as final state; empty: none asked for.
        parts: for each gradient of something shared, what each rank's own tokens contribute.

    How a gradient of something shared is divided over the ranks is an implementation's own affair: where ranks give
    parts, their sum is compared, as if rank 0 had it.
    """

    tokens: Tensors
    final_states: list[Tensor]
    parts: dict[str, list[Tensor]]

    def on(self, rank: int, split: Split, whole_gradients: bool) -> Tensors:
        """What `rank` gives. `whole_gradients`: gradients of shared inputs are summed over the ranks inside."""
        out = {n: split.local(x, rank) for n, x in self.tokens.items()}
        if self.final_states:
            out["final_state"] = self.final_states[rank]
        for n, parts in self.parts.items():
            if rank == 0 or whole_gradients or n == "dinitial_state":
                out[n] = torch.stack(parts).sum(0)
        return out


def heads_of(name: str, case: Case) -> int | None:
    """The dimension of a tensor's heads, if it has one."""
    operation = find(case.operation)
    matrix = operation.state is not None and len(operation.state(case.shapes)) == 3
    if name in ("final_state", "dinitial_state"):
        return 1 if matrix else None
    if name[1:] in operation.shared:
        return 0
    return 2 if matrix or operation.name == "attention" else None


def distance(got: Tensor | None, want: Tensor, heads: int | None, scale: float) -> float:
    """The largest relative error of a head: ‖got − want‖ / ‖want‖; infinite where numbers are missing or not finite.

    `scale`: an average element's size of the whole tensor; no head counts as smaller than FLOOR of it.
    """
    if want.numel() == 0 and (got is None or got.shape == want.shape):
        return 0.0
    if got is None or got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    if heads is None or want.dim() <= heads:
        got, want, heads = got[None], want[None], 0
    n = want.shape[heads]
    off, size = ((x.movedim(heads, 0).reshape(n, -1)).norm(dim=1) for x in (got - want, want))
    least = FLOOR * scale * math.sqrt(want.numel() / n)
    return float((off / size.clamp(min=max(least, 1e-300))).max())


def scales(right: Sequence[Tensors]) -> dict[str, float]:
    """The root mean square of each tensor over all ranks."""
    out = {}
    for n in right[0]:
        flat = torch.cat([t[n].flatten() for t in right if n in t])
        out[n] = float(flat.pow(2).mean().sqrt()) if flat.numel() else 0.0
    return out


def distances(
    got: Mapping[str, Tensor | None], want: Tensors, case: Case, sizes: Mapping[str, float]
) -> dict[str, float]:
    """`distance` of each tensor of `want`."""
    return {n: distance(got.get(n), w, heads_of(n, case), sizes[n]) for n, w in want.items()}
