"""The README of the results names each of them."""

from __future__ import annotations

from benchmarks import ROOT


def test_every_result_has_a_command():
    folder = ROOT / "benchmarks/results"
    said = (folder / "README.md").read_text()
    files = [file for file in folder.iterdir() if file.suffix in (".json", ".png")]
    assert files
    assert [file.name for file in files if file.stem not in said] == []
