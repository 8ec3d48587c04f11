"""Tests on GPUs, a plugin of pytest: they run if asked for, share the GPUs, and what they find is kept.

    pytest -m gpu tests/gpu -n 12 --gpu-report runs/gpu.json        # xdist: 12 processes that compile side by side
    pytest -m gpu tests/gpu/test_nccl.py --gpu-seconds 300          # tests that need several GPUs: without -n, or with
                                                                    # as many workers as there are groups of GPUs
    pytest -m gpu tests/gpu/test_nccl.py --gpu-ranks 4              # the ranks share the GPUs there are: as right, slow

``@pytest.mark.gpu(needs=N)`` is a test on N GPUs (1; 0 for one that compiles without any), skipped where fewer are
there; ranks of a pool (`gpu_ranks`) may share GPUs, with ``--gpu-ranks``. With ``-n`` workers have GPUs of their
own as far as they go round, and share them beyond that. Without ``-m gpu`` the folder is not even read. The report
has a row a test: its outcome, its seconds and what it recorded with `record_property`; it is written as rows come,
so that a run cut off still counts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import Ranks

FOLDER = Path(__file__).parents[1] / "gpu"
POOLS = {"gpu_ranks", "servers"}
"""Fixtures whose ranks may share GPUs."""
FIRST, LAST = 150, 450
"""Lines of an error that the report keeps: those of a few ranks' tracebacks, all of them."""
_start = time.monotonic()
_ranks = 0


def world(least: int = 1, otherwise: int = 4) -> int:
    """GPUs a test with many ranks runs on: all there are; `otherwise` where tests are only listed."""
    return max(least, torch.cuda.device_count() or otherwise)


def ranks(least: int = 1) -> int:
    """Ranks of the pool: one a GPU, or as many as are asked for."""
    return max(world(least), _ranks)


def asked(config: pytest.Config) -> bool:
    """Whether this run is of tests on GPUs."""
    return "gpu" in config.getoption("markexpr").replace("not gpu", "")


def on_gpus(pool: Ranks, P: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``check(rank, *arguments)`` gives on P ranks of a pool on GPUs, with what it makes on each rank's GPU."""
    if pool.size < P:
        pytest.skip(f"needs {P} ranks, {pool.size} are here")
    return pool.run(P, _on_gpu, check, *arguments)


def _on_gpu(rank: int, check: Callable[..., Any], *arguments: Any) -> Any:
    with torch.device("cuda"):
        return check(rank, *arguments)


def share(worker: int, workers: int, gpus: int) -> list[int]:
    """The GPUs of one of several workers.

    >>> share(1, 2, 4), share(5, 12, 4)
    ([2, 3], [1])
    """
    each = max(1, gpus // workers)
    return [(worker * each + i) % gpus for i in range(each)]


def ends_of(text: str) -> str:
    """The first and the last lines of a long text."""
    lines = text.splitlines()
    left_out = len(lines) - FIRST - LAST
    return text if left_out <= 0 else "\n".join([*lines[:FIRST], f"… {left_out} lines …", *lines[-LAST:]])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPUs")
    group.addoption("--gpu-report", type=Path, metavar="FILE", help="JSON of what tests marked gpu found")
    group.addoption("--gpu-ranks", type=int, default=0, metavar="N", help="N ranks in the pool, also on fewer GPUs")
    group.addoption("--gpu-seconds", type=float, default=float("inf"), help="start no test marked gpu after so many")


def pytest_configure(config: pytest.Config) -> None:
    global _ranks
    _ranks = config.getoption("gpu_ranks") or 0
    worker = getattr(config, "workerinput", None)
    if worker is None:
        if config.getoption("gpu_report"):
            config.pluginmanager.register(Report(config.getoption("gpu_report")))
    elif asked(config) and (gpus := torch.cuda.device_count()):  # counted without a context on any of them
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = seen if len(seen) == gpus and all(seen) else [str(i) for i in range(gpus)]
        mine = share(int(worker["workerid"].removeprefix("gw")), worker["workercount"], gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in mine)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = any("gpu" in str(argument) for argument in config.args)
    return True if collection_path == FOLDER and not (asked(config) or named) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needs, gpus = marker.kwargs.get("needs", 1), torch.cuda.device_count()
    ranks = item.config.getoption("gpu_ranks") if gpus and POOLS & {*item.fixturenames} else 0  # type: ignore[attr-defined]
    if max(gpus, ranks) < needs:
        pytest.skip(f"needs {needs} GPUs, {gpus} are here")
    if time.monotonic() - _start > item.config.getoption("gpu_seconds"):
        pytest.skip("no time left")


class Report:
    """The JSON file of --gpu-report."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []
        path.parent.mkdir(parents=True, exist_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" not in report.keywords or (report.when != "call" and report.passed):
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        row |= dict(report.user_properties)
        if report.failed:
            row["failed"] = ends_of(report.longreprtext)
        if report.skipped and isinstance(report.longrepr, tuple):
            row["skipped"] = report.longrepr[2]
        self.rows.append(row)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        self.path.write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "rows": self.rows}, indent=1))
