"""AdamW, as PyTorch has it or with states of few bits, which torchao has and shards as FSDP2 does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any, Literal

import torch

from ..errors import ArgumentError, UnsupportedError

AdamWKind = Literal["adamw", "adamw8bit", "adamw4bit"]
STATES = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit"}
"""Names in torchao.optim: moments of 8 or 4 bits, quantised by blocks (Dettmers et al. 2022, arXiv 2110.02861)."""


def adamw(kind: AdamWKind, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """An optimizer of parameters, or of groups of them; `options` are those of `torch.optim.AdamW`.

    "adamw" on CUDA is PyTorch's fused one: a step reads and writes each number once, and has no temporary as large as
    all parameters.

    Bytes a parameter of its states: 8 in fp32 and 4 in bf16 ("adamw": as the parameters), about 2 and 1 otherwise;
    small parameters keep full states. bf16 parameters are rounded stochastically where the states have few bits.

    Raises:
        ArgumentError: no such kind. UnsupportedError: torchao is not installed.
    """
    groups = list(parameters)
    given = [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]
    if kind == "adamw":
        said = bool({"fused", "foreach"} & set(options))
        fused: dict[str, Any] = {"fused": True} if not said and all(p.is_cuda for p in given) else {}
        return torch.optim.AdamW(groups, **options, **fused)
    if kind not in STATES:
        raise ArgumentError("kind", f"'adamw' or one of {', '.join(STATES)}", repr(kind))
    if importlib.util.find_spec("torchao") is None:
        hint = "pip install 'ring_la[low-memory]'"
        raise UnsupportedError("kind", "'adamw', or an environment with torchao", repr(kind), hint)
    from torchao import optim  # pyright: ignore[reportMissingImports]

    rounded = all(p.dtype == torch.bfloat16 for p in given)
    return getattr(optim, STATES[kind])(groups, bf16_stochastic_round=rounded, **options)
