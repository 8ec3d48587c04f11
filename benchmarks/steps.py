"""A training step eager, compiled and captured, beside the sum of its kernels' times.

    torchrun --nproc_per_node 2 -m benchmarks.steps --config small --tokens 4096 --out steps.json

Forward and backward of a HybridLM of examples/configs (bf16, no recomputation, no optimizer) on this rank's tokens of a
sequence of `tokens` a rank; medians over the ranks' slowest. The sum of kernels is what the profiler gives of the
eager step, exchanges among them, so a step may be shorter where two run side by side. --ways also takes "compiled,
captured" and "reduce-overhead", each in a process of its own: behind a compiled step of the same process a capture
failed, for a reason that was not found (a guess: gradients are added up on the stream of their first run).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.profiler import ProfilerActivity, profile

import ring_la
from benchmarks.options import need_gpus
from ring_la.models import HybridConfig, HybridLM

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"


def model_of(name: str, layers: int | None) -> HybridLM:
    """The model of a configuration, with bytes or its own vocabulary, in bf16."""
    fields = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]
    fields["layers"] = (fields["layers"] * fields.pop("repeat", 1))[:layers]
    fields.setdefault("vocab_size", 32000 if name != "small" else 256)
    with torch.device("cuda"):
        return HybridLM(HybridConfig(**fields)).bfloat16()


def median(run: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds of a call, the slowest rank's."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(times, device="cuda")
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 1e3 * statistics.median(slowest.tolist())


def kernels(run: Callable[[], object]) -> float:
    """Milliseconds of the kernels of a call, one after the other."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in p.key_averages()) / 3e3


def measure(options: argparse.Namespace) -> None:
    """Print and write milliseconds by way, or why there are none."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    cp = ring_la.ContextParallel() if ranks > 1 else None
    torch.manual_seed(0)
    model, T = model_of(options.config, options.layers), options.tokens
    layout = None if cp is None else cp.layout(T * ranks)
    ids = torch.randint(256, (1, T), device="cuda")

    def with_loss(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            out = loss(ids, targets, layout=layout, total=T * ranks)
            out.backward()
            return out.detach()

        return step

    found: dict[str, object] = {"config": options.config, "tokens": T, "ranks": ranks, "torch": torch.__version__}
    found["device"] = torch.cuda.get_device_name()
    eager = with_loss(model.loss)
    ways = {"eager": lambda: eager, "captured": lambda: ring_la.capture(eager, cp)}
    ways["compiled"] = lambda: with_loss(torch.compile(model.loss, fullgraph=True))
    ways["compiled, captured"] = lambda: ring_la.capture(ways["compiled"](), cp)
    ways["reduce-overhead"] = lambda: with_loss(torch.compile(model.loss, fullgraph=True, mode="reduce-overhead"))
    for name, make in ways.items():
        if name not in options.ways:
            continue
        try:
            step = make()
            began = time.perf_counter()
            for _ in range(6):
                step(ids, ids)
            torch.cuda.synchronize()
            found[f"{name}, first calls, s"] = round(time.perf_counter() - began, 1)
            found[name] = round(median(lambda step=step: step(ids, ids)), 3)
            if name in ("eager", "compiled"):
                found[f"kernels of {name}"] = round(kernels(lambda step=step: step(ids, ids)), 3)
        except Exception as error:  # a way that fails is a result, and the others are measured
            found[name] = f"{type(error).__name__}: {error}"[:600]
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(found), flush=True)
            if options.out:  # as ways end: a run that is cut off still counts
                options.out.write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="small")
    parser.add_argument("--layers", type=int, help="the first so many alone")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--ways", nargs="+", default=["eager", "captured", "compiled"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus(parser)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    measure(options)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
