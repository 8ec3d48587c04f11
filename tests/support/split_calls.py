"""Split calls as a model makes them: their inputs, both ways of one, and a CUDA graph of what all ranks do together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import ring_la


def inputs(name: str, T: int, H: int, seed: int) -> dict[str, torch.Tensor]:
    """bf16 tokens of this rank, K = V = 128; half-lives from 16 to 65,536 tokens over the heads."""
    rng = torch.Generator("cuda").manual_seed(seed * 1000 + dist.get_rank())
    draw = lambda *s: torch.randn(*s, generator=rng, device="cuda")  # noqa: E731
    x = {n: draw(1, T, H, 128).bfloat16() for n in "qkv"}
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).bfloat16()
    rate = 0.6931 / torch.logspace(4, 16, H, 2.0, device="cuda")
    if name in ("simple_gla", "gated_delta_rule"):
        x["g"] = -rate * torch.rand(1, T, H, generator=rng, device="cuda") * 2
    if name in ("gla", "kda"):
        x["g"] = -rate[:, None] * torch.rand(1, T, H, 128, generator=rng, device="cuda") * 2
    if name in ("delta_rule", "gated_delta_rule", "kda"):
        x["beta"] = torch.sigmoid(draw(1, T, H))
    return {n: t.requires_grad_() for n, t in x.items()}


def both_ways(name: str, x: dict, do: torch.Tensor, layout) -> list[torch.Tensor]:
    out = getattr(ring_la, name)(**x, layout=layout).o
    return [out, *torch.autograd.grad(out, list(x.values()), do)]


def captured(run: Callable[[], object], warm: int = 3) -> Callable[[], None]:
    """`run` as a CUDA graph; returns its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay
