"""``ring-la doctor``: every backend is used, could be, or says why not; a group's α, β and choices."""

from __future__ import annotations

import argparse
import re

from ring_la.cli import doctor
from ring_la.kernels.grouped import BACKENDS as GROUPED
from ring_la.softmax.backends import BACKENDS


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(["--heads", "4", "--width", "16"])


def test_without_ranks_it_lists_every_backend(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    doctor.run(options())
    out = capsys.readouterr().out
    for name in ("ring_la", "torch", "einops", "transformers", "safetensors"):
        assert re.search(rf"^  {name} +\S", out, re.MULTILINE), name
    for title in ("Here", "Linear recurrences", "Softmax attention", "Grouped GEMM", "Under torchrun"):
        assert title in out
    for backends, lines in ((BACKENDS, doctor.softmax(4, 16)), (GROUPED, doctor.grouped())):
        assert [name for name, _ in lines] == list(backends)
        assert [text for _, text in lines].count("used") == 1
        assert all(text for _, text in lines)


def check_group(rank: int) -> list[tuple[str, str]]:
    return doctor.group(options())


def test_under_ranks_it_measures_the_group(ranks):
    lines = ranks.run(4, check_group)
    by_name = dict(lines[0])
    assert by_name["hosts, backend"] == "1, gloo"
    assert by_name["symmetric memory"] == "the group's backend is not NCCL"
    for kind in ("identity", "scalar", "diagonal", "dense"):
        best, ms = by_name[f"A {kind}"].split()[:2]
        others = by_name[f"A {kind}"].split("(")[1].split(")")[0]
        assert all(float(ms) <= float(other.split()[1]) for other in others.split(", ")), best
    assert len({str([x for x in by_rank if x[0] != "set-up"]) for by_rank in lines}) == 1, "ranks choose alike"
