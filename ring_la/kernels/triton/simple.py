"""Launches for additive writes under a scalar decay or none (see `additive`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.local import Inputs
from ring_la.kernels.triton.additive import attend_kernel, summarise_kernel
from ring_la.kernels.triton.additive_gate import attend_dots_kernel, gate_gradient_kernel
from ring_la.kernels.triton.base import Base
from ring_la.kernels.triton.launch import launch
from ring_la.kernels.triton.table import ATTEND, ATTEND_DOTS, ATTEND_DOTS_BACK, SUMMARISE, cdiv, power_of_2, width


class Early(NamedTuple):
    """What the gradients have before any gradient of a state arrives; None where no gate's is wanted."""

    dq: Tensor
    reads: Tensor | None = None
    border: Tensor | None = None
    leaving: Tensor | None = None


class Simple(Base):
    """The four roles of `attend_kernel`, and what surrounds them."""

    def _summarise_simple(self, y, z, own, log_a, scale: float, reverse: bool, full: bool) -> None:
        how, cut = self._pick(SUMMARISE), self.segments
        block = min(how.block, width(self.V))
        launch(
            summarise_kernel, (cdiv(self.V, block) * cut.count, self._rows), y, z, self.F, own,
            own if log_a is None else log_a, cut.table, self.T, cut.count, self._NC, cut.length, scale, H=self.H,
            HY=y.shape[2], HZ=z.shape[2], DY=self.K, DZ=self.V, BY=width(self.K), BZ=block, C=self.chunk,
            GATED=self.decay == 1, REVERSE=reverse, ALL=full, PREC=self.precision, VARLEN=self._packed, **how.options,
        )  # fmt: skip

    def _attend(self, x, y, z, out, state, *, reverse=False, transposed=False, leaving=None) -> None:
        """One of the four roles of `attend_kernel`."""
        how, cut = self._pick(ATTEND), self.segments
        dx, dz = x.shape[3], z.shape[3]
        block = min(how.block, width(dz))
        launch(
            attend_kernel, (cdiv(dz, block) * cut.count, self._rows), x, y, z, self.F, x if state is None else state,
            out, x if leaving is None else leaving, cut.table, self.T, cut.count, self._NC, cut.pieces, cut.length,
            self.scale, H=self.H, HX=x.shape[2], HY=y.shape[2], HZ=z.shape[2], DX=dx, DZ=dz, BX=width(dx), BZ=block,
            C=self.chunk, GATED=self.decay == 1, REVERSE=reverse, TRANSPOSED=transposed, HAS_STATE=state is not None,
            LEAVE=leaving is not None, PREC=self.precision, VARLEN=self._packed, **how.options,
        )  # fmt: skip

    def _early_gradients(self, entering: Tensor | None, do: Tensor, gate: bool) -> Early:
        """dq, which needs no gradient of a state, and with `gate` what dg needs of the same pass."""
        q, k, v = self.inputs[:3]
        B, T, H = self.B, self.T, self.H
        dq = self._new(B, T, H, self.K, dtype=v.dtype)
        if not (gate and self.decay):
            self._attend(do, v, k, dq, entering, transposed=True)
            return Early(dq)
        nk = cdiv(self.K, min(self._pick(ATTEND_DOTS).block, width(self.K)))
        early = Early(dq, self._new(nk, B, H, T), self._new(nk, B, H, self._NC), self._pieces())
        self._attend_dots(do, v, k, dq, entering, q, early.reads, border=early.border, leaving=early.leaving)
        return early

    def _late_gradients(self, early: Early, entering, adjoint, do: Tensor, dS0: Tensor) -> Inputs:
        """The other gradients, given those of the states after the segments (None: zero)."""
        q, k, v = self.inputs[:3]
        B, T, H = self.B, self.T, self.H
        dk, dv = (self._new(B, T, H, n, dtype=v.dtype) for n in (self.K, self.V))
        self._attend(k, q, do, dv, adjoint, reverse=True, leaving=dS0)
        if early.reads is None:
            self._attend(v, do, q, dk, adjoint, reverse=True, transposed=True)
            return Inputs(early.dq, dk, dv)
        cut, nk = self.segments, early.reads.shape[0]
        writes, edge = torch.empty_like(early.reads), self._new(nk, B, H, cut.count)
        self._attend_dots(
            v, do, q, dk, adjoint, k, writes, before=entering, leaving=early.leaving, edge=edge, reverse=True
        )
        dg, block = self._new(B, T, H), min(64, power_of_2(cut.length // self.chunk))
        launch(
            gate_gradient_kernel, (cut.count, self._rows), early.reads, writes, early.border, edge, self.F, dg,
            cut.table, T, cut.count, self._NC, cut.length, H=H, NR=nk, C=self.chunk, BC=block,
            HAS_EDGE=adjoint is not None, FORGOTTEN=-24 if v.dtype == torch.float32 else -11, VARLEN=self._packed,
            num_warps=4,
        )  # fmt: skip
        return Inputs(early.dq, dk, dv, dg)

    def _attend_dots(
        self, x, y, z, out, state, w, dots, *, border=None, before=None, leaving=None, edge=None, reverse=False
    ) -> None:  # fmt: skip
        how, cut = self._pick(ATTEND_DOTS_BACK if reverse else ATTEND_DOTS), self.segments
        dx, dz = x.shape[3], z.shape[3]
        block = min(how.block, width(dz))
        launch(
            attend_dots_kernel, (cdiv(dz, block) * cut.count, self._rows), x, y, z, self.F,
            x if state is None else state, out, w, dots, dots if border is None else border,
            leaving if before is None else before, leaving, dots if edge is None else edge, cut.table, self.T,
            cut.count, self._NC, cut.pieces, cut.length, self.scale, H=self.H, HX=x.shape[2], HY=y.shape[2],
            HZ=z.shape[2], DX=dx, DZ=dz, BX=width(dx), BZ=block, C=self.chunk, REVERSE=reverse,
            HAS_STATE=state is not None, PREC=self.precision, VARLEN=self._packed, **how.options,
        )  # fmt: skip
