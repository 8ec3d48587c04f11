"""The linear recurrences. A new one is a definition in one file here, listed below; tests parametrise over the list."""

from .delta import delta_rule, gated_delta_rule, kda
from .dplr import dplr_delta_rule, rwkv7
from .gla import gla, hgrn2
from .linear_attention import linear_attention
from .mamba2 import mamba2
from .retention import lightning_attention, lightning_decay, retention, retention_decay, simple_gla

FUNCTIONS = (
    linear_attention,
    retention,
    lightning_attention,
    simple_gla,
    mamba2,
    gla,
    hgrn2,
    delta_rule,
    gated_delta_rule,
    kda,
    rwkv7,
    dplr_delta_rule,
)
RECURRENCES = tuple(f.definition for f in FUNCTIONS)  # pyright: ignore[reportFunctionMemberAccess]
"""The definition of every recurrence: what conformance tests and benchmarks go through."""

__all__ = [r.name for r in RECURRENCES] + ["RECURRENCES", "lightning_decay", "retention_decay"]
