"""Launches for every rule but the simple ones: chunks' own products, the two passes, the gradients."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ring_la.kernels.local import Inputs
from ring_la.kernels.triton.backward import backward_kernel
from ring_la.kernels.triton.base import Base
from ring_la.kernels.triton.dplr import dplr_gradient_kernel, dplr_products_kernel
from ring_la.kernels.triton.forward import forward_kernel
from ring_la.kernels.triton.gradient import gradient_kernel, pairs_kernel
from ring_la.kernels.triton.intra import inverse_kernel, products_kernel
from ring_la.kernels.triton.table import (
    BACK_SUMMARY,
    BACKWARD,
    GRADIENT,
    GRADIENT_DIAGONAL,
    INTRA,
    INTRA_DIAGONAL,
    KEEP,
    OUTPUT,
    PAIRS,
    SUMMARY,
    width,
)


class Intra(NamedTuple):
    """What chunks compute before a state arrives (see `intra`); what a rule does not have is any tensor."""

    A: Tensor
    M: Tensor
    qr: Tensor
    kr: Tensor
    kw: Tensor
    low: Tensor
    kv: Tensor
    Av: Tensor
    L: Tensor


class General(Base):
    """Delta writes, diagonal decays and dplr."""

    @cached_property
    def intra(self) -> Intra:
        """What the chunks compute before any state arrives."""
        i, launch = self.inputs, self._pick(INTRA_DIAGONAL if self.decay == 2 else INTRA)
        kw = dict(
            H=self.H, HK=self.HK, K=self.K, BK=min(launch.block, width(self.K)), C=self.chunk, PREC=self.precision,
            VARLEN=self._packed, **launch.options,
        )  # fmt: skip
        if self.decay == 2:
            kw |= dict(LEVELS=self._levels, LIMIT=self._limit)
            return self._dplr_products(kw) if self.dplr else self._products(kw)
        M = self._square()
        inverse_kernel[(self._NC, self._rows)](
            i.k, self.F, M, self.chunks.table, self.T, self._NC, GATED=self.decay == 1, **kw
        )
        return Intra(i.v, M, i.q, i.k, i.k, i.v, i.v, i.v, i.v)

    def _square(self) -> Tensor:
        return self._new(self.B, self.T, self.H, self.chunk, dtype=self.inputs.v.dtype)

    def _keys(self) -> Tensor:
        return self._new(self.B, self.T, self.H, self.K, dtype=self.inputs.v.dtype)

    def _products(self, kw: dict) -> Intra:
        i, A, qr, kw_ = self.inputs, self._square(), self._keys(), self._keys()
        M, kr = (self._square(), self._keys()) if self.delta else (i.v, kw_)
        low = self._new(self.B, self._NC, self.H, dtype=torch.int32)
        products_kernel[(self._NC, self._rows)](
            i.q, i.k, self.F, self.G, A, M, qr, kr, kw_, low, self.chunks.table, self.T, self._NC, DELTA=self.delta,
            **kw
        )
        return Intra(A, M, qr, kr, kw_, low, i.v, i.v, i.v)

    def _dplr_products(self, kw: dict) -> Intra:
        i = self.inputs
        Ab, Ak, L, M = (self._square() for _ in range(4))
        qr, ar, bw, kw_ = (self._keys() for _ in range(4))
        low = self._new(self.B, self._NC, self.H, dtype=torch.int32)
        dplr_products_kernel[(self._NC, self._rows)](
            i.q, i.k, i.a, i.b, self.G, Ab, Ak, L, M, qr, ar, bw, kw_, low, self.chunks.table, self.T, self._NC, **kw
        )
        return Intra(Ab, M, qr, ar, bw, low, kw_, Ak, L)

    @property
    def _levels(self) -> int:
        return self.chunk.bit_length() - 1

    @property
    def _limit(self) -> int:
        """How far, in powers of two, a token may be from a reference it shares (`intra.reach`)."""
        return 4 if self.inputs.v.dtype == torch.float16 else 48

    def _constants(self, block: int) -> dict:
        return dict(
            H=self.H, HK=self.H if self.decay == 2 else self.HK, K=self.K, V=self.V, BK=width(self.K), BV=block,
            C=self.chunk, DECAY=self.decay, DELTA=self.delta, DPLR=self.dplr, PREC=self.precision, VARLEN=self._packed,
        )  # fmt: skip

    def _forward(
        self, *, o=None, state=None, leaving=None, trans=None, keep=None, summary: bool = False, full: bool = False
    ) -> None:
        i, cut = self.inputs, self.segments
        launch = self._pick(SUMMARY if summary else OUTPUT if o is not None else KEEP)
        x = self.intra
        none = i.v
        u, states = keep or (none, none)
        block = min(launch.block, width(self.V))
        columns = triton.cdiv(self.V, block) + (triton.cdiv(self.K, block) if summary and self.dense else 0)
        forward_kernel[(columns * cut.count, self._rows)](
            x.qr, x.kr, x.kw, x.kv, i.v, self.F, self.G, x.A, x.Av, x.L, x.M, none if state is None else state,
            none if o is None else o, u, states, none if leaving is None else leaving, none if trans is None else trans,
            none if trans is None else trans, cut.table, self.T, cut.count, self.chunks.count, cut.pieces, cut.length,
            self.scale, SUMMARY=summary, ALL=full, OUT=o is not None, KEEP=keep is not None,
            HAS_STATE=state is not None, **self._constants(block), **launch.options,
        )  # fmt: skip

    def _backward(
        self, do, state, *, dr=None, dv=None, states=None, leaving=None, log_a=None, summary: bool = False,
        full: bool = False
    ) -> None:
        i, cut, launch = self.inputs, self.segments, self._pick(BACK_SUMMARY if summary else BACKWARD)
        x = self.intra
        none = i.v
        block = min(launch.block, width(self.V))
        backward_kernel[(triton.cdiv(self.V, block) * cut.count, self._rows)](
            x.qr, x.kr, x.kw, x.kv, do, self.F, self.G, x.A, x.Av, x.L, x.M, none if state is None else state,
            none if dr is None else dr, none if dv is None else dv, none if states is None else states, none if
            leaving is None else leaving,
            none if log_a is None else log_a, cut.table, self.T, cut.count, self.chunks.count, cut.pieces, cut.length,
            self.scale, SUMMARY=summary, ALL=full, HAS_STATE=state is not None, **self._constants(block),
            **launch.options,
        )  # fmt: skip

    def _general_gradients(self, entering, adjoint, do: Tensor, dS0: Tensor) -> Inputs:
        i, dtype = self.inputs, self.inputs.v.dtype
        shape = self.B, self._NC, self.H, self.V, self.K
        states, adjoints = (self._new(*shape, dtype=dtype) for _ in range(2))
        u = torch.empty_like(i.v) if self.dense else i.v
        dr = torch.empty_like(i.v)
        dv = torch.empty_like(i.v) if self.dplr else None
        self._forward(state=entering, keep=(u, states))
        self._backward(do, adjoint, dr=dr, dv=dv, states=adjoints, leaving=dS0)
        if self.dplr:
            return self._dplr_gradients(do, u, dr, dv, states, adjoints)
        return self._chunk_gradients(do, u, dr, states, adjoints)

    def _pairs(self, do, u, dr) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """(P, E, own, dv, dβ) of every chunk; see `pairs_kernel`."""
        i, launch = self.inputs, self._pick(PAIRS)
        B, T, H = self.B, self.T, self.H
        P = self._new(B, T, H, self.chunk, dtype=i.v.dtype)
        E = torch.empty_like(P) if self.dense else P
        dv = torch.empty_like(dr) if self.delta else dr
        dbeta = self._new(B, T, H) if self.delta else None
        own = self._new(B, T, H) if self.decay == 2 else None
        pairs_kernel[(self._NC, self._rows)](
            i.v, self.F, do, u, dr, P, E, P if own is None else own, dv, P if dbeta is None else dbeta,
            self.chunks.table, T, self._NC, self.scale, H=H, V=self.V, BV=min(launch.block, width(self.V)),
            C=self.chunk, DECAY=self.decay, DELTA=self.delta, READS=self.dense, PREC=self.precision,
            VARLEN=self._packed, **launch.options,
        )  # fmt: skip
        return P, E, own, dv, dbeta

    def _chunk_gradients(self, do, u, dr, states, adjoints) -> Inputs:
        """The gradients of every chunk's inputs, all chunks at once."""
        i, K = self.inputs, self.K
        P, E, own, dv, dbeta = self._pairs(do, u, dr)
        launch = self._pick(GRADIENT_DIAGONAL if self.decay == 2 else GRADIENT)
        block = min(launch.block, width(K))
        nk = triton.cdiv(K, block)
        shape = self.B, self.T, self.H
        dq, dk = (self._new(*shape, K, dtype=i.v.dtype) for _ in range(2))
        dread = self._new(nk, *shape) if self.delta else P
        dg = {0: None, 1: self._new(nk, *shape), 2: self._new(*shape, K)}[self.decay]
        gradient_kernel[(self._NC * nk, self._rows)](
            i.q, i.k, self.F, self.G, self.intra.low, P if own is None else own, do, u, dr, P, E, states, adjoints, dq,
            dk, P if dg is None else dg, dread, self.chunks.table, self.T, self._NC, self.scale, H=self.H, HK=self.HK,
            K=K, V=self.V, BK=block, BV=min(64, width(self.V)), C=self.chunk, LEVELS=self._levels, DECAY=self.decay,
            DELTA=self.delta, PREC=self.precision, VARLEN=self._packed, **launch.options,
        )  # fmt: skip
        if self.decay == 1:
            dg = dg.sum(0)
        return Inputs(dq, dk, dv, dg, None if dbeta is None else dbeta + dread.sum(0))

    def _dplr_gradients(self, do, y, dr, dv, states, adjoints) -> Inputs:
        i, K, launch = self.inputs, self.K, self._pick(GRADIENT_DIAGONAL)
        P, E, own, _, _ = self._pairs(do, y, dr)
        Pv, Ev, own_v, _, _ = self._pairs(do, i.v, dr)
        block = min(launch.block, width(K))
        dq, dk, da, db = (self._new(self.B, self.T, self.H, K, dtype=i.v.dtype) for _ in range(4))
        dg = self._new(self.B, self.T, self.H, K)
        dplr_gradient_kernel[(self._NC * triton.cdiv(K, block), self._rows)](
            i.q, i.k, i.a, i.b, i.v, self.G, self.intra.low, do, y, dr, P, E, Pv, Ev, own, own_v, states, adjoints, dq,
            dk, da, db, dg, self.chunks.table, self.T, self._NC, self.scale, H=self.H, HK=self.HK, K=K, V=self.V,
            BK=block, BV=min(64, width(self.V)), C=self.chunk, LEVELS=self._levels, LIMIT=self._limit,
            PREC=self.precision, VARLEN=self._packed, **launch.options,
        )  # fmt: skip
        return Inputs(dq, dk, dv, dg, None, da, db)
