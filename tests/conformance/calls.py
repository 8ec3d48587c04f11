"""What tests of one device share: sizes, and a call with its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

H, K, V = 4, 6, 5


def run(function, x: dict, state: Tensor, cotangents, **keywords):
    """Output, final state and gradients of the tensors of `x` and of the state."""
    leaves = [t for t in x.values() if isinstance(t, Tensor)]
    out = function(**x, initial_state=state, output_final_state=True, **keywords)
    do, dfinal = cotangents
    grads = torch.autograd.grad((out.o * do).sum() + (out.final_state * dfinal).sum(), [*leaves, state])
    return [out.o, out.final_state, *grads]
