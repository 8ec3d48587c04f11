"""The README of the results names each of them."""

from __future__ import annotations

from benchmarks import ROOT, beside_fla


def test_every_result_has_a_command():
    folder = ROOT / "benchmarks/results"
    said = (folder / "README.md").read_text()
    files = [file for file in folder.iterdir() if file.suffix in (".json", ".png")]
    assert files
    assert [file.name for file in files if file.stem not in said] == []


def test_what_is_said_beside_fla_core():
    """What the benchmark page says of every recurrence that fla-core has too, out of the files it names."""
    rows, missing = beside_fla.rows()
    assert len(rows) + len(missing) == len(beside_fla.NAMES)
    together = [row for row in rows if row.together and row.right]
    page = (ROOT / "docs/users/benchmarks.md").read_text()
    for ratios, mean in zip(zip(*(row.ratios for row in together)), beside_fla.means(together)):
        assert f"{min(ratios):.2f} to" in page
        assert f"{mean:.2f}" in page
    slower = page[page.index("## Where it is slower") :]
    for row in rows:
        assert min(row.ratios) > 1 or f"`{row.name}`" in slower, f"{row.name} is slower, and the page is silent"
