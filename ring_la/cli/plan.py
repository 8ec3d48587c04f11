"""Step time, memory and the best split of a hybrid model on a cluster, predicted from measured rates.

    ring-la plan --layers gdn,gdn,gdn,attention --repeat 8 --dim 2048 --heads 16 --length 262144 --gpus 8,64,1024
    ring-la plan --layers gdn --repeat 18 --length 1048576 --gpus 512 --rates benchmarks/results/scan-h200x4.json

One line for each number of ranks P a sequence can be split over; the other GPUs hold replicas with sequences of their
own, and weights, gradients and optimiser states are sharded over all. docs/users/guides/planning.md says what is
counted and how far the predictions were checked. --rates is a file `ring-la bench scan` wrote; without it, --device
names a table: that of an H200 was measured, the others scale it by the devices' data sheets.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..models import HybridConfig
from ..nn import LAYERS, KVCache
from ..scan.auto import Line
from .choosing import as_options, choose, told
from .cluster import Cluster
from .prediction import STATES, Prediction, Setting, fastest, predict, splits
from .rates import DEVICES, Rates
from .transformers_work import of_folder
from .workload import Workload

COLUMNS = ("GPUs", "P", "tokens/rank", "step", "compute", "exchange", "attention", "weights", "memory", "tokens/s/GPU")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_cluster(parser)
    _add_memory(parser)
    parser.add_argument("--forward", action="store_true", help="prefill: no backward, no optimiser")
    parser.add_argument("--choose", action="store_true", help="the fastest recomputation, chunks and offload that fit")
    parser.add_argument(
        "--write",
        type=Path,
        help="with --choose: a new file for the choice (of the last --gpus that fit), YAML for train_hybrid.py",
    )
    parser.add_argument("--force", action="store_true", help="write over the file of --write")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")


def _add_model(parser: argparse.ArgumentParser) -> None:
    """What is run, and on how much."""
    parser.add_argument("--config", type=Path, help="JSON of a HybridConfig; replaces the next six")
    parser.add_argument(
        "--transformers", type=Path, help="a folder with config.json of Transformers, instead of --config"
    )
    parser.add_argument("--layers", default="gdn,gdn,gdn,attention", help="names of ring_la.nn.LAYERS")
    parser.add_argument("--repeat", type=int, default=8, help="the list of layers so often")
    parser.add_argument("--dim", type=int, default=2048, help="channels")
    parser.add_argument("--heads", type=int, default=16, help="of every layer")
    parser.add_argument("--mlp-dim", type=int, help="inner width of the MLPs (default: 8/3 of --dim)")
    parser.add_argument("--vocab", type=int, default=151936, help="tokens of the vocabulary")
    parser.add_argument("--length", type=int, default=262144, help="tokens of one sequence")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    """What it runs on."""
    parser.add_argument("--gpus", default="8", help="GPUs of the cluster, comma-separated")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node")
    parser.add_argument("--inside", default="10,300", help="a hop in a node: latency (µs), bandwidth (GB/s, one way)")
    parser.add_argument("--between", default="20,45", help="a hop between nodes, for one GPU (400 Gb/s)")
    parser.add_argument("--graphs", action="store_true", help="steps are CUDA graphs: the host launches nothing")
    parser.add_argument("--layout", default="zigzag", choices=("contiguous", "zigzag"), help="of a sequence")
    parser.add_argument(
        "--device", default="H200", choices=DEVICES, help="whose rates; all but the H200's are guesses from data sheets"
    )
    parser.add_argument("--rates", type=Path, help="a bench_scan.json of your own, instead of --device")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    """What takes memory, and what saves it."""
    parser.add_argument("--memory", type=float, help="GiB of one GPU; default: the rates'")
    parser.add_argument(
        "--recompute",
        nargs="?",
        const="block",
        default="",
        help="what is computed again in the backward pass, as for ring_la.training.recompute: block (the same without"
        " a word), or layers by name, mlp and norm, comma-separated",
    )
    parser.add_argument("--keep-attention", action="store_true", help="results of softmax attention in it are kept")
    parser.add_argument("--mlp-chunk", type=int, help="tokens an MLP takes at a time; it is then recomputed")
    parser.add_argument("--loss-chunk", type=int, default=8192, help="tokens whose logits exist at a time")
    parser.add_argument("--rounds", type=int, default=1, help="runs a sequence is worked on in, states handed on")
    parser.add_argument("--offload", action="store_true", help="what backward needs in host memory (an estimate)")
    parser.add_argument("--host-memory", type=float, help="GiB of the host for one GPU, with --offload (100)")
    parser.add_argument("--spread-experts", action="store_true", help="experts over the context ranks, by all-to-all")
    parser.add_argument("--parameters", default="float32", choices=("float32", "bfloat16"), help="dtype of weights")
    parser.add_argument("--optimizer", default="adamw", choices=STATES, help="whose states are kept")


def run(args: argparse.Namespace) -> None:
    setting, clusters = read(args), sizes(args.gpus)
    w = setting.work
    print(f"{len(w.blocks)} blocks, {w.parameters / 1e9:.2f} G parameters, {setting.length} tokens a sequence")
    print(f"rates: {setting.rates.source}")
    if args.choose:
        return _choose(args, setting, clusters)
    lines = {gpus: [predict(setting, gpus, P) for P in splits(gpus, setting.length)] for gpus in clusters}
    best = {gpus: fastest(of_size) for gpus, of_size in lines.items()}
    table = [line for of_size in lines.values() for line in of_size]
    head, *rows = aligned([COLUMNS, *(figures(line, setting.length) for line in table)])
    print(head)
    for line, row in zip(table, rows):
        print(row + remarks(line) + ("  <- best" if line is best[line.gpus] else ""))
        if line is lines[line.gpus][-1] and best[line.gpus] is None:
            print(f"  {line.gpus} GPUs: no split fits {setting.memory / 2**30:.3g} GiB (try --recompute)")
    if args.out:
        marked = [vars(line) | {"best": line is best[line.gpus]} for line in table]
        kept = dict(rates=setting.rates.source, length=setting.length, rows=marked)
        save("--out", args.out, json.dumps(kept, indent=1))


def _choose(args: argparse.Namespace, setting: Setting, clusters: Sequence[int]) -> None:
    """A line for each number of GPUs: whether the model fits them, how, and in how many seconds."""
    last = None
    for gpus in clusters:
        best = choose(setting, gpus, splits(gpus, setting.length))
        if best is None:
            print(f"{gpus} GPUs: does not fit {setting.memory / 2**30:.3g} GiB with any choice")
            continue
        chosen, line = last = best
        print(f"{gpus} GPUs: fits, {line.memory / 2**30:.1f} GiB, {line.seconds:.2f} s a step on P = {line.P}  <- best")
        print(f"  {told(chosen)}")
    if args.write and last:
        save("--write", args.write, as_options(*last, _config(args)))


def read(args: argparse.Namespace) -> Setting:
    """The setting the options describe.

    Raises:
        ArgumentError: naming the option.
    """
    config = _config(args)
    again = tuple(filter(None, args.recompute.split(",")))
    _refuse(args, config, again)
    work = of_folder(args.transformers) if config is None else Workload.of(config)
    rates = Rates.read(args.rates) if args.rates else DEVICES[args.device]
    host: dict[str, Any] = {"post": 0.0, "launch": 0.0} if args.graphs else {}
    links = link("--inside", args.inside), link("--between", args.between)
    return Setting(
        work, rates, Cluster(args.per_node, *links, **host), args.length, args.layout, not args.forward,
        again, args.memory * 2**30 if args.memory else rates.memory, args.mlp_chunk, args.rounds, args.offload,
        args.spread_experts, args.parameters, args.optimizer, args.transformers,
        args.host_memory * 2**30 if args.host_memory else Setting.host_memory, args.loss_chunk, args.keep_attention,
    )  # fmt: skip


def _refuse(args: argparse.Namespace, config: HybridConfig | None, again: tuple[str, ...]) -> None:
    """Refuse options that are none, or do not go together."""
    numbers = {"--length": args.length, "--per-node": args.per_node}
    numbers |= {"--mlp-chunk": args.mlp_chunk, "--rounds": args.rounds, "--loss-chunk": args.loss_chunk}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ArgumentError(name, "a number ≥ 1", value)
    if args.rounds > args.length:
        raise ArgumentError("--rounds", f"at most --length {args.length}", args.rounds)
    if args.rounds > 1 and args.layout != "zigzag":
        raise ArgumentError("--layout", "zigzag with --rounds", args.layout)
    for name, file in (("--out", args.out), ("--write", args.write)):
        if file and file.is_dir():
            raise ArgumentError(name, "a file", f"the folder {file}")
    if args.write and not args.choose:
        raise ArgumentError("--write", "--choose beside it", args.write)
    if args.write and args.write.exists() and not args.force:
        raise ArgumentError("--write", "a new file, or --force", f"{args.write}, which exists")
    for name, gib in (("--memory", args.memory), ("--host-memory", args.host_memory)):
        if gib is not None and not gib > 0:
            raise ArgumentError(name, "GiB of one GPU, more than 0", gib)
    for name in again:
        if name not in ("block", "mlp", "norm", *LAYERS):
            raise ArgumentError("--recompute", f"block, mlp, norm or names out of {', '.join(LAYERS)}", repr(name))
    grows = config is not None and any(LAYERS[name].state_type is KVCache for name in config.layers)
    if args.rounds > 1 and grows:
        raise ArgumentError("--rounds", "1 with softmax attention, which has no state to hand on", args.rounds)
    _refuse_for_nothing(args, again)
    if config is None and (args.mlp_chunk or args.rounds > 1 or set(again) - {"block"}):
        raise ArgumentError("--transformers", "--recompute block alone beside it", f"{args.recompute} {args.mlp_chunk}")
    if config is not None and config.mlp == "moe" and args.mlp_chunk:
        raise ArgumentError("--mlp-chunk", "none with a mixture of experts", args.mlp_chunk)


def _refuse_for_nothing(args: argparse.Namespace, again: tuple[str, ...]) -> None:
    """Refuse options that would change nothing, or what no run takes."""
    if args.config and args.transformers:
        raise ArgumentError("--config", "none beside --transformers", args.config)
    if args.spread_experts and not args.transformers:
        raise ArgumentError("--spread-experts", "--transformers beside it: a HybridLM's are on every rank", True)
    if args.forward:
        of_backward = {"--recompute": args.recompute, "--mlp-chunk": args.mlp_chunk, "--offload": args.offload}
        for name, value in of_backward.items():
            if value:
                raise ArgumentError(name, "none with --forward, after which nothing is kept", value)
    if args.choose:
        chosen = {"--recompute": args.recompute, "--mlp-chunk": args.mlp_chunk, "--offload": args.offload}
        chosen |= {"--spread-experts": args.spread_experts, "--keep-attention": args.keep_attention}
        for name, value in chosen.items():
            if value:
                raise ArgumentError(name, "none with --choose, which chooses it", value)
    if args.recompute and not again:
        raise ArgumentError(
            "--recompute", f"block, mlp, norm or names out of {', '.join(LAYERS)}", repr(args.recompute)
        )
    if args.keep_attention and not again:
        raise ArgumentError("--keep-attention", "--recompute beside it", True)
    if args.host_memory and not args.offload and not args.choose:
        raise ArgumentError("--host-memory", "--offload or --choose beside it", args.host_memory)
    if args.force and not args.write:
        raise ArgumentError("--force", "--write beside it", True)


def _config(args: argparse.Namespace) -> HybridConfig | None:
    """The hybrid model that is described; None: it is one of Transformers."""
    if args.transformers:
        return None
    if args.config:
        try:
            return HybridConfig(**json.loads(args.config.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ArgumentError("--config", "JSON of a HybridConfig", f"{args.config} ({error})") from error
    layers = args.layers.split(",") * args.repeat
    return HybridConfig(args.vocab, args.dim, layers, args.heads, mlp_dim=args.mlp_dim)


def save(name: str, file: Path, text: str) -> None:
    """Write what the option of this name asks for.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise ArgumentError(name, "a file that can be written", f"{file} ({error})") from None


def link(name: str, text: str) -> Line:
    """ "10,300" as 10 µs and 300 GB/s."""
    try:
        alpha, beta = map(float, text.split(","))
    except ValueError:
        alpha, beta = -1.0, 0.0
    if not (0 <= alpha < math.inf and 0 < beta < math.inf):
        raise ArgumentError(name, "latency in µs and bandwidth in GB/s, such as 10,300", repr(text))
    return Line(alpha * 1e-6, beta * 1e9)


def sizes(text: str) -> list[int]:
    if not all(word.isdigit() and int(word) for word in text.split(",")):
        raise ArgumentError("--gpus", "numbers ≥ 1, comma-separated", repr(text))
    return [int(word) for word in text.split(",")]


def figures(line: Prediction, length: int) -> list[str]:
    """What stands in the columns of a line."""
    times = (line.seconds, line.compute, line.exchange, line.attention, line.weights)
    sizes = [str(n) for n in (line.gpus, line.P, length // line.P)]
    return [*sizes, *(f"{t * 1e3:.1f} ms" for t in times), f"{line.memory / 2**30:.1f} GiB", f"{line.throughput:.0f}"]


def remarks(line: Prediction) -> str:
    """What follows the columns of a line."""
    return ("" if line.fits else "  does not fit") + "".join(f"  {n}: {s}" for n, s in line.strategies.items())


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as text, each column as wide as its widest cell and two spaces, flush right."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows)]
    return ["".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows]
