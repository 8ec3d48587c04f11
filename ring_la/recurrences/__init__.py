"""The linear recurrences. A new one is a definition in one file here, listed below; tests, tables and benchmarks go
through the list.

One of your own, outside the package, is the same: see `ring_la.define`.
"""

from .. import reference
from .delta import delta_rule, gated_delta_rule, kda
from .delta_product import gated_delta_product
from .dplr import dplr_delta_rule, rwkv7
from .erase import comba, gdn2
from .gla import gla, hgrn2
from .gsa import gated_slot_attention
from .hgrn import hgrn
from .linear_attention import linear_attention
from .mamba2 import mamba2
from .mamba3 import mamba3, mamba3_mimo
from .mesa import mesa_net
from .mlstm import mlstm
from .momentum import momentum_delta_rule
from .oja import gated_oja_rule
from .preconditioned import preconditioned_gated_delta_rule, preconditioned_kda
from .retention import lightning_attention, retention, simple_gla
from .retention import lightning_decay as lightning_decay
from .retention import retention_decay as retention_decay
from .rwkv6 import rwkv6
from .shares import abc_attention, lightnet
from .ttt import ttt_linear

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
    comba,
    gdn2,
    gated_delta_product,
    preconditioned_gated_delta_rule,
    preconditioned_kda,
    gated_oja_rule,
    rwkv6,
    gated_slot_attention,
    hgrn,
    mlstm,
    mamba3,
    mamba3_mimo,
    ttt_linear,
    momentum_delta_rule,
    lightnet,
    abc_attention,
    mesa_net,
)
RECURRENCES = tuple(f.definition for f in FUNCTIONS)  # pyright: ignore[reportFunctionMemberAccess]
"""The definition of every recurrence: what conformance tests and benchmarks go through."""

reference.include(RECURRENCES)

__all__ = [r.name for r in RECURRENCES]
