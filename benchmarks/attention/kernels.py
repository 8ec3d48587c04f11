"""Kernels of softmax attention beside each other on one GPU, as the blocks of a ring call them.

    python -m benchmarks.attention.kernels [--lengths 4096,16384] [--widths 64,128] [--out FILE.json]

Every kernel that is installed and can do a case: forward, and forward with backward, medians of CUDA events over
rounds in which the kernels take turns, and how far its output and gradients are from those of the first one. FLOPs
are those of visible pairs: ``4 · H · D`` each forward, 3.5 times that with the backward pass. What cannot run is said
with its error. To have flash-attn's packages: `benchmarks.attention.build_flash_attn`, and wheels on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib

import torch
from torch import Tensor

from benchmarks.options import need_gpus
from ring_la.softmax.backends import BACKENDS, Ask, AttentionBackend, QueryRows, choose
from ring_la.softmax.geometry import Pair, Tokens
from ring_la.softmax.merging import Gradients, Partial, row_sums
from ring_la.softmax.scores import Scores

from ..errors import worst_error
from ..options import counts, names
from ..rows import machine, save
from ..timing import medians
from .bench import document_offsets, share_of_scores

WARM, ROUNDS = 2, 9
CASES: dict[str, dict] = {
    "causal": dict(right=0),
    "full": dict(),
    "gqa 32:8": dict(right=0, groups=8),
    "window 4096": dict(right=0, left=4095),
    "softcap 30": dict(right=0, softcap=30.0),
    "packed": dict(right=0, packed=True),
    "packed gqa": dict(right=0, packed=True, groups=8),
    "causal repeatable": dict(right=0, repeatable=True),
}


@dataclasses.dataclass
class Work:
    """One case: its tensors, and where its rows and keys stand."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    scores: Scores
    pair: Pair
    ask: Ask
    pairs: float

    @classmethod
    def of(cls, case: str, T: int, D: int, heads: int) -> Work:
        how = dict(CASES[case])
        groups, packed = how.pop("groups", heads), how.pop("packed", False)
        repeatable, left = how.pop("repeatable", False), how.get("left", -1)
        cu, device = document_offsets(T, 1) if packed else [0, T], torch.device("cuda")
        torch.manual_seed(0)
        q, do = (torch.randn(1, T, heads, D, device=device, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(1, T, groups, D, device=device, dtype=torch.bfloat16) for _ in range(2))
        scores, tokens = Scores(D**-0.5, **how), Tokens.whole(T, device, cu)
        facts = dict(windowed=scores.reach.windowed, packed=packed, repeatable=repeatable, rows=T)
        ask = Ask(device, q.dtype, heads, groups, D, D, scores.beyond, **facts)
        share = share_of_scores(cu, left) if "right" in how else 1.0
        return cls(q, k, v, do, scores, Pair(tokens, tokens, scores.reach), ask, share * T * T)

    def forward(self, kernel: AttentionBackend) -> tuple[Tensor, Tensor]:
        out = Partial(self.do.shape, self.q.dtype, self.q.device)
        kernel.forward(self.q, self.k, self.v, self.scores, self.pair, out)
        return out.result()

    def total(self, kernel: AttentionBackend) -> tuple[Tensor, ...]:
        o, lse = self.forward(kernel)
        grads = Gradients.of(self.q, self.k, self.v)
        delta = row_sums(self.do, o, None) if kernel.takes_delta else None
        rows = QueryRows(self.q, o, self.do, lse, delta)
        kernel.backward(rows, self.k, self.v, self.scores, self.pair, grads)
        return o, *(x.result(o.dtype) for x in (grads.dq, grads.dk, grads.dv))


def able(work: Work, kernel_names: list[str]) -> dict[str, AttentionBackend]:
    """The kernels that run this case, with what the others say printed."""
    out: dict[str, AttentionBackend] = {}
    for name in kernel_names:
        try:
            kernel = choose(work.ask, name)
            (work.forward if kernel.forward_only else work.total)(kernel)
            torch.cuda.synchronize()
        except Exception as e:  # said, so that one package's failure does not hide the others
            print(f"    {name:14} {type(e).__name__}: {' '.join(str(e).split())[:300]}", flush=True)
        else:
            out[name] = kernel
    return out


def bench(case: str, T: int, D: int, heads: int, kernel_names: list[str]) -> list[dict]:
    """The rows of one case."""
    work, rows = Work.of(case, T, D, heads), []
    kernels = able(work, kernel_names)
    both = {n: k for n, k in kernels.items() if not k.forward_only}
    forward = medians({n: functools.partial(work.forward, k) for n, k in kernels.items()}, ROUNDS, warm=WARM)
    total = medians({n: functools.partial(work.total, k) for n, k in both.items()}, ROUNDS, warm=WARM)
    truth, flops = work.total(next(iter(both.values()))), 4 * heads * D * work.pairs
    for name, kernel in kernels.items():
        got = work.forward(kernel)[:1] if kernel.forward_only else work.total(kernel)
        row: dict = dict(case=case, T=T, D=D, kernel=name, apart=worst_error(got, truth), forward=forward[name])
        row |= dict(forward_tflops=flops / forward[name] / 1e9)
        line = f"    {name:14} fwd {row['forward']:8.3f} ms {row['forward_tflops']:4.0f} TFLOP/s"
        if name in total:
            row |= dict(total=total[name], total_tflops=3.5 * flops / total[name] / 1e9)
            line += f"   fwd+bwd {row['total']:8.3f} ms {row['total_tflops']:4.0f} TFLOP/s"
        print(f"{line}   apart {row['apart']:.1e}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kernels = "cudnn,flash,triton,flash_attn_2,flash_attn_3,fa3_fwd,fa3_fwd_fp8,flash_attn_4"
    parser.add_argument("--lengths", type=counts, default="4096,16384")
    parser.add_argument("--widths", type=counts, default="64,128")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--cases", type=names(CASES), default=",".join(CASES))
    parser.add_argument("--kernels", type=names(BACKENDS), default=kernels)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/attention_kernels.json"))
    args = parser.parse_args()
    need_gpus(parser)
    rows: list[dict] = []
    for case, D, T in itertools.product(args.cases, args.widths, args.lengths):
        print(f"{case}, D {D}, T {T}, {args.heads} heads", flush=True)
        rows += bench(case, T, D, args.heads, args.kernels)
        save(args.out, machine() | dict(rows=rows))


if __name__ == "__main__":
    main()
