"""A grid of tokens split by whole slices: slices next to a rank's own, and what tokens of any layout do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la
from ring_la import reference

from .case import Case
from .problem import Here, Numbers, Problem, Tensors


def grid(case: Case) -> Problem:
    """A sum of neighbouring slices, of other weights each; attention over the grid's tokens; the whole grid again."""
    numbers, (before, after), columns = Numbers(case), case.how["width"], case.how["columns"]
    x = numbers.normal(case.B, case.T, columns, case.V)
    weight = numbers.normal(before + 1 + after)

    def summed(wide: Tensor, given: Tensors) -> Tensor:
        n = wide.shape[1] - before - after
        return torch.stack([wide[:, k : k + n] * w for k, w in enumerate(given["weight"].unbind(0))]).sum(0)

    def flat(x: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys("qkv", x.flatten(1, 2)[:, :, None])

    def truth(given: Tensors) -> Tensors:
        o = summed(F.pad(given["x"], (0, 0, 0, 0, before, after)), given)
        return {"o": o, "attended": reference.attention(**flat(given["x"]), causal=False).o, "gathered": given["x"]}

    def ours(given: Tensors, here: Here) -> Tensors:
        whole = here.others["grid"]
        assert isinstance(whole, ring_la.context.GridLayout)
        coming = whole.halo(given["x"], 1, (before, after))
        strategy = None if case.attention == "auto" else case.attention
        attended = ring_la.attention(**flat(given["x"]), causal=False, layout=whole, strategy=strategy).o
        left, right = coming.wait()
        o = summed(torch.cat([left, given["x"], right], 1), given)
        return {"o": o, "attended": attended, "gathered": whole.slices.gather(given["x"], 1)}

    def made(cp: ring_la.ContextParallel) -> ring_la.context.GridLayout:
        return cp.grid((case.T, columns), case.how.get("counts"))

    return Problem(
        truth, ours, {"o": 1, "attended": 1, "gathered": None}, {"x": x}, {"weight": weight},
        layouts={"grid": made, "slices": lambda cp: made(cp).slices},
        of={"x": "slices", "o": "slices", "attended": "grid"}, exact=("gathered",),
    )  # fmt: skip
