"""What is trained and served, as rows of the first tables of ``ring-la bench ops``: operators with gates as models have
them, at the sizes others publish, with states given and packed sequences.

    kimi    KDA, g = −5 sigmoid(x), x of N(0, 1): the eight rows of NVIDIA's kernels
    slow    KDA, g = −0.002 times a uniform number
    mixed   KDA, half-lives by head and channel, log-uniform from 0.3 to 10,000 tokens
    qwen    the gated delta rule, FlashQLA's table: nine head configurations, 19 lengths; gates logsigmoid(x) / 16 in
            three quarters of the heads, none in the others
    floors  GLA, RWKV-7 and Mamba-2 beside the memory floor

q and k are of unit length, β is a sigmoid. Sequences are packed into one batch row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from ring_la.errors import ArgumentError

KDA = "kimi", "slow", "mixed"
BOUND = -5.0
"""Of KDA's gates in every row."""
Draw = Callable[..., Tensor]


class Row(NamedTuple):
    """An operator of `cases.CASES` at a shape, of a part."""

    part: str
    op: str
    shape: str


KIMI = (
    "1x2048x12x128", "1x4096x8x128", "1x8192x16x128", "1x8192x24x128", "8x2048x8x128", "4x2048x12x128",
    "1x8192x64x128", "1x32768x32x128",
)  # fmt: skip
HEADS = "2:8", "4:16", "8:32", "16:64", "16:32", "8:24", "16:48", "16:16", "32:32"
LENGTHS = (
    "1x32768", "1x16384", "1x8192", "1x4096", "1x2048", "28672+4096", "24576+8192", "16384+16384", "8192+24576",
    "4096+28672", "12288+4096", "6144+2048", "4096+4096", "2048+6144", "1024+7168", "4x8192", "8x4096", "4x2048",
    "8x1024",
)  # fmt: skip
ROWS = (
    *(Row("kimi", "kda_kimi", shape) for shape in KIMI),
    Row("slow", "kda_slow", "1x8192x16x128"),
    *(Row("mixed", "kda_mixed", shape) for shape in ("1x8192x16x128", "1x8192x64x128")),
    *(Row("qwen", "gdn_qwen", f"{lengths}x{heads}x128") for heads in HEADS for lengths in LENGTHS),
    *(Row("floors", op, "1x32768x32x128") for op in ("gla", "rwkv7")),
    Row("floors", "mamba2", "1x32768x80x128x64"),
)
SMALL = {"kda_kimi": "20+13x2x16", "kda_slow": "1x30x2x16", "kda_mixed": "1x30x2x16", "gdn_qwen": "20+13x1:2x16"}
"""Shapes on a CPU."""
PARTS = tuple(dict.fromkeys(row.part for row in ROWS))


def chosen(text: str, device: str) -> list[Row]:
    """The rows of ``PART`` or ``PART:SHAPE``, comma-separated: of a part all, or those with so much in their shape. On
    a CPU one small row an operator.

    Raises:
        ArgumentError: no such row.
    """
    found = []
    for word in text.split(","):
        part, _, some = word.partition(":")
        rows = [row for row in ROWS if row.part == part and some in row.shape]
        if not rows:
            raise ArgumentError("rows", f"PART or PART:SHAPE, parts out of {', '.join(PARTS)}", repr(word))
        found += rows
    if device != "cuda":
        small = {row.op: row._replace(shape=SMALL.get(row.op, "1x30x2x16")) for row in found}
        found = list(small.values())
    return list(dict.fromkeys(found))


def kimi(normal: Draw, shape: tuple[int, ...]) -> Tensor:
    return BOUND * torch.sigmoid(normal(*shape).bfloat16().float())  # a peer takes x itself, in bf16


def slow(normal: Draw, shape: tuple[int, ...]) -> Tensor:
    return -0.001 * (1 + torch.erf(normal(*shape) / math.sqrt(2)))


def mixed(normal: Draw, shape: tuple[int, ...]) -> Tensor:
    even = 0.5 * (1 + torch.erf(normal(*shape[2:]) / math.sqrt(2)))
    lives = torch.exp(math.log(0.3) + even * (math.log(1e4) - math.log(0.3)))
    return (-math.log(2) / lives).expand(shape).contiguous()


def qwen(normal: Draw, shape: tuple[int, ...]) -> Tensor:
    g = logsigmoid(normal(*shape)) / 16
    g[..., normal(shape[-1]).argsort()[math.ceil(0.75 * shape[-1]) :]] = 0
    return g


GATES = {"kimi": kimi, "slow": slow, "mixed": mixed, "qwen": qwen}


def inputs(gates: str, shape, device: str, seed: int) -> dict[str, Tensor]:
    """Arguments by name; bf16 on a GPU (fp32 on a CPU) but for gates, β and states, which are fp32."""
    lengths, generator = shape.lengths, torch.Generator(device).manual_seed(seed)
    T, (H, K, V) = sum(lengths), shape[2:5]
    narrow = torch.bfloat16 if device == "cuda" else torch.float32

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator)

    x = {n: normalize(normal(1, T, shape.keys, K), dim=-1).to(narrow) for n in ("q", "k")}
    x["v"] = normal(1, T, H, V).to(narrow)
    x["g"] = GATES[gates](normal, (1, T, H) if gates == "qwen" else (1, T, H, K))
    x["beta"] = normal(1, T, H).bfloat16().float().sigmoid()
    x["initial_state"] = normal(len(lengths), H, K, V)
    x = {n: t.detach().requires_grad_() for n, t in x.items()}
    return x | {"cu_seqlens": torch.tensor([0, *lengths], device=device).cumsum(0).int()}
