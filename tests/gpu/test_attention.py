"""Softmax attention on GPUs: `python -m tests.gpu.check_attention --jobs 8`, or under torchrun with one rank a GPU.

Every backend installed here × head width × dtype × feature against the dense fp64 reference: outputs, lse and every
gradient. An error passes if it is at most twice that of an independent low-precision run (the reference's formula in
that dtype), or below a floor. Under torchrun the calls run split instead, by every strategy, layout and transport, on
the whole group, a mesh and two groups of half the ranks (see `attention_split`). Prints a line a case and a summary;
exits 1 if anything is off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from functools import cache

import torch
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


@cache
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


@cache
def truth(feature: str, D: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """o, lse and every gradient by the dense reference."""
    tensors, how, cu, do, dlse = draw(feature, D, dtype)
    return run(reference.attention, tensors, do, dlse, **how, cu_seqlens=cu)


def run(function, tensors: dict, do: torch.Tensor, dlse: torch.Tensor, **keywords) -> dict[str, torch.Tensor]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    out = function(**leaves, **keywords)
    loss = (out.o * do.to(out.o.dtype)).sum()
    if dlse.any():
        loss = loss + (finite(out.lse) * dlse.to(out.lse.dtype)).sum()
    return dict(o=out.o.detach(), lse=out.lse.detach()) | {
        f"d{n}": g for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())))
    }


@cache
def budget(dtype: torch.dtype, D: int) -> float:
    """Twice the worst error of PyTorch's own attention in this dtype on a plain causal case."""
    tensors, _, _, do, _ = draw("causal", D, dtype)
    want = truth("causal", D, dtype)
    leaves = [tensors[n].to(dtype).transpose(1, 2).detach().requires_grad_() for n in "qkv"]
    o = F.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad((o * do.to(dtype).transpose(1, 2)).sum(), leaves)
    got = [o.transpose(1, 2), *(g.transpose(1, 2) for g in grads)]
    worst = max(error(g, want[n]) for g, n in zip(got, ("o", "dq", "dk", "dv")))
    return max(FLOOR[dtype], 2 * worst)


@cache
def sinks_budget(dtype: torch.dtype, D: int) -> float:
    """Twice the worst error, over draws, of the sinks' gradient by its formula with o as PyTorch's own kernel gives it.

    The gradient is few numbers, each a sum over rows of ``do·o``: what o loses to its dtype is a larger share of it
    than of a tensor, and how large a share varies with the draw.
    """
    worst, rng = 0.0, torch.Generator(DEVICE).manual_seed(1)
    for _ in range(8):
        q, k, v, do = (torch.randn(2, 4, T, D, generator=rng, device=DEVICE).to(dtype) for _ in range(4))
        sinks = torch.randn(4, generator=rng, device=DEVICE).to(dtype).double()
        s = (q.double() @ k.double().mT * D**-0.5).masked_fill(
            torch.ones(T, T, device=DEVICE, dtype=torch.bool).triu(1), -torch.inf
        )
        keys = s.logsumexp(-1, keepdim=True)
        lse = torch.logaddexp(keys, sinks[:, None, None])
        share = (sinks[:, None, None] - lse).exp()
        whole = torch.exp(s - lse) @ v.double()
        low = F.scaled_dot_product_attention(q, k, v, is_causal=True).double() * torch.exp(keys - lse)
        want, got = (-(share * (do.double() * o).sum(-1, keepdim=True)).sum((0, 2, 3)) for o in (whole, low.to(dtype)))
        worst = max(worst, error(got.to(dtype), want))
    return 2 * worst


def limits(dtype: torch.dtype, D: int) -> dict[str, float]:
    """The largest error of each result; "" is any other."""
    return {"": budget(dtype, D), "dsinks": max(budget(dtype, D), sinks_budget(dtype, D))}


def one_device(backend: str, feature: str, D: int, dtype: torch.dtype) -> dict[str, float] | str:
    tensors, how, cu, do, dlse = draw(feature, D, dtype)
    cu = None if cu is None else torch.tensor(cu, device=DEVICE)
    how = how | dict(cu_seqlens=cu, backend=backend)
    try:
        got = run(attention, {n: t.to(dtype) for n, t in tensors.items()}, do, dlse, **how)
    except ring_la.UnsupportedError as e:
        return str(e)
    want = truth(feature, D, dtype)
    return {n: error(g, want[n]) for n, g in got.items()}


def dropout_like_torch(dtype: torch.dtype) -> dict[str, float]:
    """The Triton kernel's dropout mask is the PyTorch backend's."""
    tensors, _, _, do, dlse = draw("gqa", 64, dtype)
    how = dict(dropout_p=0.3, dropout_seed=2**61 + 12345, causal=True)
    got = run(attention, {n: t.to(dtype) for n, t in tensors.items()}, do, dlse, backend="triton", **how)
    want = run(attention, tensors, do, dlse, backend="torch", **how)
    return {n: error(g, want[n]) for n, g in got.items()}


def cases(args: argparse.Namespace) -> list[tuple]:
    """(backend, feature, D, dtype); every feature in bf16 at 64 and 128, where compilers went wrong before."""
    out = []
    for D in map(int, args.widths.split(",")):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype == torch.float32 and D != 64:
                continue
            some = FEATURES if dtype == torch.bfloat16 and D < 256 else ("causal", "gqa", "packed", "all")
            out += [(backend, feature, D, dtype) for backend in args.backends.split(",") for feature in some]
    return out


class Report:
    """Prints a line a case and counts."""

    def __init__(self, rank: int = 0, quiet: bool = False) -> None:
        self.rank, self.quiet, self.done, self.bad, self.failed, self.worst = rank, quiet, 0, 0, 0, 0.0

    def attempt(self, name: str, limit: dict[str, float], function, *arguments) -> None:
        try:
            errors = function(*arguments)
        except Exception:  # a table of all failures is the point of this script
            self.bad, self.failed = self.bad + 1, self.failed + 1
            print(f"FAILED  {name} (rank {self.rank})\n{traceback.format_exc(limit=-4)}", flush=True)
            return
        if isinstance(errors, str):
            verdict, text = "refused", errors
        else:
            share = max(e / limit.get(n, limit[""]) for n, e in errors.items())
            verdict = "ok" if share <= 1 else "OFF"
            self.done, self.bad, self.worst = self.done + 1, self.bad + (share > 1), max(self.worst, share)
            text = " ".join(f"{n}={e:.1e}" for n, e in errors.items()) + f" limit {limit['']:.1e}"
        if verdict == "OFF" or (self.rank == 0 and not self.quiet):
            print(f"{verdict:8}{name} (rank {self.rank}): {text}", flush=True)


def in_parallel(jobs: int) -> int:
    """Run this script in parts, so that kernels compile side by side."""
    command = [sys.executable, "-m", "tests.gpu.check_attention", *sys.argv[1:]]
    parts = [subprocess.Popen([*command, "--jobs", "1", "--part", f"{i}/{jobs}"]) for i in range(jobs)]
    return max(p.wait() for p in parts)


def main() -> None:
    if "RANK" in os.environ:
        from tests.gpu import attention_split

        sys.exit(attention_split.main())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="cudnn,flash,flash_attn_2,triton,torch")
    parser.add_argument("--widths", default="64,128,256")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", default="0/1")
    args = parser.parse_args()
    if args.jobs > 1:
        sys.exit(in_parallel(args.jobs))
    part, parts = map(int, args.part.split("/"))
    report = Report()
    for i, (backend, feature, D, dtype) in enumerate(cases(args)):
        if i % parts == part:
            name = f"{backend} {feature} D{D} {str(dtype)[6:]}"
            report.attempt(name, limits(dtype, D), one_device, backend, feature, D, dtype)
    if part == 0:
        report.attempt("dropout, triton as torch", limits(torch.bfloat16, 64), dropout_like_torch, torch.bfloat16)
    print(
        f"part {args.part}: {report.done} compared, {report.bad} off, worst {report.worst:.2f} of its limit", flush=True
    )
    sys.exit(report.bad > 0)


if __name__ == "__main__":
    main()
