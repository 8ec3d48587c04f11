"""Rates of ``ring-la plan``: from a benchmark's file, from links, from data sheets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ring_la.cli.cluster import Cluster
from ring_la.cli.main import main
from ring_la.cli.rates import DEVICES, H200, SHEETS, Rates
from ring_la.errors import ArgumentError
from ring_la.scan import CostModel
from ring_la.scan.auto import Line
from tests.cli.plans import CLUSTER, FAR, NEAR


def written(tmp_path, **changes) -> Rates:
    """Rates read back from a file as the benchmark writes it."""
    rows = [
        dict(op="gla", gates="trained", T=T, what=what, mode="eager", ms={"local": ms})
        for what, times in (("forward", {1000: 1.0, 2000: 1.5}), ("forward+backward", {1000: 4.0}))
        for T, ms in times.items()
    ]
    speeds = dict(matmul=1e12, copy=1e11, attention_forward=5e11, attention_backward=4e11)
    line = [1e-5, 1e9]
    model = dict(hop=line, swap=line, gather=line, exchange=line, add=line, matmul=line, post=1e-6, launch=0.0)
    machine = dict(device="d", torch="t", dtype="bfloat16", heads=4, width=64)
    path = tmp_path / "bench_scan.json"
    path.write_text(json.dumps(dict(machine=machine, speeds=speeds, groups={"4": model}, rows=rows) | changes))
    return Rates.read(path)


def test_rates_from_a_file(tmp_path):
    rates = written(tmp_path)
    assert rates.recurrence("gla", 8000, 64, 64, backward=False) == pytest.approx(1.5e-3)
    assert rates.recurrence("gla", 16000, 64, 64, backward=False) == pytest.approx(2.5e-3), "the line goes on"
    assert rates.recurrence("gla", 8000, 64, 64, backward=True) == pytest.approx(8e-3), "one point: through the origin"
    assert rates.recurrence("gla", 4000, 64, 128, backward=True) == pytest.approx(8e-3), "work grows with K·V"
    assert rates.groups[4] == CostModel(*[Line(1e-5, 1e9)] * 6, post=1e-6)
    with pytest.raises(ArgumentError, match="figures for kda"):
        rates.recurrence("kda", 1, 64, 64, False)
    with pytest.raises(ArgumentError, match=r"--rates: expected a bench_scan.json"):
        written(tmp_path, speeds={})


def test_a_group_over_hosts_mixes_near_and_far_links():
    inside, across = CLUSTER.model(8, H200), CLUSTER.model(16, H200)
    assert inside.hop == inside.swap == NEAR
    assert across.hop.alpha == pytest.approx((14 * 1e-5 + 2e-5) / 15)
    assert across.hop.beta == pytest.approx(15 / (14 / 3e11 + 1 / 4.5e10))
    assert across.swap == FAR
    assert across.gather.beta == pytest.approx(3e11), "eight links of 45 GB/s carry a node's share"
    assert CLUSTER.model(1024, H200).exchange.beta == pytest.approx(4.5e10 * 1023 / 1016)
    measured = CostModel(*[Line(1.0, 1.0)] * 6, post=1.0)
    known = replace(H200, groups={4: measured})
    assert Cluster(8, NEAR, FAR).model(4, known) == measured
    assert CLUSTER.model(4, known) == replace(measured, post=0.0), "graphs: the host launches nothing"
    assert CLUSTER.model(8, known).hop == NEAR, "another size is composed of links"


def test_devices_by_their_data_sheets_are_marked(capsys):
    """What nobody measured says so; no device is faster than its sheet."""
    for name, device in DEVICES.items():
        assert device.matmul < SHEETS[name].matmul
        assert device.copy < SHEETS[name].copy
        assert ("NOT MEASURED" in device.source) == (name != "H200")
    assert (
        main(["plan", "--layers", "gdn", "--repeat", "1", "--length", "8192", "--gpus", "8", "--device", "A100"]) == 0
    )
    out = capsys.readouterr().out
    assert (
        "rates: NOT MEASURED: an H200's, scaled by the data sheet of an NVIDIA A100 SXM 80 GB (312 TFLOP/s bf16" in out
    )
