"""Checks that the public functions share: dtypes, flags, how the tokens are split or packed, values.

Each raises an `ArgumentError` that names the argument, what was expected and what came.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from .autograd import traced
from .context import ShardedLayout
from .errors import ArgumentError, describe_tensor
from .layout import check_cu_seqlens

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_floats(x: object, dims: int | None = None) -> TypeGuard[Tensor]:
    """Whether it is a dense float tensor, of so many dimensions if that is said."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.layout is not torch.strided:
        return False
    return dims is None or x.dim() == dims


def check_flag(name: str, value: object) -> None:
    """Refuse anything but a bool: a string or None would pass for one."""
    if not isinstance(value, bool):
        raise ArgumentError(name, "True or False", describe_tensor(value))


def is_int(x: object, least: int | None = None) -> TypeGuard[int]:
    """Whether it is an int, of at least so many if that is said; True and False are none."""
    return isinstance(x, int) and not isinstance(x, bool) and (least is None or x >= least)


def check_int(name: str, value: object, least: int, of: str = "") -> None:
    """Refuse what is no int of at least so many."""
    if not is_int(value, least):
        raise ArgumentError(name, f"an int ≥ {least}{of}", describe_tensor(value))


def check_kind(name: str, value: object, kind: type, optional: bool = False) -> None:
    """Refuse what is not of a class; None is, where that is `optional`."""
    if not isinstance(value, kind) and not (optional and value is None):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        expected = f"{article} {kind.__name__}{' or None' if optional else ''}"
        raise ArgumentError(name, expected, describe_tensor(value))


def check_has(name: str, value: object, attributes: Sequence[str], expected: str) -> None:
    """Refuse what has not what a protocol asks for."""
    if missing := [attribute for attribute in attributes if not hasattr(value, attribute)]:
        raise ArgumentError(name, expected, f"{describe_tensor(value)}, which has no {missing[0]}")


def check_path(name: str, value: object) -> Path:
    """The path, after refusing what is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise ArgumentError(name, "a path, a str or a Path", describe_tensor(value))
    return Path(value)


def is_finite(x: object) -> bool:
    """Whether it is a number, and finite."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < math.inf


def check_scale(scale: object) -> None:
    """Refuse a scale that is neither None nor a finite number."""
    if scale is not None and not is_finite(scale):
        raise ArgumentError("scale", "a finite number or None", describe_tensor(scale))


def check_above_zero(name: str, value: object) -> None:
    """Refuse what is no finite number above 0."""
    if not is_finite(value) or not value > 0:  # type: ignore[operator]
        raise ArgumentError(name, "a finite number above 0", describe_tensor(value))


def check_share(name: str, value: object) -> None:
    """Refuse what is no number from 0 to below 1."""
    if not is_finite(value) or not 0 <= value < 1:  # type: ignore[operator]
        raise ArgumentError(name, "a number in [0, 1)", repr(value))


def check_least(name: str, value: object, least: int = 0) -> None:
    """Refuse what is no finite number of at least so much."""
    if not is_finite(value) or not value >= least:  # type: ignore[operator]
        raise ArgumentError(name, f"a finite number ≥ {least}", describe_tensor(value))


def check_tokens(name: str, tokens: Tensor, words: int, layout: object, ignored: int | None = None) -> None:
    """Refuse tokens that a vocabulary of so many words has not, those that are `ignored` aside. They are looked at on a
    CPU, where nobody has to wait for them, and by a layout that validates always."""
    always = isinstance(layout, ShardedLayout) and layout.cp.validate == "always"
    if traced(tokens) or not tokens.numel() or not (always or tokens.device.type == "cpu"):
        return
    tokens = tokens if ignored is None else tokens.masked_fill(tokens == ignored, 0)
    low, high = torch.stack(tokens.aminmax()).tolist()
    if low < 0 or high >= words:
        other = "" if ignored is None else f", or {ignored}"
        raise ArgumentError(name, f"tokens of the vocabulary, 0 to {words - 1}{other}", f"{low} to {high}")


def check_total(total: object, name: str = "total") -> float | str | None:
    """What ranks compare of a number of targets to divide by, after refusing what is none; a GPU's is not looked at."""
    if isinstance(total, Tensor):
        if total.numel() != 1 or total.dtype == torch.bool or total.is_complex():
            raise ArgumentError(name, "one number of targets, above 0", describe_tensor(total))
        if traced(total) or total.device.type != "cpu":
            return "a tensor"
        value: object = total.item()
    else:
        value = total
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ArgumentError(name, "a number of targets, above 0", repr(value))
    return value


def check_depth(layer_idx: object, num_layers: object) -> None:
    """Refuse a layer that a model of so many layers does not have."""
    if not is_int(layer_idx, 0) or not is_int(num_layers) or layer_idx >= num_layers:
        raise ArgumentError("layer_idx", f"an int, 0 ≤ layer_idx < num_layers = {num_layers!r}", repr(layer_idx))


def check_split(T: int, B: int, layout: object, cu_seqlens: object, device: torch.device, name: str = "x") -> int:
    """Refuse a layout or offsets that do not fit the T tokens in B rows of the argument `name`; returns the number of
    documents."""
    if layout is not None:
        if not isinstance(layout, ShardedLayout):
            raise ArgumentError("layout", "a layout made by ContextParallel.layout, or None", type(layout).__name__)
        if cu_seqlens is not None:
            raise ArgumentError("cu_seqlens", "None with a layout", "offsets", "Give them to ContextParallel.layout")
        layout.require_runs("a recurrence")
        if device != layout.cp.device:
            raise ArgumentError("layout", f"one whose group works on {device}, where the inputs are", layout.cp.device)
        layout.require_local(name, T)
        if layout.packed and B != 1:
            raise ArgumentError(
                "layout", f"one without packed documents for a batch of {B}", repr(layout), "Pack into B = 1"
            )
        return layout.num_documents if layout.packed else B
    if cu_seqlens is None:
        return B
    return len(check_offsets(cu_seqlens, B, T, device)) - 1


def check_offsets(cu_seqlens: object, B: int, T: int, device: torch.device) -> Tensor:
    """The offsets, if they are some of documents packed into the T tokens of one row."""
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dim() != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        raise ArgumentError("cu_seqlens", "an int32 or int64 tensor [N+1]", describe_tensor(cu_seqlens))
    if B != 1:
        raise ArgumentError(
            "cu_seqlens", "None for a batch of several rows", f"B = {B}", "Pack the documents into B = 1"
        )
    if cu_seqlens.device != device:
        raise ArgumentError("cu_seqlens", f"a tensor on {device}", cu_seqlens.device)
    if offsets_are_read(cu_seqlens) and not torch.compiler.is_compiling():
        check_cu_seqlens(cu_seqlens, T)
    return cu_seqlens


def offsets_are_read(cu_seqlens: object) -> bool:
    """Whether `check_offsets` looks at the values, for which a GPU would have to be waited for."""
    return isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type == "cpu"


def check_nan(name: str, x: Tensor) -> None:
    """Refuse NaN; synchronises."""
    if count := int(torch.isnan(x).sum()):
        raise ArgumentError(name, "no NaN", f"{count} of them")
