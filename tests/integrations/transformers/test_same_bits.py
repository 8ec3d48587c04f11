"""Models of Transformers under ``deterministic=True``: the same bits on any number of ranks, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tests.support.pool import group  # noqa: E402
from tests.support.same_bits import differing  # noqa: E402
from tests.support.transformers_models import CASES, VOCABULARY  # noqa: E402

SAME = ["llama", "qwen3_next", "mamba2", "minimax", "deepseek_v3", "kimi_linear"]
LENGTHS = (70, 66, 3)


def step(rank: int, P: int, name: str, kind: str, order: tuple[int, ...]) -> dict[str, Tensor]:
    """Of documents packed in some order: the loss, all gradients, and the logits of each document."""
    import ring_la
    from ring_la.integrations.transformers import parallelize
    from ring_la.training import sum_gradients

    cp = ring_la.ContextParallel(group(P), deterministic=True)
    rng = torch.Generator().manual_seed(5)
    documents = [torch.randint(3, VOCABULARY, (n,), generator=rng) for n in LENGTHS]
    ids = torch.cat([documents[i] for i in order])[None]
    lengths = [LENGTHS[i] for i in order]
    model = parallelize(CASES[name].make(), cp, kind=kind)
    out = model(input_ids=ids, labels=ids, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0), use_cache=False)
    out.loss.backward()
    sum_gradients(model.parameters(), cp)
    logits = out.layout.gather(out.logits.detach()).split(lengths, 1)
    found = {f"logits {n}": logits[i] for i, n in enumerate(order)} | {"loss": out.loss.detach()}
    return found | {n: torch.zeros(0) if p.grad is None else p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", SAME)
def test_bits_do_not_depend_on_ranks_or_packing(ranks, name):
    one = ranks.run(1, step, 1, name, "contiguous", (0, 1, 2))[0]
    assert all(torch.isfinite(x).all() for x in one.values())
    for P, kind, order in ((2, "zigzag", (2, 1, 0)), (3, "contiguous", (1, 0, 2))):
        for some in ranks.run(P, step, P, name, kind, order):
            assert not differing(one, some), (P, kind, order)
