"""Kernels in CUDA C++ on Hopper that take all of one device's tokens in a launch (see `kda_launches`, `gdn_launches`,
`gla_launches`, `dplr_launches`).

What comes into a span of tokens is often forgotten there, so that spans start early from zero, by a bound that holds;
one that does not forget waits for the span before it. A delta rule or GLA whose states meet those of other ranks may
go by the same kernels in two launches, or KDA forward in one, which carries states itself (`scanned_spans`), and so may
a delta rule that trains on one device. Other calls that meet go by chunks of 64 tokens, as does whatever these kernels
have no part for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels import gpu
from ring_la.kernels.protocol import Adjoint, Backward, Border, InputGradients, Inputs, Output, OutputUse, Summary
from ring_la.kernels.runtime import cuda_kernel
from ring_la.kernels.wy import across, dplr_launches, gdn_launches, gla_launches, kda_launches
from ring_la.kernels.wy.across import SpanKernels
from ring_la.kernels.wy.recurrence import WYRecurrence
from ring_la.kernels.wy.scanned_spans import NoNeighbours, ScannedSpans
from ring_la.kernels.wy.span_call import HEAD
from ring_la.kernels.wy.span_launches import KeptChunks


class Launches(NamedTuple):
    """What one launch does for a rule.

    Attributes:
        forward: it also gives what the gradients take of it, if they are to follow.
        enough: whether there is enough to do for gradients by one launch.
        across: its kernels where states meet those of other ranks; None: such calls go by chunks.
        alone: whether those take one device's tokens, too, where gradients follow.
    """

    forward: Callable[[Inputs, Tensor | None, float, Tensor | None, OutputUse], Output]
    gradients: Callable[[Inputs, Tensor | None, float, Backward, Tensor | None], tuple[Inputs, Tensor]]
    enough: Callable[[Inputs], bool] = lambda inputs: True
    across: SpanKernels | None = None
    alone: Callable[[Inputs, Tensor | None], bool] = lambda inputs, cu: False


def _kda(inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, use: OutputUse) -> Output:
    return Output(*kda_launches.forward(inputs, cu, scale, S0, use.final))


def _kda_gradients(
    inputs: Inputs, cu: Tensor | None, scale: float, backward: Backward, dS_end: Tensor | None
) -> tuple[Inputs, Tensor]:
    return kda_launches.gradients(inputs, cu, scale, backward.S0, backward.do, dS_end)


def _keeping(launches: Any, kept: Any, enough: Callable[[Inputs], bool] = lambda inputs: True) -> Launches:
    """Those of a module whose forward leaves its gradients `kept` where there is room for it."""

    def forward(inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, use: OutputUse) -> Output:
        o, leaving, left = launches.forward(inputs, cu, scale, S0, use.final, use.saved and launches.keeps(inputs, cu))
        return Output(o, leaving, () if left is None else tuple(left))

    def gradients(
        inputs: Inputs, cu: Tensor | None, scale: float, backward: Backward, dS_end: Tensor | None
    ) -> tuple[Inputs, Tensor]:
        left = kept.of(backward.saved)
        return launches.gradients(inputs, cu, scale, backward.S0, backward.do, dS_end, left)

    return Launches(forward, gradients, enough)


class Least(NamedTuple):
    """Tokens × heads of the smallest calls that go by these kernels, by rule; None: none does."""

    delta_none: int | None = None
    delta_scalar: int | None = None
    delta_diagonal: int | None = None
    additive_diagonal: int | None = None

    def takes(self, rule: Rule, inputs: Inputs) -> bool:
        least: int | None = getattr(self, str(rule.plain), None)
        return least is not None and math.prod(inputs.v.shape[:3]) >= least


GLA_BY_LAUNCH = True
"""Whether GLA goes by one launch each way: 0.47 to 0.78 of chunks' time on an H200, with less error."""
DPLR_BY_LAUNCH = True
"""The same of DPLR whose gate has a bound."""
ACROSS = Least(delta_scalar=2**17, delta_diagonal=2**17, additive_diagonal=2**16)
"""Of calls that exchange states. From so many on each that was measured on an H200 took less time than in chunks, the
gated delta rule 0.62 to 0.86 of it, KDA 0.14 to 0.91, GLA (whose rule is additive) 0.50 to 0.96 (at half as many more);
smaller calls of delta rules, and those without gates, no GPU has timed."""
LEAST = 2**15
"""Tokens × heads of the smallest call of a delta rule that goes by one launch where a backward pass follows. From so
many to 1.5 GiB of what chunks leave each call that was measured on an H200 took less time than in chunks."""
APART, APART_ROWS = 2**17, 16
"""Tokens × heads, and rows of heads, of the smallest call of a delta rule that trains on one device in two launches
each way: 0.83 to 0.96 of one launch's time on an H200 by Qwen's gates, 0.92 to 0.99 by others and without gates."""
NO_NEIGHBOURS = NoNeighbours()


def _apart(inputs: Inputs, cu: Tensor | None) -> bool:
    """Whether two launches each way go over a delta rule's rows where gradients follow: such as are cut into spans."""
    B, T, H, _ = inputs.v.shape
    fits = APART_ROWS <= B * H <= gpu.multiprocessors(inputs.v.device) // 2
    return fits and cu is None and B * T * H >= APART and across.DELTA.keeps(inputs, cu)


KDA = Launches(_kda, _kda_gradients, across=across.KDA)
DELTA = _keeping(gdn_launches, KeptChunks, lambda inputs: math.prod(inputs.v.shape[:3]) >= LEAST)._replace(
    across=across.DELTA, alone=_apart
)
GLA = _keeping(gla_launches, gla_launches.KeptPairs)._replace(across=across.GLA)
DPLR = _keeping(dplr_launches, KeptChunks)


def knobs() -> tuple[int | bool | Least, ...]:
    """What decides, beside a call itself, which kernels take it; tests and benchmarks set these."""
    return LEAST, APART, APART_ROWS, GLA_BY_LAUNCH, DPLR_BY_LAUNCH, ACROSS


def choice(rule: Rule, inputs: Inputs, use: OutputUse) -> Launches | None:
    """The launches that a call might go by: KDA's where a bound of its gate is known, a delta rule's where no backward
    pass follows or there is enough to do, GLA's and DPLR's if a switch above says so. Calls that train and exchange
    states go so from a size on (`ACROSS`), or (DPLR's) never."""
    if rule.plain == Rule("delta", "diagonal"):
        return None if rule.lower_bound is None or rule.lower_bound < kda_launches.LEAST else KDA
    if rule.plain in (Rule("delta", "none"), Rule("delta", "scalar")):
        if not use.saved:
            return DELTA
        return DELTA if (DELTA.enough(inputs) if use.alone else ACROSS.takes(rule, inputs)) else None
    if rule.plain == Rule("additive", "diagonal") and GLA_BY_LAUNCH:
        return GLA if use.alone or not use.saved or ACROSS.takes(rule, inputs) else None
    if rule.plain == Rule("dplr", "diagonal") and DPLR_BY_LAUNCH and (use.alone or not use.saved):
        g, bound = inputs.g, rule.lower_bound
        fits = bound is not None and bound >= dplr_launches.LEAST and g is not None and g.dtype == torch.bfloat16
        return DPLR if fits else None
    return None


def unsupported(inputs: Inputs, packed: bool) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    v = inputs.v
    if v.dtype != torch.bfloat16 or inputs.q.shape[-1] != HEAD or v.shape[-1] != HEAD:
        return f"dtype {v.dtype}, head sizes {inputs.q.shape[-1]} and {v.shape[-1]}: the kernels take bf16 and {HEAD}"
    if inputs.q.dtype != v.dtype:
        return f"queries of {inputs.q.dtype} beside values of {v.dtype}"
    if inputs.g is not None and inputs.g.shape[:2] != v.shape[:2]:
        return "a gate that all tokens share"
    if packed and v.shape[0] > 1:
        return "packed pieces in several batch rows"
    if v.shape[0] * v.shape[1] == 0 or v.shape[0] * v.shape[1] >= 2**31:
        return f"{v.shape[0]} × {v.shape[1]} tokens"
    if not gpu.is_hopper(v.device):
        return "the device is no Hopper GPU"
    return cuda_kernel.unsupported()


@dataclass(frozen=True)
class OneLaunch:
    """One rank's tokens."""

    launches: Launches
    rule: Rule
    inputs: Inputs
    cu: Tensor | None
    scale: float
    use: OutputUse

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = True

    @cached_property
    def by_chunks(self) -> WYRecurrence:
        """What does all that the fused kernels have no part for."""
        return WYRecurrence.of(self.rule.plain, self.inputs, self.cu, self.scale, self.use)

    @cached_property
    def spans(self) -> ScannedSpans:
        """What goes over spans by the kernels of `launches.across`."""
        kernels = self.launches.across
        assert kernels is not None
        return ScannedSpans.of(kernels, self.rule.plain, self.inputs, self.cu, self.scale, self.use)

    @cached_property
    def across(self) -> WYRecurrence | ScannedSpans:
        """What exchanges states with other ranks."""
        kernels = self.launches.across
        if kernels is None or not ACROSS.takes(self.rule, self.inputs):
            return self.by_chunks
        if self.use.saved and not kernels.keeps(self.inputs, self.cu):
            return self.by_chunks
        return self.spans

    def summary(self, S0: Tensor | None, through: bool, known: Summary[Any] | None = None) -> Summary[Any]:
        return self.across.summary(S0, through, known)

    def prepare(self, summary: Summary[Any]) -> Summary[Any]:
        return self.across.prepare(summary)

    def output(self, S0: Tensor | None, summary: Summary[Any] | None = None, border: Border | None = None) -> Output:
        if summary is not None or border is not None:
            return self.across.output(S0, summary, border)
        S0 = None if S0 is None else S0.to(torch.float32)
        if self.use.saved and self.launches.alone(self.inputs, self.cu):
            return self.spans.output(S0, border=NO_NEIGHBOURS)
        return self.launches.forward(self.inputs, self.cu, self.scale, S0, self.use)

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[Any]:
        which, backward = self._back(backward)
        return which.adjoint(backward, dS_end)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[Any]) -> Adjoint[Any]:
        which, backward = self._back(backward)
        return which.prepare_gradients(backward, adjoint)

    def _back(self, backward: Backward) -> tuple[WYRecurrence | ScannedSpans, Backward]:
        """What the forward went by where states are exchanged, and what that takes."""
        if self._left_by_spans(backward):
            return self.spans, backward
        return self.by_chunks, _without_kept(backward)

    def _left_by_spans(self, backward: Backward) -> bool:
        """Whether the forward went over spans by the kernels of `launches.across`: what it has left says so."""
        kernels = self.launches.across
        return kernels is not None and ScannedSpans.has_left(kernels, backward.saved)

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[Any] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        if adjoint is not None or border is not None:
            which, backward = self._back(backward)
            return which.gradients(backward, dS_end, adjoint, border)
        if self._left_by_spans(backward):
            return self.spans.gradients(backward, dS_end, border=NO_NEIGHBOURS)
        if bool(_without_kept(backward).saved) or not self.launches.enough(self.inputs):
            return self.by_chunks.gradients(_without_kept(backward), dS_end)
        return InputGradients(*self.launches.gradients(self.inputs, self.cu, self.scale, backward, dS_end))


def _without_kept(backward: Backward) -> Backward:
    """Without what only a launch takes; what a forward in chunks saved stays."""
    saved = backward.saved
    found = KeptChunks.of(saved) or gla_launches.KeptPairs.of(saved)
    return backward if found is None else backward._replace(saved=())
