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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..choices import LayoutKind
from ..errors import ArgumentError
from ..layout import Layout
from ..models import HybridConfig
from ..nn import LAYERS, KVCache
from ..scan import Chain, CostModel
from ..scan.auto import Line
from .cluster import Cluster
from .rates import DEVICES, Rates
from .transformers_work import of_folder
from .workload import BlockWork, Workload

STATES = {"adamw": 2.0, "adamw8bit": 0.5, "adamw4bit": 0.25}
"""Both moments of an optimizer, in units of a parameter in fp32; with bf16 parameters AdamW's are half as large."""
HOST = 25e9
"""Bytes a second between a GPU and its host, each way: assumed, not measured."""
COLUMNS = ("GPUs", "P", "tokens/rank", "step", "compute", "exchange", "attention", "weights", "memory", "tokens/s/GPU")
PASSES, AGAIN = 8, 3
"""How often what is saved for the backward pass is moved by what is no product and no recurrence (convolutions, norms,
gates, sums of gradients, copies), forward and backward, and once more where it is computed again; from one profile."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--memory", type=float, help="GiB of one GPU; default: the rates'")
    parser.add_argument("--forward", action="store_true", help="prefill: no backward, no optimiser")
    parser.add_argument(
        "--recompute",
        nargs="?",
        const="block",
        default="",
        help="what is computed again in the backward pass, as for ring_la.training.recompute: block (the same without"
        " a word), or layers by name, mlp and norm, comma-separated",
    )
    parser.add_argument("--mlp-chunk", type=int, help="tokens an MLP takes at a time; it is then recomputed")
    parser.add_argument("--rounds", type=int, default=1, help="runs a sequence is worked on in, states handed on")
    parser.add_argument("--offload", action="store_true", help="what backward needs in host memory (an estimate)")
    parser.add_argument("--host-memory", type=float, default=100, help="GiB of the host for one GPU, with --offload")
    parser.add_argument("--spread-experts", action="store_true", help="experts over the context ranks, by all-to-all")
    parser.add_argument("--parameters", default="float32", choices=("float32", "bfloat16"), help="dtype of weights")
    parser.add_argument("--optimizer", default="adamw", choices=STATES, help="whose states are kept")
    parser.add_argument("--choose", action="store_true", help="the fastest recomputation, chunks and offload that fit")
    parser.add_argument("--write", type=Path, help="with --choose: the choice as YAML for train_hybrid.py --config")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")


@dataclass(frozen=True)
class Setting:
    """What is the same for every line of the table."""

    work: Workload
    rates: Rates
    cluster: Cluster
    length: int
    layout: LayoutKind = "zigzag"
    backward: bool = True
    recompute: tuple[str, ...] = ()
    memory: float = 0.0
    mlp_chunk: int | None = None
    rounds: int = 1
    offload: bool = False
    spread: bool = False
    parameters: str = "float32"
    optimizer: str = "adamw"
    transformers: Path | None = None
    host_memory: float = 100 * 2**30

    @property
    def state_bytes(self) -> float:
        """Of a parameter, its gradient and its optimizer's states."""
        own = 4 if self.parameters == "float32" else 2
        return 2 * own + (own * 2 if self.optimizer == "adamw" else 4 * STATES[self.optimizer])


@dataclass(frozen=True)
class Prediction:
    """One split.

    Attributes:
        seconds: of a step on one sequence a replica. compute, exchange, attention, weights: their parts: one rank's
            own work, the recurrences' exchanges (nothing hidden), and what is not hidden of moving keys and values and
            of gathering weights and summing gradients.
        memory: bytes of one GPU.
        strategies: of the recurrences' exchange, by layer.
        throughput: tokens a second of one GPU.
    """

    gpus: int
    P: int
    seconds: float
    compute: float
    exchange: float
    attention: float
    weights: float
    memory: float
    fits: bool
    throughput: float
    strategies: dict[str, str]


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
            print(f"  {line.gpus} GPUs: no split fits {setting.memory / 2**30:.0f} GiB (try --recompute)")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        marked = [vars(line) | {"best": line is best[line.gpus]} for line in table]
        args.out.write_text(json.dumps(dict(rates=setting.rates.source, length=setting.length, rows=marked), indent=1))


def _choose(args: argparse.Namespace, setting: Setting, clusters: Sequence[int]) -> None:
    """A line for each number of GPUs: whether the model fits them, how, and in how many seconds."""
    from .choosing import choose, told, write

    for gpus in clusters:
        best = choose(setting, gpus, splits(gpus, setting.length))
        if best is None:
            print(f"{gpus} GPUs: does not fit {setting.memory / 2**30:.0f} GiB with any choice")
            continue
        chosen, line = best
        print(f"{gpus} GPUs: fits, {line.memory / 2**30:.1f} GiB, {line.seconds:.2f} s a step on P = {line.P}  <- best")
        print(f"  {told(chosen)}")
        if args.write:
            write(chosen, line, args.write)


def read(args: argparse.Namespace) -> Setting:
    """The setting the options describe.

    Raises:
        ArgumentError: naming the option.
    """
    config: HybridConfig | None = None
    if args.transformers:
        work = of_folder(args.transformers)
    elif args.config:
        try:
            config = HybridConfig(**json.loads(args.config.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ArgumentError("--config", "JSON of a HybridConfig", f"{args.config} ({error})") from error
    else:
        layers = args.layers.split(",") * args.repeat
        config = HybridConfig(args.vocab, args.dim, layers, args.heads, mlp_dim=args.mlp_dim)
    numbers = {"--length": args.length, "--per-node": args.per_node}
    numbers |= {"--mlp-chunk": args.mlp_chunk, "--rounds": args.rounds}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ArgumentError(name, "a number ≥ 1", value)
    if args.memory is not None and not args.memory > 0:
        raise ArgumentError("--memory", "GiB of one GPU, more than 0", args.memory)
    again = tuple(filter(None, args.recompute.split(",")))
    for name in again:
        if name not in ("block", "mlp", "norm", *LAYERS):
            raise ArgumentError("--recompute", f"block, mlp, norm or names out of {', '.join(LAYERS)}", repr(name))
    grows = config is not None and any(LAYERS[name].state_type is KVCache for name in config.layers)
    if args.rounds > 1 and grows:
        raise ArgumentError("--rounds", "1 with softmax attention, which has no state to hand on", args.rounds)
    if config is not None:
        work = Workload.of(config)
    elif args.mlp_chunk or args.rounds > 1 or set(again) - {"block"}:
        raise ArgumentError("--transformers", "--recompute block alone beside it", f"{args.recompute} {args.mlp_chunk}")
    rates = Rates.read(args.rates) if args.rates else DEVICES[args.device]
    host: dict[str, Any] = {"post": 0.0, "launch": 0.0} if args.graphs else {}
    links = link("--inside", args.inside), link("--between", args.between)
    return Setting(
        work, rates, Cluster(args.per_node, *links, **host), args.length, args.layout, not args.forward,
        again, args.memory * 2**30 if args.memory else rates.memory, args.mlp_chunk, args.rounds, args.offload,
        args.spread_experts, args.parameters, args.optimizer, args.transformers,
        args.host_memory * 2**30,
    )  # fmt: skip


def link(name: str, text: str) -> Line:
    """ "10,300" as 10 µs and 300 GB/s."""
    try:
        alpha, beta = map(float, text.split(","))
    except ValueError:
        alpha, beta = -1.0, 0.0
    if alpha < 0 or beta <= 0:
        raise ArgumentError(name, "latency in µs and bandwidth in GB/s, such as 10,300", repr(text))
    return Line(alpha * 1e-6, beta * 1e9)


def sizes(text: str) -> list[int]:
    if not all(word.isdigit() and int(word) for word in text.split(",")):
        raise ArgumentError("--gpus", "numbers ≥ 1, comma-separated", repr(text))
    return [int(word) for word in text.split(",")]


def splits(gpus: int, length: int) -> list[int]:
    """Powers of two that divide the GPUs, and all of them, while every rank has a chunk of tokens."""
    powers = {2**n for n in range(gpus.bit_length()) if gpus % 2**n == 0} | {gpus}
    return sorted(P for P in powers if length // P >= 64) or [1]


def predict(setting: Setting, gpus: int, P: int) -> Prediction:
    """Step time and memory with a sequence split over P of `gpus` GPUs."""
    work, rates, cluster = setting.work, setting.rates, setting.cluster
    tokens = setting.length / P
    model = cluster.model(P, rates) if P > 1 else None
    chain = Chain.of(Layout(setting.length, setting.layout, P, 0)) if P > 1 else None
    compute = matmuls(setting, work.ends, tokens)
    exchange, attention, strategies = 0.0, 0.0, {}
    for block, times in Counter(work.blocks).items():
        own = local(setting, block, tokens)
        compute += times * own
        if model is None or chain is None:
            continue
        if setting.spread and block.routed:  # there and back, forward, recomputed and backward
            ways = 2 * ((3 if "block" in setting.recompute else 2) if setting.backward else 1)
            exchange += times * ways * model.exchange(block.routed * tokens * (P - 1) / P)
        if block.recurrence:
            by_name = model.predict(chain, block.state, setting.backward)
            strategies[block.layer] = min(by_name, key=by_name.__getitem__)
            exchange += times * by_name[strategies[block.layer]]
        else:
            attention += times * max(0.0, rotation(setting, model, block, tokens, P) - own)
    weights = max(0.0, sharding(setting, gpus, 1 - 1 / P if setting.spread else 0.0) - compute)
    moved = sum(_kept(setting, block, tokens) for block in work.blocks) if setting.offload else 0.0
    seconds = max(compute + exchange + attention + weights, 2 * moved / HOST)
    memory = held(setting, gpus, tokens)
    fits = memory <= setting.memory and moved <= setting.host_memory
    parts = compute, exchange, attention, weights
    return Prediction(gpus, P, seconds, *parts, memory, fits, tokens / seconds, strategies)


def matmuls(setting: Setting, parameters: int, tokens: float) -> float:
    """Seconds of multiplying tokens with parameters: 2 operations each, 3 times that with a backward pass."""
    return 2 * (3 if setting.backward else 1) * parameters * tokens / setting.rates.matmul


def local(setting: Setting, block: BlockWork, tokens: float) -> float:
    """Seconds of one block's own work on this rank's tokens."""
    rates, backward = setting.rates, setting.backward
    products = matmuls(setting, block.multiplied, tokens)
    moved = block.saved * tokens / rates.copy
    if block.recurrence:
        mixing = rates.recurrence(block.recurrence, tokens * block.heads, block.K, block.V, backward)
        again = rates.recurrence(block.recurrence, tokens * block.heads, block.K, block.V, False)
    else:
        operations = 2 * tokens * setting.length * block.heads * block.K  # causal: half of all pairs, two products
        mixing, again = rates.attention(operations, backward), rates.attention(operations, False)
    if not backward:
        return products + AGAIN * moved + again
    seconds = products + PASSES * moved + mixing
    layer, mlp = _recomputed(setting, block)
    shares = layer * block.layer_saved + mlp * block.mlp_saved
    if shares:
        seconds += shares / (block.layer_saved + block.mlp_saved) * (products / 3 + AGAIN * moved) + layer * again
    return seconds


def _recomputed(setting: Setting, block: BlockWork) -> tuple[bool, bool]:
    """Whether the backward pass computes the layer and the MLP of a block again."""
    whole = "block" in setting.recompute
    mlp = whole or "mlp" in setting.recompute or setting.mlp_chunk is not None
    return whole or block.layer in setting.recompute, mlp


def rotation(setting: Setting, model: CostModel, block: BlockWork, tokens: float, P: int) -> float:
    """Seconds of the ring of keys and values, P − 1 swaps forward; backward their gradients travel too."""
    return (P - 1) * model.swap(block.kv * tokens) * (3 if setting.backward else 1)


def sharding(setting: Setting, gpus: int, elsewhere: float = 0.0) -> float:
    """Seconds of gathering bf16 weights for forward and backward and scattering gradients over all GPUs.

    Args:
        elsewhere: the share of the experts that is never gathered.
    """
    if gpus == 1:
        return 0.0
    model = setting.cluster.model(gpus, setting.rates)
    stay = elsewhere * sum(block.experts for block in setting.work.blocks)
    return (3 if setting.backward else 1) * model.gather(2 * (setting.work.parameters - stay) * (gpus - 1) / gpus)


def held(setting: Setting, gpus: int, tokens: float) -> float:
    """Bytes of one GPU: its shard of the training state, one block's gathered weights, what backward needs."""
    work = setting.work
    elsewhere = 1 - tokens / setting.length if setting.spread else 0.0  # of the experts, on other ranks of the sequence
    gathered = max(block.parameters - elsewhere * block.experts for block in work.blocks)
    if not setting.backward:
        return 2 * work.parameters / gpus + 2 * gathered + tokens * max(b.saved for b in work.blocks)
    kept = sum(_kept(setting, block, tokens) for block in work.blocks)  # of all rounds: they are one graph
    if setting.offload:
        kept = min(kept, 2 * 2**30 + 2 * max(_kept(setting, block, tokens) for block in work.blocks))
    tokens /= setting.rounds
    again = max(_again(setting, block, tokens) for block in work.blocks)
    logits = 4 * work.vocabulary * min(tokens, 8192)
    return setting.state_bytes * work.parameters / gpus + 4 * gathered + kept + again + logits


def _kept(setting: Setting, block: BlockWork, tokens: float) -> float:
    """Bytes of a block that last from the forward to the backward pass."""
    one = 2 * setting.work.dim  # what is recomputed keeps its input
    if "block" in setting.recompute:
        return one * tokens
    norm = one if "norm" in setting.recompute else block.norm_saved
    layer, mlp = _recomputed(setting, block)
    return ((one if layer else block.layer_saved + norm) + (one if mlp else block.mlp_saved + norm)) * tokens


def _again(setting: Setting, block: BlockWork, tokens: float) -> float:
    """Bytes that exist while a block is recomputed: all of it, or its dearer half; of an MLP's, a chunk's."""
    layer, mlp = _recomputed(setting, block)
    halves = [
        layer * (block.layer_saved + block.norm_saved) * tokens,
        mlp * (block.mlp_saved + block.norm_saved) * min(tokens, setting.mlp_chunk or tokens),
    ]
    return sum(halves) if "block" in setting.recompute else max(halves)


def fastest(lines: Sequence[Prediction]) -> Prediction | None:
    """The split with the most tokens a second among those that fit; None where none does."""
    return max((line for line in lines if line.fits), key=lambda line: line.throughput, default=None)


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
