"""One more token of each sequence through a block in a few launches, which is what a step of decoding waits for.

A layer that can has `token`: its input with what it adds to it, normalised on the way, its state written over. All
others, and all other calls, go as they always do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import traced
from ..kernels.choice import triton_installed


def one_token(
    x: Tensor, layout: object = None, cu_seqlens: object = None, in_place: bool = False, output_state: bool = False,
    **others: Any,
) -> bool:  # fmt: skip
    """Whether a call of a block ``x [N, T, D]`` is a step of decoding on a GPU that writes its states over."""
    return (
        x.is_cuda
        and x.shape[1] == 1
        and in_place
        and output_state
        and layout is None
        and cu_seqlens is None
        and not others.get("output_loss")
        and not torch.is_grad_enabled()
        and triton_installed()
        and not traced(x)
    )


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is one of this kind and nobody listens to it."""
    return type(module) is kind and not (module._forward_hooks or module._forward_pre_hooks)


def plain_linear(x: Tensor, *modules: nn.Module) -> bool:
    """Whether these are linear layers without bias, in the dtype of x."""
    return all(
        plain(m, nn.Linear)
        and m.bias is None
        and type(m.weight) is nn.Parameter
        and m.weight.dtype == x.dtype
        and m.weight.is_contiguous()
        for m in modules
    )
