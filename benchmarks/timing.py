"""Times of calls that ranks make together: the slowest rank's, arms in turns, no barrier inside what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ring_la.comm import Group

Step = Callable[[], object]


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
    if not group.on_cuda:
        for _ in range(lead):
            step()
        start = time.perf_counter()
        for _ in range(inner):
            step()
        return (time.perf_counter() - start) / inner
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    group.all_reduce(torch.zeros(1, device=group.device)).wait()
    for _ in range(lead):
        step()
    start.record()
    for _ in range(inner):
        step()
    stop.record()
    torch.cuda.synchronize(group.device)
    return start.elapsed_time(stop) / inner / 1e3


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
    slowest = group.all_reduce(table, op=dist.ReduceOp.MAX).wait().tolist()
    return {name: sorted(row)[int(quantile * len(row))] for name, row in zip(names, slowest)}


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
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        except Exception as error:
            refused[name] = f"not capturable: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        else:
            replays[name] = graph.replay
    return replays, refused
