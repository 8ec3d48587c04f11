"""``ring-la COMMAND [OPTIONS]``: finds the module of a command, parses its options, runs it.

A command is a module, listed in `COMMANDS` under the words that call it, with two functions:

    add_arguments(parser)    adds its options to an `argparse.ArgumentParser`
    run(args)                does the work; its result is the exit status (None: 0)

The module's docstring is the command's help, its first line the summary. Commands are imported when they are called;
benchmarks are not part of the package (see `bench`).
Errors in what the user asked for (`RingLAError`) are printed without a traceback; the exit status is then 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from .. import __version__
from ..errors import RingLAError
from . import bench
from .usage import Help

COMMANDS: dict[tuple[str, ...], str] = {
    ("doctor",): "what is here, what calls would run on, and what a group of ranks can do",
    ("plan",): "step time, memory and the best split of a model on a cluster, from measured rates",
    ("report",): "one HTML file that shows a training run or a benchmark",
    ("export",): "a checkpoint as files that others read: Transformers' folder, or one of safetensors",
    ("serve",): "completions of a model over HTTP, prompts split over the ranks",
    ("reader",): "long prompts of vLLM, each read by all ranks, decoded by vLLM",
    ("bench", "ops"): "every operator on one GPU beside fla-core and others",
    ("bench", "scan"): "linear recurrences on a split sequence beside the bound and what others do",
    ("bench", "attention"): "softmax attention on a split sequence beside its peers",
    ("bench", "diffusion"): "a denoising step on several GPUs beside Diffusers' own context parallelism",
    ("bench", "large"): "models of published size, random weights, one long sequence: seconds, MFU, peak memory, loss",
    ("bench", "grouped"): "grouped GEMM on one GPU beside the other ways to do it",
}
"""Words of a command, of which the last names its module, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the list; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        print(f"ring_la {__version__}")
        return 0
    command = next((c for c in COMMANDS if tuple(words[: len(c)]) == c), None)
    if command is None:
        return _overview(words)
    program = " ".join(("ring-la", *command))
    try:
        module = _module(command)
        parser = argparse.ArgumentParser(prog=program, description=module.__doc__, formatter_class=Help)
        module.add_arguments(parser)
        return module.run(parser.parse_args(words[len(command) :])) or 0
    except RingLAError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def _module(command: tuple[str, ...]) -> ModuleType:
    if command[0] == "bench":
        return bench.find(command[-1])
    return importlib.import_module(f".{command[-1]}", __package__)


def _overview(words: Sequence[str]) -> int:
    """The list of commands: on request, or with a complaint about a command that is not in it."""
    asked = not words or words[-1] in ("-h", "--help") or any(tuple(words) == c[: len(words)] for c in COMMANDS)
    lines = [f"  ring-la {' '.join(c):18}{what}" for c, what in COMMANDS.items()]
    text = "\n".join(["commands (each has --help; ring-la --version):", *lines])
    if asked:
        print(text)
        return 0
    print(f"ring-la: no command {' '.join(words[:2])!r}; {text}", file=sys.stderr)
    return 2
