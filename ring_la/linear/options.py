"""What a caller of any recurrence may ask for, as one value from the public function to where it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..choices import Mode, RecurrenceBackend
from ..context import ShardedLayout


class CommonOptions(NamedTuple):
    """The keywords all recurrences have in common, packed once; `recurrences.definition.COMMON` says what they mean."""

    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm: bool = False
    layout: ShardedLayout | None = None
    cu_seqlens: Tensor | None = None
    mode: Mode = "auto"
    backend: RecurrenceBackend | None = None
    in_place: bool = False

    @property
    def inner(self) -> dict[str, Any]:
        """What the parts of a call that is made of several have in common."""
        return {"layout": self.layout, "cu_seqlens": self.cu_seqlens}

    @property
    def scan(self) -> dict[str, Any]:
        """The same for parts that are recurrences themselves."""
        return self.inner | {"mode": self.mode, "backend": self.backend}
