"""Launches for additive writes under a scalar decay or none (see `additive`)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ring_la.kernels.local import Inputs
from ring_la.kernels.triton.additive import attend_kernel, summarise_kernel
from ring_la.kernels.triton.base import Base
from ring_la.kernels.triton.gates import gate_gradient_kernel
from ring_la.kernels.triton.table import ATTEND, SUMMARISE, width


class Simple(Base):
    """The four roles of `attend_kernel`, and what surrounds them."""

    def _summarise_simple(self, y, z, own, log_a, scale: float, reverse: bool, full: bool) -> None:
        launch, cut = self._pick(SUMMARISE), self.segments
        block = min(launch.block, width(self.V))
        summarise_kernel[(triton.cdiv(self.V, block) * cut.count, self._rows)](
            y, z, self.F, own, own if log_a is None else log_a, cut.table, self.T, cut.count, self._NC, cut.length,
            scale,
            H=self.H, HY=y.shape[2], HZ=z.shape[2], DY=self.K, DZ=self.V, BY=width(self.K), BZ=block, C=self.chunk,
            GATED=self.decay == 1, REVERSE=reverse, ALL=full, PREC=self.precision, VARLEN=self._packed,
            **launch.options,
        )  # fmt: skip

    def _attend(
        self, x, y, z, out, state, *, reverse=False, transposed=False, leaving=None, dots=None, adjoint=None, edge=None
    ) -> None:
        """One of the four roles of `attend_kernel`; dots = (w, DOT, BORDER)."""
        launch, cut = self._pick(ATTEND), self.segments
        dx, dz = x.shape[3], z.shape[3]
        block = min(launch.block, width(dz))
        w, dot, border = dots or (x, x, x)
        attend_kernel[(triton.cdiv(dz, block) * cut.count, self._rows)](
            x, y, z, self.F, x if state is None else state, out, x if leaving is None else leaving, w, dot,
            border, x if adjoint is None else adjoint, x if edge is None else edge, cut.table, self.T, cut.count,
            self._NC,
            cut.pieces, cut.length, self.scale, H=self.H, HX=x.shape[2], HY=y.shape[2], HZ=z.shape[2], HW=w.shape[2],
            DX=dx, DZ=dz,
            BX=width(dx), BZ=block, C=self.chunk, GATED=self.decay == 1, REVERSE=reverse, TRANSPOSED=transposed,
            HAS_STATE=state is not None, LEAVE=leaving is not None, DOTS=dots is not None, EDGES=edge is not None,
            PREC=self.precision, VARLEN=self._packed, **launch.options,
        )  # fmt: skip

    def _simple_gradients(self, entering, adjoint, do: Tensor, dS0: Tensor, gate: bool) -> Inputs:
        gate = gate and self.decay == 1
        q, k, v = self.inputs[:3]
        B, T, H, cut = self.B, self.T, self.H, self.segments
        dq, dk, dv = (self._new(B, T, H, n, dtype=v.dtype) for n in (self.K, self.K, self.V))
        block = self._pick(ATTEND).block
        nk = triton.cdiv(self.K, min(block, width(self.K)))
        reads = writes = border = edge = None
        if gate:
            reads, writes = self._new(nk, B, T, H), self._new(nk, B, T, H)
            border, edge = self._new(nk, B, self._NC, H), self._new(nk, B, cut.count, H)
            if adjoint is None:
                edge.zero_()
        self._attend(
            do, v, k, dq, entering, transposed=True, dots=(q, reads, border) if gate else None, adjoint=adjoint,
            edge=edge if gate and adjoint is not None else None,
        )  # fmt: skip
        self._attend(k, q, do, dv, adjoint, reverse=True, leaving=dS0)
        self._attend(v, do, q, dk, adjoint, reverse=True, transposed=True, dots=(k, writes, writes) if gate else None)
        dg = None
        if gate:
            dg = self._new(B, T, H)
            block = min(16, triton.next_power_of_2(H))
            gate_gradient_kernel[(cut.count, triton.cdiv(H, block), B)](
                reads, writes, border, edge, self.F, dg, cut.table, T, H, cut.count, self._NC, cut.length, NR=nk,
                C=self.chunk, BH=block, FORGOTTEN=-24 if v.dtype == torch.float32 else -11, VARLEN=self._packed,
                num_warps=4,
            )  # fmt: skip
        return Inputs(dq, dk, dv, dg)
