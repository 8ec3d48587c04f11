"""Short convolutions, token shifts and grouped products of the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from ring_la import reference

from .inputs import (
    B,
    T,
    close,
    rand,
)


@pytest.mark.parametrize("W", [1, 4])
@pytest.mark.parametrize("silu", [True, False])
def test_short_conv_against_pytorch(W, silu):
    x, weight, bias, start = rand(B, T, 6), rand(6, W), rand(6), rand(B, 6, W - 1)
    activation = "silu" if silu else None
    for initial in (None, start):
        seen = torch.cat([torch.zeros_like(start) if initial is None else start, x.mT], dim=-1)
        want = F.conv1d(seen, weight[:, None], bias, groups=6).mT
        keywords = {"activation": activation, "initial_state": initial, "output_final_state": True}
        out = reference.short_conv(x, weight, bias, **keywords)
        close(out.o, F.silu(want) if silu else want)
        assert torch.equal(out.final_state, seen[..., seen.shape[-1] - W + 1 :])
        heads = reference.short_conv(x.view(B, T, 2, 3), weight[:, None], bias, **keywords)
        assert torch.equal(heads.o, out.o.view(B, T, 2, 3))
        assert torch.equal(heads.final_state, out.final_state)


def test_short_conv_by_hand():
    out = reference.short_conv(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[100.0, 10.0, 1.0]]))
    assert out.o.flatten().tolist() == [1.0, 12.0, 123.0]
    assert out.final_state is None


def test_packed_short_conv_and_token_shift_equal_separate_calls():
    x, weight, bounds = rand(1, T, 6), rand(6, 4), [0, 0, 2, 3, 3, 13]
    tails, lasts = rand(5, 6, 3), rand(5, 6)
    for function, start in (
        (lambda x, **kw: reference.short_conv(x, weight, **kw), tails),
        (reference.token_shift, lasts),
    ):
        packed = function(x, initial_state=start, output_final_state=True, cu_seqlens=bounds)
        for n, (a, b) in enumerate(pairwise(bounds)):
            alone = function(x[:, a:b], initial_state=start[n : n + 1], output_final_state=True)
            assert torch.equal(packed.o[:, a:b], alone.o)
            assert torch.equal(packed.final_state[n : n + 1], alone.final_state)
        assert torch.equal(packed.final_state[[0, 3]], start[[0, 3]])
    tail = reference.short_conv(x, weight, initial_state=tails, output_final_state=True, cu_seqlens=bounds).final_state
    assert torch.equal(tail[2], torch.cat([tails[2, :, 1:], x[0, 2:3].mT], dim=-1))


def test_token_shift():
    x, start = rand(B, T, 6), rand(B, 6)
    out = reference.token_shift(x, initial_state=start, output_final_state=True)
    assert torch.equal(out.o, torch.cat([start[:, None], x[:, :-1]], dim=1))
    assert torch.equal(out.final_state, x[:, -1])
    assert not reference.token_shift(x).o[:, 0].any()
    assert torch.equal(reference.token_shift(x.view(B, T, 2, 3), initial_state=start).o.flatten(2), out.o)


def test_short_conv_and_token_shift_gradients():
    x, weight, bias, start = (rand(*s).requires_grad_() for s in ((1, 4, 2), (2, 3), (2,), (1, 2, 2)))

    def convolve(x, weight, bias, start):
        return reference.short_conv(x, weight, bias, activation="silu", initial_state=start, output_final_state=True)

    def shift(x, start):
        return reference.token_shift(x, initial_state=start, output_final_state=True)

    assert torch.autograd.gradcheck(convolve, (x, weight, bias, start))
    assert torch.autograd.gradcheck(shift, (x, start[..., 0]))


def test_grouped_gemm():
    a, b, sizes = rand(6, 3).requires_grad_(), rand(4, 3, 2).requires_grad_(), torch.tensor([2, 0, 3, 1])
    group = torch.repeat_interleave(torch.arange(4), sizes)
    close(reference.grouped_gemm(a, b, sizes), torch.einsum("mk,mkn->mn", a, b[group]))
    assert torch.autograd.gradcheck(lambda a, b: reference.grouped_gemm(a, b, sizes), (a, b))
    assert reference.grouped_gemm(a[:0], b, [0, 0, 0, 0]).shape == (0, 2)
