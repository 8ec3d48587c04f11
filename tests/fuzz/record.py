"""What ran: counts by dimension, refusals, failures, written as JSON; a run in parts adds to it."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ring_la.layout import Layout

from .case import Case
from .judge import Jury, Verdict


class Record:
    """What ran: counts by dimension, refusals, failures, the errors nearest to their bounds."""

    def __init__(self, seed: int, first: int, file: Path | None) -> None:
        self.seed, self.first, self.file, self.count, self.start = seed, first, file, 0, time.time()
        self.by: dict[str, Counter] = {}
        self.refused: Counter = Counter()
        self.failures: list[dict[str, str]] = []
        self.nearest: list[tuple[float, str]] = []
        self.seconds = self.cpu = 0.0
        if file is not None and file.exists() and first:
            self._go_on(json.loads(file.read_text()))

    def _go_on(self, told: dict[str, Any]) -> None:
        """From the record of the cases before."""
        if told["seed"] != self.seed or told["first"] + told["cases"] != self.first:
            raise SystemExit(f"{self.file} holds seed {told['seed']}, {told['cases']} cases from {told['first']}")
        self.first, self.count = told["first"], told["cases"]
        self.by = {k: Counter(c) for k, c in told["by"].items()}
        self.refused, self.failures = Counter(told["refused"]), told["failures"]
        self.nearest = [(ratio, case) for ratio, case in told["nearest"]]
        self.seconds, self.cpu = told["seconds"], told["cpu_seconds_in_ranks"]

    def add(self, v: Verdict) -> None:
        self.count += 1
        for name, value in dimensions(v.case).items():
            self.by.setdefault(name, Counter())[str(value)] += 1
        self.by.setdefault("verdict", Counter())[v.kind] += 1
        if v.kind == "refused":
            self.refused[f"{v.case.op}: {v.words[:160]}"] += 1
        if v.kind == "right":
            self.nearest = sorted([*self.nearest, (v.ratio, str(v.case))], reverse=True)[:10]

    def progress(self, jury: Jury) -> str:
        verdicts = ", ".join(f"{n} {k}" for k, n in self.by.get("verdict", Counter()).items())
        seconds, cpu = self.seconds + time.time() - self.start, self.cpu + jury.cpu
        return f"{self.count} cases ({verdicts}), {seconds:.0f} s, {cpu:.0f} s of CPU in ranks"

    def write(self, jury: Jury) -> None:
        if self.file is None:
            return
        about = {
            "command": f"python -m tests.fuzz --seed {self.seed} --cases {self.count}",
            "seed": self.seed, "first": self.first, "cases": self.count,
            "seconds": round(self.seconds + time.time() - self.start, 1),
            "cpu_seconds_in_ranks": round(self.cpu + jury.cpu, 1), "torch": torch.__version__,
            "python": platform.python_version(), "machine": f"{platform.machine()}, gloo",
            "by": {k: dict(sorted(c.items())) for k, c in self.by.items()},
            "refused": dict(self.refused.most_common()), "failures": self.failures, "nearest": self.nearest,
        }  # fmt: skip
        self.file.write_text(json.dumps(about, indent=1) + "\n")


def dimensions(c: Case) -> dict[str, object]:
    """What cases are counted by."""
    seen = {"window": c.how["seen"]} if "seen" in c.how else {}
    multiple_of = c.multiple_of or (64 if c.deterministic else 1)
    layouts = [Layout(c.T, c.kind, c.P, r, c.cu, multiple_of, c.deterministic, **seen) for r in range(c.P)]
    longest = next(
        name for name, top in (("1 to 24", 24), ("25 to 70", 70), ("71 to 150", 150), ("151 to 260", 260)) if c.T <= top
    )
    documents = "rows" if c.cu is None else "packed" if len(c.cu) > 2 else "one document"
    out: dict[str, object] = {
        "op": c.op, "P": c.P, "kind": c.kind, "transport": c.transport,
        "dtype": c.dtype, "tokens": longest, "documents": documents,
        "multiple_of": c.multiple_of, "validate": c.validate, "deterministic": c.deterministic,
        "ranks without tokens": any(not layout.local_length for layout in layouts),
        "values": "as wide as keys" if c.V == c.K else "narrower" if c.V < c.K else "wider",
    }  # fmt: skip
    out |= {"attention": c.attention} if c.is_softmax else {"scan": c.scan}
    out |= {n: c.how[n] for n in ("scale", "strides", "gates", "states") if n in c.how}
    features = ("softcap", "alibi", "joint", "dropout", "keys", "choices", "seen")
    flags = [k for k in c.how if c.how[k] is True or k in features]
    return out | {f"with {k}": "yes" for k in flags}
