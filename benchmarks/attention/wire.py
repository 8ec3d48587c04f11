"""Keys and values in FP8 on the wire beside bf16's: times of a forward pass in a ring, and what the rounding costs.

    torchrun --nproc_per_node 2 -m benchmarks.attention.wire [--lengths 1152,4096,16384] [--out FILE.json]

Each row: one call of ten in a row, the slowest rank's, and the error of o beside the same kernel on all keys in fp32
(of a few queries; root mean squares divided), bf16's own first. Ways take turns.
"""

from __future__ import annotations

import argparse
import functools
import pathlib

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from benchmarks.options import counts, join_gpus, names
from ring_la.softmax import attention
from ring_la.softmax.backends import BACKENDS
from ring_la.softmax.wire import COMM_NAMES

from ..errors import relative_error
from ..rows import machine, save
from ..timing import largest
from .measure import IN_A_ROW, milliseconds

WAYS: dict[str, torch.dtype | None] = {"bf16": None} | {name: dtype for dtype, name in COMM_NAMES.items()}
CASES = {"causal": True, "full": False}
QUERIES = 64


def exact(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, causal: bool) -> Tensor:
    """o of queries ``[n, H, D]`` at places `rows` of the sequence, over all keys ``[T, H, D]``, in fp32."""
    s = torch.einsum("nhd,thd->hnt", q.float(), k.float()) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.arange(len(k), device=k.device) > rows[:, None], -torch.inf)
    return torch.einsum("hnt,thd->nhd", s.softmax(-1), v.float())


def bench(case: str, T: int, heads: tuple[int, int], D: int, backend: str) -> list[dict]:
    """The rows of one case of T tokens a rank."""
    cp, P = ring_la.ContextParallel(), dist.get_world_size()
    layout, causal = cp.layout(T * P), CASES[case]
    torch.manual_seed(dist.get_rank())
    made = (torch.randn(1, T, h, D, device="cuda", dtype=torch.bfloat16) for h in (heads[0], heads[1], heads[1]))
    q, k, v = made
    calls = {
        name: functools.partial(attention, q, k, v, causal=causal, layout=layout, backend=backend, kv_comm_dtype=dtype)
        for name, dtype in WAYS.items()
    }
    mine = torch.linspace(0, T - 1, QUERIES, device="cuda").long()
    repeat = heads[0] // heads[1]
    every_k, every_v = (layout.gather(x)[0].repeat_interleave(repeat, 1) for x in (k, v))
    want = exact(q[0, mine], every_k, every_v, layout.shard(torch.arange(T * P, device="cuda"), dim=0)[mine], causal)
    rows = []
    for name, ms in zip(calls, milliseconds([*calls.values()], IN_A_ROW)):
        o = calls[name]().o[0, mine].float()
        (off,) = largest([relative_error(o, want)])
        rows.append(dict(case=case, T=T, P=P, backend=backend, wire=name, ms=ms, error=off))
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=counts, default="1152,4096,16384", help="tokens a rank")
    parser.add_argument("--cases", type=names(CASES), default=",".join(CASES))
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--backend", choices=[*BACKENDS], default="cudnn")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/attention_wire.json"))
    args = parser.parse_args()
    join_gpus(parser)
    found: list[dict] = []
    for case in args.cases:
        for T in args.lengths:
            rows = bench(case, T, (args.heads, args.groups), args.width, args.backend)
            found += rows
            if dist.get_rank() == 0:
                for r in rows:
                    print(f"{case:7} {T:6} {r['wire']:14} {r['ms']:7.3f} ms   error {r['error']:.1e}", flush=True)
                save(args.out, machine() | dict(rows=found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
