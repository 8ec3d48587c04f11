"""Time the deterministic forward under decays per key channel on a GPU: `python -m benchmarks.tuning.rows --limit 120`.

One document, 32 heads of 128 channels, bf16; ms of the whole forward with products of which no row depends on a later
token, and with those of other calls, by how strong gates are: −g is uniform in 0 … decay, nats a token. `levels` is the
part of chunks whose gradients need some. A row of JSON a case, as they come.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from unittest import mock

import torch

from benchmarks.timing import median
from benchmarks.tuning.fixed import INNER, ROUNDS
from ring_la.algebra import Rule
from ring_la.kernels.in_order import CHUNK, Pieces, forward
from ring_la.kernels.protocol import Inputs
from ring_la.kernels.wy import in_order
from ring_la.kernels.wy.recurrence import WYRecurrence
from ring_la.kernels.wy.saved import ChunkProducts, SavedProducts, WYSaved

RULES = "delta_diagonal", "dplr_diagonal", "additive_diagonal"
DECAYS = 0.1, 2.0, 8.0
H, D = 32, 128
LEVELS = CHUNK.bit_length() - 1


def plain(local: WYRecurrence) -> ChunkProducts:
    """As in other calls."""
    return local._products(SavedProducts(), False)


def inputs(rule: Rule, T: int, decay: float) -> Inputs:
    device = torch.device("cuda")
    q, k, v, a = (torch.randn(1, T, H, D, device=device).bfloat16() for _ in range(4))
    q, k, a = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (q, k, a))
    g = -decay * torch.rand(1, T, H, D, device=device)
    beta = torch.rand(1, T, H, device=device) if rule.write == "delta" else None
    return Inputs(q, k, v, g, beta, *((-a, a / 2) if rule.write == "dplr" else ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds; no case begins after them")
    args = parser.parse_args()
    T, began = args.tokens, time.monotonic()
    pieces = Pieces.of(T, torch.tensor([0, T], dtype=torch.int32, device="cuda"))
    S = torch.zeros(1, 1, H, D, D, device="cuda")
    for name in RULES:
        for decay in DECAYS:
            if time.monotonic() - began > args.limit:
                return
            rule = Rule.parse(name)
            x = inputs(rule, T, decay)
            row = {"rule": name, "tokens": T, "decay": decay}
            for way, products in (("by rows", in_order._products), ("plain", plain)):
                with mock.patch.object(in_order, "_products", products):
                    out = forward(rule, x, pieces, D**-0.5, S, True)
                    call = partial(forward, rule, x, pieces, D**-0.5, S, True)
                    row[way] = round(median(call, ROUNDS, INNER), 4)
                low = WYSaved.of(out.saved).products.low
                row[f"levels, {way}"] = round((low < LEVELS).float().mean().item(), 3)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
