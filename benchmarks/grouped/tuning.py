"""``ring-la bench grouped --tune``: the tile candidates of kernels/grouped/tuning.py, timed."""

from __future__ import annotations

import math
import subprocess
import sys

import torch

from ring_la.kernels.grouped import load, tuning

from .. import environment
from ..errors import relative_error
from .checks import truth_of
from .products import KINDS, call_of, group_sizes, operands, times

#: Rows per group on average and groups, for --tune; a line of the table ends between two of them.
CLASSES = ((32, 256, 48), (128, 256, 256), (512, 64, 1024), (4096, 8, math.inf))


def check_tiles(kind: str, tiles: tuning.Tiles) -> bool:
    """Whether the kernel with these tiles is right (some combinations do not compile)."""
    sizes = [300, 0, 1, 77, 512, 130, 0, 45]
    a, b, dc = operands(sum(sizes) + 50, len(sizes), 256, 384, torch.bfloat16)
    a[sum(sizes) :], dc[sum(sizes) :] = float("nan"), float("nan")
    call = call_of(kind, a, b, dc, torch.tensor(sizes, device="cuda"))
    truth = truth_of(call)
    return all(relative_error(load("triton").compute(call, tiles), truth) < 6e-3 for _ in range(5))


def probe() -> None:
    """Check every candidate, printing as it goes: in a child process, for one may hang."""
    candidates = [(kind, i, tiles) for kind in KINDS for i, tiles in enumerate(tuning.CANDIDATES[kind])]
    for kind, index, tiles in candidates:
        try:
            verdict = "ok" if check_tiles(kind, tiles) else "wrong"
        except Exception as failure:
            verdict = f"failed: {type(failure).__name__}"
        print("probe", kind, index, verdict, flush=True)


def probed(seconds: float) -> dict[tuple[str, int], str]:
    command = [sys.executable, "-m", "ring_la", "bench", "grouped", "--probe"]
    quiet = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
    with subprocess.Popen(command, **quiet) as child:
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    lines = [line.split(maxsplit=3) for line in output.splitlines() if line.startswith("probe ")]
    return {(kind, int(index)): verdict for _, kind, index, verdict in lines}


def tune(k: int, n: int, seconds: float = 100) -> list[dict]:
    """Time the candidates on balanced and Zipf sizes of every class; put the fastest into the table in use."""
    verdicts, lines = probed(seconds), []
    for kind in KINDS:
        for index, tiles in enumerate(tuning.CANDIDATES[kind]):
            verdict = verdicts.get((kind, index), "no answer")
            if verdict != "ok":
                print(f"{kind:7} {tiles}: {verdict}")
    table: dict[str, list] = {kind: [] for kind in KINDS}
    for mean, groups, upto in CLASSES:
        a, b, dc = operands(mean * groups, groups, k, n, torch.bfloat16)
        for kind in KINDS:
            right = [t for i, t in enumerate(tuning.CANDIDATES[kind]) if verdicts.get((kind, i)) == "ok"]
            total = dict.fromkeys(right, 0.0)
            for distribution in ("balanced", "zipf"):
                sizes = torch.tensor(group_sizes(distribution, mean * groups, groups), device="cuda")
                call = call_of(kind, a, b, dc, sizes)
                functions = {t: (lambda t=t, call=call: load("triton").compute(call, t)) for t in right}
                for tiles, ms in times(functions, rounds=3, inner=5).items():
                    total[tiles] += ms / 2
            ranked = sorted(total, key=total.get)
            for tiles in ranked:
                lines.append({"kind": kind, "rows per group": mean, "tiles": str(tiles), "ms": total[tiles]})
            print(f"{kind:7} {mean:5} rows a group: " + "; ".join(f"{total[t]:.3f} {short(t)}" for t in ranked[:4]))
            if ranked:
                table[kind].append((upto, ranked[0]))
        del a, b, dc
        torch.cuda.empty_cache()
    print("HOPPER = {")
    for kind, rows in table.items():
        print(f'    "{kind}": (')
        for upto, tiles in rows:
            print(f"        ({'math.inf' if upto == math.inf else upto}, {short(tiles)}),")
        print("    ),")
        if rows:
            tuning.HOPPER[kind] = tuple(rows)
    print("}")
    return lines


def short(tiles: tuning.Tiles) -> str:
    """The call that makes these tiles, without what is the default."""
    changed = [f"{name}={getattr(tiles, name)}" for name in tiles._fields[3:]
               if getattr(tiles, name) != tuning.Tiles._field_defaults[name]]  # fmt: skip
    return f"Tiles({', '.join([str(tiles.m), str(tiles.n), str(tiles.k), *changed])})"
