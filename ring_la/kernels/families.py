"""Which kernels take which rule of the linear recurrences: Triton's in chunks, or one launch in CUDA C++.

Levels of one scan: chunks inside a program, spans inside the GPU (summarise, prefix, one pass that carries the state in
registers), pieces across ranks. What a span adds and its transition are found before any state arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import PLAIN, Inputs, OutputUse
from ring_la.kernels.scalar_decay.recurrence import ScalarDecayRecurrence
from ring_la.kernels.wy import one_launch
from ring_la.kernels.wy.one_launch import OneLaunch
from ring_la.kernels.wy.recurrence import WYRecurrence

Family = ScalarDecayRecurrence | WYRecurrence

FAMILIES: dict[Rule, type[Family]] = {
    Rule("additive", "none"): ScalarDecayRecurrence,
    Rule("additive", "scalar"): ScalarDecayRecurrence,
    Rule("additive", "diagonal"): WYRecurrence,
    Rule("delta", "none"): WYRecurrence,
    Rule("delta", "scalar"): WYRecurrence,
    Rule("delta", "diagonal"): WYRecurrence,
    Rule("erase", "scalar"): WYRecurrence,
    Rule("erase", "diagonal"): WYRecurrence,
    Rule("dplr", "diagonal"): WYRecurrence,
}


def unsupported(rule: Rule, inputs: Inputs) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    v = inputs.v
    (B, T, H, V), K = v.shape, inputs.q.shape[-1]
    if rule.plain not in FAMILIES:
        return f"rule {rule.plain}: the kernels take {', '.join(map(str, FAMILIES))}"
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {v.dtype}: the kernels take fp32, bf16 and fp16"
    if not (1 <= K <= 256 and 1 <= V <= 256):
        return f"head sizes {K} and {V}: the kernels take 1 to 256"
    if B * H > 65535:
        return f"batch × heads {B * H}: the kernels take at most 65535"
    if T == 0 or B == 0:
        return "no tokens"
    return ""


def recurrence(
    rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, use: OutputUse = PLAIN
) -> Family | OneLaunch:
    """One rank's tokens under one rule (see `protocol.Local`)."""
    launches = one_launch.choice(rule, inputs, use)
    if launches is not None and not one_launch.unsupported(inputs, packed=cu is not None):
        return OneLaunch(launches, rule, inputs, cu, scale, use)
    return FAMILIES[rule.plain].of(rule.plain, inputs, cu, scale, use)
