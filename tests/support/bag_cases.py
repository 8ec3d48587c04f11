"""Sums of rows by bag: the truth, what the kernels compute and what PyTorch's operations compute."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.kernels.fused import bags
from ring_la.nn.expert_ranks import Bags
from tests.support.gate_cases import DEVICE
from tests.support.interpreter import interpreted

interpreted()

from ring_la.kernels.fused import bags_kernel  # noqa: E402


def bag_case(D: int, dtype: torch.dtype = torch.float32, rows: int = 6) -> tuple[list[Tensor], list, list]:
    """Bags of 0 to 3 of some entries, in any order: sums, weighed and not, and gradients of entries and weights."""
    generator = torch.Generator().manual_seed(0)
    there = torch.rand(rows, 3, generator=generator) < 0.6
    there[1] = False
    held = int(there.sum())
    place = torch.full((rows, 3), held).masked_scatter(there, torch.randperm(held, generator=generator))
    of, sizes = Bags.of(place.to(DEVICE), held), ((held, D), (held,), (rows, D))
    y, weight, do = (torch.randn(*size, generator=generator).to(DEVICE, dtype) for size in sizes)
    leaves = [t.double().requires_grad_() for t in (y, weight)]
    sums = bags.plain_sums(*leaves, of.entries, of.starts)
    alone = bags.plain_sums(leaves[0], None, of.entries, of.starts)
    true = [sums, *torch.autograd.grad(sums, leaves, do.double()), alone]
    ours, plain = (
        [f(y, weight, of.entries, of.starts), *b(do, y, weight, of.row), f(y, None, of.entries, of.starts)]
        for f, b in ((bags_kernel.forward, bags_kernel.backward), (bags.plain_sums, bags.plain_gradients))
    )
    return [t.detach() for t in true], ours, plain
