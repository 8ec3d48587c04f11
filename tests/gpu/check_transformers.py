"""Hybrids of Transformers over GPUs against the unmodified model: `torchrun -m tests.gpu.check_transformers`.

Every recurrent architecture of the CPU suite, widened to head dimensions of 64, 1024 tokens, dense and packed. The
truth is the unmodified model in fp32 on one GPU, by the library's own PyTorch functions. In fp32 errors are relative to
it; in bf16 they stand beside those of the unmodified model in bf16. Rank 0 prints one line a check and writes
`OUT/transformers.json`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import ring_la
from tests.integrations.transformers.models import INDEXED, RECURRENT, SMALL, VOCABULARY, Case

WIDE = dict(
    hidden_size=256,
    intermediate_size=256,
    head_dim=64,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_head_dim=64,
    kv_lora_rank=64,
    q_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    mamba_n_heads=8,
    mamba_d_head=64,
    mamba_d_state=64,
    mamba_d_ssm=512,
    ssm_state_size=64,
    mamba_head_dim=64,
    state_size=64,
    mamba_chunk_size=64,
    chunk_size=64,
    block_size=64,
    ple_embed_dim=64,
    indexer_head_dim=64,
    index_head_dim=64,
    indexer_budget=128,
    index_topk=128,
    sliding_window=100,
    max_position_embeddings=2048,
)
ARCHITECTURES: dict[str, Case] = RECURRENT | INDEXED
LENGTH, DOCUMENTS = 1024, (0, 100, 101, 700, 1024)
FIRST = ["qwen3_next", "kimi_linear", "mamba2", "minimax", "lfm2", "olmo_hybrid", "bamba"]


def widened(options: dict) -> dict:
    out = {n: WIDE[n] if x and n in WIDE else x for n, x in options.items()}
    return {n: widened(x) if n == "text_config" else x for n, x in out.items()}


def make(name: str, dtype: torch.dtype) -> torch.nn.Module:
    case = ARCHITECTURES[name]
    small = {n: x for n, x in widened(SMALL).items() if n not in case.skip}
    extra = {"head_dim": 64} if name == "mamba2" else {}
    return replace(case, options=small | widened(case.options) | extra).make().to("cuda", dtype)


def whole(name: str, dtype: torch.dtype, ids: torch.Tensor, packed: bool) -> dict[str, torch.Tensor]:
    model = make(name, dtype)
    spans = list(zip(DOCUMENTS, DOCUMENTS[1:])) if packed else [(0, LENGTH)]
    total, logits = 0.0, []
    for a, b in spans:
        out = model(input_ids=ids[:, a:b], labels=ids[:, a:b] if b - a > 1 else None, use_cache=False)
        logits.append(out.logits.detach().float())
        if b - a > 1:
            loss = out.loss * ((b - a - 1) / (LENGTH - len(spans)))
            loss.backward()
            total = total + loss.detach().float()
    return {"loss": total, "logits": torch.cat(logits, 1)} | gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: (torch.zeros_like(p) if p.grad is None else p.grad).float() for n, p in model.named_parameters()}


def split(name: str, dtype: torch.dtype, ids: torch.Tensor, packed: bool, cp) -> dict[str, torch.Tensor]:
    from ring_la.integrations.transformers import parallelize

    model = parallelize(make(name, dtype), cp)
    documents = {"cu_seqlens": torch.tensor(DOCUMENTS)} if packed else {}
    out = model(input_ids=ids, labels=ids, **documents)
    out.loss.backward()
    logits = out.layout.gather(out.logits.detach().float().contiguous())
    summed = {n: cp.comm.all_reduce(g.contiguous()).wait() for n, g in gradients(model).items()}
    return {"loss": out.loss.detach().float(), "logits": logits} | summed


def errors(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative error of the loss, of the logits, and of all gradients together and the worst (by its own size)."""
    norms = {n: (float((got[n] - truth[n]).norm()), float(truth[n].norm())) for n in truth}
    grads = {n: x for n, x in norms.items() if n not in ("loss", "logits")}
    size = sum(b * b for _, b in grads.values()) ** 0.5
    worst = max(grads, key=lambda n: grads[n][0] / max(grads[n][1], 1e-3 * size))
    return {
        "loss": norms["loss"][0] / norms["loss"][1],
        "logits": norms["logits"][0] / norms["logits"][1],
        "gradients": sum(a * a for a, _ in grads.values()) ** 0.5 / size,
        "worst": grads[worst][0] / max(grads[worst][1], 1e-3 * size),
        "worst of": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; default: all")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no check after this many")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - ARCHITECTURES.keys():
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
    faulthandler.dump_traceback_later(arguments.seconds, repeat=False)  # where a rank that does not come back stands
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    if rank == 0:
        print("joined", flush=True)
    sys.modules["fla"] = None  # type: ignore[assignment]  # the library falls back on its PyTorch functions
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    start = time.monotonic()
    cp = ring_la.ContextParallel()
    results: dict[str, object] = {"transformers": transformers.__version__, "ranks": cp.size}
    if rank == 0:
        print(f"context of {cp.size} ranks after {time.monotonic() - start:.1f} s", flush=True)
    names = arguments.names or [*FIRST, *(n for n in ARCHITECTURES if n not in FIRST)]
    names = [n for n in names if hasattr(transformers, ARCHITECTURES[n].model)]
    for name in names:
        for packed in (False, True):
            late = torch.tensor(time.monotonic() - start > arguments.seconds, dtype=torch.int32, device="cuda")
            dist.all_reduce(late)
            if late:
                continue
            key = f"{name} {'packed' if packed else 'dense'}"
            ids = torch.randint(3, VOCABULARY, (1 if packed else 2, LENGTH), generator=torch.Generator().manual_seed(7))
            ids, began = ids.cuda(), time.monotonic()
            try:
                truth = whole(name, torch.float32, ids, packed)
                own = errors(whole(name, torch.bfloat16, ids, packed), truth)
                results[key] = {
                    "fp32": errors(split(name, torch.float32, ids, packed, cp), truth),
                    "bf16": errors(split(name, torch.bfloat16, ids, packed, cp), truth),
                    "unmodified bf16": own,
                }
                line = " | ".join(
                    f"{kind} " + " ".join(f"{n} {x:.1e}" for n, x in e.items() if isinstance(x, float))
                    for kind, e in results[key].items()
                )
            except Exception:
                line = traceback.format_exc()
                results[key] = {"error": line[-1500:]}
            if rank == 0:
                print(f"{key:28} {time.monotonic() - began:5.1f} s  {line}", flush=True)
                out = Path(os.environ.get("OUT", ".")) / "transformers.json"
                out.write_text(json.dumps(results, indent=1))
    if rank == 0:
        done = [x for x in results.values() if isinstance(x, dict)]
        bad = [k for k, x in results.items() if isinstance(x, dict) and ("error" in x or x["fp32"]["gradients"] > 1e-3)]
        print(f"{len(done)} checks, failed or beyond 1e-3 in fp32: {bad or 'none'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
