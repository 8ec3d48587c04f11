"""A call of a captured step: what tells it from others, and what a graph cannot do to a caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, UnsupportedError


def known(x: Any) -> object:
    """What a graph takes for granted of an argument."""
    return (tuple(x.shape), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x


def repeated(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Of each tensor the place of its first mention: the same tensor may be given as two arguments."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), n) for n, x in enumerate(leaves) if isinstance(x, Tensor))


def hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def own_copy(x: Tensor) -> Tensor:
    """An argument as the graph keeps it."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def version(x: Any) -> int:
    """Of a tensor how often it was changed in place."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def ways() -> tuple[object, ...]:
    """What PyTorch does of one's own accord in a call: gradients, inference, another precision."""
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast


def refuse_elsewhere(device: torch.device | None, leaves: Sequence[Any], structure: pytree.TreeSpec) -> None:
    """Refuse tensors that lie elsewhere: the host reads them, once."""
    for n, x in enumerate(leaves if device is not None else ()):
        if isinstance(x, Tensor) and x.device != device:
            [(path, _)] = [
                p for p in pytree.tree_leaves_with_path(structure.unflatten([*range(len(leaves))])) if p[1] == n
            ]
            hint = "Move it there before the call, or give it as a number"
            raise ArgumentError(f"argument {pytree.keystr(path)}", f"a tensor on {device}", f"one on {x.device}", hint)


def refuse_outside(out: Any, own: Sequence[Any], versions: Sequence[int]) -> None:
    """Refuse what eager calls do to tensors of the caller's: a graph has copies of them."""
    where = "read from around the step what it changes"
    for x, before in zip(own, versions):
        if isinstance(x, Tensor) and x.is_leaf and x.grad is not None:
            hint = f"Take it by torch.autograd.grad and return it, or {where}"
            raise UnsupportedError("step", "arguments without a gradient of their own", "one whose .grad it sets", hint)
        if version(x) != before:
            shape = f"one of shape {list(x.shape)}"
            raise UnsupportedError("step", "arguments that it leaves as they are", shape, f"Return it, or {where}")
    for x in pytree.tree_leaves(out):
        if isinstance(x, Tensor) and x.requires_grad:
            hint = "Call backward within the step and detach, or run it under torch.no_grad()"
            raise UnsupportedError("step", "one that returns tensors without a gradient", list(x.shape), hint)
