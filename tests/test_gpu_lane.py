"""The plugin of tests on GPUs: who reads the folder, who gets which GPUs, what the report holds."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch

from tests.support import gpu


def config(expression: str, *arguments: str) -> SimpleNamespace:
    return SimpleNamespace(getoption={"markexpr": expression}.get, args=arguments)


def test_the_folder_is_read_if_asked_for():
    ignored = lambda *c: gpu.pytest_ignore_collect(gpu.FOLDER, config(*c))  # noqa: E731
    assert ignored("not gpu", "tests") is True
    assert ignored("", "tests") is True
    assert ignored("gpu", "tests") is None
    assert ignored("not gpu", "tests/gpu/test_triton.py") is None
    assert gpu.pytest_ignore_collect(gpu.FOLDER.parent / "nn", config("not gpu", "tests")) is None


@pytest.mark.parametrize(
    ("workers", "gpus", "shares"),
    [(1, 4, [[0, 1, 2, 3]]), (2, 4, [[0, 1], [2, 3]]), (3, 1, [[0], [0], [0]]), (3, 2, [[0], [1], [0]])],
)
def test_workers_share_the_gpus(workers, gpus, shares):
    assert [gpu.share(n, workers, gpus) for n in range(workers)] == shares


@pytest.mark.parametrize(("visible", "mine"), [("", "2,3"), ("4,5,6,7", "6,7")])
def test_a_worker_sees_its_gpus_alone(visible, mine, monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    worker = config("gpu")
    worker.workerinput = {"workerid": "gw1", "workercount": 2}
    gpu.pytest_configure(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mine


def test_a_test_without_its_gpus_is_skipped(monkeypatch):
    def item(ranks: int = 0, fixtures: tuple[str, ...] = (), **marked) -> SimpleNamespace:
        marker = pytest.mark.gpu(**marked).mark
        options = SimpleNamespace(getoption={"gpu_seconds": float("inf"), "gpu_ranks": ranks}.get)
        return SimpleNamespace(get_closest_marker=lambda name: marker, config=options, fixturenames=fixtures)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu.pytest_runtest_setup(item())
    gpu.pytest_runtest_setup(item(needs=2))
    with pytest.raises(pytest.skip.Exception, match="needs 4 GPUs, 2 are here"):
        gpu.pytest_runtest_setup(item(needs=4))
    gpu.pytest_runtest_setup(item(ranks=4, fixtures=("gpu_ranks",), needs=4))
    for alone in (item(ranks=4, needs=4), item(ranks=3, fixtures=("gpu_ranks",), needs=4)):  # ranks of its own, too few
        with pytest.raises(pytest.skip.Exception, match="needs 4 GPUs, 2 are here"):
            gpu.pytest_runtest_setup(alone)


def test_the_report_has_a_row_a_test(tmp_path):
    def row(when: str, outcome: str, keywords: tuple[str, ...] = ("gpu",), longrepr=None) -> SimpleNamespace:
        state = dict(passed=outcome == "passed", failed=outcome == "failed", skipped=outcome == "skipped")
        return SimpleNamespace(
            when=when, outcome=outcome, keywords=keywords, nodeid="test[x]", duration=1.0, longrepr=longrepr,
            longreprtext="why", user_properties=[("errors", {"o": 1e-3})], **state,
        )  # fmt: skip

    report = gpu.Report(tmp_path / "folder" / "gpu.json")
    for each in (
        row("setup", "passed"),
        row("call", "passed", ("fast",)),
        row("call", "passed"),
        row("call", "failed"),
        row("setup", "skipped", longrepr=("file", 1, "Skipped: no GPU")),
    ):
        report.pytest_runtest_logreport(each)
    rows = json.loads(report.path.read_text())["rows"]
    assert [r["outcome"] for r in rows] == ["passed", "failed", "skipped"]
    assert rows[0] == {"test": "test[x]", "outcome": "passed", "seconds": 1.0, "errors": {"o": 1e-3}}
    assert rows[1]["failed"] == "why"
    assert rows[2]["skipped"] == "Skipped: no GPU"


def test_the_report_keeps_both_ends_of_an_error():
    """Of several ranks the first one's traceback often names the cause."""
    ranks = "\n".join(f"rank {i // 200} line {i}" for i in range(600))
    assert gpu.ends_of(ranks) == ranks
    kept = gpu.ends_of("\n".join(map(str, range(1000)))).splitlines()
    assert kept == [*map(str, range(150)), "… 400 lines …", *map(str, range(550, 1000))]
