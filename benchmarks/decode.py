"""The recurrent mode on the GPU: `python -m benchmarks.decode [--rules dplr_diagonal] [--out FILE]`.

One token for 64 sequences of 32 heads, K = V = 128, against a copy of the states, over block sizes; and how long a
short sequence takes in either mode, where `kernels.backends.SHORT` comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch

import ring_la
from benchmarks.options import need_gpus
from ring_la.algebra import Rule
from ring_la.kernels import recurrent as decode
from tests.support.triton_cases import Case

from .ops.measure import bandwidth, milliseconds
from .rows import machine, save
from .timing import graph_of

RULES = "additive_scalar", "delta_scalar", "delta_diagonal", "dplr_diagonal"
TILES = (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8)


def one_token(copy: float, rules: Sequence[str]) -> dict[str, list]:
    """(share of copy bandwidth, columns, warps, ms) of each rule, the best first."""
    state = torch.randn(64, 32, 128, 128, device="cuda")
    moved, found, chosen = 2 * state.numel() * 4, {}, dict(decode.TILE)
    for name in rules:
        case = Case(name, 64, 1, 32, 32, 128, 128, torch.bfloat16)
        step = partial(decode.run, Rule.parse(name), case.inputs("cuda"), state, 0.1, into=state)
        shares = []
        for block, warps in TILES:
            decode.TILE[Rule.parse(name).write] = block, warps
            ms = milliseconds(step, budget=0.02)
            shares.append((round(moved / (ms / 1e3) / copy, 3), block, warps, ms))
        found[name] = sorted(shares, reverse=True)
        print(name, found[name], flush=True)
    decode.TILE |= chosen
    return found


def replayed(function: Callable[[], object]) -> float:
    """ms of `function` in a CUDA graph."""
    return milliseconds(graph_of(function, warm=3).replay, budget=0.02)


@torch.no_grad()
def short_sequences() -> list[dict]:
    """ms of T tokens from a state, in chunk and recurrent mode, through a graph."""
    rows = []
    for B in (1, 16):
        for T in (1, 2, 4, 8, 16, 32, 64):
            q, k, v = (torch.randn(B, T, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            k = torch.nn.functional.normalize(k, dim=-1)
            g, beta = -torch.rand(B, T, 32, device="cuda"), torch.rand(B, T, 32, device="cuda")
            state = torch.randn(B, 32, 128, 128, device="cuda")
            keywords = dict(initial_state=state, output_final_state=True)
            row = dict(B=B, T=T)
            for mode in ("chunk", "recurrent"):
                row[mode] = replayed(lambda: ring_la.gated_delta_rule(q, k, v, g, beta, mode=mode, **keywords))  # noqa: B023
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--rules", default=",".join(RULES))
    args = parser.parse_args()
    need_gpus(parser)
    found: dict = machine() | {"copy_bytes_per_second": bandwidth()}
    rules = args.rules.split(",")
    parts = ("one_token", lambda: one_token(found["copy_bytes_per_second"], rules)), ("short", short_sequences)
    for name, part in parts:
        try:
            found[name] = part()
        except Exception as e:  # the other part still says something
            print(name, type(e).__name__, str(e)[-300:], flush=True)
        save(args.out, found)


if __name__ == "__main__":
    main()
