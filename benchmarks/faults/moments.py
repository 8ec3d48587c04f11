"""What a job is doing when a fault comes to one of its ranks.

Each function runs on every rank up to `at.ready()`; the victim of a signal never comes back from it, another is told
what to do: "wedged" stays in a receive that nobody answers, "other shapes" goes on with a longer sequence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import ring_la
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import TrainingMesh, shard_parameters

from .job import TIMEOUT, VICTIM, Rank

T = 48
COMPILING = 20.0
"""Seconds that ranks wait where each compiles for itself first."""


def wait(at: Rank) -> bool:
    """Comes back when the others go on; on the victim whether it brings other shapes."""
    told = at.ready()
    if told == "wedged":
        dist.recv(torch.zeros(1, device=at.device), src=(VICTIM + 1) % at.size, tag=77)
    return told == "other shapes"


def context(at: Rank, timeout: float = TIMEOUT, **more) -> ring_la.ContextParallel:
    return ring_la.ContextParallel(scan="ring", attention="ring", timeout=timeout, **more)


def recurrence(cp: ring_la.ContextParallel, tokens: int = T):
    layout = cp.layout(tokens, "contiguous")
    x = [torch.randn(1, layout.local_length, 2, 8, device=cp.device, requires_grad=True) for _ in range(3)]
    g = -torch.rand(1, layout.local_length, 2, 8, device=cp.device)
    return lambda: ring_la.gla(*x, g, layout=layout).o.sum()


def softmax(cp: ring_la.ContextParallel, tokens: int = T):
    layout = cp.layout(tokens, "zigzag")
    x = [torch.randn(1, layout.local_length, 2, 8, device=cp.device, requires_grad=True) for _ in range(3)]
    return lambda: ring_la.attention(*x, layout=layout).o.sum()


def exchange(cp: ring_la.ContextParallel, tokens: int = T):
    """What every rank waits for: a ring's first rank waits for nobody forward."""
    layout = cp.layout(tokens)
    x = torch.randn(1, layout.local_length, 8, device=cp.device, requires_grad=True)
    return lambda: layout.gather(x).sum()


def hear(at: Rank, call) -> None:
    """On GPUs, where no host waits for messages: wait for the device, and make one more call."""
    if at.device.type == "cuda":
        torch.cuda.synchronize()
        call()


def _forward(at: Rank, make) -> None:
    cp = context(at)
    call, longer, meet = make(cp), make(cp, T + 6), exchange(cp)
    for warm in (call, longer, meet):
        warm().backward()
    if wait(at):
        longer()
    call()
    meet()
    hear(at, meet)


def _backward(at: Rank, make) -> None:
    cp = context(at)
    call, longer, meet = make(cp), make(cp, T + 6), exchange(cp)
    for warm in (call, longer, meet):
        warm().backward()
    loss, other = call(), longer()
    (other if wait(at) else loss).backward()
    meet()
    hear(at, meet)


def recurrence_forward(at: Rank) -> None:
    _forward(at, recurrence)


def recurrence_backward(at: Rank) -> None:
    _backward(at, recurrence)


def softmax_forward(at: Rank) -> None:
    _forward(at, softmax)


def softmax_backward(at: Rank) -> None:
    _backward(at, softmax)


def _model() -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(19, 16, ["gdn", "attention"], 2))


def compiled_step(at: Rank) -> None:
    cp, model = context(at, timeout=COMPILING), _model().to(at.device)
    step = torch.compile(lambda ids, layout: model.loss(ids, layout=layout), backend="aot_eager")
    layout, longer = cp.layout(T), cp.layout(T + 6)
    shards = {at: at.shard(torch.arange(at.seq_len, device=cp.device)[None] % 19) for at in (layout, longer)}
    for where, ids in shards.items():
        step(ids, where).backward()
    where = longer if wait(at) else layout
    for _ in range(2):
        step(shards[where], where).backward()
    hear(at, exchange(cp))


def captured_step(at: Rank) -> None:
    """On GPUs alone: two kinds of steps that `ring_la.capture` replays."""
    cp = context(at, transport="symmetric")
    calls = {n: recurrence(cp, n) for n in (T, T + 6)}

    def once(tokens: int) -> None:
        calls[tokens]().backward()

    step = ring_la.capture(once, cp)
    for _ in range(5):
        for n in calls:
            step(n)
    step.wait()
    odd = wait(at)
    for _ in range(2):
        step(T + 6 if odd else T)
    step.wait()
    hear(at, lambda: step(T))


def training(at: Rank) -> None:
    """FSDP2 over the ranks that share each sequence, and an optimizer."""
    mesh = TrainingMesh.make(at.device.type, context=at.size)
    cp = ring_la.ContextParallel(mesh.context, scan="ring", attention="ring", timeout=TIMEOUT)
    model = shard_parameters(_model().to(at.device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: int) -> None:
        layout = cp.layout(tokens)
        model.loss(layout.shard(torch.arange(tokens, device=cp.device)[None] % 19), layout=layout).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(T)
    step(T + 6)
    odd = wait(at)
    for _ in range(3):
        step(T + 6 if odd else T)
    hear(at, exchange(cp))


MOMENTS = {
    "a recurrence, forward": recurrence_forward,
    "a recurrence, backward": recurrence_backward,
    "softmax attention, forward": softmax_forward,
    "softmax attention, backward": softmax_backward,
    "a compiled step": compiled_step,
    "training (FSDP2)": training,
}
ON_GPUS = {"a captured step": captured_step}
FAULTS = ("kill -9", "SIGSTOP", "wedged", "other shapes")
