"""The Triton backend of the linear recurrences: launches behind the `Local` protocol (see `kernels.local`).

Levels of one scan: chunks inside a program, segments inside the GPU (summarise, prefix, one pass that carries the state
in registers), pieces across ranks. What a segment adds and its transition are found before any state arrives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.local import Inputs
from ring_la.kernels.triton.additive import attend_kernel, summarise_kernel
from ring_la.kernels.triton.backward import backward_kernel
from ring_la.kernels.triton.cut import Cut
from ring_la.kernels.triton.forward import forward_kernel
from ring_la.kernels.triton.gates import cumulate_kernel, factors_kernel, gate_gradient_kernel
from ring_la.kernels.triton.gradient import gradient_kernel
from ring_la.kernels.triton.intra import inverse_kernel, products_kernel
from ring_la.kernels.triton.prefix import prefix_dense_kernel, prefix_kernel
from ring_la.kernels.triton.table import (
    ATTEND,
    BACK_SUMMARY,
    BACKWARD,
    GRADIENT,
    GRADIENT_DIAGONAL,
    INTRA,
    INTRA_DIAGONAL,
    KEEP,
    OUTPUT,
    SUMMARISE,
    SUMMARY,
    WAVES,
    Launch,
    pick,
    width,
)

CHUNK = 64
LEAST = 4  # chunks a segment
DECAY = {"none": 0, "scalar": 1, "diagonal": 2}


def unsupported(rule: Rule, inputs: Inputs) -> str | None:
    """Why these kernels cannot take this call; None if they can."""
    q, v = inputs.q, inputs.v
    if rule.write == "dplr":
        return "the dplr rule has no Triton kernels yet"
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {v.dtype}: the kernels take fp32, bf16 and fp16"
    if not (1 <= q.shape[-1] <= 256 and 1 <= v.shape[-1] <= 256):
        return f"head sizes {q.shape[-1]} and {v.shape[-1]}: the kernels take 1 to 256"
    if v.shape[0] * v.shape[2] > 65535:
        return f"batch × heads {v.shape[0] * v.shape[2]}: the kernels take at most 65535"
    if v.shape[1] == 0 or v.shape[0] == 0:
        return "no tokens"
    return None


def supports(rule: Rule, inputs: Inputs) -> bool:
    return unsupported(rule, inputs) is None


class Intra(NamedTuple):
    """What chunks compute before a state arrives (see `intra`); what a rule does not have is any tensor."""

    A: Tensor
    M: Tensor
    qr: Tensor
    kr: Tensor
    kw: Tensor


class TritonRecurrence:
    """One rank's tokens under one rule."""

    prepares = False

    def __init__(self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float) -> None:
        dtype = inputs.v.dtype
        given = inputs
        cast = {"q": dtype, "k": dtype, "v": dtype, "a": dtype, "b": dtype}
        self.rule, self.given, self.scale = rule, given, float(scale)
        self.inputs = Inputs(
            *(
                None if x is None else x.detach().to(cast.get(name, x.dtype)).contiguous()
                for name, x in zip(Inputs._fields, inputs)
            )
        )
        self.B, self.T, self.H, self.V = inputs.v.shape
        self.HK, self.K = inputs.q.shape[2:]
        self.cu = None if cu is None else cu.to(device=inputs.v.device, dtype=torch.int32).contiguous()
        self.device = inputs.v.device
        self.decay = DECAY[rule.decay]
        self.delta = rule.write == "delta"
        self.simple = rule.write == "additive" and self.decay < 2
        self.precision = "tf32x3" if dtype == torch.float32 else "tf32"
        self.chunk = 32 if dtype == torch.float32 else CHUNK
        self.segments = Cut.of(self.T, self._segment_length(), self.chunk, self.cu)
        self.chunks = Cut.of(self.T, self.chunk, self.chunk, self.cu) if self.decay or not self.simple else None
        self.F = self._factors() if self.decay == 1 or self.delta else self.inputs.v
        self.G = self._cumulate() if self.decay == 2 else self.inputs.v
        self._intra: Intra | None = None
        self._summary: tuple[bool, Tensor, Tensor | None] | None = None
        self._entering: tuple[Tensor | None, Tensor | None] | None = None

    # -- the protocol --------------------------------------------------------------------------------------

    def summary(self, S0: Tensor | None, through: bool) -> tuple[Tensor | None, Tensor]:
        own, transition = self._summarise(True)
        _, leaving = self._prefix(own, transition, self._state(S0), False)
        return (self._through(transition) if through else None), leaving

    def prepare(self) -> None:
        """Nothing: what the output needs before a state arrives was found for the summary."""

    def output(self, S0: Tensor | None) -> tuple[Tensor, Tensor]:
        S0 = self._state(S0)
        entering, leaving = self._enter(S0)
        self._entering = (S0, entering)
        o = torch.empty_like(self.inputs.v)
        if self.simple:
            q, k, v = self.inputs[:3]
            self._attend(q, k, v, o, entering, leaving=leaving)
        else:
            self._forward(o=o, state=entering, leaving=leaving)
        return o, leaving

    def adjoint(self, do: Tensor, dS_end: Tensor | None) -> Tensor:
        do = self._cotangent(do)
        return self._prefix(*self._summarise_back(do, True), self._state(dS_end), True)[1]

    def prepare_gradients(self, S0: Tensor | None) -> None:
        """Nothing yet: entering states and what the chunks kept are found in `gradients`."""

    def gradients(
        self, S0: Tensor | None, do: Tensor, dS_end: Tensor | None, gate: bool = True
    ) -> tuple[Inputs, Tensor]:
        """See `Local`. gate=False spares the gradient of g where nobody wants it, as under a static decay."""
        S0, dS_end, do = self._state(S0), self._state(dS_end), self._cotangent(do)
        if self._entering is not None and self._entering[0] is S0:
            entering = self._entering[1]
        else:
            entering, _ = self._enter(S0)
        if self.segments.count == 1:
            adjoint, dS0 = dS_end, self._pieces(dS_end)
        else:
            adjoint, dS0 = self._prefix(*self._summarise_back(do, dS_end is not None), dS_end, True)
        if self.simple:
            grads = self._simple_gradients(entering, adjoint, do, dS0, gate)
        else:
            grads = self._general_gradients(entering, adjoint, do, dS0)
        return self._as_given(grads), dS0

    # -- shapes --------------------------------------------------------------------------------------------

    def _segment_length(self) -> int:
        """Tokens a segment: enough segments to fill the GPU, a power of two of chunks, a segment's offsets in 31
        bits."""
        lanes = self.B * self.H * max(1, self.V // 64)
        wanted = max(1, WAVES["additive" if self.rule.write == "additive" else "delta"] // lanes)
        length = max(self.T / wanted, LEAST * self.chunk)
        most = (2**31 - 1) // (self.H * max(self.K, self.V, self.chunk) * self.chunk)
        power = triton.next_power_of_2
        chunks = min(power(max(1, round(length / self.chunk))), power(triton.cdiv(self.T, self.chunk)))
        while chunks > 1 and chunks > most:
            chunks //= 2
        return chunks * self.chunk

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype)

    def _state(self, S: Tensor | None) -> Tensor | None:
        return None if S is None else S.detach().to(torch.float32).contiguous()

    def _cotangent(self, do: Tensor) -> Tensor:
        return do.detach().to(self.inputs.v.dtype).contiguous()

    def _pieces(self, S: Tensor | None) -> Tensor:
        return self._new(self.B, self.segments.pieces, self.H, self.K, self.V)

    def _as_given(self, grads: Inputs) -> Inputs:
        """Gradients of value heads summed over the heads that share a q/k head, in the inputs' dtypes."""
        out = []
        for name, x, grad in zip(Inputs._fields, self.given, grads):
            if x is None or grad is None:
                out.append(None)
                continue
            if name in ("q", "k") and self.HK != self.H:
                grad = grad.view(self.B, self.T, self.HK, -1, self.K).sum(3, dtype=torch.float32)
            out.append(grad.to(x.dtype))
        return Inputs(*out)

    @property
    def _packed(self) -> bool:
        return self.cu is not None

    @property
    def _NC(self) -> int:
        return self.chunks.count if self.chunks is not None else 0

    @property
    def _rows(self) -> int:
        return self.B * self.H

    def _pick(self, table: dict[int, Launch]) -> Launch:
        return pick(table, self.K, self.V, self.inputs.v.dtype)

    # -- scans over segments -------------------------------------------------------------------------------

    def _factors(self) -> Tensor:
        """By token, chunk by chunk: a scalar decay's factors and β (see `gates`)."""
        i, cut = self.inputs, self.chunks
        out = self._new(self.B, cut.count, self.H, 4, self.chunk)
        block = min(16, triton.next_power_of_2(self.H))
        factors_kernel[(cut.count, triton.cdiv(self.H, block), self.B)](
            i.g if self.decay == 1 else i.v, i.beta if self.delta else i.v, out, cut.table, self.T, cut.count, self.H,
            self.scale if self.simple else 1.0, C=self.chunk, BH=block, GATED=self.decay == 1, DELTA=self.delta,
            VARLEN=self._packed, num_warps=4,
        )  # fmt: skip
        return out

    def _cumulate(self) -> Tensor:
        """Running log-decays inside each chunk, by token and key channel."""
        g, cut = self.inputs.g, self.chunks
        out = self._new(*g.shape)
        channels = self.H * self.K
        block = min(64, triton.next_power_of_2(channels))
        cumulate_kernel[(cut.count, triton.cdiv(channels, block), self.B)](
            g, out, cut.table, self.T, channels, C=self.chunk, BW=block, VARLEN=self._packed, num_warps=4
        )
        return out

    def _enter(self, S0: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The state entering each segment, and a place for those leaving the pieces."""
        if self.segments.count == 1:
            return S0, self._pieces(S0)
        return self._prefix(*self._summarise(S0 is not None), S0, False)

    def _prefix(
        self, own: Tensor, transition: Tensor | None, S0: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        cut = self.segments
        entering, leaving = torch.empty_like(own), self._pieces(None)
        kw = dict(H=self.H, K=self.K, V=self.V, HAS_S0=S0 is not None, REVERSE=reverse, VARLEN=self._packed)
        init = own if S0 is None else S0
        if self.delta:
            block = 32
            prefix_dense_kernel[(triton.cdiv(self.V, block), cut.pieces, self._rows)](
                own, transition, init, entering, leaving, cut.first, cut.count, cut.pieces, BK=width(self.K),
                BJ=min(32, width(self.K)), BV=block, HAS_B=True, EYE=False, num_warps=4, num_stages=1, **kw,
            )  # fmt: skip
        else:
            block = 1024
            prefix_kernel[(triton.cdiv(self.K * self.V, block), cut.pieces, self._rows)](
                own, own if transition is None else transition, init, entering, leaving, cut.first, cut.count,
                cut.pieces, DECAY=self.decay, BLK=block, num_warps=4, **kw,
            )  # fmt: skip
        return entering, leaving

    def _through(self, transition: Tensor | None) -> Tensor | None:
        """The product of each piece's transitions, from its segments'."""
        if transition is None:
            return None
        cut = self.segments
        if self.delta:
            scratch = torch.empty_like(transition)
            out = self._new(self.B, cut.pieces, self.H, self.K, self.K)
            prefix_dense_kernel[(triton.cdiv(self.K, 32), cut.pieces, self._rows)](
                transition, transition, transition, scratch, out, cut.first, cut.count, cut.pieces, H=self.H, K=self.K,
                V=self.K, BK=width(self.K), BJ=min(32, width(self.K)), BV=32, HAS_S0=False, HAS_B=False, EYE=True,
                REVERSE=False, VARLEN=self._packed, num_warps=4, num_stages=1,
            )  # fmt: skip
            return out
        if not self._packed:
            return transition.sum(1, keepdim=True).exp2()
        piece = self.segments.table[:, 2].long()
        live = (self.segments.table[:, 1] > self.segments.table[:, 0]).view(1, -1, *[1] * (transition.dim() - 2))
        out = torch.zeros(self.B, cut.pieces, *transition.shape[2:], device=self.device)
        return out.index_add_(1, piece, torch.where(live, transition, 0.0)).exp2()

    def _summarise(self, full: bool) -> tuple[Tensor, Tensor | None]:
        """What each segment adds, and its transition (log-decays, or dense). Not `full`: only what one call needs that
        starts and ends with no state."""
        if self._summary is not None and (self._summary[0] or not full):
            return self._summary[1:]
        own = self._new(self.B, self.segments.count, self.H, self.K, self.V)
        if self.simple:
            transition = self._new(*own.shape[:3]) if self.decay else None
            self._summarise_simple(self.inputs.k, self.inputs.v, own, transition, 1.0, False, full)
        else:
            transition = self._new(*own.shape[:4], self.K) if self.delta else self._new(*own.shape[:4])
            self._forward(state=own, trans=transition, summary=True, full=full)
        self._summary = (full, own, transition)
        return own, transition

    def _summarise_back(self, do: Tensor, full: bool) -> tuple[Tensor, Tensor | None]:
        own = self._new(self.B, self.segments.count, self.H, self.K, self.V)
        if self.simple:
            transition = self._new(*own.shape[:3]) if self.decay else None
            self._summarise_simple(self.inputs.q, do, own, transition, self.scale, True, full)
        else:
            transition = self._summarise(full)[1] if self.delta else self._new(*own.shape[:4])
            self._backward(do, own, log_a=transition, summary=True, full=full)
        return own, transition

    # -- additive writes, scalar decay or none -------------------------------------------------------------

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
        """One of the four roles of `attend_kernel`; dots = (w, DOT)."""
        launch, cut = self._pick(ATTEND), self.segments
        dx, dz = x.shape[3], z.shape[3]
        block = min(launch.block, width(dz))
        w, dot = dots or (x, x)
        attend_kernel[(triton.cdiv(dz, block) * cut.count, self._rows)](
            x, y, z, self.F, x if state is None else state, out, x if leaving is None else leaving, w, dot,
            x if adjoint is None else adjoint, x if edge is None else edge, cut.table, self.T, cut.count, self._NC,
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
        reads = writes = edge = None
        if gate:
            reads, writes = self._new(nk, B, T, H), self._new(nk, B, T, H)
            edge = self._new(nk, B, cut.count, H)
            if adjoint is None:
                edge.zero_()
        self._attend(
            do, v, k, dq, entering, transposed=True, dots=(q, reads) if gate else None, adjoint=adjoint,
            edge=edge if gate and adjoint is not None else None,
        )  # fmt: skip
        self._attend(k, q, do, dv, adjoint, reverse=True, leaving=dS0)
        self._attend(v, do, q, dk, adjoint, reverse=True, transposed=True, dots=(k, writes) if gate else None)
        dg = None
        if gate:
            dg = self._new(B, T, H)
            block = min(16, triton.next_power_of_2(H))
            gate_gradient_kernel[(cut.count, triton.cdiv(H, block), B)](
                reads, writes, edge, dg, cut.table, T, H, cut.count, cut.length, NR=nk, NW=nk, C=self.chunk, BH=block,
                VARLEN=self._packed, num_warps=4,
            )  # fmt: skip
        return Inputs(dq, dk, dv, dg)

    # -- every other rule ----------------------------------------------------------------------------------

    @property
    def intra(self) -> Intra:
        if self._intra is None:
            i, launch = self.inputs, self._pick(INTRA_DIAGONAL if self.decay == 2 else INTRA)
            shape, dtype = (self.B, self.T, self.H), i.v.dtype
            M = self._new(*shape, self.chunk, dtype=dtype) if self.delta else i.v
            kw = dict(
                H=self.H, HK=self.HK, K=self.K, BK=min(launch.block, width(self.K)), C=self.chunk, PREC=self.precision,
                VARLEN=self._packed, **launch.options,
            )  # fmt: skip
            grid = (self.chunks.count, self._rows)
            if self.decay == 2:
                A = self._new(*shape, self.chunk, dtype=dtype)
                qr, kw_ = (self._new(*shape, self.K, dtype=dtype) for _ in range(2))
                kr = self._new(*shape, self.K, dtype=dtype) if self.delta else kw_
                products_kernel[grid](
                    i.q, i.k, self.F, self.G, A, M, qr, kr, kw_, self.chunks.table, self.T, self._NC,
                    DELTA=self.delta, **self._levels, **kw,
                )  # fmt: skip
                self._intra = Intra(A, M, qr, kr, kw_)
            else:
                inverse_kernel[grid](i.k, self.F, M, self.chunks.table, self.T, self._NC, GATED=self.decay == 1, **kw)
                self._intra = Intra(i.v, M, i.q, i.k, i.k)
        return self._intra

    @property
    def _levels(self) -> dict[str, int]:
        """Levels of a chunk, and how far (in powers of two) a token may be from the reference it shares (`reach`)."""
        return {"LEVELS": self.chunk.bit_length() - 1, "LIMIT": 4 if self.inputs.v.dtype == torch.float16 else 48}

    def _constants(self, block: int) -> dict:
        return dict(
            H=self.H, HK=self.H if self.decay == 2 else self.HK, K=self.K, V=self.V, BK=width(self.K), BV=block,
            C=self.chunk, DECAY=self.decay,
            DELTA=self.delta, PREC=self.precision, VARLEN=self._packed,
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
        columns = triton.cdiv(self.V, block) + (triton.cdiv(self.K, block) if summary and self.delta else 0)
        forward_kernel[(columns * cut.count, self._rows)](
            x.qr, x.kr, x.kw, i.v, self.F, self.G, x.A, x.M, none if state is None else state,
            none if o is None else o, u, states, none if leaving is None else leaving, none if trans is None else trans,
            none if trans is None else trans, cut.table, self.T, cut.count, self.chunks.count, cut.pieces, cut.length,
            self.scale, SUMMARY=summary, ALL=full, OUT=o is not None, KEEP=keep is not None,
            HAS_STATE=state is not None, **self._constants(block), **launch.options,
        )  # fmt: skip

    def _backward(
        self, do, state, *, dr=None, states=None, leaving=None, log_a=None, summary: bool = False, full: bool = False
    ) -> None:
        i, cut, launch = self.inputs, self.segments, self._pick(BACK_SUMMARY if summary else BACKWARD)
        x = self.intra
        none = i.v
        block = min(launch.block, width(self.V))
        backward_kernel[(triton.cdiv(self.V, block) * cut.count, self._rows)](
            x.qr, x.kr, x.kw, do, self.F, self.G, x.A, x.M, none if state is None else state,
            none if dr is None else dr, none if states is None else states, none if leaving is None else leaving,
            none if log_a is None else log_a, cut.table, self.T, cut.count, self.chunks.count, cut.pieces, cut.length,
            self.scale, SUMMARY=summary, ALL=full, HAS_STATE=state is not None, **self._constants(block),
            **launch.options,
        )  # fmt: skip

    def _general_gradients(self, entering, adjoint, do: Tensor, dS0: Tensor) -> Inputs:
        i, dtype = self.inputs, self.inputs.v.dtype
        B, T, H, K, V, NC = self.B, self.T, self.H, self.K, self.V, self.chunks.count
        states, adjoints = (self._new(B, NC, H, K, V, dtype=dtype) for _ in range(2))
        u = torch.empty_like(i.v) if self.delta else i.v
        dr = torch.empty_like(i.v)
        self._forward(state=entering, keep=(u, states))
        self._backward(do, adjoint, dr=dr, states=adjoints, leaving=dS0)
        launch = self._pick(GRADIENT_DIAGONAL if self.decay == 2 else GRADIENT)
        block = min(launch.block, width(K))
        nk = triton.cdiv(K, block)
        dq, dk = (self._new(B, T, H, K, dtype=dtype) for _ in range(2))
        dv = torch.empty_like(dr) if self.delta else dr
        dbeta = self._new(nk, B, T, H) if self.delta else None
        dg = {0: None, 1: self._new(nk, B, T, H), 2: self._new(B, T, H, K)}[self.decay]
        constants = self._constants(min(launch.block, 64, width(V))) | {"BK": block, "HK": self.HK} | self._levels
        gradient_kernel[(NC * nk, self._rows)](
            i.q, i.k, i.v, self.F, self.G, do, u, dr, states, adjoints, dq, dk, dv,
            dq if dg is None else dg, dq if dbeta is None else dbeta, self.chunks.table, T, NC, self.scale,
            **constants, **launch.options,
        )  # fmt: skip
        if self.decay == 1:
            dg = dg.sum(0)
        return Inputs(dq, dk, dv, dg, None if dbeta is None else dbeta.sum(0))
