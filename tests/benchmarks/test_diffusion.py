"""What `ring-la bench diffusion` runs: models that take their inputs, and rows that say why they cannot be."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

pytest.importorskip("diffusers")

from benchmarks.diffusion.bench import Where, sizes_of
from benchmarks.diffusion.book import Book
from benchmarks.diffusion.parts import Launch, summed
from benchmarks.diffusion.shapes import SHAPES, build, draw_inputs
from benchmarks.peers.diffusion import degrees, xdit_model
from benchmarks.step_cases import denoising
from ring_la import ContextParallel, capture
from ring_la.errors import ArgumentError, UnsupportedError
from tests.support.pool import group


def test_models_take_their_inputs():
    cpu = torch.device("cpu")
    for name, shape in SHAPES.items():
        model = build(shape, None, True, cpu, torch.float32)
        inputs = draw_inputs(shape, shape.small, True, cpu, torch.float32)
        with torch.no_grad():
            out = model(**inputs, return_dict=False)[0]
        assert out.isfinite().all(), name
        assert all(len(size) == len(shape.small) for size in shape.sizes), name


def check_steps(rank: int) -> list[float]:
    """How far split steps are from those of one device."""
    cpu, cp, apart = torch.device("cpu"), ContextParallel(group(), scan="ring"), []
    for name in ("flux", "wan"):
        whole, split = (denoising(name, None, None, by, cpu, tiny=True) for by in (None, cp))
        want = whole.step(whole.function)(*whole.arguments)
        got = capture(split.step(split.function), cp)(*split.arguments)
        apart.append(float((got - want).norm() / want.norm()))
    return apart


def test_denoising_steps_are_those_of_one_device(ranks):
    assert all(max(apart) < 1e-4 for apart in ranks.run(2, check_steps))


def test_fewer_layers_keep_their_proportion():
    assert SHAPES["flux"].of_layers(5) == dict(num_layers=5, num_single_layers=10)
    assert SHAPES["wan"].of_layers(6) == dict(num_layers=6)


def test_xdit_says_which_package_is_missing_before_it_imports_any(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "yunchang" else name)
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imports {name}"))
    with pytest.raises(UnsupportedError, match="no yunchang"):
        xdit_model("flux", "xdit_ulysses", 4, on_cuda=True)


def test_sizes_of_models():
    assert sizes_of("8x4,3x8x4") == {"": [(8, 4), (3, 8, 4)]}
    assert sizes_of("wan:3x8x4,flux:8x4,4x4") == {"wan": [(3, 8, 4)], "flux": [(8, 4), (4, 4)]}
    for wrong in ("8", "other:8x4", "1x2x3x4"):
        with pytest.raises(argparse.ArgumentTypeError, match="ROWSxCOLUMNS"):
            sizes_of(wrong)


def test_degrees_of_arms():
    assert degrees("diffusers_ring", 4) == (1, 4)
    assert degrees("xdit_ulysses", 2) == (2, 1)
    assert degrees("diffusers_usp", 8) == (2, 4)
    with pytest.raises(ArgumentError, match="two axes divide"):
        degrees("xdit_usp", 2)


def check_book(rank: int, file) -> list[dict]:
    """Rows of which one cannot be on the last rank."""
    book = Book(argparse.Namespace(out=file, limit=60.0, resume=False), {"ranks": 4})
    for mode in ("eager", "graph"):
        what = dict(model="flux", arm="ours", mode=mode, size="8x8")
        found = book.attempt(what, lambda: 1 / (0 if rank == 3 and mode == "graph" else 2))  # noqa: B023
        if found is not None:
            book.add(what | dict(ms=found))
    assert book.has(model="flux", arm="ours", mode="graph", size="8x8")
    return book.rows


def test_rows_are_there_as_they_come_or_say_why(ranks, tmp_path):
    rows = ranks.run(4, check_book, tmp_path / "rows.json")
    assert rows[0] == rows[3] == json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows[0][0]["ms"] == 0.5
    assert rows[0][1]["cannot"].startswith("ZeroDivisionError")


def test_outputs_of_one_device_are_there_for_later_runs(tmp_path):
    where = argparse.Namespace(reference=tmp_path / "kept", layers=None, sizes=None)
    cpu = argparse.Namespace(on_cuda=False, rank=0, device=torch.device("cpu"))
    Where(cpu, where, "flux").keep((64, 64), torch.ones(3))
    later = Where(cpu, where, "flux")
    assert torch.equal(later.want((64, 64)), torch.ones(3))
    assert later.want((64, 32)) is None
    assert Where(cpu, argparse.Namespace(reference=None, layers=None, sizes=None), "flux").want((64, 64)) is None


def test_parts_of_a_step_by_the_kernels_names():
    kernels = [("nvjet_hsh_128x256", 0, 4), ("Memcpy PtoP (Device -> Device)", 2, 9), ("triton_poi_fused_gelu", 20, 21)]
    kernels += [("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 9, 12), ("_merge", 12, 13)]
    found = summed(Launch(name, 1_000_000 * a, 1_000_000 * b) for name, a, b in kernels)
    kinds = dict(matrices=4.0, messages=7.0, others=1.0, attention=3.0, merging=1.0)
    assert found["parts"] == kinds | dict(busy=14.0, span=21.0)
    assert found["kernels"][0] == ["Memcpy PtoP (Device -> Device)", 1, 7.0]
