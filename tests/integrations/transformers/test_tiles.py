"""MLPs over some tokens at a time, and losses with their gradients beside them: the same loss and gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from ring_la import ArgumentError, UnsupportedError
from ring_la.integrations.transformers import loss
from ring_la.integrations.transformers.tiles import tile_mlps
from tests.support.transformers_models import CASES, VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])  # the second: experts that every token passes
def test_tiles_change_nothing(name):
    x = torch.randint(3, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(3))
    whole, tiled = CASES[name].make(), CASES[name].make()
    assert len(tile_mlps(tiled, 8)) >= 2
    for model in (whole, tiled):
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
    for (n, p), q in zip(whole.named_parameters(), tiled.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")
    with pytest.raises(ArgumentError, match="chunk: expected an int ≥ 1"):
        tile_mlps(tiled, 0)
    with pytest.raises(UnsupportedError, match="model: expected one with dense MLPs"):
        tile_mlps(CASES["mamba2"].make(), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_with_their_gradients_beside_them_are_the_library_s(dtype, monkeypatch):
    """As on CUDA: the logits stay as they are, and the gradient, in their dtype, is no further from fp32's."""
    logits = torch.randn(12, 19, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    labels = torch.tensor([3, -1, *range(10)])
    before = logits.detach().clone()
    sums, grads = [], []
    for on_cuda in (False, True):
        monkeypatch.setattr(loss, "fused", lambda x, on=on_cuda: on)
        sums.append(loss.sum_of_losses(logits, labels, -1) / 11)
        grads += torch.autograd.grad(sums[-1], logits)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=0)
    assert sums[1].dtype == torch.float32
    assert torch.equal(logits, before)
    assert grads[1].dtype == dtype
    near = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # of bf16: two roundings of the gradient, and of 1 / 11
    torch.testing.assert_close(grads[1], grads[0], rtol=near, atol=1e-9)
