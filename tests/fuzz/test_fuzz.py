"""A few hundred random cases; a mistake that is planted is found, and shrunk to the line that shows it."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any
from unittest import mock

import pytest

import ring_la
from tests.fuzz import in_rank
from tests.fuzz.__main__ import case_of
from tests.fuzz.case import Case
from tests.fuzz.draw import draw
from tests.fuzz.judge import Jury
from tests.fuzz.shrink import shrink

CASES = 250


def test_random_cases_are_right(ranks):
    seen, wrong = Counter(), []
    for verdict in Jury(ranks).of(case_of(0, n, small=True) for n in range(CASES)):
        seen.update((verdict.kind, verdict.case.transport, verdict.case.op))
        wrong += [f"{verdict.case.line}\n{verdict.words}"] if verdict.kind == "wrong" else []
    assert not wrong, "\n".join(wrong)
    assert seen["right"] > 0.95 * CASES  # what is refused is not judged
    assert min(seen["symmetric"], seen["grid"]) > 5


FOUND = (
    '{"op":"forgetting_attention","P":2,"T":20,"cu":[0,2,10,13,15,20],"groups":2,"V":5,"how":{"left":4,"dlse":true}}',
    '{"op":"mlstm","P":2,"T":3,"validate":"always","seed":236374894}',
    '{"op":"mlstm","T":1,"dtype":"bf16","seed":946177337,"how":{"final":true}}',
    '{"op":"mla","P":2,"T":2,"seed":755642186,"how":{"causal":true,"window":[-1,-1],"rotary":0,"latent":8}}',
    '{"op":"log_linear_attention","P":4,"kind":"balanced","T":13,"Hk":3,"K":3,"V":5,"seed":261556459}',
    '{"op":"mamba3_mimo","P":3,"kind":"balanced","T":12,"cu":[0,6,9,11,12],"groups":2,"K":6,"V":1,"seed":226072925}',
    '{"op":"gated_delta_product","P":3,"kind":"balanced","T":12,"cu":[0,2,9,12],"seed":300273616,"how":{"own":true}}',
    '{"op":"hgrn2","P":4,"T":1,"cu":[0,0,1,1],"Hk":2,"seed":532933013,"how":{"scale":0.3,"gates":"bf16"}}',
    '{"op":"mamba3","kind":"zigzag","T":24,"Hk":2,"K":6,"V":5,"seed":1105311,"how":{"gates":"bf16"}}',
    '{"op":"mamba3_mimo","T":21,"B":2,"K":6,"dtype":"fp32","seed":434514547,"how":{"initial":true,"states":"bf16"}}',
    '{"op":"mamba3_mimo","P":2,"K":6,"V":3,"dtype":"fp32","seed":9,"how":{"initial":true,"autocast":true}}',
    '{"op":"mesa_net","T":3,"dtype":"fp32","seed":1,"how":{"gates":"fp64"}}',
    '{"op":"short_conv","P":2,"T":22,"V":5,"seed":229768033,"how":{"final":true,"W":4,"inference":true}}',
    '{"op":"mlstm","T":2,"dtype":"fp32","seed":834782607,"how":{"initial":true,"final":true,"states":"bf16"}}',
    '{"op":"mlstm","P":2,"T":6,"K":4,"V":5,"dtype":"bf16","seed":1039577117,"how":{"final":true,"gates":"fp64"}}',
    '{"op":"training","P":4,"T":17,"seed":389706351,"how":{"layers":["gsa","hgrn2"],"mlp":"swiglu","recompute":"block"}}',
)
"""What longer runs found: the gradient of lse, a sum that rounds above zero, a state's dtype, a kernel's own Δ,
segments of a balanced layout that were taken for those of another, gates and states of another dtype, autocast, what
inference mode left to training."""


OVER_FILES = (
    '{"op":"grid","P":4,"T":3,"dtype":"fp32","attention":"ulysses","transport":"symmetric","how":{"columns":2,"width":[0,2]}}',
    '{"op":"grid","P":3,"T":9,"attention":"ring","transport":"symmetric","how":{"columns":1,"width":[5,1],"counts":[0,7,2]}}',
)
"""Rings and heads that copy, halos by mailboxes, beyond a neighbour's slices, and a rank without any."""


def counted(rank: int, line: str) -> tuple[str, int]:
    """What is said of such a case, and how many messages go by mailboxes, none of which arrives on rank 0."""
    case = Case.parse(line)
    boxes: Any = in_rank.context(case).comm.transport
    launched, launch = [], boxes._launch

    def lost(message: Any, stream: Any) -> None:
        launched.append(message)
        launch(message, stream)
        if rank == 0:
            message.target.zero_()

    with mock.patch.object(boxes, "_launch", lost):
        kind = in_rank.judge(rank, [line])[0][0].kind
    return kind, len(launched)


@pytest.mark.parametrize("line", OVER_FILES)
def test_messages_over_files_are_seen(ranks, line):
    """Right as they are, wrong where what mailboxes bring is lost."""
    P = Case.parse(line).P
    assert Jury(ranks).one(Case.parse(line)).kind == "right"
    told = ranks.run(P, counted, line)
    assert told[0][0] == "wrong"
    assert min(n for _, n in told) > 0


@pytest.mark.parametrize("line", FOUND)
def test_what_was_found_is_right(ranks, line):
    verdict = Jury(ranks).one(Case.parse(line))
    assert verdict.kind == "right", verdict.words


def test_a_case_is_the_line_it_prints():
    for seed in range(50):
        case = draw(Random(seed))
        assert Case.parse(str(case)) == case


def planted(rank: int, lines: list[str]) -> str:
    """What is said of a case where the gated delta rule takes its documents for one."""
    right = ring_la.gated_delta_rule

    def wrong(*args, layout, **keywords):
        whole = layout.cp.layout(layout.seq_len, layout.kind)
        return right(*args, layout=whole if layout.num_documents > 1 else layout, **keywords)

    ring_la.gated_delta_rule = wrong
    try:
        return in_rank.judge(0, lines)[0][0].kind
    finally:
        ring_la.gated_delta_rule = right


def test_a_planted_mistake_is_shrunk_to_a_line(ranks):
    how = {"l2norm": True, "scale": 0.3}
    case = Case("gated_delta_rule", kind="zigzag", T=19, cu=(0, 3, 3, 11, 19), Hk=2, groups=2, K=4, V=3, how=how)

    def fails(c: Case) -> bool:
        return ranks.run(1, planted, [str(c)])[0] == "wrong"

    assert fails(case)
    small = shrink(case, fails)
    assert fails(small)
    assert (small.T, small.documents) == (2, 2)
    assert len(small.line) < 120
