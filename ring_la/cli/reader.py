"""Read long prompts for vLLM: under torchrun all ranks read a prompt, vLLM decodes from what they leave in its memory.

    torchrun --nproc_per_node 4 -m ring_la reader MODEL --listen unix:/tmp/reader.sock

MODEL is the folder of a causal model of Transformers, the one vLLM serves, with the same weights. vLLM finds the reader
by its connector (docs/users/guides/vllm.md) and runs on the same host, or with --hosts on any that reaches this one.
Each rank holds the whole model, or with --sharded a part of its weights.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..context import ContextParallel
from ..errors import require
from ..serving.load import DTYPES, pretrained
from .job import all_ranks, job
from .options import count

if TYPE_CHECKING:
    from ..serving.reader import Reader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder of Transformers")
    parser.add_argument("--listen", default="unix:/tmp/ring-la-reader.sock", help="unix:PATH or HOST:PORT")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights (default: as stored)")
    parser.add_argument("--sharded", action="store_true", help="each rank reads and has a part of the weights")
    parser.add_argument("--folder", type=Path, help="for memory of CPUs that vLLM maps (default: /dev/shm)")
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="for vLLM on other hosts, by NIXL (--listen 0.0.0.0:PORT, on your own network)",
    )
    parser.add_argument("--timeout", type=count, default=300, help="seconds after which a rank is taken for lost")


def run(args: argparse.Namespace) -> None:
    require("transformers", "model", "a model of Transformers")
    from ..serving.reader import Door, Reader, listen

    logging.basicConfig(level=logging.INFO, format="ring-la reader: %(message)s")
    listening = listen(args.listen) if os.environ.get("RANK", "0") == "0" else None
    try:
        with job():
            cp = ContextParallel(all_ranks(args.timeout), validate="never", timeout=args.timeout)
            model = pretrained(args.model, cp, DTYPES[args.dtype], args.sharded)
            reader = Reader(model, cp, args.folder, args.hosts)
            with stopped_by_signals(reader):
                cp.comm.agreement.agree("being ready", True)
                if listening is None:
                    reader.run()
                    return
                with Door(listening, reader.desk, reader.check, reader.about):
                    print(f"ring-la reader: {args.model} on {args.listen}, {cp.size} rank(s)", flush=True)
                    reader.run()
    finally:
        if listening is not None and args.listen.startswith("unix:"):
            Path(args.listen.removeprefix("unix:")).unlink(missing_ok=True)


@contextmanager
def stopped_by_signals(reader: Reader) -> Iterator[None]:
    """SIGTERM and SIGINT stop the reader after the prompt that is being read."""

    def stop(*_: object) -> None:
        reader.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
