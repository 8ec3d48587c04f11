"""Serve completions of a model over HTTP, by OpenAI's protocol; under torchrun prompts are read by all ranks.

    ring-la serve runs/demo
    torchrun --nproc_per_node 4 -m ring_la serve runs/demo --port 8000

    curl localhost:8000/v1/completions -d '{"prompt": "def ", "max_tokens": 50}'

MODEL is a checkpoint of a HybridLM (what examples/train_demo.py or train_hybrid.py left), or the folder of a causal
model of Transformers. Each rank holds the whole model, or with --sharded a part of its weights; the tokens of a prompt
are split over the ranks. Keys stay on the rank that read them where the model bears it, and all ranks decode.
docs/users/guides/serving.md says more. Needs the extra "serve" (FastAPI and uvicorn).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..context import ContextParallel
from ..errors import ArgumentError, UnsupportedError
from ..serving import Engine, Keep, Lookout, Overdue
from ..serving.load import DTYPES, load
from ..serving.memory import fitting, spare
from ..serving.model import rehearse
from .job import all_ranks, job
from .options import amount, count

DEMO = Path("runs/demo")
"""What is served where no model is named: the checkpoint of examples/train_demo.py."""
KEYS = "RING_LA_API_KEY"
"""The variable of the environment with API keys."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"a checkpoint or its folder (default: {DEMO})")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this host's")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--name", help="the model's name in requests (default: the folder's)")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights (default: as stored)")
    parser.add_argument(
        "--sharded",
        action="store_true",
        help="each rank has a part of the weights, and all ranks decode; of Transformers' safetensors it reads no more",
    )
    parser.add_argument("--tokenizer", help='"bytes", a tokenizer.json or a folder (default: the model\'s)')
    parser.add_argument(
        "--max-tokens-total",
        type=count,
        help="of a prompt and its completion (default: what the model allows and memory holds)",
    )
    parser.add_argument("--piece", type=count, default=32768, help="tokens of a prompt each rank reads at once")
    parser.add_argument("--batch", type=count, default=8, help="completions decoded side by side")
    parser.add_argument("--waiting", type=count, default=64, help="requests that may wait")
    parser.add_argument(
        "--keep", type=amount, help="MiB of states kept for prompts that begin alike (default: a tenth of what is free)"
    )
    parser.add_argument(
        "--keep-host", type=amount, default=0, help="MiB of host memory for those that leave the device (0)"
    )
    parser.add_argument("--keep-disk", type=amount, default=0, help="MiB on disk for those that leave the host's (0)")
    parser.add_argument("--keep-folder", help="where on disk: a folder that all ranks see, of this server alone")
    parser.add_argument(
        "--capture", action="store_true", help="a step of decoding as one CUDA graph, where the model can (on GPUs)"
    )
    parser.add_argument("--timeout", type=count, default=300, help="seconds after which a rank is taken for lost")
    parser.add_argument("--drain", type=amount, default=5, help="seconds for requests under way once it is to stop")
    parser.add_argument("--max-choices", type=count, default=16, help="completions of one request")
    parser.add_argument("--max-body", type=count, default=16, help="MiB of a request")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help=f"a key that requests need, or several (default: those in {KEYS}, between commas, which ps does not show)",
    )
    parser.add_argument(
        "--request-log", default="-", help='a line of JSON for each request: "-" standard error, "off", a file'
    )


def run(args: argparse.Namespace) -> None:
    require()
    args.model = args.model or demo()
    first = os.environ.get("RANK", "0") == "0"
    listening = _listen(args.host, args.port) if first else None  # before a model is loaded for nothing
    with job():
        if not torch.cuda.is_available():
            torch.set_num_threads(max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        serve(args, listening)


def serve(args: argparse.Namespace, listening: socket.socket | None) -> None:
    """Load and serve until a signal comes. `listening`: on rank 0, the socket."""
    cp = ContextParallel(all_ranks(args.timeout), validate="never", timeout=args.timeout)
    model, text = load(args.model, cp, dtype=args.dtype, tokenizer=args.tokenizer, sharded=args.sharded)
    rehearse(model, cp)
    piece, keep = args.piece * cp.size, spare(model, cp) if args.keep is None else args.keep * 2**20
    engine = Engine(
        model,
        text,
        cp,
        max_tokens=args.max_tokens_total,
        room=fitting(model, cp, piece if model.goes_on else None, keep),
        piece=piece,
        batch=args.batch,
        waiting=args.waiting,
        keep=Keep(keep, args.keep_host * 2**20, args.keep_disk * 2**20, args.keep_folder),
        patience=args.drain,
        capture=args.capture,
    )
    with stopped_by_signals(engine), Lookout(engine, cp) as lookout:
        cp.comm.agreement.agree("being ready", True)  # who is told of the server may send a signal to any rank
        if listening is None:
            engine.run()
        else:
            answer(engine, args, listening, lookout)


@contextmanager
def stopped_by_signals(engine: Engine) -> Iterator[None]:
    """SIGTERM and SIGINT stop the engine; SIGALRM, which `Lookout` sends, ends a piece that keeps it from stopping."""

    def stop(*_: object) -> None:
        engine.stop()

    def hurry(*_: object) -> None:
        if engine.late():
            raise Overdue

    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGALRM: hurry}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:  # and hold it no longer: process groups must be gone before the interpreter is
        for number, handler in before.items():
            signal.signal(number, handler)


def answer(engine: Engine, args: argparse.Namespace, listening: socket.socket, lookout: Lookout) -> None:
    """On rank 0: run the engine, and serve HTTP beside it."""
    from ..serving.http import Options, Server, application
    from ..serving.keys import parsed
    from ..serving.records import log_to

    name = args.name or Path(args.model).resolve().name
    keys, log = parsed(args.api_key, os.environ.get(KEYS)), log_to(args.request_log)
    options = Options(args.max_body << 20, choices=min(args.max_choices, args.waiting), keys=keys, log=log)
    app = application(engine, name, lookout=lookout, options=options)
    (host, port), ranks = listening.getsockname()[:2], 1 if engine.cp is None else engine.cp.size
    longest = "of any length" if engine.max_tokens is None else f"of up to {engine.max_tokens:,} tokens"
    where = f"{ranks} rank(s) on {engine.model.device.type}"
    print(f"ring-la serve: {name} on http://{host}:{port}, requests {longest}, {where}", flush=True)
    with Server(app, engine, listening):
        engine.run()
    print("ring-la serve: stopped", flush=True)


def demo() -> str:
    """The demo's checkpoint, if it was made here."""
    if not (DEMO / "checkpoint.pt").is_file():
        hint = "bash launch/demo.sh trains it in some minutes; or name a model"
        raise ArgumentError("MODEL", f"one, or the demo's checkpoint in {DEMO}", "none, and none is there", hint)
    return str(DEMO)


def require() -> None:
    """Refuse to serve where something of the extra "serve" is not installed."""
    needed = ("fastapi", "uvicorn", "prometheus_client")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        hint = "pip install 'ring_la[serve]'"
        raise UnsupportedError("serve", f"an environment with {', '.join(needed)}", f"no {', no '.join(missing)}", hint)


def _listen(host: str, port: int) -> socket.socket:
    from ..serving.connections import listen

    return listen(host, port)


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
