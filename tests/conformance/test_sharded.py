"""Sharded ≡ whole: every recurrence × scan × layout × P, outputs, final states and every gradient on every rank.

The truth is the fp64 token loop of `ring_la.reference` on the whole sequence.
"""

from __future__ import annotations

import pytest
import torch

from ring_la.scan import STRATEGIES
from tests.support.recurrence_cases import DOCUMENTS, RECURRENCES
from tests.support.split_recurrences import TOLERANCE, assert_close, check_sharded


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RECURRENCES)
def test_split_is_whole_by_every_scan_and_layout(ranks, name, P):
    scans = tuple(STRATEGIES) if P > 1 else ("ring",)  # one rank exchanges nothing
    for documents in DOCUMENTS:
        for kind in ("contiguous", "zigzag"):
            results = ranks.run(P, check_sharded, P, name, documents, kind, scans)
            assert_close(results, TOLERANCE[torch.float64])
