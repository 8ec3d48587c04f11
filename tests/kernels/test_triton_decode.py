"""The one-token step against the PyTorch one: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from ring_la.algebra import Rule
from ring_la.kernels.local import Inputs
from ring_la.kernels.recurrent import step as plain_step
from tests.kernels.triton_cases import RULES, Case, interpreted

interpreted()

from ring_la.kernels.triton.decode import step  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_step(rule: str, in_place: bool) -> None:
    torch.manual_seed(0)
    case = Case(rule, B=3, T=1, H=4, Hk=2, K=24, V=40)
    x = Inputs(*(None if t is None else t[:, 0] for t in case.inputs(DEVICE)))
    state = torch.randn(3, 4, 24, 40, device=DEVICE)
    wide = Inputs(*(None if t is None else t.repeat_interleave(4 // t.shape[1], 1) for t in x))
    true = plain_step(Rule.parse(rule), state.clone(), wide)
    o, after = step(Rule.parse(rule), x, state, 0.5, in_place=in_place)
    assert (after is state) == in_place
    torch.testing.assert_close(after, true)
    torch.testing.assert_close(o, 0.5 * (wide.q[..., None, :] @ true)[..., 0, :])


def test_states_by_row() -> None:
    torch.manual_seed(0)
    case = Case("delta_scalar", B=2, T=1, H=2, Hk=2, K=16, V=16)
    x = Inputs(*(None if t is None else t[:, 0] for t in case.inputs(DEVICE)))
    pool = torch.randn(5, 2, 16, 16, device=DEVICE)
    rows = torch.tensor([3, 1], device=DEVICE)
    o, after = step(Rule.parse(case.rule), x, pool[rows].contiguous(), 1.0)
    before = pool.clone()
    o2, _ = step(Rule.parse(case.rule), x, pool, 1.0, in_place=True, rows=rows)
    torch.testing.assert_close(o2, o)
    torch.testing.assert_close(pool[rows], after)
    torch.testing.assert_close(pool[[0, 2, 4]], before[[0, 2, 4]])
