"""Train a model of published size with random weights on one long sequence, by examples/train_hybrid.py itself.

    ring-la bench large hybrid_8b --gpus 4 --length 1048576 --out hybrid_8b.json
    ring-la bench large moe_35b_a3b --gpus 2 --layers 16 --length 131072 --limit 140
    ring-la bench large moe_35b_a3b --gpus 2 --tiny --length 512                     # on CPUs

Starts its ranks by torchrun, or is one where torchrun started it. Every step prints seconds, MFU and peak GiB on GPUs,
and the loss; --out is written after each of them, with what `ring-la plan` says of the same choices. After --limit
seconds the ranks are stopped and what was done is kept. Shapes:

    hybrid_8b      36 layers of 4,096 channels, three gated delta nets to one softmax attention, 8 B parameters
    hybrid_8b_kda  the same with KDA
    hybrid_1b      examples/configs/hybrid_1b.yaml
    hybrid_1b_mla  KDA and attention over latents, 1 B parameters; hybrid_1b_dsa: with 2,048 chosen keys a token
    moe_35b_a3b    Qwen3.5-35B-A3B's text model, of Transformers: 256 experts of which 8 are picked, over the ranks

A plan that `ring-la plan --choose --write` wrote goes in by --config; what follows --more are options of the script.

    ring-la bench large hybrid_1b --gpus 2 --length 131072 --documents balanced --more --parallel.layout balanced

`--more --run.profile 1` adds the third step's kernels to --out.

--documents takes drawn documents with a long tail in place of one long one, 8 sequences a step, cut where a sequence is
full ("packed") or packed by attention's work ("balanced").
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ring_la.cli.options import count
from ring_la.errors import ArgumentError

from .. import ROOT, environment, script, torchrun
from ..rows import save
from ..training import kernels, logged, watch
from .documents import long_tailed
from .report import about, line

CONFIGS = ROOT / "examples" / "configs"
SHAPES = {
    "hybrid_8b": ["--config", f"{CONFIGS}/hybrid_8b.yaml"],
    "hybrid_8b_kda": ["--config", f"{CONFIGS}/hybrid_8b.yaml", "--model.layers", "[kda, kda, kda, attention]"],
    "hybrid_1b": ["--config", f"{CONFIGS}/hybrid_1b.yaml"],
    "hybrid_1b_mla": ["--config", f"{CONFIGS}/hybrid_1b_mla.yaml"],
    "hybrid_1b_dsa": ["--config", f"{CONFIGS}/hybrid_1b_dsa.yaml"],
    "moe_35b_a3b": ["--config", f"{CONFIGS}/moe_35b_a3b.yaml"],
}
SEQUENCES = 8
"""Of a step, where documents have a long tail."""
GROUP = 4
"""Layers that repeat: three recurrences and one softmax attention."""
TINY = ["--model.dim=32", "--model.num_heads=2", "--model.repeat=1", "--model.vocab_size=300", "--memory.mlp_chunk=128"]
TINY += ["--model.options.dsa={head_dim: 16, backend: torch, index_backend: torch, topk: 16}"]
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
    parser.add_argument("--gpus", type=count, default=1, help="ranks to start; on CPUs too")
    parser.add_argument("--length", type=count, default=262144, help="tokens of the one sequence of a step")
    parser.add_argument("--layers", type=count, help="of the model, a multiple of 4; default: as published")
    parser.add_argument("--steps", type=count, default=3)
    parser.add_argument("--limit", type=count, default=600, help="seconds after which the ranks are stopped")
    parser.add_argument("--documents", choices=("joined", "packed", "balanced"), default="joined", help="of a sequence")
    parser.add_argument("--tiny", action="store_true", help="a few channels of the same kind, for CPUs")
    parser.add_argument(
        "--memory", action="store_true", help="what has the last step's memory at its peak, by line of code"
    )
    parser.add_argument("--config", type=Path, help="options from `ring-la plan --choose --write`")
    parser.add_argument("--folder", type=Path, default=Path("runs/large"), help="what the run leaves, below it")
    parser.add_argument("--out", type=Path, help="also write the steps as JSON")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="options of the script, last")


def run(args: argparse.Namespace) -> int:
    if args.layers is not None and args.layers % GROUP:
        raise ArgumentError("--layers", f"a multiple of {GROUP}", args.layers)
    if "RANK" not in os.environ:
        return start(args)
    train = script.load()
    began = train.Start()
    began.part("imports")
    device = train.join(timedelta(seconds=args.limit))
    began.part("process group")
    import torch.distributed as dist

    try:
        on_rank(args, device, began)
        if dist.get_rank() == 0:
            keep(args, "exit 0", shown=0)
    finally:
        dist.destroy_process_group()
    return 0


# -- the ranks ---------------------------------------------------------------------------------------------


def on_rank(args: argparse.Namespace, device: Any, began: Any = None) -> Any:
    """The script's Trainer after its run on this rank; what it is about goes to the folder before the first step."""
    import torch.distributed as dist

    folder, first = folder_of(args), dist.get_rank() == 0
    train = script.load()
    trainer = train.Trainer(script.config(train, options(args, folder, first)), device, began)
    if first:
        save(folder / "about.json", about(args, trainer))
    trainer.train()
    return trainer


def folder_of(args: argparse.Namespace) -> Path:
    return args.folder.resolve() / args.shape


def options(args: argparse.Namespace, folder: Path, first: bool) -> list[str]:
    """The script's command line."""
    import torch.distributed as dist

    given = [*SHAPES[args.shape], "--data.source", str(ROOT / "ring_la")]
    if args.documents != "joined":
        drawn = folder / "documents.jsonl"
        if first:
            long_tailed(drawn, (args.steps + 1) * SEQUENCES * args.length, args.length)
        dist.barrier()
        given += ["--data.source", str(drawn)]
    given += ["--config", str(args.config)] if args.config else []
    if args.shape.startswith("moe"):
        model = folder / "model"
        if first:
            from transformers import Qwen3_5MoeTextConfig

            fewer = {"num_hidden_layers": args.layers} if args.layers else {}
            Qwen3_5MoeTextConfig(**(SMALL_MOE if args.tiny else {}) | fewer).save_pretrained(model)
        dist.barrier()
        given += ["--model.transformers", str(model)]
    else:
        given += TINY if args.tiny else []
        given += [f"--model.repeat={args.layers // GROUP}"] if args.layers else []
    given += ["--memory.dtype=float32", "--run.rehearse=null"] if args.tiny else []
    sequences = 1 if args.documents == "joined" else SEQUENCES
    given += [f"--data.seq_len={args.length}", f"--data.sequences={sequences}", f"--data.documents={args.documents}"]
    given += [f"--run.steps={args.steps}", "--run.save_every=0", "--run.resume=false", f"--run.folder={folder}"]
    return [*given, *args.more]


# -- the process that starts them --------------------------------------------------------------------------


def start(args: argparse.Namespace) -> int:
    """Ranks under torchrun, watched; the exit status."""
    folder = folder_of(args)
    for name in ("about.json", "metrics.jsonl", "starts.jsonl", "profile/rank-0.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    command = torchrun(args.gpus, "ring_la", "bench", "large", *words(args))
    shown = 0

    def moving() -> None:
        nonlocal shown
        shown = keep(args, "under way", shown)

    log = folder / "log.txt"
    with open(log, "w") as out:
        watched = environment(PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1")  # SIGABRT leaves the stacks
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=watched)
        outcome = watch(process, [folder / "metrics.jsonl"], args.limit, moving, stall=args.limit)
    keep(args, outcome, shown)
    text = log.read_text()
    print(*(row for row in text.splitlines() if row.startswith(("starting", "ready after"))), sep="\n")
    if outcome != "exit 0":
        print(text[-6000:])
    print(f"{args.shape}: {outcome}", flush=True)
    return 0 if outcome == "exit 0" else 1


def keep(args: argparse.Namespace, outcome: str, shown: int) -> int:
    """Print the steps from number `shown` on and write --out; the number of steps there are."""
    folder = folder_of(args)
    steps = logged(folder / "metrics.jsonl")
    known = json.loads((folder / "about.json").read_text()) if (folder / "about.json").exists() else {}
    if steps and shown == 0:
        print(f"{args.shape}: {known}", flush=True)
    for step in steps[shown:]:
        print(f"  {line(step)}", flush=True)
    if args.out:
        found = {"command": " ".join(words(args, told)), "outcome": outcome, **known}
        found |= {"starts": logged(folder / "starts.jsonl"), "steps": steps}
        if outcome != "under way":
            found |= kernels(folder / "profile" / "rank-0.json")
        save(args.out, found)
    return len(steps)


def told(path: Path) -> Path:
    """A path as a raw file names it: relative as it was given, and the name alone of a place of one machine."""
    return Path(path.name) if path.is_absolute() else path


def words(args: argparse.Namespace, place: Callable[[Path], Path] = Path.resolve) -> list[str]:
    """The command line of a rank; `place` says how it names paths."""
    given = [args.shape, "--length", str(args.length), "--steps", str(args.steps), "--limit", str(args.limit)]
    given += ["--layers", str(args.layers)] if args.layers else []
    given += ["--documents", args.documents] if args.documents != "joined" else []
    given += ["--tiny"] if args.tiny else []
    given += ["--config", str(place(args.config))] if args.config else []
    given += ["--folder", str(place(args.folder))]
    return [*given, *(["--more", *args.more] if args.more else [])]
