"""The rule "sum" in PyTorch: heads of one number, channel by channel, ``S ← e^g S + v``, ``o = scale · S``.

Tokens stand in rows of about √T. Rows are summed up side by side, a token of each at a time; what leaves them goes from
row to row; and each token gets what entered its row. So there are 2 √T steps, in which no decay is divided by. Where a
piece starts the decay is zero, and what is left of its own state is added to what its first token writes.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...algebra import Rule
from ..protocol import Adjoint, Backward, Border, InputGradients, Inputs, Output, Summary


class PlainSums:
    """See `protocol.Local`. States are ``[B, N, H, 1, 1]``."""

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = False

    def __init__(self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float) -> None:
        v, g = inputs.v[..., 0], inputs.g
        wide = any(x is not None and x.dtype == torch.float64 for x in inputs)
        self.dtype = torch.float64 if wide else torch.float32
        self.inputs, self.scale, self.gated = inputs, scale, rule.decay == "scalar"
        self.v = v.to(self.dtype)
        self.g = torch.zeros_like(self.v) if g is None else g.to(self.dtype)
        self.decay = self.g.exp()
        token = torch.arange(v.shape[1], device=v.device)
        cu = torch.tensor([0, v.shape[1]], device=v.device) if cu is None else cu.to(v.device, torch.int64)
        self.cu, self.empty = cu, (cu.diff() == 0)[:, None]
        self.piece = torch.searchsorted(cu[1:].contiguous(), token, right=True)
        self.first = (token == cu[self.piece])[:, None]
        self.last = (token == cu[self.piece + 1] - 1)[:, None]

    # -- the protocol --------------------------------------------------------------------------------------

    def summary(self, S0: Tensor | None, through: bool, known: Summary[None] | None = None) -> Summary[None]:
        A = None
        if through and self.gated:
            total = self.g.new_zeros(len(self.g), len(self.empty), self.g.shape[2])
            A = total.index_add(1, self.piece, self.g).exp()
        return Summary(A, self._leaving(self._states(S0), S0), None)

    def prepare(self, summary: Summary[None]) -> Summary[None]:
        return summary

    def output(self, S0: Tensor | None, summary: Summary[None] | None = None, border: Border | None = None) -> Output:
        assert border is None  # see `crosses`
        states = self._states(S0)
        o = (self.scale * states).to(self.inputs.v.dtype)
        return Output(o[..., None], self._leaving(states, S0))

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[None]:
        return Adjoint(self._entering(self._gradients(backward, dS_end), dS_end), None)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[None]) -> Adjoint[None]:
        return adjoint

    def gradients(
        self, backward: Backward, dS_end: Tensor | None, adjoint: Adjoint[None] | None = None,
        border: Border | None = None,
    ) -> InputGradients:  # fmt: skip
        assert border is None
        G = self._gradients(backward, dS_end)
        dg = None
        if self.gated and backward.gate:
            states = self._states(backward.S0)
            before = torch.cat([states[:, :1], states[:, :-1]], 1).masked_fill(self.first, 0)
            dg = G * self.decay * (before + self._at(backward.S0, self.first))
        given: list[Any] = [None, None, G[..., None], dg]  # q and k are not read
        return InputGradients(Inputs(*given), self._entering(G, dS_end))

    # -- walks ---------------------------------------------------------------------------------------------

    def _states(self, S0: Tensor | None) -> Tensor:
        """The state after each token ``[B, T, C]``."""
        return walk(self.decay.masked_fill(self.first, 0), self.v + self.decay * self._at(S0, self.first))

    def _gradients(self, backward: Backward, dS_end: Tensor | None) -> Tensor:
        """The gradient of the state after each token: the same from right to left, by the decay of the token after."""
        after = torch.cat([self.decay[:, 1:], self.decay[:, :1]], 1).masked_fill(self.last, 0)
        d = self.scale * backward.do[..., 0].to(self.dtype) + self._at(dS_end, self.last)
        return walk(after.flip(1), d.flip(1)).flip(1)

    def _at(self, states: Tensor | None, tokens: Tensor) -> Tensor:
        """States of pieces at some of their tokens, zero elsewhere."""
        if states is None:
            return self.v.new_zeros(1, 1, 1)
        rows = states[..., 0, 0].to(self.dtype).index_select(1, self.piece)
        return rows.masked_fill(~tokens, 0)

    def _leaving(self, states: Tensor, S0: Tensor | None) -> Tensor:
        return self._of_pieces(states, self.cu[1:] - 1, S0)

    def _entering(self, G: Tensor, dS_end: Tensor | None) -> Tensor:
        return self._of_pieces(G * self.decay, self.cu[:-1], dS_end)

    def _of_pieces(self, tokens: Tensor, at: Tensor, otherwise: Tensor | None) -> Tensor:
        """The values at one token of each piece, for pieces without any what is there without them."""
        B, T, C = tokens.shape
        none = self.v.new_zeros(B, len(at), C) if otherwise is None else otherwise[..., 0, 0].to(self.dtype)
        found = torch.where(self.empty, none, tokens.index_select(1, at.clamp(0, T - 1))) if T else none.clone()
        return found[..., None, None]


def walk(decay: Tensor, x: Tensor) -> Tensor:
    """``S_t = decay_t S_{t−1} + x_t`` from zero, all ``[B, T, C]``."""
    B, T, C = x.shape
    if T == 0:
        return x
    n = math.isqrt(T)
    rows = -(-T // n)
    decay, x = (F.pad(t, (0, 0, 0, rows * n - T)).view(B, rows, n, C) for t in (decay, x))
    own, total = [x[:, :, 0]], [decay[:, :, 0]]
    for i in range(1, n):
        own.append(torch.addcmul(x[:, :, i], decay[:, :, i], own[-1]))
        total.append(total[-1] * decay[:, :, i])
    entering = [x.new_zeros(B, C)]
    for r in range(rows - 1):
        entering.append(torch.addcmul(own[-1][:, r], total[-1][:, r], entering[-1]))
    states = torch.stack(own, 2) + torch.stack(total, 2) * torch.stack(entering, 1)[:, :, None]
    return states.view(B, rows * n, C)[:, :T]
