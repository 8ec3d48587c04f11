"""A budget for low precision: the fp64 loop once more, with every step of it rounded.

Shares nothing with what is judged: under `Rounded` each floating result of PyTorch's operators, forward and backward,
is rounded to the case's dtype, as a plain loop in it rounds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Rounded(TorchDispatchMode):
    """Rounds what operators on fp64 tensors give to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:  # of numbers that are rounded already
            return out
        if func._schema.is_mutable:
            if isinstance(out, Tensor) and out.dtype == torch.float64:
                out.copy_(rounded(out, self.dtype))
            return out
        return tree_map_only(Tensor, lambda x: rounded(x, self.dtype), out)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 numbers that `dtype` holds; other tensors as they are."""
    return x.to(dtype).double() if x.dtype == torch.float64 else x
