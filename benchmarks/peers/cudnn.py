"""NVIDIA's Hopper kernels of KDA (nvidia-cudnn-frontend >= 1.32), by their launchers: no graph layer, no checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def unsupported() -> str:
    """Why they cannot run here, or an empty string."""
    try:
        importlib.import_module("cudnn.linear_attention.hopper.cuda_bwd_host")
    except ImportError as e:
        return f"nvidia-cudnn-frontend: {e}"
    return ""


@dataclass
class CudnnKDA:
    """KDA of packed sequences of one length: q, k, v, do ``[1, T, H, 128]`` bf16, g and beta fp32, states fp32
    ``[N, H, K, V]``, which theirs take turned over."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    S0: Tensor
    do: Tensor
    dS: Tensor
    cu_seqlens: Tensor

    def __post_init__(self) -> None:
        names = "hopper.cuda_host", "hopper.cuda_bwd_host"
        self._there, self._back = (importlib.import_module(f"cudnn.linear_attention.{name}") for name in names)
        self._entering, self._arriving = (x.transpose(-1, -2).contiguous() for x in (self.S0, self.dS))
        self.o, self._leaving = torch.empty_like(self.v), torch.empty_like(self._entering)
        self._grads = [torch.empty_like(x) for x in (self.q, self.k, self.v, self.g, self.beta, self._entering)]

    @property
    def final_state(self) -> Tensor:
        return self._leaving.transpose(-1, -2)

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """Of q, k, v, g, beta and the initial states."""
        *rest, dS0 = self._grads
        return (*rest, dS0.transpose(-1, -2))

    @cached_property
    def _workspace(self) -> Tensor:
        _, T, H, _ = self.v.shape
        size = self._back.workspace_bytes(T, H, len(self.S0))
        return torch.empty(size, dtype=torch.uint8, device=self.v.device)

    @property
    def _common(self) -> dict[str, int]:
        named = dict(q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta, cu_seqlens=self.cu_seqlens)
        addresses = {name: x.data_ptr() for name, x in named.items()}
        _, T, H, _ = self.v.shape
        stream = torch.cuda.current_stream().cuda_stream
        return addresses | dict(
            device=self.v.device.index or 0, stream=stream, total_tokens=T, n_heads=H, n_seqs=len(self.S0),
            initial_state=self._entering.data_ptr(),
        )  # fmt: skip

    def forward(self) -> None:
        self._there.launch(**self._common, o=self.o.data_ptr(), final_state=self._leaving.data_ptr())

    def backward(self) -> None:
        names = "dq", "dk", "dv", "dg", "dbeta", "d_initial_state"
        grads = {name: x.data_ptr() for name, x in zip(names, self._grads)}
        given = dict(dO=self.do.data_ptr(), d_final_state=self._arriving.data_ptr())
        self._back.launch(**self._common, **given, **grads, workspace=self._workspace.data_ptr())

    def both(self) -> Callable[[], None]:
        def step() -> None:
            self.forward()
            self.backward()

        return step
