"""Launches for additive writes under a scalar decay or none (see `additive`)."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.runtime.triton_version import TensorDescriptor
from ring_la.kernels.scalar_decay.chunk_gradients import additive_gradient_kernel
from ring_la.kernels.scalar_decay.gate_gradient import gate_gradient_kernel
from ring_la.kernels.scalar_decay.passes import attend_kernel, summarise_kernel
from ring_la.kernels.scalar_decay.states import states_kernel
from ring_la.kernels.scalar_decay.write_gradients import writes_kernel
from ring_la.kernels.segments import table
from ring_la.kernels.segments.base import Base
from ring_la.kernels.segments.table import (
    ADDITIVE_GRADIENT,
    ATTEND,
    ATTEND_GATED,
    ATTEND_KEEP,
    STATES,
    SUMMARISE,
    WRITES,
    cdiv,
    power_of_2,
    width,
)


class Early(NamedTuple):
    """What the gradients have before any gradient of a state arrives; None where no gate's is wanted."""

    dq: Tensor | None = None
    reads: Tensor | None = None
    border: Tensor | None = None
    leaving: Tensor | None = None
    states: Tensor | None = None


def columns(D: int) -> int:
    """A head as a tile is wide: narrower ones than 64 columns are what the compiler gets wrong."""
    return max(64, width(D))


class Simple(Base):
    """The four roles of `attend_kernel`, and what surrounds them."""

    # -- what a call allows --------------------------------------------------------------------------------

    @cached_property
    def _bulk(self) -> bool:
        """Whether tensors go by descriptor: large enough, in whole tiles, none of which holds another row's tokens.

        Beside an exchange in any case: without addresses in registers the passes leave room for its kernel."""
        v = self.inputs.v
        whole = all(columns(n) == n for n in (self.K, self.V)) and (self.B == 1 or self.T % self.chunk == 0)
        large = self.B * self.T * self.H * max(self.K, self.V) >= table.BULK
        return (large or self._crowded) and whole and not self._packed and v.element_size() == 2 and self._copies

    @property
    def _copies(self) -> bool:
        """Whether the device has a copy engine for tiles."""
        return self.device.type != "cuda" or torch.cuda.get_device_capability(self.device)[0] >= 9

    @property
    def _fused(self) -> bool:
        """Whether one program can hold a head's state: then gradients share passes."""
        return max(self.K, self.V) <= 128 and self.inputs.v.element_size() == 2

    @property
    def _most(self) -> int:
        """Where a decay's gradient is a sum over a segment errors add up, so that it is short."""
        return table.RUN if self.decay and not self._fused else 2**31

    def _by_chunk(self, gate: bool) -> bool:
        """Whether dq, dk and dg come of the chunks' states, all chunks at once: under a decay by token, or where
        `gate`, a decay's gradient, is wanted."""
        return self._fused and self.decay == 1 and (gate or not self._static)

    @property
    def _sums_with_dq(self) -> bool:
        """Whether dq's pass, which reads do, also sums up the segments for the state's gradient."""
        return self.simple and self._fused and not self.decay

    def _tiles(self, x: Tensor, block: int, bulk: bool = True) -> Tensor | TensorDescriptor:
        """`x` [B, T, H, D], or what reads and writes its tiles of a chunk by `block` columns."""
        if not (bulk and self._bulk):
            return x
        rows, row = x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]
        return TensorDescriptor(x, [rows, row], [row, 1], [self.chunk, block])

    def _decays(self, static: bool) -> Tensor:
        """What passes read of a decay: its factors by token (see `gates`), or `static` the one of each head."""
        if static:
            return self.inputs.g
        if self.decay == 1 and self.F is self.inputs.v:
            self.F = self._factors()
        return self.F

    def _state_tiles(self, states: Tensor, rows: int, block: int) -> Tensor | TensorDescriptor:
        """The chunks' states [B, NC, H, K, V], or what writes them by `rows` and `block` columns."""
        if not self._bulk:
            return states
        return TensorDescriptor(states, [states.numel() // self.V, self.V], [self.V, 1], [rows, block])

    def _chunk_states(self) -> Tensor:
        """A place for the state before each chunk."""
        return self._new(self.B, self._NC, self.H, self.K, self.V, dtype=self.inputs.v.dtype)

    @property
    def _shape(self) -> dict[str, object]:
        """The constants all passes share."""
        return dict(H=self.H, C=self.chunk, BULK=self._bulk, PREC=self.precision, VARLEN=self._packed)

    # -- passes --------------------------------------------------------------------------------------------

    def _summarise_simple(self, y, z, own, log_a, scale: float, reverse: bool, full: bool) -> None:
        """What the segments add."""
        how, cut = self._pick(SUMMARISE), self.segments
        block, wide = min(how.block, columns(self.V)), columns(self.K)
        launch(
            summarise_kernel, (cdiv(self.V, block) * cut.count, self._rows), self._tiles(y, wide),
            self._tiles(z, block), self._decays(self._static), own, own if log_a is None else log_a, cut.table, self.T,
            cut.count, self._NC, cut.length, scale, HY=y.shape[2], HZ=z.shape[2], DY=self.K, DZ=self.V, BY=wide,
            BZ=block, GATED=self.decay == 1, STATIC=self._static, REVERSE=reverse, ALL=full, **self._shape,
            **how.options,
        )  # fmt: skip

    def _states_between(self, x, y, entering: Tensor | None, leaving: Tensor | None = None) -> Tensor:
        """The states before the chunks from k and v; with `leaving` those after them, of the adjoint, from q and do."""
        how, cut, states = self._pick(STATES), self.segments, self._chunk_states()
        block, wide = min(how.block, columns(self.K)), columns(self.V)
        launch(
            states_kernel, (cdiv(self.K, block) * cut.count, self._rows), self._tiles(x, block), self._tiles(y, wide),
            self._decays(self._static), x if entering is None else entering, self._state_tiles(states, block, wide),
            x if leaving is None else leaving, cut.table, self.T, cut.count, self._NC, cut.pieces, cut.length,
            self.scale, HX=x.shape[2], K=self.K, V=self.V, BK=block, BV=wide, STATIC=self._static,
            REVERSE=leaving is not None, HAS_STATE=entering is not None, **self._shape, **how.options,
        )  # fmt: skip
        return states

    def _attend(
        self, x, y, z, out, state, *, reverse=False, transposed=False, leaving=None, states=None, sums=None, dots=None
    ) -> None:  # fmt: skip
        """One of the four roles of `attend_kernel`. `sums`: (w, sums). `dots`: (w, DOT, STATE_DOT, before, ends,
        EDGE)."""
        wanted, summed, cut = dots is not None, sums is not None, self.segments
        static = self._static and not wanted
        gated = self.decay == 1 and not static
        how = self._pick(ATTEND_GATED if gated else ATTEND)
        dx, dz = x.shape[3], z.shape[3]
        if gated and self._bulk and states is not None and dx == dz == 128:
            how = ATTEND_KEEP
        if summed:
            how = self._pick(table.ATTEND_SUMS)
        block, wide = min(how.block, columns(dz)), columns(dx)
        w, *dots = (x if d is None else d for d in dots or (None,) * 6)
        w, sums = (self._tiles(sums[0], block), sums[1]) if summed else (w, x)
        launch(
            attend_kernel, (cdiv(dz, block) * cut.count, self._rows), self._tiles(x, wide), self._tiles(y, wide),
            self._tiles(z, block), self._decays(static), x if state is None else state,
            self._tiles(out, block, not summed), x if leaving is None else leaving,
            x if states is None else self._state_tiles(states, wide, block), w, sums, *dots, cut.table, self.T,
            cut.count, self._NC, cut.pieces, cut.length, self.scale, HX=x.shape[2], HY=y.shape[2], HZ=z.shape[2],
            DX=dx, DZ=dz, BX=wide, BZ=block, GATED=self.decay == 1, STATIC=static, REVERSE=reverse,
            TRANSPOSED=transposed, HAS_STATE=state is not None, LEAVE=leaving is not None, KEEP=states is not None,
            SUMS=summed, DOTS=wanted, **self._shape, **how.options,
        )  # fmt: skip

    def _writes(self, do: Tensor, adjoint: Tensor | None, dk: Tensor, dv: Tensor, dS0: Tensor) -> None:
        """dk and dv in one pass, without a decay or with one that is the same at every token."""
        how, cut = self._pick(WRITES), self.segments
        q, k, v = self.inputs[:3]
        wk, wv = columns(self.K), columns(self.V)
        launch(
            writes_kernel, (cut.count, self._rows), self._tiles(q, wk), self._tiles(k, wk), self._tiles(v, wv),
            self._tiles(do, wv), self._decays(self._static), dS0 if adjoint is None else adjoint, dk, dv, dS0,
            cut.table, self.T, cut.count, self._NC, cut.pieces, cut.length, self.scale, HK=self.HK, K=self.K, V=self.V,
            BK=wk, BV=wv, GATED=self.decay == 1, HAS_STATE=adjoint is not None, **self._shape, **how.options,
        )  # fmt: skip

    def _chunk_gradients_simple(self, do, states, adjoints) -> Inputs:
        """All gradients of all chunks at once, from the states before the chunks and their gradients after them."""
        how, (q, k, v) = self._pick(ADDITIVE_GRADIENT), self.inputs[:3]
        B, T, H = self.B, self.T, self.H
        dq, dk, dv = (self._new(B, T, H, n, dtype=v.dtype) for n in (self.K, self.K, self.V))
        dg = self._new(B, T, H)
        args = (
            q, k, v, do, self._decays(self._static), states, adjoints, dq, dk, dv, dg, self.chunks.table, T, self._NC,
            self.scale,
        )  # fmt: skip
        shape = dict(H=H, HK=self.HK, K=self.K, V=self.V, C=self.chunk, VARLEN=self._packed)
        if not self._static and self._gluon:
            from ring_la.kernels.scalar_decay.chunk_gradients_hopper import additive_gradient_hopper_kernel

            launch(additive_gradient_hopper_kernel, (self._NC * H, B), *args, **shape, num_warps=4)
        else:
            launch(
                additive_gradient_kernel, (self._NC * H, B), *args, **shape, BK=how.block, BV=columns(self.V),
                STATIC=self._static, PREC=self.precision, **how.options,
            )  # fmt: skip
        return Inputs(dq, dk, dv, dg)

    # -- gradients -----------------------------------------------------------------------------------------

    def _early_gradients(self, entering: Tensor | None, do: Tensor, gate: bool, sums: Tensor | None = None) -> Early:
        """What needs no gradient of a state: the chunks' states; or dq, and with `gate` what dg needs of its pass.
        `sums`: room for what the segments add to the state's gradient, where dq's pass finds that, too."""
        q, k, v = self.inputs[:3]
        if self._by_chunk(gate):
            return Early(states=self._states_between(k, v, entering) if self._states is None else self._states[1])
        B, T, H = self.B, self.T, self.H
        dq = self._new(B, T, H, self.K, dtype=v.dtype)
        if not (gate and self.decay):
            self._attend(do, v, k, dq, entering, transposed=True, sums=None if sums is None else (q, sums))
            return Early(dq)
        parts = self._parts(self.K)
        early = Early(dq, self._new(parts, B, H, T), self._new(parts, B, H, T), self._pieces())
        dots = q, early.reads, early.border, None, None, None
        self._attend(do, v, k, dq, entering, transposed=True, leaving=early.leaving, dots=dots)
        return early

    def _late_gradients(self, early: Early, entering, adjoint, do: Tensor, dS0: Tensor, gate: bool) -> Inputs:
        """The other gradients, given those of the states after the segments (None: zero)."""
        q, k, v = self.inputs[:3]
        B, T, H, cut = self.B, self.T, self.H, self.segments
        if early.states is not None:
            found = self._chunk_gradients_simple(do, early.states, self._states_between(q, do, adjoint, dS0))
            return found if gate else found._replace(g=None)
        dk, dv = (self._new(B, T, H, n, dtype=v.dtype) for n in (self.K, self.V))
        if self._fused:
            self._writes(do, adjoint, dk, dv, dS0)
            return Inputs(early.dq, dk, dv)
        self._attend(k, q, do, dv, adjoint, reverse=True, leaving=dS0)
        if early.reads is None:
            self._attend(v, do, q, dk, adjoint, reverse=True, transposed=True)
            return Inputs(early.dq, dk, dv)
        parts = self._parts(self.K)
        writes, edge, dg = self._new(parts, B, H, T), self._new(parts, B, H, cut.count), self._new(B, T, H)
        states = early.leaving if entering is None else entering, early.leaving
        self._attend(
            v, do, q, dk, adjoint, reverse=True, transposed=True, dots=(k, writes, None, *states, edge)
        )  # fmt: skip
        launch(
            gate_gradient_kernel, (cut.count, self._rows), early.reads, writes, early.border, edge,
            self._decays(False), dg, cut.table, T, cut.count, self._NC, cut.length, H=H, NR=early.reads.shape[0],
            NW=parts, C=self.chunk, BC=power_of_2(cut.length // self.chunk), HAS_EDGE=adjoint is not None,
            FORGOTTEN=-24 if v.dtype == torch.float32 else -11, VARLEN=self._packed, num_warps=4,
        )  # fmt: skip
        return Inputs(early.dq, dk, dv, dg)

    def _parts(self, D: int) -> int:
        """Programs that share the columns of one head under a decay by token."""
        return cdiv(D, min(self._pick(ATTEND_GATED).block, columns(D)))
