"""One denoising step of diffusion transformers, split over the ranks, beside Diffusers' and xDiT's own ways.

    torchrun --nproc_per_node 4 -m ring_la bench diffusion --model flux --sizes 1024x1024 --modes eager,graph
    torchrun --nproc_per_node 4 -m ring_la bench diffusion --model flux,qwen,wan --out runs/diffusion.json
    torchrun --nproc_per_node 4 -m ring_la bench diffusion --pipeline --arms one,ours

Models have published shapes and random weights (the same on all ranks); a size is the image's, ROWSxCOLUMNS, or a
video's, LATENT_FRAMESxROWSxCOLUMNS. Arms: "one" (the whole step on every rank: one GPU's time), "ours" and its
strategies (`parallelize`), and those of `benchmarks.peers.diffusion`, where they can run the model. Modes: as it is,
its blocks compiled, and either as a CUDA graph. Errors are relative to "one" in eager mode, by the norm. Arms run one
after the other, each in a model of its own; times are medians of the slowest rank's; `sent`, on CPUs, is what a rank
sends a step. Rows are written as they come; one that takes longer than --limit, building and compiling included,
ends, and the others go on. --parts adds what one rank's kernels took, by kind (`parts`). --pipeline takes whole images
of Flux instead: text, 28 steps, decoder. --reference keeps the outputs of "one" in a folder, and a run without that arm
compares with what it finds there. Without GPUs tiny models run over gloo.
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ring_la
from ring_la.cli.options import count
from ring_la.comm import Group
from ring_la.errors import ArgumentError
from ring_la.integrations.diffusers import PLANS, parallelize

from ..errors import relative_error
from ..options import names
from ..peers.diffusion import PEERS, XDIT, degrees, diffusers_parallel, xdit_model
from ..rows import machine
from ..timing import barrier, in_turns, largest, seconds
from .book import Book
from .parts import profiled
from .pipelines import FIRST, OURS, images
from .shapes import SHAPES, Shape, build, draw_inputs

ARMS = ("one", *OURS, "ours_usp", *PEERS, *XDIT)
MODES = ("eager", "graph", "compiled", "compiled_graph")
CUDNN = "_native_cudnn"


def sizes_of(text: str) -> dict[str, list[tuple[int, ...]]]:
    """Sizes by model: ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS, comma-separated, under "" where none stands before them.

    >>> sizes_of("wan:21x480x832,sana:512x512,1024x512")
    {'wan': [(21, 480, 832)], 'sana': [(512, 512), (1024, 512)]}
    """
    found: dict[str, list[tuple[int, ...]]] = {}
    model = ""
    for word in text.split(","):
        named, colon, size = word.rpartition(":")
        model = named if colon else model
        numbers = size.split("x")
        if not 2 <= len(numbers) <= 3 or (model and model not in SHAPES):
            expected = "ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS, or MODEL: before it"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {word!r}")
        found.setdefault(model, []).append(tuple(count(n) for n in numbers))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = ", ".join(SHAPES)
    parser.add_argument("--model", type=names(SHAPES), default=["flux"], help=f"out of {models}, comma-separated")
    parser.add_argument(
        "--sizes",
        type=sizes_of,
        default=None,
        help="ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS, of several models as MODEL:SIZE,…",
    )
    parser.add_argument("--layers", type=count, default=None, help="num_layers, other lists in proportion")
    parser.add_argument("--arms", type=names(ARMS), default=list(ARMS), help=f"out of {', '.join(ARMS)}")
    parser.add_argument("--modes", type=names(MODES), default=["eager"], help=f"out of {', '.join(MODES)}")
    parser.add_argument("--pipeline", action="store_true", help="whole images of Flux: text, steps, decoder")
    parser.add_argument("--steps", type=count, default=28, help="denoising steps of --pipeline")
    parser.add_argument("--parts", action="store_true", help="what a step's time is made of, on GPUs")
    parser.add_argument("--rounds", type=count, default=5, help="at most: slow steps are timed less often")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds a row may take")
    parser.add_argument("--reference", type=pathlib.Path, default=None, help="a folder of outputs of the arm one")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the figures as JSON")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out, and add those it lacks")


class Where:
    """What arms of a model have in common: ranks, whether it is tiny, its dtype, options, outputs to compare."""

    def __init__(self, group: Group, options: argparse.Namespace, model: str) -> None:
        self.group, self.options, self.model, self.tiny = group, options, model, not group.on_cuda
        self.dtype = torch.bfloat16 if group.on_cuda else torch.float32
        self.shape: Shape = SHAPES[model]
        own = [self.shape.small] if self.tiny else list(self.shape.sizes)
        self.sizes = own if options.sizes is None else options.sizes.get(model, options.sizes.get("", own))
        self.wanted: dict[tuple[int, ...], Tensor] = {}

    def keep(self, size: tuple[int, ...], out: Tensor) -> None:
        """What outputs of this size are compared with, also by later runs."""
        self.wanted[size] = out
        file = self._file(size)
        if file is not None and self.group.rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(out.cpu(), file)

    def want(self, size: tuple[int, ...]) -> Tensor | None:
        """That output, if there is one."""
        file = self._file(size)
        if size not in self.wanted and file is not None and file.exists():
            self.wanted[size] = torch.load(file, map_location=self.group.device)
        return self.wanted.get(size)

    def _file(self, size: tuple[int, ...]) -> pathlib.Path | None:
        folder, layers = self.options.reference, self.options.layers or "all"
        return None if folder is None else folder / f"{self.model}-{layers}-{_word(size)}.pt"


def run(options: argparse.Namespace) -> int:
    if options.sizes is not None and "" in options.sizes and len(options.model) > 1:
        raise ArgumentError("sizes", "MODEL:SIZE with several models", ", ".join(options.model))
    if not dist.is_initialized():
        _join()
    group = Group(None, timedelta(minutes=5))
    book = Book(options, dict(ranks=group.size) | machine() | dict(layers=options.layers or "all"))
    if options.pipeline:
        images(options, group, book)
        return 0
    for model in options.model:
        here = Where(group, options, model)
        for arm in options.arms:
            _measure(arm, here, book)
    return 0


def _measure(arm: str, here: Where, book: Book) -> None:
    """A row for each mode and size, each written as it comes; an arm that cannot run says why."""
    named = dict(model=here.model, arm=arm)
    rows = [(mode, size) for mode in MODES if mode in here.options.modes for size in here.sizes]
    rows = [(mode, size) for mode, size in rows if not book.has(**named, mode=mode, size=_word(size))]
    made: Any = book.attempt(dict(named), partial(_made, arm, here)) if rows else None
    compiled = False
    for mode, size in rows if made is not None else ():
        if mode.startswith("compiled") and not compiled:
            compiled = True
            for block in _blocks(made[0], here.shape):
                block.compile(dynamic=False)
        row = named | dict(mode=mode, size=_word(size))
        found = book.attempt(row, partial(_timed, made, mode, size, here, (arm, mode) == ("one", "eager")))
        if found is not None:
            book.add(row | found)
    del made
    if compiled:
        torch._dynamo.reset()  # whose limit of compilations counts those of all arms
    gc.collect()
    if here.group.on_cuda:
        torch.cuda.empty_cache()


def _word(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def _blocks(model: nn.Module, shape: Shape) -> list[nn.Module]:
    """The blocks that are compiled. Diffusers' compile_repeated_blocks knows none of SANA's."""
    lists = [getattr(model, path) for path in PLANS[shape.model].blocks]
    return [block for each in lists if isinstance(each, nn.ModuleList) for block in each]


def _timed(
    made: tuple[nn.Module, ring_la.ContextParallel | None],
    mode: str,
    size: tuple[int, ...],
    here: Where,
    reference: bool,
) -> dict[str, Any]:
    """Milliseconds, GiB, what is sent, and the error beside the `reference` output of this size."""
    model, cp = made
    group, cuda = here.group, here.group.on_cuda
    inputs = draw_inputs(here.shape, size, here.tiny, group.device, here.dtype)
    step = _step(model, inputs, mode.endswith("graph") and cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    out = step().float()
    if reference:
        here.keep(size, out)
    before = 0 if cp is None else cp.comm.bytes_sent
    barrier(group)
    (took,) = largest([seconds(step, group, 1)])
    sent = 0 if cp is None else cp.comm.bytes_sent - before
    rounds = min(here.options.rounds, int(here.options.limit / 8 / took))
    slow = rounds < 1  # then the one that was timed is what there is
    median = took if slow else in_turns({"it": step}, group, rounds=rounds, warm=0)["it"]
    row = {"ms": 1e3 * median, "rounds": max(1, rounds)}
    want = here.want(size)
    if want is not None:
        row["error"] = relative_error(out, want)
    if cp is not None and cp.axes is None and not cuda:  # there keys may be copied, which counts nothing
        row["sent"] = sent
    if cuda:
        row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row | (profiled(step, group) if cuda and here.options.parts else {})


def _step(model: nn.Module, inputs: dict[str, Any], graph: bool) -> Callable[[], Tensor]:
    """One step; as a graph that is captured already, where asked."""

    def step(**inputs: Any) -> Tensor:
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    if not graph:
        return lambda: step(**inputs)
    captured = ring_la.capture(step, warmup=2)
    for _ in range(2):
        captured(**inputs)
    return lambda: captured(**inputs)


def _made(arm: str, here: Where) -> tuple[nn.Module, ring_la.ContextParallel | None]:
    """The model of an arm, and how it is split if that is ours."""
    group, options = here.group, here.options
    ulysses, ring = degrees(arm, group.size)
    kind = xdit_model(here.model, arm, group.size, group.on_cuda) if arm in XDIT else None
    model: Any = build(here.shape, options.layers, here.tiny, group.device, here.dtype, kind)
    kernel = CUDNN if group.on_cuda and here.shape.kernel else None
    if arm in PEERS:
        return diffusers_parallel(model, arm, group.size, kernel), None
    if kernel is not None and arm not in XDIT:
        model.set_attention_backend(kernel)
    if not arm.startswith("ours"):
        return model, None
    if arm == "ours_usp":
        mesh = init_device_mesh(group.device.type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        cp = ring_la.ContextParallel(mesh["ring", "ulysses"], attention="usp")
    else:
        cp = ring_la.ContextParallel(attention=OURS[arm])
    return parallelize(model, cp, keys_first=arm == FIRST), cp


def _join() -> None:
    """The job's process group; alone where torchrun has not started this."""
    if "RANK" not in os.environ:
        raise ArgumentError("ranks", "a run under torchrun", "none", "torchrun --nproc_per_node N -m ring_la bench …")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
