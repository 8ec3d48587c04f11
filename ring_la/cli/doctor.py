"""What is here, what each call would run on and why not on something else; under torchrun, what the group can do.

    ring-la doctor
    torchrun --nproc_per_node 4 -m ring_la doctor [--heads 32 --width 128] [--layout zigzag]

Alone: versions, GPUs, optional libraries, and for each kind of call the backends in the order they are tried. Under
torchrun also α and β of the group, as scan="auto" measures them when a ContextParallel is made, and what it chooses for
the states of each recurrence, with the predicted time of their exchange, forward and back.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl as nvidia

from .. import __version__
from ..algebra import Affine, Rule, Transition
from ..comm import Group, sharing
from ..context import ContextParallel
from ..kernels import Inputs, choice
from ..kernels.grouped import BACKENDS as GROUPED
from ..kernels.grouped import GroupedProduct, choose, load
from ..scan import STRATEGIES, Chain
from ..softmax.backends import BACKENDS, Ask
from ..softmax.backends import choose as choose_kernel
from .job import job
from .options import count
from .transitions import TRANSITIONS

LIBRARIES = (
    "einops", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "fla-core", "transformers", "accelerate", "peft",
    "diffusers", "yunchang", "xfuser", "ring-flash-attn", "nvidia-cutlass-operators", "liger-kernel", "tokenizers",
    "safetensors", "jsonargparse", "tensorboard", "wandb", "pyarrow", "fastapi", "uvicorn", "matplotlib", "numpy",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=count, default=32, help="of the states whose exchange is predicted")
    parser.add_argument("--width", type=count, default=128, help="K and V")
    parser.add_argument("--layout", default="zigzag", choices=("contiguous", "zigzag"), help="of the sequence")


def run(args: argparse.Namespace) -> None:
    first = os.environ.get("RANK", "0") == "0"
    if first:
        show("Here", here())
        show("Linear recurrences", linear(args.width))
        show("Softmax attention, causal", softmax(args.heads, args.width))
        show("Grouped GEMM", grouped())
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with job():
            lines = group(args)
        if first:
            show(f"The group of {os.environ['WORLD_SIZE']} ranks", lines)
    elif first:
        print("\nUnder torchrun this also measures the group.")


def show(title: str, lines: Iterable[tuple[str, str]]) -> None:
    print(f"\n{title}")
    for name, text in lines:
        print(f"  {name:26}{text}", flush=True)


def here() -> list[tuple[str, str]]:
    """Versions, GPUs and optional libraries."""
    lines = [("ring_la", f"{__version__}, in {Path(__file__).parents[1]}"), ("system", platform.platform())]
    lines += [("Python", platform.python_version()), ("torch", torch.__version__), *cuda()]
    if not torch.cuda.is_available():
        lines.append(("GPUs", "none: everything runs on the CPU, over gloo"))
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        reach = [j for j in range(torch.cuda.device_count()) if j != i and torch.cuda.can_device_access_peer(i, j)]
        memory = f"{p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}"
        lines.append((f"GPU {i}", f"{p.name}, {memory}, reads memory of GPUs {reach or 'none'}"))
    return lines + [(name, version(name)) for name in LIBRARIES]


def cuda() -> list[tuple[str, str]]:
    """What this torch was built with for NVIDIA's GPUs; nothing for a torch without."""
    if torch.version.cuda is None:
        return []
    nccl = ".".join(map(str, nvidia.version())) if dist.is_nccl_available() else "not built in"
    return [("CUDA", torch.version.cuda), ("cuDNN", str(torch.backends.cudnn.version())), ("NCCL", nccl)]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    return (torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else (torch.device("cpu"), torch.float32)


def verdict(refusals: dict[str, str], used: str) -> list[tuple[str, str]]:
    """Backends in the order they are tried: which is used, which could be, and why the others could not."""
    return [(name, why or ("used" if name == used else "could")) for name, why in refusals.items()]


def linear(width: int) -> list[tuple[str, str]]:
    """In chunks and token by token, each rule on the first backend that can."""
    device, dtype = device_and_dtype()
    x = torch.empty(1, 64, 1, width, device=device, dtype=dtype)
    lines = []
    for write in ("additive", "delta", "dplr"):
        rule = Rule(write, "scalar" if write != "dplr" else "diagonal")
        why = choice.unsupported(rule, Inputs(x, x, x, *[x] * (len(rule.inputs) - 3)))
        lines.append((f"{write}, in chunks", f"torch (triton: {why})" if why else "triton"))
    why = choice.unsupported(rule, Inputs(x, x, x), recurrent=True)
    return [*lines, ("token by token", f"torch (triton: {why})" if why else "triton")]


def softmax(heads: int, width: int) -> list[tuple[str, str]]:
    device, dtype = device_and_dtype()
    ask = Ask(device, dtype, heads, heads, width, width)
    return verdict({n: backend.unsupported(ask) for n, backend in BACKENDS.items()}, choose_kernel(ask, None).name)


def grouped() -> list[tuple[str, str]]:
    device, dtype = device_and_dtype()
    a, b = torch.empty(256, 64, device=device, dtype=dtype), torch.empty(4, 64, 64, device=device, dtype=dtype)
    call = GroupedProduct("rows", a, b, torch.full((4,), 64, device=device))
    used = choose("auto", call)
    return [(n, load(n).unsupported(call) or ("used" if n == used else "could")) for n in GROUPED]


def symmetric(comm: Group) -> str:
    used = "carries rings of states" if comm.mailboxes else "not shared by these GPUs"
    return f"{used}; all messages: ContextParallel(transport='symmetric')"


def group(args: argparse.Namespace) -> list[tuple[str, str]]:
    """α and β of the group and what follows from them. Collective."""
    start = time.monotonic()
    cp = ContextParallel(scan="auto")
    seconds = time.monotonic() - start
    hosts = set(cp.comm.agreement.tell(socket.gethostname()))
    lines = [
        ("hosts, backend", f"{len(hosts)}, {dist.get_backend()}"),
        ("symmetric memory", sharing.unsupported(cp.comm, cp.comm.agreement) or symmetric(cp.comm)),
        ("set-up", f"{seconds:.2f} s, the measurement included"),
    ]
    for pattern in ("link", "hop", "swap", "gather", "exchange"):
        line = getattr(cp.cost, pattern)
        if line is None:
            continue
        lines.append((f"  {pattern}", f"α {line.alpha * 1e6:.0f} µs, β {line.beta / 1e9:.2f} GB/s received by a rank"))
    assert cp.cost is not None  # several ranks were measured
    chain = Chain.of(cp.layout(64 * cp.size, args.layout))
    shown: dict[Transition, list[str]] = {}
    for name, kind in TRANSITIONS.items():
        shown.setdefault(kind, []).append(name)
    for kind, names in shown.items():
        like = Affine(kind, None, torch.empty(1, args.heads, args.width, args.width, device="meta"))
        best, times = cp.strategy(chain, like).name, cp.cost.predict(chain, like, backward=True)
        others = ", ".join(f"{name} {times[name] * 1e3:.2f}" for name in STRATEGIES if name != best)
        lines.append((f"A {kind}", f"{best} {times[best] * 1e3:.2f} ms ({others}): {', '.join(names)}"))
    return lines
