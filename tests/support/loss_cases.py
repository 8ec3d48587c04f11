"""Losses of rows: the truth, what the kernel computes and what PyTorch's operations compute."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.kernels.fused.cross_entropy import plain_losses
from ring_la.models.loss import IGNORE
from tests.support.interpreter import interpreted

interpreted()

from ring_la.kernels.fused import cross_entropy_kernel as cross_entropy  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loss_case(V: int, dtype: torch.dtype = torch.float32, rows: int = 6) -> tuple[list[Tensor], list, list]:
    """(true, by the kernel, by PyTorch): the rows' losses and the gradient; some rows do not count."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(rows, V, device=DEVICE)).to(dtype)
    targets = torch.randint(V, (rows,), device=DEVICE)
    targets[1::3], targets[0], targets[2] = IGNORE, V - 1, 0
    given = (targets, IGNORE, True)
    ours = [cross_entropy.forward(own := logits.clone(), *given), own]
    return [list(x) for x in (plain_losses(logits.double(), *given), ours, plain_losses(logits, *given))]
