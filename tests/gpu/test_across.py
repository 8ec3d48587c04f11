"""Delta rules whose states meet those of other ranks, by the kernels in CUDA C++ on Hopper, against one device in fp64:
`pytest -m gpu tests/gpu/test_across.py [--gpu-ranks 3]`.

Spans are of 64 tokens, so that they begin early, and end within others; segments have 297. What the ranks exchange goes
by mailboxes where GPUs reach each other's memory, or by messages.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

import ring_la
from tests.support import border_calls, pool

pytestmark = pytest.mark.gpu


def forget() -> None:
    """What calls are replayed by: one of the same shapes would be, by the kernels it had then."""
    from ring_la.kernels.replay import root
    from ring_la.kernels.runtime.replayed_function import record_of

    root.cache_clear()
    record_of.cache_clear()


def check(rank: int, name: str, kind: str) -> tuple[dict[str, float], dict[str, float], int]:
    """Errors by these kernels and by chunks of 64 tokens, and how many calls those took."""
    from ring_la.kernels.wy import gdn_launches, kda_launches, one_launch
    from ring_la.kernels.wy.scanned_spans import ScannedSpans

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    cp, shape = ring_la.ContextParallel(pool.group(), scan="ring"), dict(H=4, Hk=2, K=128, V=128)
    with ExitStack() as changes:
        bounded = functools.partial(ring_la.kda, lower_bound=-5.0)
        changes.enter_context(mock.patch.object(ring_la, "kda", bounded))
        forget()
        plain = border_calls.errors(cp, name, kind, 9, torch.bfloat16, **shape)
        forget()
        calls = changes.enter_context(mock.patch.object(ScannedSpans, "of", side_effect=ScannedSpans.of))
        changes.enter_context(mock.patch.object(one_launch, "ACROSS", one_launch.Least(0, 0, 0)))
        changes.enter_context(mock.patch.object(gdn_launches, "across", return_value=(64, 64)))
        changes.enter_context(mock.patch.object(kda_launches, "multiprocessors", return_value=10**6))
        return border_calls.errors(cp, name, kind, 9, torch.bfloat16, **shape), plain, calls.call_count


@pytest.mark.parametrize("name", ["gated_delta_rule", "delta_rule", "kda"])
@pytest.mark.parametrize("kind", [kind for kind in border_calls.LAYOUTS if kind != "folded"])
def test_against_one_device(name, kind, gpu_ranks, record_property):
    results = gpu_ranks.run(gpu_ranks.size, check, name, kind)
    worst = {n: max(found[n] for found, _, _ in results) for n in results[0][0]}
    chunks = {n: max(plain[n] for _, plain, _ in results) for n in worst}
    record_property("errors", worst)
    record_property("in chunks", chunks)
    assert all(e <= max(6e-3, 2 * chunks[n]) for n, e in worst.items()), (worst, chunks)
    assert all(calls > 0 for *_, calls in results), "they went by chunks"
