"""The registered operators around the recurrence, as PyTorch computes them: schemas, fakes, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ring_la.errors import SecondDerivativeError
from ring_la.kernels import operators as ops
from ring_la.kernels.fused import ahead, discretise, log_decay, short_conv, swiglu, turned, unit_length, wide_softmax
from ring_la.kernels.fused import bidirectional as outer
from ring_la.kernels.fused import rms_norm as rms

CU = torch.tensor([0, 3, 3, 8])


def leaf(*shape: int) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    ).requires_grad_()


def positive(*shape: int) -> Tensor:
    return leaf(*shape).detach().abs().add(0.1).requires_grad_()


CASES = {
    "short_conv": (short_conv.short_conv, (leaf(1, 8, 3), leaf(3, 4), leaf(3), leaf(1, 3, 3, 3), CU, True, True)),
    "short_conv, bare": (short_conv.short_conv, (leaf(2, 5, 3), leaf(3, 2), None, None, None, False, False)),
    "ahead": (ahead.ahead, (leaf(2, 3, 2, 5), leaf(2, 3, 2), -0.4)),
    "wide_softmax": (wide_softmax.wide_softmax, (leaf(2, 3, 2, 5),)),
    "unit_length": (unit_length.unit_length, (leaf(2, 3, 2, 5), 1e-6)),
    "log_decay": (log_decay.log_decay, (leaf(2, 3, 6), leaf(2), leaf(6), 1.0, 1.0, False)),
    "rms_norm": (rms.rms_norm_op, (leaf(2, 3, 5), leaf(5), leaf(2, 3, 5), True, 1e-5)),
    "relu_and_turn": (
        turned.relu_and_turn_op,
        (leaf(2, 3, 2, 4), leaf(3, 1, 4)[None].detach(), leaf(1, 3, 1, 4).detach()),
    ),
    "swiglu": (swiglu.swiglu_op, (leaf(2, 3, 10),)),
    "discretise": (discretise.discretise_op, (leaf(1, 4, 3, 2), leaf(1, 4, 3), leaf(3), leaf(3), True)),
    "discretise, bare": (discretise.discretise_op, (leaf(1, 4, 3, 2), leaf(1, 4, 3), leaf(3), None, False)),
    "outer_sum": (outer.outer_sum_op, (leaf(1, 8, 1, 3), leaf(1, 8, 2, 2), CU)),
    "read_state": (outer.read_state_op, (leaf(1, 8, 1, 3), leaf(1, 3, 2, 3, 2), CU, 0.5, False)),
    "read_state, transposed": (outer.read_state_op, (leaf(2, 5, 2, 3), leaf(2, 1, 2, 2, 3), None, 0.5, True)),
    "sum_and_read": (
        outer.sum_and_read_op,
        (leaf(1, 8, 1, 3), leaf(1, 8, 1, 3), leaf(1, 8, 2, 2), leaf(1, 3, 2, 3, 2), CU, 0.5),
    ),
    "sum_and_read, bare": (
        outer.sum_and_read_op,
        (leaf(2, 5, 2, 3), leaf(2, 5, 2, 3), leaf(2, 5, 2, 2), None, None, 0.5),
    ),
    "read_quotient": (
        outer.read_quotient_op,
        (positive(1, 8, 1, 3), positive(1, 8, 1, 3), positive(1, 3, 2, 3, 3), CU, 0.5, 0.1),
    ),
    "read_quotient, bare": (
        outer.read_quotient_op,
        (positive(2, 5, 2, 3), None, positive(2, 1, 2, 3, 3), None, 0.5, 0.1),
    ),
    "logsigmoid": (log_decay.log_decay, (leaf(2, 3, 6), None, None, -1.0, 0.25, False)),
    "bounded decay": (log_decay.log_decay, (leaf(2, 3, 6), leaf(2), leaf(6), 1.0, 5.0, True)),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_have_right_schemas_fakes_and_gradients(name):
    operator, given = CASES[name]
    torch.library.opcheck(operator.registered, given)
    wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]

    for op in (operator, operator.registered):

        def of(*leaves: Tensor, op=op) -> Tensor | tuple[Tensor, ...]:
            rest = iter(leaves)
            return op(*(next(rest) if isinstance(x, Tensor) and x.requires_grad else x for x in given))

        assert torch.autograd.gradcheck(of, wanted)
        out = of(*wanted)
        out = out[0] if isinstance(out, tuple) else out
        (grad,) = torch.autograd.grad(out.sum(), wanted[:1], create_graph=True)
        with pytest.raises(SecondDerivativeError):
            grad.sum().backward()


def test_the_state_is_said_to_be_overwritten():
    q, k, v = (leaf(1, 8, 2, 4).detach() for _ in range(3))
    state = leaf(1, 3, 2, 4, 4).detach()
    given = (q, k, v, None, None, None, None, state, CU, "additive_none", 0.5, "chunk", "torch")
    torch.library.opcheck(ops.overwrite_op, given)
