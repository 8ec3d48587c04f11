"""A parallelized model, and what it is called with."""

from __future__ import annotations

import torch

from tests.support.sums import summed
from tests.support.transformers_models import CASES, VOCABULARY

LENGTH = 21


def ids(rows: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randint(
        3, VOCABULARY, (rows, LENGTH), generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
    )


def parallel(name: str, **options):
    import ring_la
    from ring_la.integrations.transformers import parallelize
    from tests.support.pool import group

    cp = ring_la.ContextParallel(group(), scan="ring", attention="ring", timeout=60)
    return parallelize(CASES[name].make(), cp, **options), cp


def gradients(model, cp=None) -> dict[str, torch.Tensor]:
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return grads if cp is None else summed(grads, cp.comm.group)


def close(a, b, **keywords):
    torch.testing.assert_close(a, b, **({"rtol": 2e-4, "atol": 2e-5} | keywords))
