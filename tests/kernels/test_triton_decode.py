"""The recurrent mode's kernel against the fp64 token loop: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from ring_la.algebra import Rule
from ring_la.kernels.protocol import Inputs
from tests.support.interpreter import interpreted
from tests.support.triton_cases import RULES, Case, error, token_loop

interpreted()

from ring_la.kernels.recurrent import TritonTokens, run  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"one token": dict(B=3, T=1), "some": dict(B=2, T=5), "packed": dict(T=6, cu=(0, 1, 1, 6))}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_against_token_loop(rule: str, shape: str) -> None:
    torch.manual_seed(0)
    case = Case(rule, H=4, Hk=2, K=24, V=40, **SHAPES[shape])
    x, pieces = case.inputs(DEVICE), len(case.cu or (0, 0)) - 1
    state = torch.randn(case.B, pieces, 4, 24, 40, device=DEVICE)
    cu = None if case.cu is None else torch.tensor(case.cu, device=DEVICE)
    wide = Inputs(*(None if t is None else t.double() for t in x))
    for S0 in (state, None):
        o, after = token_loop(Rule.parse(rule), wide, None if S0 is None else S0.double(), 0.5, case.cu)
        got = TritonTokens(Rule.parse(rule), x, cu, 0.5, None, in_place=False).output(S0)
        assert max(error(got.o, o), error(got.leaving, after)) < 1e-5
    o, after = token_loop(Rule.parse(rule), wide, state.double(), 0.5, case.cu)
    got = TritonTokens(Rule.parse(rule), x, cu, 0.5, None, in_place=True).output(state)
    assert got.leaving.data_ptr() == state.data_ptr()
    assert max(error(got.o, o), error(state, after)) < 1e-5


def test_steps_are_replayed() -> None:
    """Token after token in place, from the third on by what the second wrote down, also from another state."""
    torch.manual_seed(0)
    case = Case("delta_scalar", B=2, T=6, H=2, Hk=1, K=16, V=24)
    rule, x = Rule.parse(case.rule), case.inputs(DEVICE)
    states = torch.randn(2, 2, 1, 2, 16, 24, device=DEVICE)
    for state in states:
        o, after = token_loop(rule, Inputs(*(None if t is None else t.double() for t in x)), state.double(), 0.5, None)
        for t in range(6):
            token = Inputs(*(None if y is None else y[:, t : t + 1] for y in x))
            got = TritonTokens(rule, token, None, 0.5, None, in_place=True).output(state)
            assert got.leaving.data_ptr() == state.data_ptr()
            assert error(got.o, o[:, t : t + 1]) < 1e-5
        assert error(state, after) < 1e-5


def test_states_are_read_and_written_by_row_of_a_pool() -> None:
    torch.manual_seed(0)
    case = Case("delta_scalar", B=2, T=1, H=2, Hk=2, K=16, V=16)
    rule, x = Rule.parse(case.rule), case.inputs(DEVICE)
    pool = torch.randn(5, 2, 16, 16, device=DEVICE)
    rows = torch.tensor([3, 1], device=DEVICE)
    o, after = run(rule, x, pool[rows][:, None].contiguous(), 1.0)
    before = pool.clone()
    o2, _ = run(rule, x, pool, 1.0, into=pool, rows=rows)
    torch.testing.assert_close(o2, o)
    torch.testing.assert_close(pool[rows], after[:, 0])
    torch.testing.assert_close(pool[[0, 2, 4]], before[[0, 2, 4]])
