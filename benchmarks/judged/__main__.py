"""Judge other projects' context parallelism: ``python -m benchmarks.judged [NAME …] [--cuda | --one-gpu] [--json F]``.

Without names, all that this machine's kind of device can run.
"""

from __future__ import annotations

import argparse
import functools
import time
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from ring_la.testing import Report, Subject, judge

from ..rows import save
from . import fla_on_cpu, recurrences, softmax


class Peer(NamedTuple):
    """A subject, the package it is of, and where it runs."""

    package: str
    subject: Subject
    devices: tuple[str, ...]


GPU, CPU = ("cuda",), ("cpu",)
CAUSAL, WINDOW = {"causal": True}, {"causal": True, "window": (7, 0)}
ROPES = dict(operation="attention", dtype=torch.float32, key_dim=8, value_dim=8, tokens=48, tolerance=1e-5)
FLASH = {**ROPES, "dtype": torch.bfloat16, "tolerance": 6e-2}  # FlashAttention takes no fp32
ON_GPU = dict(operation="attention", dtype=torch.bfloat16, key_dim=64, value_dim=64, tokens=512)
LINEAR = dict(states=False, key_dim=64, value_dim=64, tokens=512, dtype=torch.bfloat16)
INTERPRETED = dict(states=False, key_dim=16, value_dim=16, tokens=48, dtype=torch.float32, tolerance=1e-3)
ALL = ("contiguous", "zigzag", "striped")
EACH = (softmax.in_each_document, softmax.zigzag_in_each_document)
PEERS = {
    "ring_flash_attn": Peer(
        "ring-flash-attn", Subject(softmax.ring_flash_attn, kinds=ALL, options=(CAUSAL,), **FLASH), CPU
    ),
    "ring_flash_attn window": Peer(
        "ring-flash-attn", Subject(softmax.ring_flash_attn, kinds=ALL, options=(WINDOW,), **FLASH), CPU
    ),
    "ring_flash_attn varlen": Peer(
        "ring-flash-attn", Subject(softmax.ring_flash_attn_varlen, kinds=EACH, unit=2, options=(CAUSAL,), **FLASH), CPU
    ),
    "yunchang": Peer("yunchang", Subject(softmax.yunchang, kinds=ALL, options=(CAUSAL,), **FLASH), CPU),
    "yunchang window": Peer("yunchang", Subject(softmax.yunchang, kinds=ALL, options=(WINDOW,), **FLASH), CPU),
    "yunchang varlen": Peer(
        "yunchang", Subject(softmax.yunchang_varlen, kinds=EACH, unit=2, options=(CAUSAL,), **FLASH), CPU
    ),
    "yunchang ulysses": Peer("yunchang", Subject(softmax.yunchang_ulysses, options=(CAUSAL,), **ROPES), CPU),
    "diffusers ulysses": Peer(
        "diffusers", Subject(softmax.diffusers_ulysses, options=({"causal": False}, CAUSAL), **ROPES), CPU
    ),
    "diffusers ulysses_anything": Peer(
        "diffusers", Subject(softmax.diffusers_ulysses_anything, options=({"causal": False},), **ROPES), CPU
    ),
    "diffusers ring": Peer("diffusers", Subject(softmax.diffusers_ring, options=({"causal": False},), **ON_GPU), GPU),
    "diffusers ring_anything": Peer(
        "diffusers", Subject(softmax.diffusers_ring_anything, options=({"causal": False},), **ON_GPU), GPU
    ),
    "torch context_parallel": Peer(
        "torch",
        Subject(softmax.torch_context_parallel, kinds=("contiguous", "zigzag"), options=(CAUSAL,), **ON_GPU),
        GPU,
    ),
    "fla gated_delta_rule": Peer(
        "fla-core", Subject(recurrences.gated_delta_rule, "gated_delta_rule", ("contiguous", "zigzag"), **LINEAR), GPU
    ),
    "flash_qla gated_delta_rule": Peer(  # --sizes 1
        "flash-qla",
        Subject(
            recurrences.flash_qla, "gated_delta_rule", **{**LINEAR, "states": True, "key_dim": 128, "value_dim": 128}
        ),
        GPU,
    ),
    "fla kda": Peer("fla-core", Subject(recurrences.kda, "kda", ("contiguous", "zigzag"), **LINEAR), GPU),
    "fla dplr": Peer("fla-core", Subject(recurrences.dplr, "dplr_delta_rule", ("contiguous",), **LINEAR), GPU),
    "fla conv": Peer(
        "fla-core", Subject(recurrences.short_conv, "short_conv", ("contiguous", "zigzag"), **LINEAR), GPU
    ),
    "fla token_shift": Peer(
        "fla-core", Subject(recurrences.token_shift, "token_shift", ("contiguous", "zigzag"), **LINEAR), GPU
    ),
}
for _name in ("gated_delta_rule", "kda", "short_conv", "token_shift"):
    _run = functools.partial(fla_on_cpu.run, name=_name)
    _subject = Subject(_run, _name, ("contiguous", "zigzag"), **INTERPRETED)
    PEERS[f"fla {_name} interpreted"] = Peer("fla-core", _subject, CPU)


def main() -> None:
    """Judge, print each report as it comes, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=None)
    parser.add_argument("--cuda", action="store_true", help="a GPU a rank")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--json")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", help="names of cases")
    options = parser.parse_args()
    device, results = "cuda:0" if options.one_gpu else "cuda" if options.cuda else "cpu", {}
    chosen = options.names or [n for n, p in PEERS.items() if device.split(":")[0] in p.devices]
    for name in chosen:
        start, peer = time.time(), PEERS[name]
        show = lambda finding, start=start: print(f"{time.time() - start:5.0f} s {finding}", flush=True)  # noqa: E731
        try:
            found = version(peer.package)
        except PackageNotFoundError:
            print(f"{name}: {peer.package} is not installed", flush=True)
            continue
        report = judge(
            peer.subject, sizes=options.sizes, device=device, timeout=options.timeout, only=options.only, show=show
        )
        print(f"\n== {name}, {peer.package} {found}, {time.time() - start:.0f} s\n{report}", flush=True)
        results[name] = as_data(peer, found, report)
        save(options.json, {"torch": torch.__version__, "device": device, "peers": results})


def as_data(peer: Peer, found: str, report: Report) -> dict:
    """A report as JSON takes it."""
    cases = [{"case": str(f.case), "verdict": f.verdict, "words": f.words, "errors": f.errors} for f in report.findings]
    return {"package": peer.package, "version": found, "run": peer.subject.name, "cases": cases}


if __name__ == "__main__":
    main()
