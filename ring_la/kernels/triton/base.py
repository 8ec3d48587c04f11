"""What the launches of every rule share: shapes, gates, and the scan over segments."""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.local import Inputs
from ring_la.kernels.triton import table
from ring_la.kernels.triton.cut import Cut
from ring_la.kernels.triton.gates import cumulate_kernel, factors_kernel
from ring_la.kernels.triton.prefix import prefix_dense_kernel, prefix_kernel
from ring_la.kernels.triton.table import Launch, width

DECAY = {"none": 0, "scalar": 1, "diagonal": 2}


class Base:
    """One rank's tokens under one rule, cut into chunks and segments."""

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
        self.dplr = rule.write == "dplr"
        self.dense = self.delta or self.dplr
        self.simple = rule.write == "additive" and self.decay < 2
        self.precision = "tf32x3" if dtype == torch.float32 else "tf32"
        self.chunk = 32 if dtype == torch.float32 else table.CHUNK
        self.segments = Cut.of(self.T, self._segment_length(), self.chunk, self.cu)
        self.chunks = Cut.of(self.T, self.chunk, self.chunk, self.cu) if self.decay or not self.simple else None
        self.F = self._factors() if self.decay == 1 or self.delta else self.inputs.v
        self.G = self._cumulate() if self.decay == 2 else self.inputs.v

    # -- shapes --------------------------------------------------------------------------------------------

    def _segment_length(self) -> int:
        """Tokens a segment: enough segments to fill the GPU, a power of two of chunks, a segment's offsets in 31
        bits."""
        lanes = self.B * self.H * max(1, self.V // 64)
        wanted = max(1, table.WAVES["additive" if self.rule.write == "additive" else "delta"] // lanes)
        length = max(self.T / wanted, table.LEAST * self.chunk)
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

    def _pick(self, entries: dict[int, Launch]) -> Launch:
        launch = table.pick(entries, self.K, self.V, self.inputs.v.dtype)
        # dplr's second stream fills the shared memory that prefetching would take
        return dataclasses.replace(launch, stages=1, registers=0) if self.dplr else launch

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

    def _prefix(
        self, own: Tensor, transition: Tensor | None, S0: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        cut = self.segments
        entering, leaving = torch.empty_like(own), self._pieces(None)
        kw = dict(H=self.H, K=self.K, V=self.V, HAS_S0=S0 is not None, REVERSE=reverse, VARLEN=self._packed)
        init = own if S0 is None else S0
        if self.dense:
            block = 16
            prefix_dense_kernel[(triton.cdiv(self.V, block), cut.pieces, self._rows)](
                own, transition, init, entering, leaving, cut.first, cut.count, cut.pieces, BK=width(self.K),
                BV=block, HAS_B=True, EYE=False, **self._dense, **kw,
            )  # fmt: skip
        else:
            block = 1024
            prefix_kernel[(triton.cdiv(self.K * self.V, block), cut.pieces, self._rows)](
                own, own if transition is None else transition, init, entering, leaving, cut.first, cut.count,
                cut.pieces, DECAY=self.decay, BLK=block, num_warps=4, **kw,
            )  # fmt: skip
        return entering, leaving

    @property
    def _dense(self) -> dict[str, int]:
        """How a dense transition is read: whole up to 128 channels."""
        if width(self.K) <= 128:
            return {"BJ": width(self.K), "num_warps": 4 if self.K <= 64 else 8, "num_stages": 2}
        return {"BJ": 32, "num_warps": 4, "num_stages": 1}

    def _through(self, transition: Tensor | None) -> Tensor | None:
        """The product of each piece's transitions, from its segments'."""
        if transition is None:
            return None
        cut = self.segments
        if self.dense:
            scratch = torch.empty_like(transition)
            out = self._new(self.B, cut.pieces, self.H, self.K, self.K)
            prefix_dense_kernel[(triton.cdiv(self.K, 32), cut.pieces, self._rows)](
                transition, transition, transition, scratch, out, cut.first, cut.count, cut.pieces, H=self.H, K=self.K,
                V=self.K, BK=width(self.K), BV=32, HAS_S0=False, HAS_B=False, EYE=True, REVERSE=False,
                VARLEN=self._packed, **self._dense,
            )  # fmt: skip
            return out
        if not self._packed:
            return transition.sum(1, keepdim=True).exp2()
        piece = self.segments.table[:, 2].long()
        live = (self.segments.table[:, 1] > self.segments.table[:, 0]).view(1, -1, *[1] * (transition.dim() - 2))
        out = torch.zeros(self.B, cut.pieces, *transition.shape[2:], device=self.device)
        return out.index_add_(1, piece, torch.where(live, transition, 0.0)).exp2()
