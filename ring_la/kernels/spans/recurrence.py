"""What backends that go by spans have in common: a plan of the tokens, and the spans' maps as their summary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import Inputs, OutputUse, Summary
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.prefix import prefix, transitions_of_pieces


class HasMaps(Protocol):
    """What is found for a summary, the `SpanMaps` among it (None: of a single span nobody asked for them)."""

    @property
    def maps(self) -> Any: ...


Found = TypeVar("Found", bound=HasMaps)
Own = TypeVar("Own", bound="SpanRecurrence")


@dataclass(frozen=True)
class SpanRecurrence(ABC, Generic[Found]):
    """One rank's tokens under one rule; `given` are the inputs as they came."""

    plan: SpanPlan
    inputs: Inputs
    given: Inputs
    use: OutputUse

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = True

    @classmethod
    def of(cls: type[Own], rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, use: OutputUse) -> Own:
        plan = SpanPlan.of(rule, inputs, cu, scale)
        return cls(plan, plan.ready(inputs), inputs, use)

    @abstractmethod
    def _maps(self, all: bool) -> Found:
        """The spans' maps; `all`: that of a piece's last span, too."""

    def summary(self, S0: Tensor | None, through: bool, known: Summary[Found] | None = None) -> Summary[Found]:
        found = self._maps(True) if known is None else known.found
        _, leaving = prefix(self.plan, found.maps, self.plan.state(S0), False, enter=False)
        return Summary(transitions_of_pieces(self.plan, found.maps) if through else None, leaving, found)

    def prepare(self, summary: Summary[Found]) -> Summary[Found]:
        """As it is: what the output needs before a state arrives was found for the summary."""
        return summary
