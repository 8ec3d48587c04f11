"""Where a step's time goes on each rank, from the profiler's Chrome traces: compute, exchange, and both at once."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comm import is_exchange
from ..errors import ArgumentError

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
Intervals = list[tuple[float, float]]
Event = dict[str, Any]


@dataclass(frozen=True)
class RankTime:
    """A rank's step.

    Attributes:
        rank: its number in the job. start, stop: of the step, µs on the clock of its host.
        compute, exchange: when it did each, merged, in order.
    """

    rank: int
    start: float
    stop: float
    compute: Intervals
    exchange: Intervals

    @property
    def hidden(self) -> float:
        """µs of exchange while it computed."""
        return sum(min(b, d) - max(a, c) for a, b in self.exchange for c, d in _near(self.compute, a, b))

    def seconds(self, part: Intervals) -> float:
        """Seconds of a part together."""
        return sum(b - a for a, b in part) / 1e6


def read(folder: Path) -> list[RankTime]:
    """The first profiled step of every rank-N.json in a folder, in order of rank.

    Raises:
        ArgumentError: a file is no trace.
    """
    files = sorted(folder.glob("rank-*.json"), key=lambda f: int(f.stem[5:]))
    return [rank_time(int(file.stem[5:]), file) for file in files]


def rank_time(rank: int, file: Path) -> RankTime:
    """One rank's first profiled step."""
    try:
        found = json.loads(file.read_text())
        events: list[Event] = [e for e in found["traceEvents"] if e.get("ph") == "X"]
        base = found.get("baseTimeNanoseconds", 0) / 1e3
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ArgumentError("RUN", "Chrome traces of torch.profiler in profile/", f"{file} ({e})") from None
    if not events:
        raise ArgumentError("RUN", "a trace with events", str(file))
    steps = sorted((e["ts"], e["dur"]) for e in events if str(e["name"]).startswith("ProfilerStep"))
    first = steps[0][0] if steps else min(e["ts"] for e in events)
    last = first + steps[0][1] if steps else max(e["ts"] + e["dur"] for e in events)
    parts = _on_gpu(events) if any(e.get("cat") in ON_GPU for e in events) else _on_cpu(events)
    cut = [[(max(first, e["ts"]), min(last, e["ts"] + e["dur"])) for e in part] for part in parts]
    compute, exchange = (merged((base + a, base + b) for a, b in part if b > a) for part in cut)
    return RankTime(rank, base + first, base + last, compute, exchange)


def _on_gpu(events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """What computes and what exchanges: kernels and copies."""
    found = [e for e in events if e.get("cat") in ON_GPU]
    return [e for e in found if not _exchanges(e)], [e for e in found if _exchanges(e)]


def _on_cpu(events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """The same: operators that call no other, as those around them wait too; and gloo's messages, on its threads."""
    ops = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e.get("tid", 0), e["ts"], -e["dur"]))
    leaves = [e for e, after in zip(ops, [*ops[1:], None]) if after is None or not _calls(e, after)]
    compute = [e for e in leaves if not _exchanges(e)]
    return compute, [e for e in events if e.get("cat") == "user_annotation" and _exchanges(e)]


def _calls(e: Event, after: Event) -> bool:
    """Whether an operator calls the one that comes next, by thread and by its beginning."""
    return after.get("tid") == e.get("tid") and after["ts"] < e["ts"] + e["dur"]


def _exchanges(e: Event) -> bool:
    return is_exchange(str(e["name"]))


def merged(spans: Iterable[tuple[float, float]], gap: float = 0.0) -> Intervals:
    """Spans in order, those that touch or lie less than `gap` apart as one."""
    out: Intervals = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1] + gap:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def _near(spans: Sequence[tuple[float, float]], a: float, b: float) -> Intervals:
    """Those of merged spans that meet a … b."""
    i = max(0, bisect_left(spans, (a, a)) - 1)
    out: Intervals = []
    while i < len(spans) and spans[i][0] < b:
        if spans[i][1] > a:
            out.append(spans[i])
        i += 1
    return out
