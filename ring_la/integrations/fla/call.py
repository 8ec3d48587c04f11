"""A call of fla-core's recurrences: its arguments, and what ring_la's functions take for them."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import check_flag, is_finite, is_floats
from ...context import ShardedLayout
from ...errors import ArgumentError, UnsupportedError, describe_tensor
from ...outputs import LinearAttentionOutput


class FlaCall(NamedTuple):
    """What both recurrences have: arguments by upstream's names, and what ring_la's functions take for them."""

    q: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    output_final_state: bool
    state_v_first: bool
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None

    def check(self, context: Any) -> None:
        """Refuse what is no tensor or flag, and states with a context."""
        for name in ("q", "g", "beta"):
            if not is_floats(getattr(self, name)):
                raise ArgumentError(name, "a float tensor", describe_tensor(getattr(self, name)))
        for name in ("output_final_state", "state_v_first"):
            check_flag(name, getattr(self, name))
        if self.initial_state is not None and not is_floats(self.initial_state, 4):
            expected = "a float tensor of four dimensions, or None"
            raise ArgumentError("initial_state", expected, describe_tensor(self.initial_state))
        if context is None:
            if self.cu_seqlens_cpu is not None and self.cu_seqlens is None:
                raise ArgumentError("cu_seqlens_cpu", "None without cu_seqlens", describe_tensor(self.cu_seqlens_cpu))
            return
        for name, given in (
            ("initial_state", self.initial_state is not None),
            ("output_final_state", self.output_final_state),
        ):
            if given:
                raise UnsupportedError(name, "none with a cp_context, as upstream", "one")

    def where(self, layout: ShardedLayout | None) -> dict[str, Any]:
        """Where the tokens stand, and the states that go in and out."""
        if layout is not None:
            return {"layout": layout}
        state = self.initial_state
        state = state.mT if state is not None and self.state_v_first else state
        return dict(cu_seqlens=self.cu_seqlens, initial_state=state, output_final_state=self.output_final_state)

    def results(self, out: LinearAttentionOutput) -> tuple[Tensor, Tensor | None]:
        """As upstream returns them."""
        state = out.final_state
        return out.o, state.mT if state is not None and self.state_v_first else state

    def strength(self, sigmoid: bool, negative: bool) -> Tensor:
        """β, fp32 where it is made here."""
        check_flag("use_beta_sigmoid_in_kernel", sigmoid)
        check_flag("allow_neg_eigval", negative)
        if negative and not sigmoid:
            raise ArgumentError("allow_neg_eigval", "False without use_beta_sigmoid_in_kernel", negative)
        beta = self.beta.float().sigmoid() if sigmoid else self.beta
        return 2 * beta if negative else beta

    def gate(self, make: bool, keywords: dict[str, Any], lower_bound: float | None = None) -> Tensor:
        """Decays in log space, fp32 where they are made here; as upstream, A_log and dt_bias are of those alone."""
        check_flag("use_gate_in_kernel", make)
        if not make:
            return self.g
        if lower_bound is not None and not is_finite(lower_bound):
            raise ArgumentError("lower_bound", "a finite number or None", describe_tensor(lower_bound))
        of, A_log, bias = self.g.shape[2:], keywords.get("A_log"), keywords.get("dt_bias")
        for name, x, size in (("A_log", A_log, prod(of[:1])), ("dt_bias", bias, prod(of))):
            if x is not None and not (is_floats(x) and x.numel() == size):
                raise ArgumentError(name, f"a float tensor of {size} numbers, or None", describe_tensor(x))
        g = self.g.float() if bias is None else self.g.float() + bias.float().view(of)
        rate = None if A_log is None else A_log.float().exp().view(-1, *(1 for _ in of[1:]))
        if lower_bound is not None:
            return lower_bound * torch.sigmoid(g if rate is None else rate * g)
        if rate is None:
            raise ArgumentError("A_log", "one with use_gate_in_kernel", "None")
        return -rate * F.softplus(g)
