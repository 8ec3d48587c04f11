"""How fast a device is, for ``ring-la plan``: from a file of ``ring-la bench scan``, or the table for an H200."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ArgumentError
from ..scan import CostModel
from ..scan.auto import Line

WIDTH = 128


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

    def recurrence(self, name: str, token_heads: float, K: int, V: int, backward: bool) -> float:
        """Seconds of a recurrence on one device; work grows with K·V."""
        table = self.both if backward else self.forward
        if name not in table:
            raise ArgumentError("--rates", f"figures for {name}", f"only for {', '.join(table)}")
        return table[name](token_heads * K * V / self.width**2)

    def attention(self, operations: float, backward: bool) -> float:
        """Seconds of softmax attention whose forward takes so many operations."""
        both = 2.5 * operations / self.attention_backward if backward else 0.0
        return operations / self.attention_forward + both


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
