"""Rows of a benchmark are there as soon as they come."""

from __future__ import annotations

import json

from benchmarks.rows import Rows


def test_each_row_is_printed_and_written_as_it_comes(tmp_path, capsys):
    for about in ({}, {"gpu": "none"}):
        file = tmp_path / "new" / f"{len(about)}.json"
        rows = Rows(file, **about)
        for n in range(2):
            rows.add({"n": n})
            had = [{"n": i} for i in range(n + 1)]
            assert json.loads(file.read_text()) == (about | {"rows": had} if about else had)
            assert json.loads(capsys.readouterr().out) == {"n": n}
    Rows(None).add({"n": 0})
