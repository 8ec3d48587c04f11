"""What the convolution and the token shift have in common in their arguments, and its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_flag, check_nan, check_split, is_floats
from ..context import ShardedLayout
from ..errors import ArgumentError, Facts, RingLAError, UnsupportedError, describe_tensor


class TailOptions(NamedTuple):
    """The keywords both have in common, as `short_conv` explains them."""

    initial_state: Tensor | None
    output_final_state: bool
    layout: ShardedLayout | None
    cu_seqlens: Tensor | None

    def counted(self, x: Tensor) -> int:
        """How many documents the rows of a split `x` are, which nobody has checked."""
        assert self.layout is not None
        return self.layout.num_documents if self.layout.packed else x.shape[0]

    def documents(self, flat: Tensor) -> int:
        """How many documents tokens ``[B, T, D]`` are, after checking that the split fits them."""
        check_flag("output_final_state", self.output_final_state)
        return check_split(flat.shape[1], flat.shape[0], self.layout, self.cu_seqlens, flat.device)


def as_channels(x: Tensor) -> Tensor:
    """``x`` as ``[B, T, D]``."""
    if not is_floats(x) or x.dim() not in (3, 4):
        raise ArgumentError("x", "a float tensor [B, T, D] or [B, T, H, D]", describe_tensor(x))
    return x.flatten(2)


def check_channels(name: str, t: Tensor | None, shape: list[int], x: Tensor) -> None:
    """Refuse what is not None, nor a float tensor of this shape beside `x`."""
    if t is None:
        return
    if not is_floats(t) or list(t.shape) != shape:
        raise ArgumentError(name, f"a float tensor {shape}", describe_tensor(t))
    if t.device != x.device:
        raise ArgumentError(name, f"a tensor on {x.device}, where x is", t.device)


def check_in_place(initial: Tensor | None, layout: ShardedLayout | None, *inputs: Tensor | None) -> Tensor:
    """The state, unless it is missing, shared between ranks or part of a graph."""
    if layout is not None:
        raise UnsupportedError("in_place", "False under a layout", True)
    if not isinstance(initial, Tensor):
        raise ArgumentError("initial_state", "a tensor for in_place=True", describe_tensor(initial))
    wanting = any(isinstance(x, Tensor) and x.requires_grad for x in (initial, *inputs))
    if torch.is_grad_enabled() and wanting:
        raise ArgumentError("in_place", "False where gradients are wanted", True, "Call it under torch.no_grad()")
    return initial


def check_values(layout: ShardedLayout | None, **tensors: Tensor | None) -> None:
    """Refuse NaN where the layout's ContextParallel looks at values."""
    if layout is not None and layout.cp.validate == "always":
        for name, t in tensors.items():
            if t is not None:
                check_nan(name, t)


def facts_of(t: object) -> Facts | None:
    """What ranks compare of a tensor they share; None for what has been refused already."""
    return Facts.of(t) if isinstance(t, Tensor) else None


def agree(call: str, layout: object, error: RingLAError | None, x: Tensor, own: dict[str, Any]) -> None:
    """Let the ranks agree on a call, `own` being what it brings beside ``x``; an error on one is an error on all."""
    if isinstance(layout, ShardedLayout):
        signature = None
        if error is None:
            signature = (("x", Facts.of(x, 1)), *own.items(), ("gradients", torch.is_grad_enabled()))
        layout.agree(call, signature, error)
    elif error is not None:
        raise error
