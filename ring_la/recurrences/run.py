"""A described call: what all ranks check and agree on before anything is sent, and where it runs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import linear
from ..context import ShardedLayout
from ..errors import RingLAError
from ..kernels import Inputs
from ..kernels.fused.unit_length import l2norm
from ..outputs import LinearAttentionOutput
from .agreement import Flags, agree
from .bidirectional import bidirectional
from .checks import check
from .definition import CommonOptions, Recurrence


def agreed(
    name: str, describe: Callable[[], Recurrence], options: CommonOptions, flags: Flags
) -> tuple[Recurrence, tuple[float, ...] | None]:
    """What `describe` gives, checked, and its decays where the host knows them; an error of one rank is raised on
    all."""
    r, error, layout = None, None, options.layout
    try:
        r = describe()
        check(r, options)
    except RingLAError as e:
        error = e
    split = isinstance(layout, ShardedLayout)
    if error is not None:
        if split:
            layout.agree(name, None, error)  # raises, on every rank
        raise error
    return r, agree(name, r, options, flags) if split else None


def compute(
    r: Recurrence, scale: float, options: CommonOptions, decays: tuple[float, ...] | None
) -> LinearAttentionOutput:
    """``scale · Sᵀ q`` and the final states."""
    inputs = ready(r.inputs, options.use_qk_l2norm)
    return bidirectional(inputs, scale, options) if not r.causal else linear.run(r.rule, inputs, scale, options, decays)


def ready(x: Inputs, unit_length: bool) -> Inputs:
    """What kernels take: q and k of unit length where that is asked for, and gates and the like that come with the
    heads of q and k repeated for the value heads they serve."""
    heads = x.v.shape[2]
    if not unit_length and x.q.shape[2] == heads:
        return x

    def own(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], 2)

    q, k = (l2norm(x.q), l2norm(x.k)) if unit_length else (x.q, x.k)
    return Inputs(q, k, x.v, *map(own, x[3:]))
