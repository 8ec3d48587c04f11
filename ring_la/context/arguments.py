"""Checks of what a `ContextParallel` and its layouts are given: an `ArgumentError` names the argument."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from ..comm import TRANSPORTS
from ..errors import ArgumentError
from ..layout import Layout
from ..scan import STRATEGIES

ATTENTION = ("auto", "ring", "all_gather", "ulysses", "usp")
VALIDATE = ("first", "always", "never")
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def check_choices(scan: str, attention: str, transport: str, deterministic: bool, validate: str) -> None:
    """Refuse choices that do not exist, or do not go together."""
    one_of("scan", scan, ("auto", *STRATEGIES))
    one_of("attention", attention, ATTENTION)
    one_of("transport", transport, TRANSPORTS)
    one_of("validate", validate, VALIDATE)
    if not isinstance(deterministic, bool):
        raise ArgumentError("deterministic", "True or False", repr(deterministic))
    if deterministic and scan not in ("auto", "ring"):
        raise ArgumentError("scan", '"auto" or "ring" with deterministic=True', repr(scan), "States fold in one order")


def several_threads(device: torch.device) -> ArgumentError | None:
    """What is wrong where deterministic ranks compute with several threads on CPUs: how work is cut among these changes
    bits, those of operators of one's own, too."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return None
    hint = "Call torch.set_num_threads(1), or set OMP_NUM_THREADS=1, as torchrun does for several processes"
    return ArgumentError("deterministic", "one thread a process with True on CPUs", f"{threads} threads", hint)


def check_head_groups(head_groups: object) -> None:
    """Refuse what is no number of groups."""
    number = isinstance(head_groups, int) and not isinstance(head_groups, bool) and head_groups >= 1
    if not number and head_groups != "auto":
        raise ArgumentError("head_groups", 'an int ≥ 1 or "auto"', repr(head_groups))


def check_dim(x: Tensor, dim: int, name: str = "x") -> None:
    """Refuse what has no dimension `dim`."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ArgumentError("dim", "an int", repr(dim))
    if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim():
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(name, f"a tensor with dimension {dim}", got)


def check_length(x: Tensor, dim: int, length: int, what: str, name: str = "x") -> None:
    """Refuse what has not `length` rows along `dim`; `what` says what these are."""
    check_dim(x, dim, name)
    if x.shape[dim] != length:
        raise ArgumentError(name, f"{length} along dimension {dim} ({what})", list(x.shape))


def check_dense(x: Tensor, name: str = "x") -> None:
    """Refuse what messages cannot be made of."""
    if x.layout is not torch.strided:
        raise ArgumentError(name, "a dense tensor", str(x.layout))


def check_labels(ids: Tensor, ignore_index: object) -> None:
    """Refuse ids that cannot be labels, and a label of no token that their dtype does not hold."""
    if ids.dtype not in SIGNED:
        raise ArgumentError("ids", f"one of {', '.join(map(str, SIGNED))}", ids.dtype)
    held = torch.iinfo(ids.dtype)
    if not isinstance(ignore_index, int) or not held.min <= ignore_index <= held.max:
        raise ArgumentError("ignore_index", f"an int that {ids.dtype} holds", repr(ignore_index))


def describe(layout: Layout) -> str:
    """A layout in few words, equal on two ranks only if the layouts are."""
    cu = layout.cu_seqlens
    shown = str(list(cu)) if len(cu) <= 9 else f"{len(cu) - 1} documents, hash {hash(cu):x}"
    text = f"seq_len={layout.seq_len}, kind={layout.kind}, cu_seqlens={shown}, multiple_of={layout.multiple_of}"
    text += "" if layout.window is None else f", window={layout.window}"
    counts = getattr(layout, "counts", None)
    return text if counts is None else f"{text}, counts={list(counts)}"


def duration(timeout: timedelta | float) -> timedelta:
    """A timeout as a timedelta."""
    try:
        out = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):  # no number, or none that a timedelta can hold
        out = timedelta(0)
    if out <= timedelta(0):
        raise ArgumentError("timeout", "a positive timedelta or number of seconds", repr(timeout))
    return out


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ArgumentError(name, f"one of {', '.join(choices)}", repr(value))
