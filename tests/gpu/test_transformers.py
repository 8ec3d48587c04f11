"""Architectures of Transformers over GPUs against the unmodified model: `torchrun -m tests.gpu.check_transformers`.

Every recurrent and indexed architecture of the CPU suite, and softmax models with windows, sinks and soft caps, widened
to head dimensions of 64, 1024 tokens, dense and packed, on groups of 2 and of 4 ranks. The truth is the unmodified
model in fp32 on one GPU, by the library's own PyTorch functions. In fp32 errors are relative to it; in bf16 they stand
beside those of the unmodified model in bf16.

On groups of 2 every group takes its own share of the architectures. Each line is printed as it comes and kept in
``OUT/transformers.P.R.json``, R the first of the P ranks. A check beyond --limit prints where every rank stands and
ends the job; started again, it goes on after that check.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import ring_la
from tests.integrations.transformers.models import INDEXED, RECURRENT, SMALL, SOFTMAX, VOCABULARY, Case

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
EXTRA = {
    "mamba2": {"head_dim": 64},
    "deepseek_v3": {"head_dim": 32},
    "zamba": {"attention_hidden_size": 512, "attention_head_dim": 128},
    "mamba": {"state_size": 16},
    "falcon_mamba": {"state_size": 16},
}
PLAIN = ("gemma2", "gpt_oss", "llama4", "deepseek_v3", "falcon", "gptj")
ARCHITECTURES: dict[str, Case] = RECURRENT | INDEXED | {n: SOFTMAX[n] for n in PLAIN}
DOCUMENTS = (0, 1, 100, 700, 1024)
"""Offsets of packed documents, in 1024ths of the sequence."""


def widened(options: dict) -> dict:
    out = {n: WIDE[n] if x and n in WIDE else x for n, x in options.items()}
    return {n: widened(x) if n == "text_config" else x for n, x in out.items()}


@dataclass(frozen=True)
class Check:
    """One architecture, dense (two rows) or packed (one row of documents)."""

    name: str
    packed: bool
    length: int
    device: torch.device

    def __str__(self) -> str:
        return f"{self.name} {'packed' if self.packed else 'dense'}"

    def make(self, dtype: torch.dtype) -> torch.nn.Module:
        case = ARCHITECTURES[self.name]
        small = {n: x for n, x in widened(SMALL).items() if n not in case.skip}
        return (
            replace(case, options=small | widened(case.options) | EXTRA.get(self.name, {}))
            .make()
            .to(self.device, dtype)
        )

    def ids(self) -> torch.Tensor:
        random = torch.Generator().manual_seed(7)
        return torch.randint(3, VOCABULARY, (1 if self.packed else 2, self.length), generator=random).to(self.device)

    def offsets(self) -> list[int]:
        if not self.packed:
            return [0, self.length]
        first, *rest = DOCUMENTS
        return [first, *(max(x * self.length // 1024, i) for i, x in enumerate(rest, 1))]

    def whole(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Loss, logits and gradients of the unmodified model, documents one at a time."""
        model, ids, spans = self.make(dtype), self.ids(), list(zip(self.offsets(), self.offsets()[1:]))
        total, logits = torch.zeros((), device=self.device), []
        for a, b in spans:
            out = model(input_ids=ids[:, a:b], labels=ids[:, a:b] if b - a > 1 else None, use_cache=False)
            logits.append(out.logits.detach().float())
            if b - a > 1:
                loss = out.loss * ((b - a - 1) / (self.length - len(spans)))
                loss.backward()
                total = total + loss.detach().float()
        return {"loss": total, "logits": torch.cat(logits, 1)} | gradients(model)

    def split(self, dtype: torch.dtype, cp: ring_la.ContextParallel, took: Took) -> dict[str, torch.Tensor]:
        """The same on a split sequence, gradients summed over the group."""
        from ring_la.integrations.transformers import parallelize

        model, ids = parallelize(self.make(dtype), cp), self.ids()
        took.part(f"parallelize {dtype}".replace("torch.", ""))
        documents = {"cu_seqlens": torch.tensor(self.offsets())} if self.packed else {}
        out = model(input_ids=ids, labels=ids, **documents)
        out.loss.backward()
        logits = out.layout.gather(out.logits.detach().float().contiguous())
        summed = {n: cp.comm.all_reduce(g.contiguous()).wait() for n, g in gradients(model).items()}
        took.part(f"split {dtype}".replace("torch.", ""))
        return {"loss": out.loss.detach().float(), "logits": logits} | summed

    def run(self, cp: ring_la.ContextParallel) -> dict[str, dict]:
        took = Took()
        truth = self.whole(torch.float32)
        took.part("whole float32")
        out = {dtype: errors(self.split(getattr(torch, dtype), cp, took), truth) for dtype in ("float32", "bfloat16")}
        try:
            out["unmodified bfloat16"] = errors(self.whole(torch.bfloat16), truth)
        except RuntimeError as error:  # xLSTM's own mixes dtypes
            out["unmodified"] = str(error)[:80]
        took.part("whole bfloat16")
        return out | {"took": took.parts}


class Took:
    """Where a check's seconds went: most of a first one's are kernels being compiled."""

    def __init__(self) -> None:
        self.at, self.parts = time.monotonic(), {}

    def part(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.parts[name], self.at = round(now - self.at, 2), now


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: (torch.zeros_like(p) if p.grad is None else p.grad).float() for n, p in model.named_parameters()}


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


class Record:
    """What became of a group's checks, kept by its first rank in a file; one that ended a job counts as done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}
        for result in self.results.values():
            if "seconds" not in result:
                result["error"] = "the job ended in it"

    def write(self, key: str, result: dict) -> None:
        self.results[key] = result
        self.path.write_text(json.dumps(self.results, indent=1))

    def failures(self) -> list[str]:
        """Checks that failed, or whose gradients are off: by 1e-3 in fp32, in bf16 by three times the model's own."""
        return [k for k, x in self.results.items() if "error" in x or x["float32"]["gradients"] > 1e-3 or _coarse(x)]


def _coarse(result: dict) -> bool:
    own = result.get("unmodified bfloat16")
    return result["bfloat16"]["gradients"] > (0.2 if own is None else 3 * own["gradients"] + 1e-2)


def line_of(result: dict) -> str:
    if "error" in result:
        return result["error"]
    parts = {kind: e for kind, e in result.items() if isinstance(e, dict) and kind != "took"}
    numbers = {k: " ".join(f"{n} {x:.1e}" for n, x in e.items() if isinstance(x, float)) for k, e in parts.items()}
    return " | ".join(f"{kind} {text}" for kind, text in numbers.items())


@dataclass(frozen=True)
class Half:
    """Half of a group, which compiles the kernels of one dtype while the other half compiles the other's."""

    cp: ring_la.ContextParallel
    dtype: torch.dtype

    @classmethod
    def of(cls, groups: list[list[int]], rank: int, timeout: float) -> Half | None:
        """That of this rank; collective over all ranks."""
        mine = None
        for group in groups:
            for i, dtype in enumerate((torch.float32, torch.bfloat16)):
                ranks = group[i * len(group) // 2 : (i + 1) * len(group) // 2]
                handle = dist.new_group(ranks)
                if rank in ranks:
                    mine = cls(ring_la.ContextParallel(handle, timeout=timeout), dtype)
        return mine


def run_checks(
    checks: list[Check],
    cp: ring_la.ContextParallel,
    half: Half | None,
    record: Record | None,
    end: float,
    limit: float,
) -> None:
    """Run checks on a group, one by one, until `end`; its first rank has the record."""
    for check in checks:
        key, began = f"P={cp.size} {check}", time.monotonic()
        skip = record is not None and (key in record.results or began > end)
        if int(cp.comm.all_reduce(torch.tensor(int(skip), device=cp.device)).wait()):
            continue
        if record is not None:
            record.write(key, {})
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            if half is not None and not check.packed:
                check.split(half.dtype, half.cp, Took())
            result = check.run(cp)
        except Exception:
            result = {"error": traceback.format_exc()[-1500:]}
        faulthandler.cancel_dump_traceback_later()
        if record is not None:
            seconds = time.monotonic() - began
            record.write(key, result | {"seconds": round(seconds, 2)})
            print(f"{key:28} {seconds:5.1f} s  {line_of(result)} {result.get('took', '')}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of the context group, one by one")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no check after this many")
    parser.add_argument("--limit", type=float, default=60.0, help="a check that takes longer ends the job")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    if unknown := set(given.names) - ARCHITECTURES.keys():
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
    return given


def main() -> None:
    given, start = arguments(), time.monotonic()
    faulthandler.dump_traceback_later(given.seconds, exit=True)  # until the first check
    rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(given.device, rank) if given.device == "cuda" else torch.device("cpu")
    if given.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    sys.modules["fla"] = None  # type: ignore[assignment]  # the library falls back on its PyTorch functions
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, transformers {transformers.__version__}", flush=True)
    names = [n for n in given.names or ARCHITECTURES if hasattr(transformers, ARCHITECTURES[n].model)]
    if given.names and len(names) < len(given.names) and rank == 0:
        print("not in this version:", *sorted(set(given.names) - set(names)), flush=True)
    folder, world = Path(os.environ.get("OUT", ".")), dist.get_world_size()
    for size in given.ranks:
        groups = [list(range(a, a + size)) for a in range(0, world - size + 1, size)]
        handles = [dist.new_group(group) for group in groups]
        half = Half.of(groups, rank, given.limit) if size > 2 else None
        mine = next((i for i, group in enumerate(groups) if rank in group), None)
        if mine is None:
            continue
        first, cp = groups[mine][0], ring_la.ContextParallel(handles[mine], timeout=given.limit)
        record = Record(folder / f"transformers.{size}.{first}.json") if rank == first else None
        checks = [
            Check(n, packed, given.length, device) for n in names[mine :: len(groups)] for packed in (False, True)
        ]
        if record is not None:
            print(f"groups of {size} ranks after {time.monotonic() - start:.1f} s", flush=True)
        run_checks(checks, cp, half, record, start + given.seconds, given.limit)
        if record is not None:
            print(f"P={size}: {len(record.results)} checks, wrong: {record.failures() or 'none'}", flush=True)
    os._exit(0)  # groups of the other sizes are not waited for


if __name__ == "__main__":
    main()
