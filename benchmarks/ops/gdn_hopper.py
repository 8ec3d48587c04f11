"""The gated delta rule on one Hopper GPU, beside FlashQLA: `python -m benchmarks.ops.gdn_hopper [--out FILE]`.

FlashQLA's own benchmark inputs: q and k of unit length, gates ``logsigmoid(x) / 16`` in three quarters of the heads and
none in the others, beta a sigmoid, states given. Times are CUDA graphs, ms; errors against fp64 are from 512 tokens.
FlashQLA compiles for a minute or two a head configuration; rows whose configuration has no time left are without it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la
from benchmarks.ops.kda_hopper import graph_ms
from benchmarks.options import need_gpus
from ring_la.kernels.wy import one_launch

ROWS = (
    (16, 32, (32768,)), (16, 32, (8192,)), (16, 32, (2048,)), (16, 32, (4096,) * 8), (16, 32, (1024,) * 8),
    (16, 32, (131072,)), (32, 32, (32768,)), (2, 8, (32768,)), (4, 8, (32768,)), (4, 8, (8192,)), (16, 64, (32768,)),
)  # fmt: skip
"""Key heads, value heads, lengths."""
Call = Callable[..., tuple[Tensor, Tensor]]


def inputs(HK: int, H: int, lengths: Sequence[int]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    T, n = sum(lengths), len(lengths)
    q, k = (F.normalize(torch.randn(1, T, HK, 128, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v, do = (torch.randn(1, T, H, 128, device="cuda").bfloat16() for _ in range(2))
    g = F.logsigmoid(torch.randn(1, T, H, device="cuda")) / 16
    g[..., torch.randperm(H)[math.ceil(0.75 * H) :].cuda()] = 0
    S0, dS = (torch.randn(n, H, 128, 128, device="cuda") for _ in range(2))
    beta = torch.randn(1, T, H, device="cuda").sigmoid()
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return dict(q=q, k=k, v=v, g=g, beta=beta, S0=S0, cu_seqlens=cu, do=do, dS=dS / 8)


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S0: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
    out = ring_la.gated_delta_rule(
        q, k, v, g, beta, initial_state=S0, output_final_state=True, cu_seqlens=cu if len(cu) > 2 else None
    )
    return out.o, out.final_state


def flashqla() -> Call | None:
    if find_spec("flash_qla") is None:
        return None
    from flash_qla import chunk_gated_delta_rule

    def call(q, k, v, g, beta, S0, cu):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, scale=128**-0.5, initial_state=S0, output_final_state=True, cu_seqlens=cu
        )

    return call


def timed(call: Call, x: dict[str, Tensor], both: bool) -> dict[str, float]:
    names = ("q", "k", "v", "g", "beta", "S0")
    with torch.no_grad():
        found = {"forward": graph_ms(lambda: call(*(x[n] for n in names), x["cu_seqlens"]))}
    if both:
        leaves = [x[n].clone().requires_grad_() for n in names]

        def step() -> None:
            for t in leaves:
                t.grad = None
            torch.autograd.backward(list(call(*leaves, x["cu_seqlens"])), [x["do"], x["dS"]])

        found["both"] = graph_ms(step, 10)
    return found


def errors(calls: dict[str, Call], HK: int, H: int) -> dict[str, dict[str, float]]:
    """Of outputs and states, against fp64."""
    x = inputs(HK, H, (512,))
    args = [x[n] for n in ("q", "k", "v", "g", "beta")]
    true = ring_la.reference.gated_delta_rule(
        *(t.double() for t in args), initial_state=x["S0"].double(), output_final_state=True
    )
    out = {}
    for name, call in calls.items():
        with torch.no_grad():
            o, S = call(*args, x["S0"], x["cu_seqlens"])
        pairs = {"o": (o, true.o), "S": (S.reshape(true.final_state.shape), true.final_state)}
        out[name] = {n: float(f"{(a.double() - b).norm() / b.norm():.2e}") for n, (a, b) in pairs.items()}
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON of what was found")
    parser.add_argument("--rows", help="which, by number, with commas between")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row of FlashQLA's after so many")
    parser.add_argument("--chunks", action="store_true", help="ours that train by chunks, however large")
    args = parser.parse_args(arguments)
    need_gpus(parser)
    if args.chunks:
        one_launch.LEAST = 2**60
    start, calls = time.monotonic(), {"ring_la": ours}
    if (other := flashqla()) is not None:
        calls["FlashQLA"] = other
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for i in map(int, args.rows.split(",")) if args.rows else range(len(ROWS)):
        HK, H, lengths = ROWS[i]
        row: dict[str, object] = {"heads": [HK, H], "length": lengths[0], "sequences": len(lengths)}
        x = inputs(HK, H, lengths)
        for name, call in calls.items():
            if name == "ring_la" or time.monotonic() - start < args.seconds:
                row[name] = timed(call, x, both=sum(lengths) <= 32768)
        row["errors"] = errors({n: calls[n] for n in calls if n in row}, HK, H)
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
