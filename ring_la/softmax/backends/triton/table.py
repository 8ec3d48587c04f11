"""Block sizes and launch settings of the kernels, by the wider of K and V (rounded up to a power of two).

Half as many rows and keys for fp32, whose tiles are twice as large.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TileSettings(NamedTuple):
    """Queries and keys of a tile, warps, and depth of the software pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# The fastest of benchmarks.tuning.softmax (8,192 tokens, 16 heads, causal, bf16) on an H200 with Triton 3.6.
FORWARD = {64: TileSettings(64, 128, 4, 2), 128: TileSettings(128, 64, 4, 2), 256: TileSettings(128, 64, 8, 2)}
BACKWARD_KEYS = {64: TileSettings(128, 64, 4, 2), 128: TileSettings(64, 64, 4, 2), 256: TileSettings(64, 32, 4, 2)}
BACKWARD_QUERIES = {64: TileSettings(64, 64, 4, 3), 128: TileSettings(64, 64, 4, 2), 256: TileSettings(64, 64, 4, 2)}

# The same of the kernels of spans, of benchmarks.tuning.spans (packed documents, then causal).
SPANS_FORWARD = {64: TileSettings(64, 64, 4, 2), 128: TileSettings(128, 64, 4, 2), 256: TileSettings(128, 64, 8, 2)}
SPANS_KEYS = {64: TileSettings(64, 64, 4, 2), 128: TileSettings(64, 64, 4, 2), 256: TileSettings(64, 64, 8, 2)}
SPANS_QUERIES = {64: TileSettings(64, 64, 4, 3), 128: TileSettings(128, 64, 8, 3), 256: TileSettings(64, 32, 4, 3)}


def settings(table: dict[int, TileSettings], width: int, dtype: torch.dtype) -> TileSettings:
    """The settings of a kernel for tensors whose wider one has `width` columns, rounded up to a power of two."""
    chosen = table[max(64, width)]
    if dtype == torch.float32:
        return chosen._replace(rows=chosen.rows // 2, keys=chosen.keys // 2)
    return chosen
