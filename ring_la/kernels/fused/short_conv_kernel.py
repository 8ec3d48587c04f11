"""Launches of the short convolution and its gradients (`short_conv_device`): how many programs, over which tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_la.kernels.fused.short_conv_device import (
    conv_backward_kernel,
    conv_edges_kernel,
    conv_kernel,
    conv_sums_kernel,
)
from ring_la.kernels.runtime import strided
from ring_la.kernels.runtime.launch import aligned, filled, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.sizes import cdiv, power_of_2

CHANNELS = 128
"""Of a program, one warp."""
FORWARD, BACKWARD = (8, 32, 128), (4, 32, 256)
"""Tokens whose rows are loaded together; fewest and most tokens a program walks over. From benchmarks.tuning.conv."""
REGISTERS = (80, 128)
"""Of the walks without borders, forward and backward, for up to four taps: what the others spill is seldom run."""
SUMS = (16, 128)
"""Runs and numbers a program adds up at a time."""
PROGRAMS = 4224
"""As many as fill the GPU: 32 a multiprocessor of 132."""


def unsupported(x: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    return "" if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"dtype {x.dtype}"


class ConvolutionLaunches:
    """What the launches of one convolution share. x ``[B, T, D]``, weight ``[D, W]``, lead ``[B, N, W−1, D]``."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, lead: Tensor | None, cu: Tensor | None) -> None:
        self.x, self.weight = strided.rows(x), aligned(weight)
        self.bias, self.cu = (None if t is None else aligned(t) for t in (bias, cu))
        self.lead = None if lead is None else strided.on_boundary(lead)
        (self.B, self.T, self.D), self.W = x.shape, weight.shape[1]
        self.N = 1 if cu is None else cu.shape[0] - 1
        self.unit, self.steps = strided.strides(self.x)
        self.block = min(CHANNELS, max(32, power_of_2(self.D)))
        self.columns = cdiv(self.D, self.block)

    def run(self, fewest: int, most: int) -> int:
        """Tokens a program walks over."""
        return min(max(cdiv(self.B * self.T * self.columns, PROGRAMS), fewest), most)

    @property
    def strides(self) -> tuple[int, ...]:
        lead = (0, 0, 0, 0) if self.lead is None else self.lead.stride()
        return (*self.steps, *lead)

    @property
    def inputs(self) -> list[Tensor]:
        """x, weight, bias, lead and cu, as kernels take them."""
        return filled(self.x, self.weight, self.bias, self.lead, self.cu)

    @property
    def shape(self) -> dict[str, Any]:
        return dict(D=self.D, W=self.W, BD=self.block, UNIT=self.unit, PACKED=self.cu is not None, num_warps=1)

    @property
    def present(self) -> dict[str, Any]:
        return dict(BIAS=self.bias is not None, LEAD=self.lead is not None)

    def capped(self, registers: int) -> dict[str, Any]:
        """The option of a kernel with both walks."""
        return {"maxnreg": registers} if self.W <= 4 and not (self.lead is None and self.cu is None) else {}

    def forward(self, silu: bool) -> Tensor:
        o = self.x.new_empty(self.B, self.T, self.D)
        if o.numel():
            step, run = FORWARD[0], self.run(*FORWARD[1:])
            launch(
                conv_kernel, (cdiv(self.T, run) * self.columns, self.B), *self.inputs, o,
                self.T, self.N, self.N.bit_length(), run, *self.strides, STEP=step, SILU=silu, **self.shape,
                **self.present, **self.capped(REGISTERS[0]), tensors="strided",
            )  # fmt: skip
        return o

    def ends(self) -> Tensor:
        """The last W − 1 rows of each piece ``[B, N, W−1, D]``."""
        out = self.x.new_empty(self.B, self.N, self.W - 1, self.D)
        return self._edges(out, self.x, None, False)

    def backward(
        self, do: Tensor, dends: Tensor | None, silu: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients of x, the weight, the bias and the lead."""
        do, D, W = aligned(do), self.D, self.W
        dends = None if dends is None else aligned(dends)
        dx = self.x.new_empty(self.B, self.T, D)
        heads = dlead = None
        if self.lead is not None:
            heads = torch.empty(self.B, self.N, W - 1, D, device=do.device)
            dlead = torch.empty(heads.shape, dtype=self.lead.dtype, device=do.device)
        if not do.numel():
            dweight, dbias = torch.zeros_like(self.weight), None if self.bias is None else torch.zeros_like(self.bias)
        else:
            dweight, dbias = torch.empty_like(self.weight), None if self.bias is None else torch.empty_like(self.bias)
            step, run = BACKWARD[0], self.run(*BACKWARD[1:])
            runs = cdiv(self.T, run)
            sums = torch.empty(self.B * runs, (W + 1) * D, device=do.device)
            launch(
                conv_backward_kernel, (runs * self.columns, self.B), *self.inputs,
                *filled(do, dends, dx, heads), sums, self.T, self.N,
                self.N.bit_length(), run, *self.strides, STEP=step, SILU=silu, ENDS=dends is not None, **self.shape,
                **self.present, **self.capped(REGISTERS[1]), tensors="strided",
            )  # fmt: skip
            launch(
                conv_sums_kernel, (cdiv((W + 1) * D, SUMS[1]),), sums, *filled(dweight, dbias),
                self.B * runs, D=D, W=W, ROWS=SUMS[0], BLK=SUMS[1], BIAS=dbias is not None, num_warps=4,
            )  # fmt: skip
        if dlead is not None:
            self._edges(dlead, heads, dends, True)
        return dx, dweight, dbias, dlead

    def _edges(self, out: Tensor, dz: Tensor, dends: Tensor | None, back: bool) -> Tensor:
        if out.numel():
            launch(
                conv_edges_kernel, (self.N * self.columns, self.B), *filled(self.x, self.lead),
                *filled(dz, self.weight, dends), *filled(self.cu, by=self.x), out, self.T, self.N, *self.strides,
                WP=power_of_2(self.W), BACK=back, LEAD=self.lead is not None, ENDS=dends is not None, **self.shape,
                tensors="strided",
            )  # fmt: skip
        return out


@replayed(5, strided=True)
def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, lead: Tensor | None, cu: Tensor | None, silu: bool, ends: bool
) -> tuple[Tensor, Tensor]:
    """(o [B, T, D], the last W − 1 rows of each piece, or an empty tensor); see `short_conv.convolve`."""
    call = ConvolutionLaunches(x, weight, bias, lead, cu)
    return call.forward(silu), call.ends() if ends else x.new_empty(0)


@replayed(7, strided=True)
def backward(
    do: Tensor,
    dends: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lead: Tensor | None,
    cu: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and lead."""
    return ConvolutionLaunches(x, weight, bias, lead, cu).backward(do, dends, silu)
