"""Errors, times, memory and the host's share of one operator."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from ..errors import relative_error
from ..rows import reason
from ..timing import gaps, graph_of, host, peak, wall
from .cases import Case, Inputs, Results, Shape, inputs, tensors

Op = Callable[[Inputs], Results]
TOKENS = 512
"""At which errors are taken, in one batch row; heads and their sizes are those timed."""


# -- errors --------------------------------------------------------------------------------------------------


def errors(case: Case, op: Op, shape: Shape, device: str) -> dict[str, float]:
    """‖got − true‖ / ‖true‖ of the output and of every input's gradient, against fp64 on the same inputs."""
    x = inputs(case, shape.short(TOKENS), device, seed=2)
    wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in x.items() if t.is_floating_point()}
    true = results(case.truth, x | wide, trains(op))  # before a step overwrites its state
    got = results(op, given(op, case, x), trains(op))
    return {n: float(f"{relative_error(got[n], true[n]):.2e}") for n in true}


def trains(op: Op) -> bool:
    """Whether a side has gradients."""
    return getattr(op, "trains", True)


def given(op: Op, case: Case, x: Inputs) -> Inputs:
    """The inputs as a side takes them; what it costs to lay them out is no part of its time."""
    if getattr(op, "values_first", False):
        S = x["initial_state"]
        x = x | {"initial_state": S.detach().mT.contiguous().mT.requires_grad_(S.requires_grad)}
    more = getattr(op, "more", None)
    return x if more is None else more(x, case)


def results(op: Op, x: Inputs, gradients: bool = True) -> Inputs:
    """The output (and final states, S), and the gradients by ``d`` and the input's name; the output's own is rounded to
    bf16, the same one in every dtype."""
    with torch.set_grad_enabled(gradients):
        out = tensors(op(x))
    found = dict(zip(("o", "S"), (t.detach() for t in out)))
    wanted = [n for n, t in x.items() if t.requires_grad]
    if not wanted or not gradients:
        return found
    generator = torch.Generator(out[0].device).manual_seed(3)
    do = [torch.randn(t.shape, generator=generator, device=t.device).bfloat16().to(t.dtype) for t in out]
    grads = torch.autograd.grad(out, [x[n] for n in wanted], do)
    return found | {f"d{n}": g for n, g in zip(wanted, grads)}


# -- times ---------------------------------------------------------------------------------------------------


def measure(case: Case, op: Op, shape: Shape, device: str) -> dict[str, Any]:
    """ms of a forward (without gradients) and of forward and backward, GiB at the peak beyond the inputs, µs of the
    host for a forward call without and with gradients, and the same through CUDA graphs. A step has no backward, nor
    has a side that does not train."""
    x = given(op, case, inputs(case, shape, device))
    budget = 0.05 if case.gates else 0.25  # there are many rows of them
    with torch.no_grad():
        do = [torch.randn_like(t) for t in tensors(op(x))]

    def forward() -> None:
        with torch.no_grad():
            op(x)

    def both() -> None:
        torch.autograd.grad(tensors(op(x)), [t for t in x.values() if t.requires_grad], do)

    row: dict[str, Any] = {"fwd": milliseconds(forward, device, budget)}
    alone = case.step or not trains(op)
    whole = forward if alone else both
    if not alone:
        row["fwd_bwd"] = milliseconds(both, device, budget)
    if device == "cuda":
        row |= {"host_us": host_microseconds(forward), "peak_gib": round(peak(whole), 3)}
        if not alone:
            row["host_grad_us"] = host_microseconds(lambda: op(x))
        row |= graph_times(forward, "fwd", min(budget, 0.1))
        if not alone:
            by_hand = getattr(op, "by_hand", None)
            row |= graph_times(both if by_hand is None else by_hand(x, do), "fwd_bwd", min(budget, 0.1))
    return row


def milliseconds(step: Callable[[], Any], device: str = "cuda", budget: float = 0.25) -> float:
    """Median time of a call, among calls issued without waiting on a GPU, so that the host's time shows only where it
    is the bound."""
    step()
    if device != "cuda":
        return round(statistics.median(wall(step) for _ in range(5)) * 1e3, 4)
    return round(statistics.median(gaps(step, max(8, min(40, int(budget / wall(step)))))), 4)


def host_microseconds(call: Callable[[], Any]) -> float:
    """How long a call keeps the host, with nothing queued before it."""
    return round(statistics.median(host(call) for _ in range(15)) * 1e6, 1)


def graph_times(call: Callable[[], Any], name: str, budget: float = 0.1) -> dict[str, Any]:
    """A call captured: ms of a replay, µs of the host for one of a forward; or why it cannot be captured."""
    try:
        graph = graph_of(call)
    except Exception as e:
        return {f"graph_{name}_failed": reason(e)}
    host = {"graph_host_us": host_microseconds(graph.replay)} if name == "fwd" else {}
    return {f"graph_{name}": milliseconds(graph.replay, budget=budget)} | host


def bandwidth(device: str = "cuda") -> float:
    """Bytes a second of a large copy, read and written."""
    x = torch.empty(2**30 if device == "cuda" else 2**26, dtype=torch.uint8, device=device).random_(0, 255)
    y = torch.empty_like(x)
    return 2 * x.numel() / (milliseconds(lambda: y.copy_(x), device) / 1e3)
