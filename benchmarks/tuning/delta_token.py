"""A token of a gated delta net between its projections: `python -m benchmarks.tuning.delta_token --out FILE`.

The layer of examples/configs/hybrid_1b.yaml, bf16, of 1, 8 and 64 sequences, by warps and registers of a program: CUDA
graphs over several layers' states, so that none is in a cache; µs a call beside the time of the states' bytes, read and
written, at 4.1 TB/s. What another program gives is held to what the first gives.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from benchmarks.errors import relative_error
from benchmarks.options import need_gpus
from benchmarks.rows import Rows
from ring_la.kernels.tokens.gated_delta_kernel import gated_delta_token
from ring_la.nn import GatedDeltaNet

from .products import BANDWIDTH, CACHED, microseconds

DIM, HEADS, CHANNELS = 2560, 20, 128
PROGRAMS = [(8, 128), (16, 0), (16, 64), (16, 80), (8, 0), (8, 80), (4, 0)]
CLOSE = 1e-2


def row(sequences: int) -> dict[str, object]:
    """Times of so many sequences."""
    torch.manual_seed(0)
    layer = GatedDeltaNet(DIM, HEADS, head_dim=CHANNELS).to("cuda", torch.bfloat16)
    weights = (layer.conv.weight, layer.A_log, layer.dt_bias, layer.norm.weight)
    each = 2 * 4 * sequences * HEADS * CHANNELS**2
    states = torch.randn(-(-CACHED // each), sequences, HEADS, CHANNELS, CHANNELS, device="cuda")
    tails = torch.randn(len(states), sequences, 3 * HEADS * CHANNELS, 3, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(sequences, DIM, device="cuda", dtype=torch.bfloat16)
    found: dict[str, object] = {"sequences": sequences, "bytes' time": round(1e6 * each / BANDWIDTH, 2)}
    with torch.no_grad():
        parts = [m(x) for m in (layer.qkv_proj, layer.beta_proj, layer.decay_proj, layer.gate_proj)]
        first = None
        for program in PROGRAMS:
            call = partial(gated_delta_token, *parts, weights, program=program, heads=HEADS)
            got = call(tail=tails[0].clone(), state=states[0].clone())
            first = got if first is None else first
            assert relative_error(got, first) < CLOSE, program
            calls = [partial(call, tail=tail, state=state) for tail, state in zip(tails, states)]
            found[str(program)] = round(microseconds(calls), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus(parser)
    rows = Rows(options.out)
    for sequences in (1, 8, 64):
        rows.add(row(sequences))


if __name__ == "__main__":
    main()
