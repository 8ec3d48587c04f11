"""Losses of rows: the truth, what the kernel computes and what PyTorch's operations compute."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.models import loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loss_case(V: int, dtype: torch.dtype = torch.float32, rows: int = 6) -> tuple[list[Tensor], list, list]:
    """(true, by the kernel, by PyTorch): the rows' losses and the gradient; some rows do not count."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(rows, V, device=DEVICE)).to(dtype)
    targets = torch.randint(V, (rows,), device=DEVICE)
    targets[1::3], targets[0], targets[2] = loss.IGNORE, V - 1, 0
    given = (targets, loss.IGNORE, True)
    ours = loss.triton_losses(logits.clone(), *given)
    return [list(x) for x in (loss.plain_losses(logits.double(), *given), ours, loss.plain_losses(logits, *given))]
