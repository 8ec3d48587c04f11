"""Models under ``deterministic=True``, and what differs of two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from ring_la.blockwise import switch
from ring_la.inference import BlockReader
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import sum_gradients
from tests.support.pool import group

LAYERS = ["gdn", "kda", "mamba2", "rwkv7", "gla", "attention"]
PACKED = (0, 70, 71, 170)
OTHERS = ["linear_attention", "retention", "lightning", "hgrn2", "deltanet", "comba", "gdn2", "gated_delta_product"]
OTHERS += ["hgrn", "rwkv6", "gsa", "mla", "mlstm", "mamba3", "fox", "ttt", "preconditioned_gdn", "preconditioned_kda"]
OTHERS += ["momentum_deltanet", "mesa_net", "lightnet", "abc"]


EXPERTS = "moe"
"""In a list of layers: mixtures of experts between them."""


def model(layers: list[str] = LAYERS) -> HybridLM:
    torch.manual_seed(0)
    options = {"mamba2": dict(state_dim=16), "attention": dict(num_kv_heads=1, qk_norm=True, gated=True)}
    options |= {
        "hgrn": dict(lower_bound=0.2),
        "gsa": dict(slots=5),
        "abc": dict(slots=5),
        "lightnet": dict(key_dim=5, gate_rank=3),
        "mesa_net": dict(steps=3),
        "mla": dict(q_rank=12, value_dim=5),
        "mamba3": dict(state_dim=16),
    }
    options = {name: o for name, o in options.items() if name in layers}
    layers, moe = [name for name in layers if name != EXPERTS], EXPERTS in layers
    experts = dict(experts=5, shared_hidden=7, shared_gate=True, balance_coef=0.3, z_coef=0.1) if moe else {}
    # 3 heads and 33 channels: rows of which vector registers are not multiples
    config = HybridConfig(
        50, 48, layers, 3, mlp="moe" if moe else "swiglu", mlp_dim=33, options=options, mlp_options=experts
    )
    m = HybridLM(config)
    with torch.no_grad():
        for p in m.parameters():  # some start at zero, and others' gradients with them
            p += 0.02 * torch.randn(p.shape)
    return m


def tokens(*lengths: int, seed: int = 1) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (n,), generator=rng) for n in lengths]


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [n for n in one | other if not torch.equal(one[n], other[n])]


class Run(NamedTuple):
    """How one step is made: on `P` ranks, documents in an order, packed or (of one length) as rows of a batch."""

    P: int = 1
    kind: str = "contiguous"
    order: tuple[int, ...] = (0, 1, 2)
    way: str = "eager"
    rows: bool = False
    transport: str = "torch"


def step_of(
    rank: int, run: Run, layers: list[str], dtype: torch.dtype, at_once: bool, lengths: tuple[int, ...]
) -> dict[str, Tensor]:
    """The loss and all gradients of a step; the loss and each document's logits without gradients."""
    before, switch.ON_GPUS = switch.ON_GPUS, at_once
    try:
        return _step(run, layers, dtype, lengths)
    finally:
        switch.ON_GPUS = before


def _step(run: Run, layers: list[str], dtype: torch.dtype, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    cp = ring_la.ContextParallel(group(run.P), deterministic=True, transport=run.transport)
    m, documents = model(layers).to(cp.device, dtype), tokens(*lengths)
    if run.rows:
        layout, ids = cp.layout(lengths[0], run.kind), torch.stack([documents[i] for i in run.order])
    else:
        cu = [0]
        for i in run.order:
            cu.append(cu[-1] + lengths[i])
        layout = cp.layout(cu[-1], run.kind, cu_seqlens=tuple(cu))
        ids = torch.cat([documents[i] for i in run.order])[None]
    mine = layout.shard(ids.to(cp.device))

    def step(ids: Tensor) -> Tensor:
        loss = m.loss(ids, layout=layout)
        loss.backward()
        return loss.detach()

    loss = _made(step, mine, m, run.way, layout)
    sum_gradients(m.parameters(), cp)
    out = {"loss": cp.comm.all_reduce(loss).wait()} | {n: p.grad for n, p in m.named_parameters()}
    with torch.no_grad(), projected(m) as found:
        out["loss without gradients"] = cp.comm.all_reduce(m.loss(mine, layout=layout)).wait()
        logits = layout.gather(found[0]).flatten(0, 1).split([lengths[i] for i in run.order])
    out |= {f"logits {i}": x for i, x in zip(run.order, logits)}
    return {n: t.cpu() for n, t in out.items()}


@contextmanager
def projected(m: HybridLM) -> Iterator[list[Tensor]]:
    """The logits a model makes in here, a loss's among them."""
    found, project = [], m.logits

    def logits(*given: Any) -> Tensor:
        found.append(project(*given))
        return found[-1]

    with mock.patch.object(m, "logits", logits):
        yield found


def _made(
    step: Callable[[Tensor], Tensor], ids: Tensor, m: HybridLM, way: str, layout: ring_la.ShardedLayout
) -> Tensor:
    """The loss, the gradients in the parameters."""
    if way == "eager":
        return step(ids)
    if way == "compiled":
        torch._dynamo.reset()  # ranks have compiled as much before, or one gives up where others go on
        loss = torch.compile(m.loss)(ids, layout=layout)
        loss.backward()
        return loss.detach()
    step(ids)  # what is made once is made before
    call = ring_la.capture(step, layout.cp)
    for _ in range(5):
        for p in m.parameters():
            p.grad.zero_()
        loss = call(ids)
    return loss


def decoded(
    rank: int, P: int, T: int, read: int, layers: list[str], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Logits of two documents from one forward pass over `P` ranks, and token by token after a prefill of `read`."""
    cp = ring_la.ContextParallel(group(P), deterministic=True)
    m, ids = model(layers).to(cp.device, dtype), torch.stack(tokens(T, T)).to(cp.device)
    alone = dist.new_group([rank], use_local_synchronization=True)
    reader = BlockReader(m, ring_la.ContextParallel(alone, deterministic=True))
    layout = cp.layout(T, "zigzag")
    with torch.no_grad():
        whole = layout.gather(m(layout.shard(ids), layout=layout).logits)
    border = read // 64 * 64
    steps = [reader.prefill(ids[:, :read], layout=cp.layout(border) if border and P > 1 else None)]
    steps += [reader.step(ids[:, t]) for t in range(read, T)]
    return whole[:, read - 1 :].cpu(), torch.stack(steps, 1).cpu()
