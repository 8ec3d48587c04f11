"""What text_to_image.py and text_to_video.py share: options, ranks, pipelines by name, and a run's figures."""

from __future__ import annotations

import argparse
import os
import time
import zlib
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist

from ring_la import ContextParallel
from ring_la.errors import ArgumentError
from ring_la.integrations.diffusers import PLANS, parallelize


def count(word: str) -> int:
    """A number of pixels, frames, steps or runs: a pipeline takes its own for 0."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a number, at least 1, got {word!r}")
    return int(word)


def options(description: str | None, sizes: dict[str, int], out: str) -> argparse.Namespace:
    """The command line; `sizes` are those that a tiny pipeline takes by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a lighthouse at dusk, waves against the rocks")
    parser.add_argument("--model", help="a pipeline of the hub by name, or its folder; without: a tiny random one")
    for name, tiny in sizes.items():
        parser.add_argument(f"--{name}", type=count, help=f"by default the pipeline's own ({tiny} of a tiny one)")
    parser.add_argument("--steps", type=count, default=None, help="denoising steps")
    parser.add_argument("--guidance", type=float, default=None, help="the pipeline's guidance_scale")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", default="auto", help="auto, ring, ulysses or all_gather")
    parser.add_argument("--cfg", type=int, default=1, help="ranks that share guidance out; 1 splits the tokens alone")
    parser.add_argument("--vae", action="store_true", help="decode by rows, over all ranks")
    parser.add_argument("--text", action="store_true", help="encode prompts on the first rank alone")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of all transformers")
    parser.add_argument("--capture", action="store_true", help="denoising steps as CUDA graphs, on GPUs")
    parser.add_argument("--repeat", type=count, default=1, help="runs; the last one's seconds are without warming up")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser.parse_args()


def join(attention: str) -> ContextParallel:
    """All ranks that torchrun started; or one alone."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return ContextParallel(attention=attention)


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    """A tiny model's weights, the same on all ranks."""
    torch.manual_seed(zlib.crc32(type(model).__name__.encode()))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def embeds(prompt: str, *shape: int) -> torch.Tensor:
    """What stands for a prompt where no text encoder is there: numbers drawn from it."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(prompt.encode())))


def load(name: str) -> Any:
    """A pipeline by name, in bf16 on a GPU."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return diffusers.DiffusionPipeline.from_pretrained(name, torch_dtype=dtype)


def compile_blocks(pipe: Any) -> None:
    """Each block of each transformer (Wan 2.2 has two), by its plan: Diffusers' compile_repeated_blocks has none of
    SANA's, PixArt's or SD3's."""
    for name, model in pipe.components.items():
        if name.startswith("transformer") and model is not None:
            kinds = PLANS[type(model).__name__].blocks.values()
            for block in (module for module in model.modules() if type(module).__name__ in kinds):
                block.compile(fullgraph=True)


def generate(pipe: Any, cp: ContextParallel, args: argparse.Namespace, call: dict[str, Any]) -> Any:
    """Split the pipeline, run it, and say how long that took and how much memory a rank needed."""
    pipe.to(cp.device)
    pipe.set_progress_bar_config(disable=cp.rank != 0)
    try:
        parallelize(pipe, cp, cfg=args.cfg, vae=args.vae, text=args.text, capture=args.capture)
    except ArgumentError as error:
        raise SystemExit(f"{type(pipe).__name__}: {error}") from None
    if args.compile:
        compile_blocks(pipe)
    for name, given in (("num_inference_steps", args.steps), ("guidance_scale", args.guidance)):
        if given is not None:
            call[name] = given
    for run in range(args.repeat):
        start = time.perf_counter()
        out = pipe(**call, generator=torch.Generator().manual_seed(args.seed))
        if cp.device.type == "cuda":
            torch.cuda.synchronize()
        if cp.rank == 0:
            ranks = f"{cp.size} rank" + ("s" if cp.size > 1 else "")
            gib = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB a rank" if cp.device.type == "cuda" else ""
            print(f"run {run + 1} on {ranks}: {time.perf_counter() - start:.2f} s{gib}", flush=True)
    return out
