"""MLPs over some tokens at a time: the same loss and gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from ring_la import ArgumentError, UnsupportedError
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
