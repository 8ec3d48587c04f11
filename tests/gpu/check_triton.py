"""Every Triton kernel on the GPU against the fp64 token loop: `python -m tests.gpu.check_triton [--jobs 12] [--out
FILE]`.

The interpreter cannot show what the compiler gets wrong (Triton 3.4–3.7 on Hopper miscompiles a transposed product of
accumulators at 64 channels), so every gradient is proven here at K = 64, 128 and 256. Exits 1 if anything is off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time

import torch

from ring_la.algebra import Rule
from ring_la.kernels.families import recurrence
from ring_la.kernels.protocol import Backward, Inputs
from ring_la.kernels.spans import plan, table
from tests.kernels.triton_cases import RULES, Case, error, errors

PACKED = (0, 1, 1, 130, 257, 300)
LIMIT = {torch.bfloat16: 1.2e-2, torch.float16: 3e-3, torch.float32: 1e-4}


def cases(rules: list[str]) -> list[Case]:
    out = []
    for rule in rules:
        for K, V in ((64, 64), (128, 128), (256, 256), (128, 64), (64, 128), (32, 32), (16, 16), (80, 48)):
            out.append(Case(rule, 2, 300, 4, 2, K, V, torch.bfloat16))
        for K, V in ((64, 64), (128, 128), (256, 256)):
            out.append(Case(rule, 1, 300, 4, 4, K, V, torch.bfloat16, PACKED))
            out.append(Case(rule, 1, 200, 2, 2, K, V, torch.float32))
        out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.float16, states=False))
        out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.bfloat16, decay=30.0))
        out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.bfloat16, decay=1e-4))
        out.append(Case(rule, 1, 1, 2, 1, 64, 64, torch.bfloat16))
        out.append(Case(rule, 1, 2000, 2, 2, 128, 128, torch.bfloat16, states=False))
        if rule in ("additive_none", "additive_scalar"):
            out += by_descriptor(rule)
        if rule == "additive_scalar":
            out += constant(rule)
        if rule in ("additive_scalar", "delta_scalar"):
            out += forgetful(rule)
        if rule in ("additive_scalar", "delta_none", "delta_scalar"):
            out += portable(rule)
    return out


def by_descriptor(rule: str) -> list[Case]:
    """What only large inputs do, on small ones."""
    half = dict(dtype=torch.bfloat16, bulk=True)
    out = [Case(rule, 1, 300, 4, 2, K, V, **half) for K, V in ((64, 64), (128, 128), (128, 64), (64, 128))]
    out += [Case(rule, 2, 320, 4, 4, D, D, states=False, gate=False, **half) for D in (64, 128)]
    out += [Case(rule, 1, 300, 4, 4, 128, 128, decay=d, **half) for d in (30.0, 1e-4)]
    return [*out, Case(rule, 1, 300, 4, 4, 128, 128, torch.float16, bulk=True)]


def forgetful(rule: str) -> list[Case]:
    """Segments of many chunks, of which only the last matter to what leaves them, or all."""
    more = [dict(decay=d, waves=w) for d in (2.0, 0.4, 0.03) for w in (16, 32)]
    out = [Case(rule, 1, 1200, 4, 2, 128, 128, torch.bfloat16, **m) for m in more]
    out.append(Case(rule, 1, 1200, 4, 2, 128, 128, torch.bfloat16, (0, 1, 1, 500, 1200), decay=2.0, waves=16))
    return [*out, Case(rule, 1, 1200, 2, 2, 64, 64, decay=2.0, waves=4)]


def portable(rule: str) -> list[Case]:
    """What devices and versions of Triton compute that have no kernel in Gluon."""
    more = dict(dtype=torch.bfloat16, gluon=False)
    out = [Case(rule, 2, 300, 4, 2, K, V, **more) for K, V in ((64, 64), (128, 128), (128, 64), (64, 128))]
    out.append(Case(rule, 1, 300, 4, 4, 128, 128, cu=PACKED, **more))
    return [*out, Case(rule, 1, 2000, 2, 2, 128, 128, states=False, decay=30.0, **more)]


def constant(rule: str) -> list[Case]:
    """A decay whose gradient nobody wants, by token and the same at every token."""
    out = []
    for static, bulk in ((False, False), (True, False), (True, True)):
        more = dict(gate=False, static=static, bulk=bulk)
        out += [Case(rule, 1, 300, 4, 2, K, V, torch.bfloat16, **more) for K, V in ((64, 64), (128, 128), (128, 64))]
        out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.bfloat16, decay=30.0, **more))
    out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.bfloat16, PACKED, gate=False, static=True))
    out.append(Case(rule, 2, 300, 4, 4, 80, 48, torch.bfloat16, gate=False, static=True))
    return [*out, Case(rule, 1, 200, 2, 2, 64, 64, gate=False, static=True)]


def work(part: int, parts: int, rules: list[str]) -> None:
    """Check every `parts`-th case; one line of JSON each, so that a crash loses only what follows it."""
    table.LEAST_CHUNKS, large, waves, slots, hopper = 1, table.DESCRIBED, table.WAVES, table.SLOTS, plan.hopper
    for i, case in enumerate(cases(rules)):
        if i % parts != part:
            continue
        row = {"case": {k: str(v) for k, v in case.__dict__.items()}}
        start = time.time()
        table.DESCRIBED = 0 if case.bulk else large
        table.WAVES = dict.fromkeys(waves, case.waves) if case.waves else waves
        table.SLOTS = dict.fromkeys(slots, case.waves) if case.waves else slots
        plan.hopper = hopper if case.gluon else lambda device: False
        try:
            torch.manual_seed(i)
            row["errors"] = errors(case, recurrence, "cuda")
            row["ok"] = all(e < LIMIT[case.dtype] for e in row["errors"].values())
        except Exception as e:  # a table of all failures is the point of this script
            row |= {"ok": False, "errors": {}, "failed": f"{type(e).__name__}: {str(e)[-400:]}"}
        row["seconds"] = round(time.time() - start, 1)
        print(json.dumps(row), flush=True)


def wide(rule: str, T: int = 530_000, H: int = 32, D: int = 128) -> dict:
    """More than 2^31 elements a tensor: the last head's last tokens, of every result, are those of the head alone."""
    rows = {"case": dict(rule=rule, B="1", T=str(T), H=str(H), Hk=str(H), K=str(D), V=str(D), dtype="torch.bfloat16",
            cu="None", decay="0.1")}  # fmt: skip
    start = time.time()
    torch.manual_seed(0)
    write, decay = rule.split("_")

    def unit() -> torch.Tensor:
        return torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16).mul_(D**-0.5)

    def gates(*shape: int) -> torch.Tensor:
        return torch.rand(1, T, H, *shape, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = unit(), unit(), unit(), unit()
    g = None if decay == "none" else gates(*(D,) * (decay == "diagonal")).mul_(-0.1)
    a = unit() if write == "dplr" else None
    x = Inputs(q, k, v, g, gates() if write == "delta" else None, a, None if a is None else a.mul(-0.5))

    def results(x: Inputs, do: torch.Tensor) -> list[torch.Tensor]:
        run = recurrence(Rule.parse(rule), x, None, 1.0)
        out = run.output(None)
        grads, _ = run.gradients(Backward(None, do), None)
        return [t[:, -300:, -1].clone() for t in (out.o, *grads) if t is not None] + [out.leaving[:, :, -1]]

    try:
        whole = results(x, do)
        last = Inputs(*(None if t is None else t[:, :, -1:].contiguous() for t in x))
        alone = results(last, do[:, :, -1:].contiguous())
    except torch.OutOfMemoryError:
        return rows | {"errors": {}, "ok": False, "failed": "out of memory", "seconds": round(time.time() - start, 1)}
    names = ["o", *(f"d{n}" for n, t in x._asdict().items() if t is not None), "S"]
    errs = {n: error(a, b.double()) for n, a, b in zip(names, whole, alone)}
    seconds = round(time.time() - start, 1)
    return rows | {"errors": errs, "ok": all(e < 1.2e-2 for e in errs.values()), "seconds": seconds}


def show(row: dict) -> str:
    c = row["case"]
    name = f"{c['rule']:17s} B{c['B']} T{c['T']} H{c['H']}/{c['Hk']} {c['K']}x{c['V']} {c['dtype'][6:]}"
    name += f" cu={c['cu']} g={c['decay']}" + "".join(f" {n}" for n in ("static", "bulk") if c.get(n) == "True")
    name += " without Gluon" if c.get("gluon") == "False" else ""
    errs = " ".join(f"{k}:{v:.1e}" for k, v in row["errors"].items())
    return f"{'ok ' if row['ok'] else 'BAD'} {name} {errs} {row.get('failed', '')} {row['seconds']}s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--out")
    parser.add_argument("--part", type=int)
    parser.add_argument("--limit", type=float, help="seconds after which what is not done is left out")
    parser.add_argument("--wide", default="", help="rules to check beyond 2^31 elements too, or all (130 GB)")
    parser.add_argument("--warm", help="compile what --wide launches for a rule")
    args = parser.parse_args()
    rules = [r for r in args.rules.split(",") if r]
    if args.part is not None:
        work(args.part, args.jobs, rules)
        return
    if args.warm:
        table.DESCRIBED = 0
        wide(args.warm, 512)
        return
    command = [sys.executable, "-m", "tests.gpu.check_triton", "--jobs", str(args.jobs), "--rules", args.rules]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, "--part", str(i)], stdout=subprocess.PIPE, env=env) for i in range(args.jobs)
    ]
    large = RULES if args.wide == "all" else [r for r in args.wide.split(",") if r]
    warm = [subprocess.Popen([*command, "--warm", rule], env=env) for rule in large]
    threading.Timer(args.limit, lambda: [p.terminate() for p in running]).start() if args.limit else None
    rows = []
    for p in running:
        rows += [json.loads(line) for line in p.communicate()[0].decode().splitlines() if line.startswith("{")]
    for p in warm:
        p.wait()
    for rule in large:
        rows.append(wide(rule))
        torch.cuda.empty_cache()
        print(show(rows[-1]), flush=True)
    rows.sort(key=lambda r: (r["ok"], str(r["case"])), reverse=True)
    for row in rows:
        if not row["ok"]:
            print(show(row))
    worst: dict = {}
    for row in rows:
        key = (row["case"]["rule"], row["case"]["dtype"][6:])
        for name, e in row["errors"].items():
            worst.setdefault(key, {})[name] = max(e, worst.get(key, {}).get(name, 0.0))
    for key, errs in sorted(worst.items()):
        print(*key, " ".join(f"{n}:{e:.1e}" for n, e in errs.items()))
    print(len(cases(rules)) + len(large) - len(rows), "not checked")
    print(f"{sum(r['ok'] for r in rows)} of {len(rows)} right")
    if args.out:
        json.dump(rows, open(args.out, "w"), indent=1)
    sys.stdout.flush()
    os._exit(not all(r["ok"] for r in rows))


if __name__ == "__main__":
    main()
