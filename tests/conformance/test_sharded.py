"""Sharded ≡ whole: every recurrence × scan × layout × P, outputs, final states and every gradient on every rank.

The truth is the fp64 token loop of `ring_la.reference` on the whole sequence. A scan knows of a recurrence the shape of
its transition: one of each shape goes by every scan with all documents, layouts and P. The others meet every scan, and
all documents, layouts and P, but not every product of these: the scans take turns.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ring_la.scan import STRATEGIES
from tests.support.recurrence_cases import BY_NAME, DOCUMENTS, RECURRENCES, make_inputs
from tests.support.split_recurrences import TOLERANCE, assert_close, check_sharded

BY_EVERY_SCAN = ("linear_attention", "simple_gla", "gla", "gated_delta_rule")
CASES = list(itertools.product(DOCUMENTS, ("contiguous", "zigzag")))


def scans_of(name: str, P: int, case: int) -> tuple[str, ...]:
    scans = tuple(STRATEGIES)
    if P == 1:
        return ("ring",)  # one rank exchanges nothing
    return scans if name in BY_EVERY_SCAN else (scans[(case // 2 + case % 2 + P) % len(scans)],)


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RECURRENCES)
def test_split_is_whole_by_every_scan_and_layout(ranks, name, P):
    for case, (documents, kind) in enumerate(CASES):
        results = ranks.run(P, check_sharded, P, name, documents, kind, scans_of(name, P, case))
        assert_close(results, TOLERANCE[torch.float64])


def test_what_goes_by_every_scan_has_every_transition_and_the_others_meet_every_scan():
    transitions = {name: BY_NAME[name].describe(**make_inputs(name)).rule.transition for name in RECURRENCES}
    assert {transitions[name] for name in BY_EVERY_SCAN} == set(transitions.values())
    for name, P in itertools.product(RECURRENCES, (2, 3, 4)):
        met = {(scan, kind) for case, (_, kind) in enumerate(CASES) for scan in scans_of(name, P, case)}
        assert met == set(itertools.product(STRATEGIES, ("contiguous", "zigzag")))
