"""Trial: launches and whole calls under variants of the tables."""
import json, os, statistics, sys, time
from contextlib import ExitStack
from unittest.mock import patch
import torch, ring_la
from ring_la.algebra import Rule
from ring_la.kernels.triton import base, general, local, simple, table
from ring_la.kernels.triton.launch import launch as plain
from ring_la.kernels.triton.table import Launch
from ring_la.cli.bench_ops import cases, measure
from tests.kernels.triton_cases import Case
FLAGS = ("REVERSE", "TRANSPOSED", "DOTS", "STATIC", "BULK", "KEEP", "GATE", "PUT")
def times(name, shape, gate, static, reps=7):
    B, T, H, Hk, K, V = shape
    rule = Rule.parse(name)
    x = Case(name, B, T, H, Hk, K, V, torch.bfloat16, decay=0.1, static=static).inputs("cuda")
    do = torch.randn_like(x.v); found = {}
    def both(between=None):
        run = local.TritonRecurrence(rule, x, None, K ** -0.5); run.output(None, keep=True)
        if between: between.record()
        return local.TritonRecurrence(rule, x, None, K ** -0.5, run.kept()).gradients(None, do, None, gate)
    for r in range(reps):
        marks = {}
        def timed(kernel, grid, *args, **c):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); plain(kernel, grid, *args, **c); b.record()
            marks.setdefault(" ".join([kernel.__name__.removesuffix("_kernel"), *(f.lower() for f in FLAGS if c.get(f))]), []).append((a, b))
        with ExitStack() as st:
            for m in (simple, general, base): st.enter_context(patch.object(m, "launch", timed))
            torch.cuda._sleep(3_000_000); both()
        torch.cuda.synchronize()
        for n, ps in marks.items(): found.setdefault(n, []).append(sum(a.elapsed_time(b) for a, b in ps))
        ev = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(3_000_000); ev[0].record(); both(ev[1]); ev[2].record(); torch.cuda.synchronize()
        found.setdefault("=fwd", []).append(ev[0].elapsed_time(ev[1])); found.setdefault("=both", []).append(ev[0].elapsed_time(ev[2]))
    return {n: round(statistics.median(t[1:]), 4) for n, t in found.items()}
A = "ADDITIVE_GRADIENT"
VARIANTS = {"default": {}, "8 warps": {A: {64: Launch(64, 8, 1), 128: Launch(64, 8, 1)}}, "wide": {A: {64: Launch(64, 4, 1), 128: Launch(128, 8, 1)}}}
KINDS = {"linear": ("additive_none", True, False), "retention": ("additive_scalar", False, True), "simple_gla": ("additive_scalar", True, False)}
D32, D8, D64, DM = (1, 32768, 32, 32, 128, 128), (1, 32768, 8, 8, 128, 128), (4, 4096, 16, 16, 64, 64), (1, 32768, 80, 8, 128, 64)
todo = [("simple_gla", D32, "default"), ("simple_gla", DM, "default"), ("simple_gla", D64, "default"), ("simple_gla", D32, "8 warps"), ("simple_gla", D32, "wide"), ("simple_gla", D8, "default"), ("retention", D32, "default"), ("linear", D32, "default")]
def under(v):
    st = ExitStack()
    for n, x in VARIANTS[v].items():
        if isinstance(x, dict):
            kept = dict(getattr(table, n)); st.enter_context(patch.dict(getattr(table, n), kept | x, clear=True))
        else: st.enter_context(patch.object(table, n, x))
    base.wave_length.cache_clear()
    from ring_la.kernels.triton import replay
    for n in dir(replay):
        if hasattr(getattr(replay, n), "cache_clear"): getattr(replay, n).cache_clear()
    return st
def one(k, s, v, reps=7):
    name, gate, static = KINDS[k]
    with under(v): return times(name, s, gate, static, reps)
def compare():
    with under("default"):
        for name, shape in (("simple_gla", "1x512x32x128"), ("simple_gla", "1x512x8x128"), ("simple_gla", "1x512x16x64"), ("mamba2", "1x512x80x128x64")):
            case = cases.CASES[name]
            try: print("OP ERR", name, shape, measure.errors(case, case.ours, cases.Shape.parse(shape), "cuda"), flush=True)
            except Exception as e: print("OP ERR", name, shape, repr(e)[-200:], flush=True)
def ops():
    for v in ("default",):
        with under(v):
            for name, shape in (("simple_gla", "1x32768x32x128"), ("simple_gla", "1x32768x8x128"), ("mamba2", "1x32768x80x128x64"), ("retention", "1x32768x32x128"), ("simple_gla", "4x4096x16x64")):
                case = cases.CASES[name]
                try: print("OP TIME", v, name, shape, {n: (round(x, 3) if isinstance(x, float) else x) for n, x in measure.measure(case, case.ours, cases.Shape.parse(shape), "cuda").items()}, flush=True)
                except Exception as e: print("OP TIME", v, name, repr(e)[-200:], flush=True)
if __name__ == "__main__":
    if len(sys.argv) > 2:
        for k, s, v in todo[int(sys.argv[1])::int(sys.argv[2])]:
            try: one(k, s, v, 1)
            except Exception as e: print(k, s, v, repr(e)[-100:], file=sys.stderr)
        sys.exit()
    import subprocess
    start = time.time(); budget = float(os.environ.get("BUDGET", 60))
    ps = [subprocess.Popen([sys.executable, "-m", "tests.gpu.trial_time", str(i), "14"], env=os.environ | {"OMP_NUM_THREADS": "1"}) for i in range(14)]
    for p in ps:
        try: p.wait(max(1, 25 - (time.time() - start)))
        except subprocess.TimeoutExpired: p.kill()
    print("compiled", time.time() - start, flush=True)
    z = torch.zeros(8, device='cuda', requires_grad=True); (z * 2).sum().backward(); rows = []
    for k, s, v in todo:
        if time.time() - start > budget - 22: break
        try: r = one(k, s, v)
        except Exception as e: r = {"failed": repr(e)[-150:]}
        rows.append((k, s, v, r)); print('ROW', k, s[2], s[5], v, r, flush=True)
        if os.environ.get("OUT"): json.dump(rows, open(os.environ["OUT"] + "/times.json", "w"))
    for f in (compare, ops):
        try: f()
        except Exception as e: print("OP", f.__name__, "failed", repr(e)[-300:], flush=True)
