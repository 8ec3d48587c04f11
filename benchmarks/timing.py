"""The clocks of all benchmarks: of one device, of the host, and of calls that ranks make together.

On one device: `elapsed` by events around calls in a row, `gaps` by events between them, `medians` of calls in turns,
`wall` and `host` by the host's clock, `graph_of` what is timed as a replay; `kernels` of a call by the profiler, and
`peak`, what it takes of memory. Of ranks: the slowest one's time, arms in turns, no barrier inside what is timed.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ring_la.comm import Group

from .rows import reason

Step = Callable[[], object]


# -- one device ----------------------------------------------------------------------------------------------


def elapsed(step: Step, inner: int = 1) -> float:
    """Milliseconds of one of `inner` calls in a row on this GPU, by events; waits for the last."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stop.record()  # makes it, which the host would else do behind the calls
    start.record()
    for _ in range(inner):
        step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / inner


def gaps(step: Step, count: int) -> list[float]:
    """Milliseconds between the ends of calls that are issued without waiting for this GPU."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def now() -> float:
    """Seconds, when all is done that this process has given its GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def wall(step: Step, inner: int = 1) -> float:
    """Seconds of one of `inner` calls in a row, until the device has done them."""
    start = now()
    for _ in range(inner):
        step()
    return (now() - start) / inner


def host(step: Step, inner: int = 1) -> float:
    """Seconds that one of `inner` calls in a row keeps the host, with nothing queued before them."""
    start = now()
    for _ in range(inner):
        step()
    took = time.perf_counter() - start
    now()
    return took / inner


def medians(
    steps: Mapping[str, Step], rounds: int, inner: int = 1, warm: int = 1, clock: Callable[[Step, int], float] = elapsed
) -> dict[str, float]:
    """The median of each step's times, of rounds in which they take turns: a GPU's clock moves by more than steps are
    apart. `warm` rounds before those do not count. clock: what one of `inner` calls in a row takes."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for n in range(warm + rounds):
        for name, step in steps.items():
            took = clock(step, inner)
            if n >= warm:
                times[name].append(took)
    return {name: statistics.median(of_one) for name, of_one in times.items()}


def median(step: Step, rounds: int, inner: int = 1) -> float:
    """Milliseconds of a step alone, the median of rounds of so many calls, behind one that does not count."""
    return medians({"it": step}, rounds, inner)["it"]


def peak(step: Step) -> float:
    """GiB that a call takes on this GPU at the most, above what is held before."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def kernels(step: Step, calls: int = 1) -> list[tuple[str, float, float]]:
    """What the profiler sees of a call on this GPU: each kernel's name, how often it runs and its microseconds, the
    longest first; the mean of `calls` in a row."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for e in seen.key_averages():
        count, us = found.get(e.key[:80], (0.0, 0.0))
        found[e.key[:80]] = count + e.count / calls, us + e.self_device_time_total / calls
    return sorted(((name, *of) for name, of in found.items() if of[1]), key=lambda kernel: -kernel[2])


def graph_of(step: Step, warm: int = 0, mode: str = "global") -> torch.cuda.CUDAGraph:
    """A CUDA graph of a step, behind `warm` calls, after which kernels are compiled and memory is there. Where it
    cannot be captured the error comes, and what is done afterwards is not disturbed.

    mode: which threads must not disturb it; "thread_local" beside NCCL's watchdog.
    """
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            step()
    except Exception:
        torch.cuda.synchronize()
        torch.cuda.set_stream(stream)  # which a capture that failed does not give back
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros((), device="cuda")  # else PyTorch's generator stays in the capture that failed, and draws raise
        raise
    return graph


# -- ranks together ------------------------------------------------------------------------------------------


def largest(numbers: Iterable[float]) -> list[float]:
    """Of each of these numbers the largest of all ranks; where there are none, themselves. Collective."""
    if not dist.is_initialized():
        return [*numbers]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.tensor([*numbers], dtype=torch.float64, device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.tolist()


def barrier(group: Group) -> None:
    """All ranks are here, and their devices idle."""
    group.all_reduce(torch.zeros(1, device=group.device)).wait()
    if group.on_cuda:
        torch.cuda.synchronize(group.device)


def seconds(step: Step, group: Group, inner: int, lead: int = 0) -> float:
    """Seconds of one of `inner` calls in a row on this rank: CUDA events, or the clock on a CPU.

    On CUDA all ranks' devices start together, behind a sum over the group: when their hosts came out of a barrier would
    else be part of what the first exchange takes. `lead`: calls before those, behind which hosts are ahead of their
    devices and ranks in step.
    """
    if group.on_cuda:
        group.all_reduce(torch.zeros(1, device=group.device)).wait()
    for _ in range(lead):
        step()
    return elapsed(step, inner) / 1e3 if group.on_cuda else wall(step, inner)


def in_turns(
    arms: Mapping[str, Step], group: Group, *, rounds: int, inner: int = 1, warm: int = 1, quantile: float = 0.5,
    lead: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Seconds a call of each arm: of each round the slowest rank's time, of the rounds the median (or `quantile`).

    Collective over `group`. Every round takes the arms in another order; a barrier stands before each arm's calls,
    `lead` untimed and `inner` timed ones, and none between them, so ranks wait for each other only as their exchanges
    make them.
    """
    names = list(arms)
    for name in names:
        for _ in range(warm):
            arms[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for n in range(rounds):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            barrier(group)
            times[name].append(seconds(arms[name], group, inner, lead))
    table = torch.tensor([times[name] for name in names], dtype=torch.float64, device=group.device)
    table = group.all_reduce(table, op=dist.ReduceOp.MAX).wait().tolist()
    return {name: sorted(row)[int(quantile * len(row))] for name, row in zip(names, table)}


def speeds(group: Group) -> dict[str, float]:
    """What this device reaches: matmul (operations a second), copy (bytes read and written a second), causal softmax
    attention forward and backward (operations a second, half the square). bf16 on CUDA, fp32 on a CPU. Collective."""
    cuda = group.on_cuda
    n, T, H, D = (8192, 8192, 16, 128) if cuda else (512, 512, 2, 64)
    dtype = torch.bfloat16 if cuda else torch.float32
    make = lambda *shape: torch.randn(shape, device=group.device, dtype=dtype)  # noqa: E731
    a, b, wide = make(n, n), make(n, n), make(32 * n, n)
    q, k, v, do = (make(1, H, T, D).requires_grad_() for _ in range(4))
    forward = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    o = forward()
    backward = lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)  # noqa: E731
    steps = {"matmul": lambda: a @ b, "copy": wide.clone, "forward": forward, "backward": backward}
    times = in_turns(steps, group, rounds=5, inner=3)
    flops = 2 * T * T * H * D
    return {
        "matmul": 2 * n**3 / times["matmul"],
        "copy": 2 * wide.nbytes / times["copy"],
        "attention_forward": flops / times["forward"],
        "attention_backward": 2.5 * flops / times["backward"],
    }


def captured(steps: Mapping[str, Step]) -> tuple[dict[str, Step], dict[str, str]]:
    """(replays of CUDA graphs of these steps, {step: why it could not be captured}).

    Steps must have run before, so that kernels are compiled and connections open. Collective where steps are.
    """
    replays: dict[str, Step] = {}
    refused: dict[str, str] = {}
    for name, step in steps.items():
        try:
            replays[name] = graph_of(step, mode="thread_local").replay
        except Exception as error:
            refused[name] = f"not capturable: {reason(error)}"
    return replays, refused
