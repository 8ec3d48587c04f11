"""Train a model of published size with random weights on one long sequence, by examples/train_hybrid.py itself.

    torchrun --standalone --nproc_per_node 4 -m ring_la bench large hybrid_8b --length 1048576
    torchrun --standalone --nproc_per_node 4 -m ring_la bench large moe_35b_a3b --length 262144
    torchrun --standalone --nproc_per_node 2 -m ring_la bench large moe_35b_a3b --tiny --length 512     # on CPUs

Every step prints seconds, MFU and peak GiB on GPUs, and the loss; --out keeps them as JSON. Shapes:

    hybrid_8b      36 layers of 4,096 channels, three gated delta nets to one softmax attention, 8 B parameters
    hybrid_8b_kda  the same with KDA
    hybrid_1b      examples/configs/hybrid_1b.yaml
    moe_35b_a3b    Qwen3.5-35B-A3B's text model, of Transformers: 256 experts of which 8 are picked, over the ranks

A plan that `ring-la plan --choose --write` wrote goes in by --config; what follows --more are options of the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from ring_la.cli.options import count

from .. import ROOT

CONFIGS = "examples/configs"
SHAPES = {
    "hybrid_8b": ["--config", f"{CONFIGS}/hybrid_8b.yaml"],
    "hybrid_8b_kda": ["--config", f"{CONFIGS}/hybrid_8b.yaml", "--model.layers", "[kda, kda, kda, attention]"],
    "hybrid_1b": ["--config", f"{CONFIGS}/hybrid_1b.yaml"],
    "moe_35b_a3b": ["--config", f"{CONFIGS}/moe_35b_a3b.yaml"],
}
TINY = ["--model.dim=32", "--model.num_heads=2", "--model.repeat=1", "--model.vocab_size=300", "--memory.mlp_chunk=128"]
TINY += ["--model.options.attention.num_kv_heads=1"]
SMALL_MOE = dict(
    vocab_size=300,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shape", choices=SHAPES, help="of the model")
    parser.add_argument("--length", type=count, default=262144, help="tokens of the one sequence of a step")
    parser.add_argument("--steps", type=count, default=3)
    parser.add_argument("--tiny", action="store_true", help="a few channels of the same kind, for CPUs")
    parser.add_argument("--config", type=Path, help="options from `ring-la plan --choose --write`")
    parser.add_argument("--folder", type=Path, default=Path("runs/large"), help="what the run leaves, below it")
    parser.add_argument("--out", type=Path, help="also write the steps as JSON")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="options of the script, last")


def run(args: argparse.Namespace) -> None:
    script = _script()
    import torch.distributed as dist
    from jsonargparse import auto_cli

    folder = args.folder / args.shape
    start = script.Start()
    device = script.join(timedelta(seconds=600))
    try:
        first = dist.get_rank() == 0
        config = auto_cli(script.Config, args=options(args, folder, first), as_positional=False)
        trainer = script.Trainer(config, device, start)
        trainer.train()
        if first:
            report(args, trainer, folder)
    finally:
        dist.destroy_process_group()


def options(args: argparse.Namespace, folder: Path, first: bool) -> list[str]:
    """The script's command line."""
    import torch.distributed as dist

    given = [*SHAPES[args.shape], *(["--config", str(args.config)] if args.config else [])]
    if args.shape.startswith("moe"):
        model = folder / "model"
        if first:
            from transformers import Qwen3_5MoeTextConfig

            Qwen3_5MoeTextConfig(**(SMALL_MOE if args.tiny else {})).save_pretrained(model)
        dist.barrier()
        given += ["--model.transformers", str(model)]
    elif args.tiny:
        given += TINY
    given += ["--memory.dtype=float32", "--run.rehearse=null"] if args.tiny else []
    given += [f"--data.seq_len={args.length}", "--data.sequences=1", "--data.documents=joined"]
    given += [f"--run.steps={args.steps}", "--run.save_every=0", "--run.resume=false", f"--run.folder={folder}"]
    return [*given, *args.more]


def report(args: argparse.Namespace, trainer: Any, folder: Path) -> None:
    """What each step took, printed and kept."""
    import torch

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    print(f"{args.shape}: {trainer.flops.parameters / 1e9:.2f} G parameters, {args.length:,} tokens, {trainer.mesh}")
    for m in steps:
        mfu = f"{m['mfu']:.1%} MFU" if "mfu" in m else "no MFU"
        peak = f"{m['peak_memory_gib']:.1f} GiB" if "peak_memory_gib" in m else "no peak memory"
        print(f"  step {m['step']}: {m['seconds']:.2f} s, {mfu}, {peak}, loss {m['loss']:.4f}")
    if args.out:
        about = {"shape": args.shape, "tiny": args.tiny, "length": args.length, "axes": str(trainer.mesh)}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        about |= {"device": device, "torch": torch.__version__, "parameters": trainer.flops.parameters}
        args.out.write_text(json.dumps(about | {"steps": steps}, indent=1))


def _script() -> Any:
    """examples/train_hybrid.py as a module."""
    spec = importlib.util.spec_from_file_location("train_hybrid", ROOT / "examples" / "train_hybrid.py")
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules["train_hybrid"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
