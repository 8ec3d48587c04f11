"""Which of the ways to save memory a run needs, for ``ring-la plan --choose``: the fastest of those that fit, and the
options of examples/train_hybrid.py that take it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ..models import HybridConfig
from .prediction import Prediction, Setting, predict

CHUNK = 65536


def settings(setting: Setting) -> Iterator[Setting]:
    """The choices tried beside what the options say, the least work first: those that training takes."""
    layers = tuple(dict.fromkeys(b.layer for b in setting.work.blocks if b.recurrence))
    ways: list[tuple[tuple[str, ...], int | None]] = [((), None), (("block",), None)]
    if not setting.transformers:
        some = [("mlp", "norm"), (*layers, "mlp", "norm"), ("block", "norm")]
        chunks = (None,) if any(b.met for b in setting.work.blocks) else (None, CHUNK)
        ways = [((), None), *product(some, chunks)]
    spreads = (False, True) if any(b.experts for b in setting.work.blocks) else (False,)
    softmax = any(not b.recurrence for b in setting.work.blocks)
    for recompute, chunk in ways:
        keeps = (False, True) if softmax and "block" in recompute else (False,)
        for offload, spread, keep in product((False, True), spreads, keeps):
            kept = replace(setting, recompute=recompute, mlp_chunk=chunk, keep_attention=keep)
            yield replace(kept, offload=offload, spread=spread)


def choose(setting: Setting, gpus: int, splits: list[int]) -> tuple[Setting, Prediction] | None:
    """The fastest choice and split that fit; None where nothing does."""
    found = [(s, line) for s in settings(setting) for P in splits if (line := predict(s, gpus, P)).fits]
    return max(found, key=lambda pair: pair[1].throughput, default=None)


def told(setting: Setting) -> str:
    """A choice in a line."""
    parts = [f"recompute {','.join(setting.recompute) or 'nothing'}"]
    parts += [f"mlp_chunk {setting.mlp_chunk}"] if setting.mlp_chunk else []
    parts += ["results of attention kept"] if setting.keep_attention else []
    parts += ["activations in host memory"] if setting.offload else []
    parts += ["experts over the context ranks"] if setting.spread else []
    return ", ".join(parts)


def as_options(setting: Setting, line: Prediction, shape: HybridConfig | None) -> str:
    """The choice as YAML, for ``examples/train_hybrid.py --config``; a later --config or option wins.

    Args:
        shape: of a HybridLM; None: the model is `setting.transformers`.
    """
    replicas = line.gpus // line.P
    model: dict[str, Any] = {"transformers": str(setting.transformers), "spread_experts": setting.spread}
    if shape is not None:
        model = {name: value for name, value in shape.to_dict().items() if name != "norm_eps"}
    memory = {
        "dtype": "bfloat16",
        "parameters": setting.parameters,
        "recompute": list(setting.recompute),
        "mlp_chunk": setting.mlp_chunk,
        "keep_attention": setting.keep_attention,
        "loss_chunk": setting.loss_chunk,
        "rounds": setting.rounds,
        "offload": 2.0 if setting.offload else None,
    }
    parts = {
        "model": model,
        "parallel": {"context": line.P, "fsdp": replicas, "layout": setting.layout},
        "memory": memory,
        "optimizer": {"kind": setting.optimizer},
        "data": {"seq_len": setting.length, "sequences": replicas},
    }
    rows = [f"{part}:\n" + "".join(f"  {k}: {json.dumps(v)}\n" for k, v in of.items()) for part, of in parts.items()]
    return "".join(rows)
