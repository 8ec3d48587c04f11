"""Softmax attention on GPUs: `python -m tests.gpu.check_attention --jobs 8`, or under torchrun with one rank a GPU.

Every backend installed here × head width × dtype × feature against the dense fp64 reference: outputs, lse and every
gradient. An error passes if it is at most twice that of an independent low-precision run (the reference's formula in
that dtype), or below a floor. Under torchrun each case also runs split, by every strategy and layout. Prints a line a
case and a summary; exits 1 if anything is off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ring_la
from ring_la import reference
from ring_la.softmax import attention
from tests.softmax.cases import error, finite

FLOOR = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 3e-5}
FEATURES: dict[str, dict] = {
    "causal": dict(),
    "full": dict(causal=False),
    "gqa": dict(heads=(8, 2)),
    "window": dict(window=(100, -1)),
    "window both": dict(causal=False, window=(70, 90)),
    "packed": dict(cu=(0, 1, 1, 200, 330, 331, 700)),
    "packed gqa full": dict(cu=(0, 1, 1, 200, 330, 331, 700), heads=(8, 2), causal=False),
    "softcap": dict(softcap=5.0),
    "alibi": dict(alibi=True),
    "sinks": dict(sinks=True),
    "joint front": dict(joint="front"),
    "joint rear": dict(joint="rear", causal=False),
    "lse gradient": dict(dlse=True),
    "all": dict(window=(150, -1), softcap=5.0, alibi=True, sinks=True, joint="front", heads=(8, 2), dlse=True),
}
T, DEVICE = 700, "cuda"


def draw(feature: str, D: int, dtype: torch.dtype) -> tuple[dict, dict, tuple | None, torch.Tensor, torch.Tensor]:
    """(tensors in fp64 as rounded to dtype, keywords, cu, do, dlse)."""
    how = dict(FEATURES[feature])
    (H, Hk), cu = how.pop("heads", (4, 4)), how.pop("cu", None)
    B, rng = 1 if cu else 2, torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=DEVICE).to(dtype).double()

    tensors = dict(q=normal(B, T, H, D), k=normal(B, T, Hk, D), v=normal(B, T, Hk, D))
    if how.pop("sinks", False):
        tensors["sinks"] = normal(H)
    if how.get("joint"):
        tensors |= dict(joint_k=normal(B, 33, Hk, D), joint_v=normal(B, 33, Hk, D))
    if how.pop("alibi", False):
        how["alibi_slopes"] = normal(H).abs() * 0.05
    dlse = normal(B, H, T) * float(how.pop("dlse", False))
    return tensors, how, cu, normal(B, T, H, D), dlse


def run(function, tensors: dict, do: torch.Tensor, dlse: torch.Tensor, **keywords) -> dict[str, torch.Tensor]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    out = function(**leaves, **keywords)
    loss = (out.o * do.to(out.o.dtype)).sum()
    if dlse.any():
        loss = loss + (finite(out.lse) * dlse.to(out.lse.dtype)).sum()
    return dict(o=out.o, lse=out.lse) | {
        f"d{n}": g for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())))
    }


def budget(dtype: torch.dtype, D: int) -> float:
    """Twice the worst error of PyTorch's own attention in this dtype on a plain causal case."""
    tensors, _, _, do, dlse = draw("causal", D, dtype)
    want = run(reference.attention, tensors, do, dlse)
    leaves = [tensors[n].to(dtype).transpose(1, 2).detach().requires_grad_() for n in "qkv"]
    o = F.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad((o * do.to(dtype).transpose(1, 2)).sum(), leaves)
    got = [o.transpose(1, 2), *(g.transpose(1, 2) for g in grads)]
    worst = max(error(g, want[n]) for g, n in zip(got, ("o", "dq", "dk", "dv")))
    return max(FLOOR[dtype], 2 * worst)


def one_device(backend: str, feature: str, D: int, dtype: torch.dtype) -> dict[str, float] | str:
    tensors, how, cu, do, dlse = draw(feature, D, dtype)
    want = run(reference.attention, tensors, do, dlse, **how, cu_seqlens=cu)
    cu = None if cu is None else torch.tensor(cu, device=DEVICE)
    try:
        got = run(
            attention, {n: t.to(dtype) for n, t in tensors.items()}, do, dlse, **how, cu_seqlens=cu, backend=backend
        )
    except ring_la.UnsupportedError as e:
        return str(e)
    return {n: error(g, want[n]) for n, g in got.items()}


def split(
    cp, backend: str | None, feature: str, D: int, dtype: torch.dtype, kind: str, strategy: str
) -> dict[str, float] | str:
    tensors, how, cu, do, dlse = draw(feature, D, dtype)
    want = run(reference.attention, tensors, do, dlse, **how, cu_seqlens=cu)
    layout = cp.layout(T, kind, cu_seqlens=cu)
    local = {n: (layout.shard(t) if n in "qkv" else t).to(dtype) for n, t in tensors.items()}
    more = dict(layout=layout, strategy=strategy, backend=backend)
    try:
        got = run(attention, local, layout.shard(do), layout.shard(dlse, dim=2), **how, **more)
    except ring_la.UnsupportedError as e:
        return str(e)
    shared = {
        n: cp.comm.all_reduce(g.float()).wait() for n, g in got.items() if n in ("dsinks", "djoint_k", "djoint_v")
    }
    parts = {n: layout.shard(t, dim=2 if n == "lse" else 1) for n, t in want.items() if n not in shared}
    return {n: error(shared.get(n, g), parts.get(n, want[n])) for n, g in got.items()}


def dropout_like_torch(dtype: torch.dtype) -> dict[str, float]:
    """The Triton kernel's dropout mask is the PyTorch backend's."""
    tensors, _, _, do, dlse = draw("gqa", 64, dtype)
    how = dict(dropout_p=0.3, dropout_seed=2**61 + 12345, causal=True)
    got = run(attention, {n: t.to(dtype) for n, t in tensors.items()}, do, dlse, backend="triton", **how)
    want = run(attention, tensors, do, dlse, backend="torch", **how)
    return {n: error(g, want[n]) for n, g in got.items()}


def cases(args: argparse.Namespace, sharded: bool) -> list[tuple]:
    """(backend, feature, D, dtype); every feature in bf16 at 64 and 128, where compilers went wrong before."""
    out = []
    for D in map(int, args.widths.split(",")):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if (sharded and (D, dtype) != (128, torch.bfloat16)) or (dtype == torch.float32 and D != 64):
                continue
            some = FEATURES if dtype == torch.bfloat16 and D < 256 else ("causal", "gqa", "packed", "all")
            out += [(backend, feature, D, dtype) for backend in args.backends.split(",") for feature in some]
    return out


class Report:
    """Prints a line a case and counts."""

    def __init__(self, rank: int) -> None:
        self.rank, self.done, self.bad = rank, 0, 0

    def attempt(self, name: str, limit: float, function, *arguments) -> None:
        try:
            errors = function(*arguments)
        except Exception:  # a table of all failures is the point of this script
            self.bad += 1
            print(f"FAILED  {name} (rank {self.rank})\n{traceback.format_exc(limit=-4)}", flush=True)
            return
        if isinstance(errors, str):
            verdict, text = "refused", errors
        else:
            ok = max(errors.values()) <= limit
            verdict, self.done, self.bad = "ok" if ok else "OFF", self.done + 1, self.bad + (not ok)
            text = " ".join(f"{n}={e:.1e}" for n, e in errors.items()) + f" limit {limit:.1e}"
        if self.rank == 0 or verdict == "OFF":
            print(f"{verdict:8}{name} (rank {self.rank}): {text}", flush=True)


def in_parallel(jobs: int) -> int:
    """Run this script in parts, so that kernels compile side by side."""
    command = [sys.executable, "-m", "tests.gpu.check_attention", *sys.argv[1:]]
    parts = [subprocess.Popen([*command, "--jobs", "1", "--part", f"{i}/{jobs}"]) for i in range(jobs)]
    return max(p.wait() for p in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="cudnn,flash,flash_attn_2,triton,torch")
    parser.add_argument("--widths", default="64,128,256")
    parser.add_argument("--transport", default="auto", choices=("auto", "torch", "symmetric"))
    parser.add_argument("--kinds", default="contiguous,zigzag,striped")
    parser.add_argument("--strategies", default="ring,all_gather,ulysses")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", default="0/1")
    args = parser.parse_args()
    if args.jobs > 1:
        sys.exit(in_parallel(args.jobs))
    part, parts = map(int, args.part.split("/"))
    sharded, rank = "RANK" in os.environ, int(os.environ.get("RANK", 0))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    cp, report = None, Report(rank)
    if sharded:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        cp = ring_la.ContextParallel(scan="ring", transport=args.transport)
    limits = {(D, dtype): budget(dtype, D) for _, _, D, dtype in cases(args, sharded)}
    for i, (backend, feature, D, dtype) in enumerate(cases(args, sharded)):
        if i % parts != part:
            continue
        name, limit = f"{backend} {feature} D{D} {str(dtype)[6:]}", limits[D, dtype]
        if not sharded:
            report.attempt(name, limit, one_device, backend, feature, D, dtype)
            continue
        for kind in args.kinds.split(","):
            for strategy in args.strategies.split(","):
                more = (cp, backend, feature, D, dtype, kind, strategy)
                report.attempt(f"P{cp.size} {kind} {strategy} {name}", limit, split, *more)
    if not sharded and part == 0:
        report.attempt("dropout, triton as torch", budget(torch.bfloat16, 64), dropout_like_torch, torch.bfloat16)
    print(f"rank {rank} part {args.part}: {report.done} compared, {report.bad} off", flush=True)
    if sharded:
        dist.destroy_process_group()
    sys.exit(report.bad > 0)


if __name__ == "__main__":
    main()
