"""Deterministic steps on GPUs: the same bits on one and on two, by NCCL and by mailboxes, compiled and captured.

pytest -m gpu tests/gpu/test_same_bits.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la.blockwise import switch
from ring_la.training import sum_gradients
from tests.support.pool import group
from tests.support.same_bits import LAYERS, OTHERS, PACKED, differing, model, tokens

pytestmark = pytest.mark.gpu(needs=2)


def step_of(rank: int, P: int, transport: str, dtype: torch.dtype, layers: list[str], way: str) -> dict[str, Tensor]:
    """The loss and all gradients of a step, and the logits."""
    cp = ring_la.ContextParallel(group(P), deterministic=True, transport=transport)
    m, (ids,) = model(layers).to(cp.device, dtype), tokens(PACKED[-1])
    layout = cp.layout(PACKED[-1], "contiguous" if P == 1 else "zigzag", cu_seqlens=PACKED)
    mine = layout.shard(ids[None].to(cp.device))

    def step(ids: Tensor) -> Tensor:
        loss = m.loss(ids, layout=layout)
        loss.backward()
        return loss.detach()

    switch.ON_GPUS, way = way.startswith("at once"), way.removeprefix("at once").lstrip(", ") or "eager"
    call = step if way == "eager" else ring_la.capture(step, cp) if way == "captured" else None
    if call is None:
        compiled = torch.compile(m.loss)
        call = lambda ids: _back(compiled(ids, layout=layout))  # noqa: E731
    if way == "captured":
        step(mine)  # what is made once is made before
    loss = call(mine)
    for _ in range(4 if way == "captured" else 0):
        for p in m.parameters():
            p.grad.zero_()
        loss = call(mine)
    sum_gradients(m.parameters(), cp)
    out = {"loss": cp.comm.all_reduce(loss).wait()} | {n: p.grad for n, p in m.named_parameters()}
    with torch.no_grad():
        out["logits"] = layout.gather(m(mine, layout=layout).logits)
    return {n: t.cpu() for n, t in out.items()}


def _back(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("layers", "dtype", "transport", "way"),
    [
        (LAYERS, torch.float32, "torch", "eager"),
        (LAYERS, torch.bfloat16, "symmetric", "eager"),
        (OTHERS, torch.float32, "symmetric", "eager"),
        (["gdn", "attention"], torch.bfloat16, "auto", "compiled"),
        (["gdn", "attention"], torch.bfloat16, "auto", "captured"),
        (LAYERS, torch.bfloat16, "torch", "at once"),
        (["gdn", "attention"], torch.bfloat16, "torch", "at once, captured"),
    ],
    ids=["nccl fp32", "mailboxes bf16", "others", "compiled", "captured", "at once", "at once, captured"],
)
def test_one_gpu_and_two(layers, dtype, transport, way, gpu_ranks):
    if way.startswith("at once"):
        one = gpu_ranks.run(1, step_of, 1, "torch", dtype, layers, "at once")[0]
        for P, how in ((1, "at once"), (2, way)):  # another run, and the split one
            for some in gpu_ranks.run(P, step_of, P, transport, dtype, layers, how):
                assert not differing(one, some)
        return
    one = gpu_ranks.run(1, step_of, 1, "torch", dtype, layers, "eager")[0]
    for some in gpu_ranks.run(2, step_of, 2, transport, dtype, layers, way):
        assert not differing(one, some)
