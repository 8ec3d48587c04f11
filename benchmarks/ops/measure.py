"""Errors, times, memory and the host's share of one operator."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Inputs, Shape, inputs

Op = Callable[[Inputs], Tensor]
TOKENS = 512
"""At which errors are taken, in one batch row; heads and their sizes are those timed."""


# -- errors --------------------------------------------------------------------------------------------------


def errors(case: Case, op: Op, shape: Shape, device: str) -> dict[str, float]:
    """‖got − true‖ / ‖true‖ of the output and of every input's gradient, against fp64 on the same inputs."""
    small = shape._replace(B=1, T=min(shape.T, TOKENS))
    x = inputs(case, small, device, seed=2)
    wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in x.items()}
    true = results(case.truth, wide)  # before a step overwrites its state
    got = results(op, x)
    return {n: float(f"{error(got[n], true[n]):.2e}") for n in true}


def results(op: Op, x: Inputs) -> Inputs:
    """The output, and the gradients by ``d`` and the input's name; the output's own is rounded to bf16, the same one in
    every dtype."""
    o = op(x)
    wanted = [n for n, t in x.items() if t.requires_grad]
    if not wanted:
        return {"o": o}
    do = torch.randn(o.shape, generator=torch.Generator(o.device).manual_seed(3), device=o.device).bfloat16()
    grads = torch.autograd.grad(o, [x[n] for n in wanted], do.to(o.dtype))
    return {"o": o.detach()} | {f"d{n}": g for n, g in zip(wanted, grads)}


def error(got: Tensor, true: Tensor) -> float:
    return ((got.double() - true).norm() / true.norm()).item()


# -- times ---------------------------------------------------------------------------------------------------


def measure(case: Case, op: Op, shape: Shape, device: str) -> dict[str, Any]:
    """ms of a forward (without gradients) and of forward and backward, GiB at the peak beyond the inputs, µs of the
    host for a forward call without and with gradients, and the same through CUDA graphs. A step has no backward."""
    x = inputs(case, shape, device)
    with torch.no_grad():
        do = torch.randn_like(op(x))

    def forward() -> None:
        with torch.no_grad():
            op(x)

    def both() -> None:
        torch.autograd.grad(op(x), [t for t in x.values() if t.requires_grad], do)

    row: dict[str, Any] = {"fwd": milliseconds(forward, device)}
    whole = forward if case.step else both
    if not case.step:
        row["fwd_bwd"] = milliseconds(both, device)
    if device == "cuda":
        row |= {"host_us": host_microseconds(forward), "peak_gib": peak(whole)}
        if not case.step:
            row["host_grad_us"] = host_microseconds(lambda: op(x))
        row |= graph_times(forward, "fwd")
        if not case.step:
            row |= graph_times(both, "fwd_bwd")
    return row


def milliseconds(step: Callable[[], Any], device: str = "cuda", budget: float = 0.25) -> float:
    """Median time of a call, among calls issued without waiting on a GPU, so that the host's time shows only where it
    is the bound."""
    if device != "cuda":
        step()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return round(statistics.median(times) * 1e3, 4)
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(8, min(40, int(budget / (time.perf_counter() - start))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return round(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)), 4)


def host_microseconds(call: Callable[[], Any]) -> float:
    """How long a call keeps the host, with nothing queued before it."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return round(statistics.median(times) * 1e6, 1)


def peak(call: Callable[[], Any]) -> float:
    """GiB above what is held before."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - held) / 2**30, 3)


def graph_times(call: Callable[[], Any], name: str) -> dict[str, Any]:
    """A call captured: ms of a replay, µs of the host for one of a forward; or why it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as e:
        torch.cuda.synchronize()
        return {f"graph_{name}_failed": f"{type(e).__name__}: {e}".splitlines()[0][:120]}
    host = {"graph_host_us": host_microseconds(graph.replay)} if name == "fwd" else {}
    return {f"graph_{name}": milliseconds(graph.replay, budget=0.1)} | host


def bandwidth(device: str = "cuda") -> float:
    """Bytes a second of a large copy, read and written."""
    x = torch.empty(2**30 if device == "cuda" else 2**26, dtype=torch.uint8, device=device).random_(0, 255)
    y = torch.empty_like(x)
    return 2 * x.numel() / (milliseconds(lambda: y.copy_(x), device) / 1e3)
