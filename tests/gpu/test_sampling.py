"""Tokens of many rows at once on a GPU: a row's are its own, the host waits for none, and a graph draws anew.

pytest -m gpu tests/gpu/test_sampling.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_la.serving import Request
from ring_la.serving.sampling import Choosers, Ways

pytestmark = pytest.mark.gpu
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(temperature=0.8),
    dict(temperature=0.8, top_p=0.9),
    dict(temperature=1.2, top_k=50, top_p=0.9, frequency_penalty=0.5, logit_bias={7: 3.0}),
]
STEPS, ROWS, TOKENS = 6, 16, 32_768


def seated(rows: range, device: str) -> tuple[Choosers, Ways]:
    choosers, ways = Choosers(torch.device(device), len(rows)), Ways(0)
    for n, row in enumerate(rows):
        chooser = Request([1], seed=row, **OPTIONS[row % len(OPTIONS)]).chooser()
        choosers.seat(n, chooser, TOKENS)
        ways |= chooser.ways
    return choosers, ways


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_of_many_rows(dtype):
    logits = (2 * torch.randn(STEPS, ROWS, TOKENS, generator=torch.Generator().manual_seed(0))).to(dtype)
    on_gpu = logits.cuda()
    choosers, ways = seated(range(ROWS), "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = torch.stack([choosers.choose(z, ways) for z in on_gpu])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for row in range(ROWS):
        alone, own = seated(range(row, row + 1), "cuda")
        assert [int(alone.choose(z[row : row + 1], own)) for z in on_gpu] == got[:, row].tolist()
    plain, _ = seated(range(ROWS), "cpu")
    want = torch.stack([plain.choose(z, ways) for z in logits])
    assert (got.cpu() == want).float().mean() > 0.97  # but where rounding turns a choice, and penalties those behind it


def test_a_graph_draws_anew():
    choosers, ways = seated(range(ROWS), "cuda")
    again, _ = seated(range(ROWS), "cuda")
    z = 2 * torch.randn(ROWS, TOKENS, device="cuda")
    want = [again.choose(z, ways) for _ in range(STEPS)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = choosers.choose(z, ways)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = choosers.choose(z, ways)
    got = [first.clone()]
    for _ in range(STEPS - 1):
        graph.replay()
        got.append(tokens.clone())
    assert torch.equal(torch.stack(got), torch.stack(want))
    assert len({tuple(x.tolist()) for x in got}) == STEPS
