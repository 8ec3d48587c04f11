"""A convolution over part of its slices, whose borders are made good behind it: as over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from ring_la.integrations.diffusers.modules import convolved


@pytest.mark.parametrize("width", [1, 2, 3])
def test_parts_of_a_convolution_are_the_whole(width):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, (2 * width + 1, 3), padding=(width, 1), groups=2, bias=False).double()
    whole = torch.randn(2, 4, 9 + 2 * width, 5, dtype=torch.float64, requires_grad=True)
    for n in range(1, 10):  # fewer slices than it reaches, and more
        before, x, after = whole[:, :, : n + 2 * width].split([width, n, width], 2)
        got = convolved(conv, x, lambda: (before, after), width)  # noqa: B023
        want = conv(whole[:, :, : n + 2 * width])[:, :, width:-width]
        torch.testing.assert_close(got, want)
        loss = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
        grads = [torch.autograd.grad((y * loss).sum(), (whole, conv.weight)) for y in (got, want)]
        torch.testing.assert_close(*grads)
