"""What the same bits cost: a step of a hybrid model with and without ``deterministic=True``; and whether they are.

python -m benchmarks.same_bits --tokens 2048 --dim 256
torchrun --nproc-per-node 2 -m benchmarks.same_bits --transport symmetric
torchrun --nproc-per-node 1 -m benchmarks.same_bits --config hybrid_1b --tokens 16384 --profile
torchrun --nproc-per-node 1 -m benchmarks.same_bits --config hybrid_1b --tokens 16384 --captured

The digest is that of the loss and of all gradients of a step: runs with other numbers of ranks print the same one, of
deterministic steps. `--config` is one of examples/configs, in bf16. `--profile`: the dearest kernels of one more step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from ring_la import ContextParallel, capture
from ring_la.blockwise import switch
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import sum_gradients

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"


def model_of(options: argparse.Namespace) -> HybridLM:
    """The same on every rank, on the current device."""
    torch.manual_seed(0)
    if options.config is None:
        return HybridLM(HybridConfig(1024, options.dim, ["gdn", "gdn", "gdn", "attention"], options.dim // 64))
    fields = yaml.safe_load((CONFIGS / f"{options.config}.yaml").read_text())["model"]
    fields["layers"] = (fields["layers"] * fields.pop("repeat", 1))[: options.layers]
    return HybridLM(HybridConfig(**{"vocab_size": 32000, **fields})).bfloat16()


def seconds(deterministic: bool, options: argparse.Namespace) -> tuple[list[float], str]:
    """Of each step, forward, backward and the sum of the gradients over the ranks; and the last one's digest."""
    cp = ContextParallel(deterministic=deterministic, transport=options.transport)
    with cp.device:  # on a GPU a large one is made in no time
        model = model_of(options)
    layout = cp.layout(options.tokens, "zigzag")
    rng = torch.Generator().manual_seed(1)
    ids = layout.shard(torch.randint(0, model.config.vocab_size, (1, options.tokens), generator=rng).to(cp.device))
    out, loss = [], torch.zeros(())

    def step(ids: Tensor) -> Tensor:
        loss = model.loss(ids, layout=layout)
        loss.backward()
        return loss.detach()

    call = capture(step, cp) if options.captured else step
    if options.captured:
        step(ids)  # what is made once is made before
    for _ in range(options.repeats + (4 if options.captured else 1)):
        begin = time.perf_counter()
        for p in model.parameters():
            p.grad = None if p.grad is None or not options.captured else p.grad.zero_()
        loss = call(ids)
        sum_gradients(model.parameters(), cp)
        float(model.norm.weight.grad.sum())  # waits for a GPU
        out.append(time.perf_counter() - begin)
    found = [cp.comm.all_reduce(loss.detach()).wait(), *(p.grad for p in model.parameters())]
    bits = hashlib.sha256()
    for name, t in zip(("loss", *(n for n, _ in model.named_parameters())), found):
        own = t.cpu().view(-1).view(torch.uint8).numpy().tobytes()
        bits.update(own)
        if options.each and cp.rank == 0:
            print(f"    {hashlib.sha256(own).hexdigest()[:8]} {name}", flush=True)
    if options.profile:
        profiled(lambda: call(ids), cp.device)
    return out[-1 - options.repeats :], bits.hexdigest()[:16]


def profiled(step: Callable[[], None], device: torch.device) -> None:
    """Prints what the first rank's step spends on kernels, the dearest ones, and how many there are."""
    kind = torch.profiler.ProfilerActivity
    on_gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[kind.CUDA] if on_gpu else [kind.CPU]) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    if dist.get_rank() != 0:
        return
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, name))
    rows = [
        row for row in rows if getattr(row, name) and not (on_gpu and row.device_type == torch.autograd.DeviceType.CPU)
    ]
    total = sum(getattr(row, name) for row in rows)
    print(f"    {sum(row.count for row in rows)} launches, {total / 1e3:.2f} ms in them", flush=True)
    for row in rows[:40]:
        print(f"    {getattr(row, name) / 1e3:8.3f} ms {row.count:5}  {row.key[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 2048), ("dim", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--config", help="of examples/configs, in place of --dim")
    parser.add_argument("--only", choices=("plain", "same"), help="steps of one kind alone")
    parser.add_argument("--by-block", action="store_true", help="a launch a block, on GPUs too")
    parser.add_argument("--captured", action="store_true", help="the step as a CUDA graph")
    parser.add_argument("--each", action="store_true", help="the digest of each gradient, too")
    parser.add_argument("--profile", action="store_true", help="what a step spends on kernels")
    parser.add_argument("--layers", type=int, help="the first so many of them")
    parser.add_argument("--transport", choices=("auto", "torch", "symmetric"), default="auto", help="of messages")
    args = parser.parse_args()
    switch.ON_GPUS = not args.by_block
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # on which bits depend
    if "RANK" in os.environ:
        dist.init_process_group()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ways = [d for d in (False, True) if args.only in (None, "same" if d else "plain")]
    if dist.get_rank() == 0:
        what = f"{args.tokens} tokens, {args.config or f'dim {args.dim}'}, {dist.get_world_size()} ranks"
        print(f"{what}, messages by {args.transport}, {torch.get_num_threads()} threads", flush=True)
    for deterministic in ways:
        times, bits = seconds(deterministic, args)
        if dist.get_rank() == 0:
            name, middle = "deterministic" if deterministic else "plain", statistics.median(times[1:] or times)
            print(f"  {name:13} {middle:.3f} s a step, the first {times[0]:.1f}; digest {bits}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
