"""AdamW, as PyTorch has it or with states of few bits, which torchao has and shards as FSDP2 does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ArgumentError, require
from .gradients import USED_UP

AdamWKind = Literal["adamw", "adamw8bit", "adamw4bit"]
STATES = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit"}
"""Names in `few_bits`: moments of 8 or 4 bits, quantised by blocks (Dettmers et al. 2022, arXiv 2110.02861)."""

EXPECTED = "parameters, such as model.parameters(), or groups of them"


def adamw(kind: AdamWKind, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """An optimizer of parameters, or of groups of them; `options` are those of `torch.optim.AdamW`.

    "adamw" on CUDA is PyTorch's fused one: a step reads and writes each number once, and has no temporary as large as
    all parameters.

    Bytes a parameter of its states: 8 in fp32 and 4 in bf16 ("adamw": as the parameters), about 2 and 1 otherwise;
    small parameters keep full states. bf16 parameters are rounded stochastically where the states have few bits.
    `state_dict` has moments in fp32 whatever their bits, so that a checkpoint fits any number of ranks.

    Raises:
        ArgumentError: no such kind, or no parameters. UnsupportedError: torchao is not installed.
    """
    groups = [{**g, "params": _listed(g["params"])} if isinstance(g, dict) else g for g in _listed(parameters)]
    given = [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]
    given = [p[1] if isinstance(p, tuple) else p for p in given]  # of named_parameters
    if not given:
        raise ArgumentError("parameters", "at least one", "none", USED_UP)
    for p in given:
        if not hasattr(p, "is_cuda"):
            raise ArgumentError("parameters", EXPECTED, f"a {type(p).__name__} among them")
    if kind == "adamw":
        said = bool({"fused", "foreach"} & set(options))
        fused: dict[str, Any] = {"fused": True} if not said and all(p.is_cuda for p in given) else {}
        return torch.optim.AdamW(groups, **options, **fused)
    if kind not in STATES:
        raise ArgumentError("kind", f"'adamw' or one of {', '.join(STATES)}", repr(kind))
    require("torchao", "kind", f"{kind!r} ('adamw' needs none)")
    from . import few_bits

    rounded = all(p.dtype == torch.bfloat16 for p in given)
    made: torch.optim.Optimizer = getattr(few_bits, STATES[kind])(groups, bf16_stochastic_round=rounded, **options)
    return made


def _listed(parameters: Any) -> list[Any]:
    """Parameters in a list, which can be gone through more than once."""
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, dict):
        raise ArgumentError("parameters", EXPECTED, f"a {type(parameters).__name__}")
    return list(parameters)
