"""Launches for every rule but the simple ones: chunks' own products, the two passes, the gradients."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.segments import table
from ring_la.kernels.segments.base import Base, Kept, total
from ring_la.kernels.segments.table import (
    BACK_SUMMARY,
    BACKWARD,
    DPLR_GRADIENT,
    GRADIENT,
    GRADIENT_DIAGONAL,
    INTRA,
    INTRA_DIAGONAL,
    KEEP,
    OUTPUT,
    PAIRS,
    SUMMARY,
    SUMMARY_ALL,
    cdiv,
    width,
)
from ring_la.kernels.triton.gates import LEAST_HALF
from ring_la.kernels.wy.backward import backward_kernel
from ring_la.kernels.wy.delta_gradients import delta_gradient_kernel
from ring_la.kernels.wy.diagonal_gradients import gradient_kernel
from ring_la.kernels.wy.dplr import dplr_gradient_kernel, dplr_levels_kernel, dplr_products_kernel, pairs_kernel
from ring_la.kernels.wy.forward import forward_kernel
from ring_la.kernels.wy.products import levels_kernel, plain_products_kernel, products_kernel, weigh_kernel


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
    Ar: Tensor


class General(Base):
    """Delta writes, diagonal decays and dplr."""

    @cached_property
    def intra(self) -> Intra:
        """What the chunks compute before any state arrives."""
        if self.decay != 2:  # delta writes
            i = self.inputs
            A, M = self._plain_products() if self._kept.M is None else (self._kept.A, self._kept.M)
            return Intra(A, M, i.q, i.k, i.k, i.v, i.v, i.v, i.v, i.v)
        if self._kept.A is not None:
            return self._weigh(self._kept)
        return self._dplr_products() if self.dplr else self._products()

    def _squares(self, count: int) -> list[Tensor]:
        shape = self.B, self.T, self.H, self.chunk
        return [self._new(*shape, dtype=self.inputs.v.dtype) for _ in range(count)]

    def _keys(self, count: int) -> list[Tensor]:
        return [self._new(self.B, self.T, self.H, self.K, dtype=self.inputs.v.dtype) for _ in range(count)]

    def _plain_products(self) -> tuple[Tensor, Tensor]:
        """A and M of every chunk under a scalar decay or none."""
        i, how, (A, M) = self.inputs, self._pick(INTRA), self._squares(2)
        self.F = self._room_for_factors()
        bounded = self.decay == 1 and self._bounded
        self.bounds = self._new(self.B, self.H, self._NC) if bounded else i.v
        launch(
            plain_products_kernel, (self._NC, self._rows), i.q, i.k, i.g if self.decay else i.beta, i.beta, self.F,
            self.bounds, A, M, self.chunks.table, self.T, self._NC, self.scale, H=self.H, HK=self.HK, K=self.K,
            BK=min(how.block, width(self.K)), C=self.chunk, GATED=self.decay == 1, STATIC=self._once,
            BOUNDED=bounded, PREC=self.precision, VARLEN=self._packed, **how.options,
        )  # fmt: skip
        return A, M

    def _products(self) -> Intra:
        i, how = self.inputs, self._pick(INTRA_DIAGONAL)
        A, Ar = [*self._squares(2 if self._fine else 1), i.v][:2]
        self.G = self._new(*i.g.shape)
        qr, kw_, kr = [*self._keys(3 if self.delta else 2), i.v][:3]
        M = self._squares(1)[0] if self.delta else i.v
        self.F = self._room_for_factors() if self.delta else i.v
        low = self._new(self.B, self._NC, self.H, dtype=torch.int32)
        kw = dict(
            H=self.H, HK=self.HK, K=self.K, BK=min(how.block, width(self.K)), C=self.chunk, LEVELS=self._levels,
            LIMIT=self._limit, DELTA=self.delta, FINE=self._fine, PREC=self.precision, VARLEN=self._packed,
        )  # fmt: skip
        out = self.F, self.G, A, Ar, M, qr, kr, kw_, low, self.chunks.table, self.T, self._NC, self.scale
        beta = i.beta if self.delta else i.v
        launch(products_kernel, (self._NC, self._rows), i.q, i.k, i.g, beta, *out, **kw, **how.options)
        launch(levels_kernel, (self._NC, self._rows), i.q, i.k, *out, **kw, num_warps=4, num_stages=1)
        return Intra(A, M, qr, kr, kw_, low, i.v, i.v, i.v, Ar)

    def _dplr_products(self) -> Intra:
        i, how, (Ab, Ak, L, M) = self.inputs, self._pick(INTRA_DIAGONAL), self._squares(4)
        self.G = self._new(*i.g.shape)
        qr, ar, bw, kw = self._keys(4)
        low = self._new(self.B, self._NC, self.H, dtype=torch.int32)
        out = self.G, Ab, Ak, L, M, qr, ar, bw, kw, low, self.chunks.table, self.T, self._NC, self.scale
        constants = dict(
            H=self.H, HK=self.HK, K=self.K, BK=min(how.block, width(self.K)), C=self.chunk, LEVELS=self._levels,
            LIMIT=self._limit, PREC=self.precision, VARLEN=self._packed,
        )  # fmt: skip
        grid = self._NC, self._rows
        launch(dplr_products_kernel, grid, i.q, i.k, i.a, i.b, i.g, *out, **constants, **how.options)
        launch(dplr_levels_kernel, grid, i.q, i.k, i.a, i.b, *out, **constants, num_warps=4, num_stages=1)
        return Intra(Ab, M, qr, ar, bw, low, kw, Ak, L, i.v)

    def _weigh(self, kept: Kept) -> Intra:
        """`intra` from what was kept of it: the keys and queries weighed again."""
        i = self.inputs
        reads, writes = (i.a, i.b) if self.dplr else (i.k, i.k)
        qr, kw, kr, kv = [*self._keys(4 if self.dplr else 3 if self.delta else 2), i.v, i.v][:4]
        launch(
            weigh_kernel, (self._NC, self._rows), i.q, reads, writes, i.k, self.G, qr, kr, kw, kv, self.chunks.table,
            self.T, H=self.H, HK=self.HK, HR=self.H if self.dplr else self.HK, K=self.K, BK=width(self.K),
            C=self.chunk, DELTA=self.delta, DPLR=self.dplr, VARLEN=self._packed, num_warps=8,
        )  # fmt: skip
        A, M, low, Av, L = (i.v if x is None else x for x in kept[2:7])
        return Intra(A, M, qr, kr, kw, low, kv, Av, L, i.v if kept.Ar is None else kept.Ar)

    @property
    def _fine(self) -> bool:
        """Whether what A's rounding leaves is kept: where no delta rule rounds more, it would be most of dv's error."""
        return not self.dense and self.inputs.v.dtype != torch.float32

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
        i, x, cut = self.inputs, self.intra, self.segments
        how = self._pick((SUMMARY_ALL if full else SUMMARY) if summary else OUTPUT if o is not None else KEEP)
        none = i.v
        u, states = keep or (none, none)
        block = min(how.block, width(self.V))
        columns = cdiv(self.V, block) + (cdiv(self.K, block) if summary and self.dense else 0)
        launch(
            forward_kernel, (columns * cut.count, self._rows), x.qr, x.kr, x.kw, x.kv, i.v, self.F, self.bounds,
            self.G, x.A, x.Av, x.L, x.M, none if state is None else state, none if o is None else o, u, states,
            none if leaving is None else leaving, none if trans is None else trans, none if trans is None else trans,
            cut.table, self.T, cut.count, self.chunks.count, cut.pieces, cut.length, self.scale,
            **self._constants(block), SUMMARY=summary, ALL=full, HORIZON=summary and full and self.bounds is not none,
            OUT=o is not None, KEEP=keep is not None, HAS_STATE=state is not None, **how.options,
        )  # fmt: skip

    def _backward(
        self, do, state, *, dr=None, dv=None, states=None, leaving=None, log_a=None, summary: bool = False,
        full: bool = False
    ) -> None:  # fmt: skip
        i, x, cut = self.inputs, self.intra, self.segments
        how = self._pick(BACK_SUMMARY if summary else BACKWARD)
        none = i.v
        block = min(how.block, width(self.V))
        launch(
            backward_kernel, (cdiv(self.V, block) * cut.count, self._rows), x.qr, x.kr, x.kw, x.kv, do, self.F,
            self.G, x.A, x.Ar, x.Av, x.L, x.M, none if state is None else state, none if dr is None else dr,
            none if dv is None else dv, none if states is None else states, none if leaving is None else leaving,
            none if log_a is None else log_a, cut.table, self.T, cut.count, self.chunks.count, cut.pieces, cut.length,
            self.scale, **self._constants(block), SUMMARY=summary, ALL=full, FINE=self._fine,
            HAS_STATE=state is not None, **how.options,
        )  # fmt: skip

    def _room(self) -> tuple[Tensor, Tensor]:
        """Where U of every token goes and the state before every chunk, [V, K], in the inputs' dtype."""
        states = self._new(self.B, self._NC, self.H, self.V, self.K, dtype=self.inputs.v.dtype)
        return torch.empty_like(self.inputs.v) if self.dense else self.inputs.v, states

    @property
    def _holds(self) -> bool:
        """Whether the pass that makes the output leaves them for the backward."""
        return self.B * self._NC * self.H * self.V * self.K * self.inputs.v.element_size() <= table.HELD

    def _carry(self, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """U and the states, from the states that enter the segments."""
        room = self._room()
        self._forward(state=entering, keep=room)
        return room

    def _general_gradients(self, carried, adjoint, do: Tensor, dS0: Tensor) -> Inputs:
        u, states = carried
        adjoints, dr = torch.empty_like(states), torch.empty_like(self.inputs.v)
        dv = torch.empty_like(dr) if self.dplr else None
        self._backward(do, adjoint, dr=dr, dv=dv, states=adjoints, leaving=dS0)
        if self.dplr:
            return self._dplr_gradients(do, u, dr, dv, states, adjoints)
        if self.decay != 2:
            return self._delta_gradients(do, u, dr, states, adjoints)
        return self._chunk_gradients(do, u, dr, states, adjoints)

    def _delta_gradients(self, do, u, dv, states, adjoints) -> Inputs:
        """The gradients of every chunk's inputs, all chunks at once: a scalar decay or none."""
        i, K, how = self.inputs, self.K, self._pick(GRADIENT)
        block = max(32, min(how.block, width(K)))  # the transposed products go wrong at 16 columns
        nk = 1 if self._gluon else cdiv(K, block)
        dq, dk = self._keys(2)
        dbeta = self._by_block(nk)
        dg = torch.empty_like(dbeta) if self.decay else dbeta
        args = (
            i.q, i.k, i.v, self.F, do, u, dv, states, adjoints, dq, dk, dg, dbeta, self.chunks.table, self.T, self._NC,
            self.scale,
        )  # fmt: skip
        shape = dict(H=self.H, HK=self.HK, K=K, V=self.V, C=self.chunk, GATED=self.decay == 1, VARLEN=self._packed)
        if self._gluon:
            from ring_la.kernels.wy.delta_gradients_hopper import delta_gradient_hopper_kernel

            launch(delta_gradient_hopper_kernel, (self._NC * self.H, self.B), *args, **shape, num_warps=4)
        else:
            launch(
                delta_gradient_kernel, (self._NC * nk, self._rows), *args, **shape, BK=block,
                BV=min(table.INNER[self.decay], width(self.V)), PREC=self.precision, **how.options,
            )  # fmt: skip
        return Inputs(dq, dk, self._by_beta(dv), total(dg) if self.decay else None, total(dbeta))

    def _chunk_gradients(self, do, u, dv, states, adjoints) -> Inputs:
        """The same for a decay per key channel."""
        i, K, how = self.inputs, self.K, self._pick(GRADIENT_DIAGONAL)
        dq, dk = self._keys(2)
        dg = torch.empty_like(i.g)
        dbeta = self._new(self.B, self.T, self.H) if self.delta else None
        for levelled in (False, True):
            launch(
                gradient_kernel, (self._NC, self._rows), i.q, i.k, i.v, self.F, self.G, self.intra.low, do, u, dv,
                states, adjoints, dq, dk, dg, dg if dbeta is None else dbeta, self.chunks.table, self.T, self._NC,
                self.scale, H=self.H, HK=self.HK, K=K, V=self.V, BK=max(32, min(how.block, width(K))),
                BV=min(64, width(self.V)) if i.v.dtype == torch.float32 else width(self.V), C=self.chunk,
                LEVELS=self._levels, LEVELLED=levelled, DELTA=self.delta, PREC=self.precision, VARLEN=self._packed,
                **how.options,
            )  # fmt: skip
        return Inputs(dq, dk, self._by_beta(dv), dg, dbeta)

    def _by_beta(self, dv: Tensor) -> Tensor:
        """β dR, where the pass left `divisor` · dR: in fp16 they differ by more than rounding."""
        if not self.delta or dv.dtype != torch.float16:
            return dv
        beta = self.inputs.beta.float()
        return dv * torch.where(beta.abs() < LEAST_HALF.value, beta / LEAST_HALF.value, 1.0).to(dv.dtype)[..., None]

    def _pairs(self, do, u, dr, fine: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(P, E, P's diagonal) of every chunk, `fine`: in fp32; see `pairs_kernel`."""
        how, shape = self._pick(PAIRS), (self.B, self.T, self.H)
        P, E = (self._new(*shape, self.chunk) for _ in "PE") if fine else self._squares(2)
        own = self._new(*shape)
        launch(
            pairs_kernel, (self._NC, self._rows), do, u, dr, P, E, own, self.chunks.table, self.T, self.scale,
            H=self.H, V=self.V, BV=min(how.block, width(self.V)), C=self.chunk, PREC=self.precision,
            VARLEN=self._packed, **how.options,
        )  # fmt: skip
        return P, E, own

    def _dplr_gradients(self, do, y, dr, dv, states, adjoints) -> Inputs:
        i, K, how = self.inputs, self.K, self._pick(DPLR_GRADIENT)
        P, E, own = self._pairs(do, y, dr, False)
        Pv, Ev, own_v = self._pairs(do, i.v, dr, True)  # most of what is wanted; what comes by Y is rounded with Y
        block = min(how.block, width(K))
        dq, dk, da, db = self._keys(4)
        dg = torch.empty_like(i.g)
        for levelled in (False, True):
            launch(
                dplr_gradient_kernel, (self._NC * cdiv(K, block), self._rows), i.q, i.k, i.a, i.b, i.v, self.G,
                self.intra.low, do, y, dr, P, E, Pv, Ev, own, own_v, states, adjoints, dq, dk, da, db, dg,
                self.chunks.table, self.T, self._NC, self.scale, H=self.H, HK=self.HK, K=K, V=self.V, BK=block,
                BV=min(64, width(self.V)), C=self.chunk, LEVELS=self._levels, LIMIT=self._limit, LEVELLED=levelled,
                PREC=self.precision, VARLEN=self._packed, **how.options,
            )  # fmt: skip
        return Inputs(dq, dk, dv, dg, None, da, db)
