"""Kernels that begin before the launch before them has ended (programmatic dependent launch, from Hopper on).

    if EARLY:
        others_may_begin()      from here on what earlier launches have written is there, and the next one may begin

Before that a kernel may load what nobody writes meanwhile, such as weights. As the next launch begins no earlier than
when all programs of this one have come here, never more than two run side by side: so what was written two launches ago
may be loaded early, too.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ring_la.kernels import gpu


@triton.jit
def others_may_begin():
    """Wait for the launch before this one, then let the next one begin."""
    gdc_wait()
    gdc_launch_dependents()


def options(x: Tensor, wanted: bool = True) -> dict[str, Any]:
    """The constant EARLY, and what Triton is told, of a launch on the device of x."""
    early = wanted and x.is_cuda and gpu.from_hopper(x.device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
