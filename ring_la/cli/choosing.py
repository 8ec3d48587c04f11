"""Which of the ways to save memory a run needs, for ``ring-la plan --choose``: the fastest of those that fit, and the
options of examples/train_hybrid.py that take it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from .prediction import Prediction, Setting, predict

CHUNK = 65536


def settings(setting: Setting) -> Iterator[Setting]:
    """The choices tried beside what the options say, the least work first."""
    layers = tuple(dict.fromkeys(b.layer for b in setting.work.blocks if b.recurrence))
    ways: list[tuple[tuple[str, ...], int | None]] = [((), None), (("block",), None)]
    if not setting.transformers:
        some = [("mlp", "norm"), (*layers, "mlp", "norm")]
        ways = [((), None), *((way, chunk) for way in some for chunk in (None, CHUNK)), (("block", "norm"), None)]
        ways.append((("block", "norm"), CHUNK))
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


def write(setting: Setting, line: Prediction, file: Path) -> None:
    """The choice as YAML, for ``examples/train_hybrid.py --config``; a later --config or option wins."""
    recompute = ", ".join(setting.recompute)
    rows = ["parallel:", f"  context: {line.P}", f"  fsdp: {line.gpus // line.P}", "memory:", "  dtype: bfloat16"]
    rows += [f"  parameters: {setting.parameters}", f"  recompute: [{recompute}]"]
    rows += [f"  mlp_chunk: {setting.mlp_chunk or 'null'}", f"  offload: {'2.0' if setting.offload else 'null'}"]
    rows += [f"  keep_attention: {str(setting.keep_attention).lower()}"]
    rows += ["optimizer:", f"  kind: {setting.optimizer}", "data:", f"  seq_len: {setting.length}"]
    rows += [f"  sequences: {line.gpus // line.P}"]
    if setting.transformers:
        rows += [
            "model:",
            f"  transformers: {setting.transformers}",
            f"  spread_experts: {str(setting.spread).lower()}",
        ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(rows) + "\n")
