"""What a run of ``ring-la bench large`` is about, what the plan says of it, and a line for each step."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ring_la.cli.cluster import Cluster
from ring_la.cli.prediction import Setting, predict
from ring_la.cli.rates import DEVICES
from ring_la.cli.transformers_work import of_folder
from ring_la.cli.workload import Workload
from ring_la.errors import UnsupportedError
from ring_la.scan.auto import Line

from ..rows import machine


def about(args: argparse.Namespace, trainer: Any) -> dict[str, Any]:
    """The run of a Trainer of examples/train_hybrid.py, which has its model."""
    here = machine()
    name = next((n for n in DEVICES if n in here["device"]), None)
    found = {"shape": args.shape, "tiny": args.tiny, "length": args.length, "axes": str(trainer.mesh)}
    found |= here | {"parameters": trainer.flops.parameters}
    found |= {"memory": asdict(trainer.config.memory), "optimizer": trainer.config.optimizer.kind}
    if args.documents != "joined":  # the plan knows one document
        return found | {"documents": args.documents}
    try:
        return found | ({} if name is None else {"plan": planned(trainer.config, name, trainer.mesh)})
    except UnsupportedError as error:  # a layer without a rate
        return found | {"plan": str(error)}


def planned(config: Any, device: str, mesh: Any) -> dict[str, Any]:
    """What ``ring-la plan`` says of these choices on such GPUs: seconds of a step, and GiB as PyTorch's allocator
    counts them; also of the first step, whose optimizer has no moments yet."""
    model, memory = config.model, config.memory
    folder = Path(model.transformers) if model.transformers else None
    work = Workload.of(model.config(257)) if folder is None else of_folder(folder)
    rates = DEVICES[device]
    setting = Setting(
        work,
        rates,
        Cluster(8, Line(10e-6, 300e9), Line(20e-6, 45e9)),
        config.data.seq_len,
        config.parallel.layout,
        recompute=tuple(memory.recompute),
        memory=rates.memory,
        mlp_chunk=memory.mlp_chunk,
        rounds=memory.rounds,
        offload=memory.offload is not None,
        spread=model.spread_experts,
        parameters=memory.parameters,
        optimizer=config.optimizer.kind,
        transformers=folder,
        loss_chunk=memory.loss_chunk,
        keep_attention=memory.keep_attention,
    )
    said = predict(setting, mesh.axes.size(), mesh.axes.size(2))
    counted, moments = said.memory - said.mailboxes, setting.moments * work.parameters / mesh.axes.size()
    return {
        "seconds": said.seconds,
        "gib": counted / 2**30,
        "first_gib": (counted - moments) / 2**30,
        "rates": rates.source,
    }


def line(step: dict[str, Any]) -> str:
    """One step."""
    mfu = f"{step['mfu']:.1%} MFU" if "mfu" in step else "no MFU"
    peak = f"{step['peak_memory_gib']:.1f} GiB" if "peak_memory_gib" in step else "no peak memory"
    return f"step {step['step']}: {step['seconds']:.2f} s, {mfu}, {peak}, loss {step['loss']:.4f}"
