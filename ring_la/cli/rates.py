"""How fast a device is, for ``ring-la plan``: from a file of ``ring-la bench scan``, the table for an H200, or that
table scaled by the data sheets of two devices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError
from ..scan import CostModel
from ..scan.auto import Line

WIDTH = 128
SHORT, LONG, GAIN = 8192, 262144, 0.145
"""Softmax attention over blocks of SHORT tokens, as rates are measured, and over blocks of LONG, so much faster: what
the runs of whole models in docs/users/guides/planning.md took beyond the rest of a step."""
CHOSEN = 2.8e12, 1.55e12
"""Bytes a second of attention to chosen latents, forward and of both passes: 2 bytes a number that is read, 8 with the
fp32 sums of the gradients; one H200, 16 heads. Forward of 16,384 tokens (docs/notebook/2026-11-23-chosen-sorted.md),
both of 1,048,576, whose latents no cache holds: 6.30 s on one GPU, 1.60 for a quarter of the queries
(benchmarks/results/sparse-warm-h200.json, sparse-h200x4.json); of 16,384 tokens it was 1.9e12."""
APART = 0.226
"""What each round of a ring behind the first adds to attention to chosen latents: fitted to one row, 2.33 s in three
rounds beside 1.60 with the latents of 4 ranks at hand (benchmarks/results/sparse-h200x4.json). Partial results that are
written and added up are less than a tenth of it by their bytes; what the rest is, is not known."""
AT_ONCE = 16
"""Query heads that read a latent together."""
INDEX, LISTED = 1.37e14, 3.2e6
"""Operations a second of an indexer's scores, and queries a second whose lists of the best are begun and cut, whatever
keys there are: through 105 ms of 131,072 tokens on one GPU (benchmarks/results/index-tuning-2-h200.json) and 1.11 s of
1,048,576 on four (sparse-h200x4.json)."""
LOSS = 1.7e12
"""Bytes a second of an indexer's loss, counted as those of `CHOSEN`, of a call that read latents twice (which layers
no longer ask for: they give attention's lse): 4.13 s of 1,048,576 tokens on one GPU
(benchmarks/results/sparse-index-2-h200.json), a first call, which may have compiled for a second. Of 16,384 tokens,
which a cache holds, it is 3.4e12 (docs/notebook/2026-11-23-index-in-one-pass.md). The 3.05 s of a quarter of the
queries in sparse-h200x4.json are not used (docs/notebook/2026-11-28-four-gpus.md#what-the-plan-misses says why)."""
WIDE = (1.40, 0.87)
"""Speed of cuDNN at heads of 256 channels beside the rates of WIDTH, forward and backward, causal, on an H200: means of
1.44, 1.43 and 1.34, and of 0.92, 0.83 and 0.85, by two profiles of 32,768 tokens
(benchmarks/results/large-moe-h200.json, large-moe-norms-h200.json) and one time of 16,384
(docs/notebook/2026-11-23-short-shards.md)."""
GROUPED = 0.85
"""Speed of grouped products beside one product: 643 TFLOPs with their gradients where a product alone is taken as 757
(benchmarks/results/grouped-h200.json, PyTorch's and ours), 631 of experts in a step (large-moe-norms-h200.json)."""


@dataclass(frozen=True)
class Rates:
    """One device's speeds, and α and β of groups of such devices on one host.

    Attributes:
        source: where the figures come from.
        matmul, attention_forward, attention_backward: operations a second (of causal attention: half the square).
        copy: bytes read and written a second. memory: bytes.
        forward, both: seconds of a recurrence over token-heads (tokens · heads) at K = V = `width`, without and with
            its backward.
        groups: the cost model measured on P ranks, by P.
    """

    source: str
    matmul: float
    copy: float
    attention_forward: float
    attention_backward: float
    memory: float
    forward: Mapping[str, Line]
    both: Mapping[str, Line]
    groups: Mapping[int, CostModel] = field(default_factory=dict)
    width: int = WIDTH

    @classmethod
    def read(cls, path: Path) -> Rates:
        """The rates in a file of ``ring-la bench scan`` (eager, arm "local", trained gates)."""
        try:
            found = json.loads(path.read_text())
            machine, speeds = found["machine"], found["speeds"]
            times: dict[str, dict[str, dict[int, float]]] = {"forward": {}, "forward+backward": {}}
            for row in found["rows"]:
                if row["what"] in times and row["mode"] == "eager" and "local" in row["ms"] and row["gates"] != "none":
                    points = times[row["what"]].setdefault(row["op"], {})
                    seconds = row["ms"]["local"] / 1e3
                    tokens = row["T"] * machine["heads"]
                    points[tokens] = min(seconds, points.get(tokens, seconds))
            groups = {int(P): CostModel.from_dict(values) for P, values in found["groups"].items()}
            source = f"{path}, measured on {machine['device']}, torch {machine['torch']}, {machine['dtype']}"
            lines = [{op: _line(points) for op, points in by_op.items()} for by_op in times.values()]
            memory = machine.get("memory", H200.memory)
            return cls(source, **speeds, memory=memory, forward=lines[0], both=lines[1], groups=groups,
                       width=machine["width"])  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            expected = "a bench_scan.json that `ring-la bench scan` wrote"
            raise ArgumentError("--rates", expected, f"{path} ({type(error).__name__}: {error})") from error

    def chosen(self, keys: float, width: float, heads: int, backward: bool, rounds: int = 1) -> float:
        """Seconds of attention to so many chosen latents, of all queries together, of `width` numbers.

        Args:
            rounds: of a ring, in which latents come one after the other.
        """
        scale = self.copy / H200.copy * CHOSEN[backward] / (1 + APART * (rounds - 1))
        return keys * width * (8 if backward else 2) * math.ceil(heads / AT_ONCE) / scale

    def index(self, queries: float, keys: float, heads: int, channels: int) -> float:
        """Seconds of the scores of so many queries, each of so many keys in the mean, and of keeping the best."""
        scores = 2 * queries * keys * heads * channels / (INDEX * self.matmul / H200.matmul)
        return scores + queries / (LISTED * self.copy / H200.copy)

    def index_loss(self, keys: float, width: float, channels: int) -> float:
        """Seconds of an indexer's loss with its gradients, of as many chosen keys as `chosen`: latents are read once,
        index keys twice, and gradients of these added once."""
        return keys * (2 * width + 8 * channels) / (LOSS * self.copy / H200.copy)

    def recurrence(self, name: str, token_heads: float, K: int, V: int, backward: bool) -> float:
        """Seconds of a recurrence on one device; work grows with K·V."""
        table = self.both if backward else self.forward
        if name not in table:
            raise ArgumentError("--rates", f"figures for {name}", f"only for {', '.join(table)}")
        return table[name](token_heads * K * V / self.width**2)

    def attention(self, operations: float, backward: bool, rows: float = SHORT, width: int = WIDTH) -> float:
        """Seconds of softmax attention whose forward takes so many operations, of heads of so many channels.

        Args:
            rows: tokens of a rank: kernels are faster on long blocks.
        """
        share = math.log2(min(max(rows, SHORT), LONG) / SHORT) / math.log2(LONG / SHORT)
        ahead, back = (1 + GAIN * share,) * 2 if width <= WIDTH else WIDE
        both = 2.5 * operations / (back * self.attention_backward) if backward else 0.0
        return operations / (ahead * self.attention_forward) + both


def _line(points: Mapping[int, float]) -> Line:
    """Through the smallest and the largest size; through the origin where there is one size."""
    small, large = min(points), max(points)
    if small == large or points[large] <= points[small]:
        return Line(0.0, large / points[large])
    beta = (large - small) / (points[large] - points[small])
    alpha = points[small] - small / beta
    return Line(alpha, beta) if alpha > 0 else Line(0.0, large / points[large])


def _table(milliseconds: Mapping[str, float]) -> dict[str, Line]:
    """Proportional to the tokens: figures of T 16,384, 32 heads."""
    return {name: Line(0.0, 16384 * 32 / (ms / 1e3)) for name, ms in milliseconds.items()}


H200 = Rates(
    source="built in, NVIDIA H200, torch 2.11, bf16, K = V = 128 (docs/users/guides/planning.md, 2026-11-21)",
    matmul=757e12,
    copy=4.26e12,
    attention_forward=513e12,
    attention_backward=457e12,
    memory=139 * 2**30,
    forward=_table(
        {
            "linear_attention": 0.210, "retention": 0.227, "simple_gla": 0.280, "gla": 0.809, "delta_rule": 0.583,
            "gated_delta_rule": 0.644, "kda": 1.195,
        }
    ),
    both=_table(
        {
            "linear_attention": 0.705, "retention": 0.720, "simple_gla": 1.170, "gla": 3.090, "delta_rule": 1.708,
            "gated_delta_rule": 2.135, "kda": 4.609,
        }
    ),
)  # fmt: skip
"""As `ring-la bench scan` measured them, replayed as CUDA graphs."""


class Sheet(NamedTuple):
    """What a maker's data sheet promises of one device."""

    name: str
    matmul: float
    """Dense bf16 operations a second."""
    copy: float
    """Bytes a second of its memory."""
    memory: float
    """Gigabytes of it, as they are sold."""


SHEETS = {
    "H200": Sheet("NVIDIA H200 SXM", 989e12, 4.8e12, 141),
    "H100": Sheet("NVIDIA H100 SXM", 989e12, 3.35e12, 80),
    "H100-PCIe": Sheet("NVIDIA H100 PCIe", 756e12, 2.0e12, 80),
    "H20": Sheet("NVIDIA H20", 148e12, 4.0e12, 96),
    "A100": Sheet("NVIDIA A100 SXM 80 GB", 312e12, 2.039e12, 80),
    "A100-40GB": Sheet("NVIDIA A100 SXM 40 GB", 312e12, 1.555e12, 40),
    "L40S": Sheet("NVIDIA L40S", 362e12, 0.864e12, 48),
    "B200": Sheet("NVIDIA B200", 2250e12, 8.0e12, 180),
}
"""By the name that --device takes."""


def from_sheet(sheet: Sheet) -> Rates:
    """What a device would do if it came as near to its data sheet as an H200 does; nobody has measured it.

    Recurrences go with the slower of products and memory: which of them bounds a kernel elsewhere is not known.
    """
    known = SHEETS["H200"]
    products, bytes_ = sheet.matmul / known.matmul, sheet.copy / known.copy
    both = min(products, bytes_)
    told = f"{sheet.matmul / 1e12:.0f} TFLOP/s bf16, {sheet.copy / 1e12:.2f} TB/s"
    return Rates(
        source=f"NOT MEASURED: an H200's, scaled by the data sheet of an {sheet.name} ({told})",
        matmul=H200.matmul * products,
        copy=H200.copy * bytes_,
        attention_forward=H200.attention_forward * products,
        attention_backward=H200.attention_backward * products,
        memory=H200.memory * sheet.memory / known.memory,
        forward={name: replace(line, beta=line.beta * both) for name, line in H200.forward.items()},
        both={name: replace(line, beta=line.beta * both) for name, line in H200.both.items()},
    )


DEVICES = {name: H200 if name == "H200" else from_sheet(sheet) for name, sheet in SHEETS.items()}
"""Rates by the name of a device."""
