"""Grouped GEMM on one GPU: correctness against fp64, then times beside the other ways to do it, in one run.

    ring-la bench grouped [--tune] [--out runs/bench_grouped]

Products: "rows" (the forward product), "rows_t" (the gradient of A: B by columns), "outer" (the gradient of B), and
"train" (forward and both gradients through autograd). Peers are called as bare as they come: "loop" knows the sizes
on the host, "torch" has its offsets ready. "dense" is one matmul of the same FLOPs. Writes a table, JSON and PNG.

``--tune`` first times the tile candidates of kernels/grouped/tuning.py, prints the table to paste there, and uses
it for the rest of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ring_la.cli.options import count
from ring_la.errors import UnsupportedError
from ring_la.grouped_gemm import grouped_gemm
from ring_la.kernels.grouped import BACKENDS, Call, choose, load, tuning
from ring_la.kernels.grouped.aten import grouped_mm

KINDS = ("rows", "rows_t", "outer")
GROUPS = (8, 64, 256)
ROUNDS, INNER, WARM = 5, 8, 2
#: Rows per group on average and groups, for --tune; a line of the table ends between two of them.
CLASSES = ((32, 256, 48), (128, 256, 256), (512, 64, 1024), (4096, 8, math.inf))


def group_sizes(kind: str, rows: int, groups: int) -> list[int]:
    """Sizes that sum to `rows`: all alike, or Zipf's law (the i-th largest ∝ 1/i) in a shuffled order."""
    if kind == "balanced":
        return [rows // groups + (g < rows % groups) for g in range(groups)]
    generator = torch.Generator().manual_seed(groups)
    weights = (1 / torch.arange(1, groups + 1, dtype=torch.float64))[torch.randperm(groups, generator=generator)]
    ends = (weights.cumsum(0) / weights.sum() * rows).round().long().tolist()
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def call_of(kind: str, a: Tensor, b: Tensor, dc: Tensor, sizes: Tensor) -> Call:
    return {
        "rows": Call("rows", a, b, sizes),
        "rows_t": Call("rows", dc, b.mT, sizes),
        "outer": Call("outer", a, dc, sizes),
    }[kind]


def operands(rows: int, groups: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
    return make(rows, k), make(groups, k, n), make(rows, n)


# Correctness


def error(out: Tensor, truth: Tensor) -> float:
    return float((out.double() - truth).norm() / truth.norm().clamp_min(1e-30))


def truth_of(call: Call) -> Tensor:
    return load("loop").compute(call._replace(x=call.x.double(), y=call.y.double(), sizes=call.sizes.cpu()))


CHECKS = (
    # sizes, K, N, dtype, spare rows past the sizes
    ([300, 0, 1, 77, 512, 130, 0, 45], 256, 384, torch.bfloat16, 0),
    ([300, 0, 1, 77, 512, 130, 0, 45], 64, 128, torch.bfloat16, 100),
    ([300, 0, 1, 77, 512, 130, 0, 45], 128, 64, torch.bfloat16, 3),
    ([5] * 40 + [0] * 20 + [700], 520, 1032, torch.bfloat16, 9),
    ([300, 0, 1, 77], 100, 75, torch.bfloat16, 5),
    ([300, 0, 1, 77], 256, 384, torch.float16, 5),
    ([300, 0, 1, 77], 100, 96, torch.float32, 5),
    ([0, 0, 0], 64, 64, torch.bfloat16, 64),
)


def check_all() -> list[dict]:
    """Every back end on every product, its error against fp64 beside the loop's; NaN waits in the spare rows."""
    lines = []
    for sizes, k, n, dtype, spare in CHECKS:
        a, b, dc = operands(sum(sizes) + spare, len(sizes), k, n, dtype)
        a[sum(sizes) :], dc[sum(sizes) :] = float("nan"), float("nan")
        device_sizes = torch.tensor(sizes, device="cuda")
        for kind in KINDS:
            call = call_of(kind, a, b, dc, device_sizes)
            truth = truth_of(call)
            low = error(load("loop").compute(call), truth)
            for name in BACKENDS:
                reason = load(name).refusal(call)
                line = {"kind": kind, "backend": name, "dtype": str(dtype), "K": k, "N": n, "G": len(sizes)}
                if reason is None:
                    found = error(load(name).compute(call), truth)
                    line |= {"error": found, "of the loop": low, "ok": bool(found <= 2 * low + 1e-6)}
                else:
                    line |= {"refused": reason}
                lines.append(line)
    return lines


def check_training() -> list[dict]:
    """Gradients through autograd: without any host synchronisation, compiled, and captured in a CUDA graph."""
    sizes = torch.tensor([300, 0, 1, 77, 512, 130, 0, 44], device="cuda")
    a, b, dc = operands(1064, 8, 256, 128, torch.bfloat16)
    x, y = a.double().requires_grad_(), b.double().requires_grad_()
    truth = torch.autograd.grad(grouped_gemm(x, y, sizes, backend="loop"), (x, y), dc.double())
    a.requires_grad_(), b.requires_grad_()
    whole = torch.compile(lambda a, b: grouped_gemm(a, b, sizes), fullgraph=True, dynamic=True, backend="aot_eager")

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(grouped_gemm(a, b, sizes), (a, b), dc)

    def unsynchronised() -> tuple[Tensor, ...]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return train()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def captured() -> tuple[Tensor, ...]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            grads = train()
        graph.replay()
        return tuple(grad.clone() for grad in grads)

    ways = {
        "eager, synchronisation forbidden": unsynchronised,
        "compiled": lambda: torch.autograd.grad(whole(a, b), (a, b), dc),
        "CUDA graph": captured,
    }
    lines = []
    for how, way in ways.items():
        try:
            errors = [error(ours, theirs) for ours, theirs in zip(way(), truth, strict=True)]
            lines.append({"kind": "dA, dB", "backend": f"auto, {how}", "error": errors, "ok": max(errors) < 1e-2})
        except Exception as failure:
            lines.append({"kind": "dA, dB", "backend": f"auto, {how}", "failure": repr(failure)[:300], "ok": False})
    return lines


# Times


def times(functions: dict[str, Callable[[], object]], rounds: int = ROUNDS, inner: int = INNER) -> dict[str, float]:
    """Milliseconds a call: the median of rounds in which the functions take turns."""
    for function in functions.values():
        for _ in range(WARM):
            function()
    marks: dict[str, list] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                function()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(s.elapsed_time(e) / inner for s, e in pairs) for name, pairs in marks.items()}


def contenders(kind: str, call: Call, sizes: list[int]) -> dict[str, Callable[[], object]]:
    """The ways to compute one product."""
    ends = call.ends()
    x, y = call.x, call.y
    host = call._replace(sizes=call.sizes.cpu())
    functions: dict[str, Callable[[], object]] = {
        "dense": (lambda: x.mT @ y) if kind == "outer" else (lambda: x @ y[0]),
        "loop": lambda: load("loop").compute(host),
    }
    if load("torch").refusal(call) is None:
        functions["torch"] = lambda: grouped_mm(x.mT if kind == "outer" else x, y, ends)
    for name in ("cutlass", "triton"):
        if load(name).refusal(call) is None:
            functions[name] = lambda name=name: load(name).compute(call)
    operator = torch.ops.ring_la.grouped_outer if kind == "outer" else torch.ops.ring_la.grouped_rows
    functions["auto"] = lambda: operator(x, y, call.sizes, "auto", True)
    return functions


def training(a: Tensor, b: Tensor, dc: Tensor, sizes: list[int], device_sizes: Tensor) -> dict[str, Callable]:
    """Forward and both gradients through autograd."""
    a, b, w = a.detach().requires_grad_(), b.detach().requires_grad_(), b[0].detach().requires_grad_()
    ends = torch.cumsum(device_sizes, 0, dtype=torch.int32)

    def loop() -> Tensor:
        return torch.cat([x @ y for x, y in zip(a.split(sizes), b.unbind(), strict=True)])

    forwards = {
        "dense": lambda: a @ w,
        "loop": loop,
        "torch": lambda: grouped_mm(a, b, ends),
        "triton": lambda: grouped_gemm(a, b, device_sizes, backend="triton"),
        "auto": lambda: grouped_gemm(a, b, device_sizes),
    }
    call = Call("rows", a.detach(), b.detach(), device_sizes)
    return {
        name: lambda name=name, f=f: torch.autograd.grad(f(), (a, w if name == "dense" else b), dc)
        for name, f in forwards.items()
        if name not in ("torch", "triton") or load(name).refusal(call) is None
    }


def measure(rows: int, k: int, n: int) -> list[dict]:
    lines = []
    for groups in GROUPS:
        a, b, dc = operands(rows, groups, k, n, torch.bfloat16)
        for distribution in ("balanced", "zipf"):
            sizes = group_sizes(distribution, rows, groups)
            device_sizes = torch.tensor(sizes, device="cuda")
            for kind in (*KINDS, "train"):
                if kind == "train":
                    functions, chosen = training(a, b, dc, sizes, device_sizes), ""
                else:
                    call = call_of(kind, a, b, dc, device_sizes)
                    functions, chosen = contenders(kind, call, sizes), choose("auto", call)
                ms = times(functions)
                flops = 2 * rows * k * n * (3 if kind == "train" else 1)
                others = {name: t for name, t in ms.items() if name in ("loop", "torch", "cutlass")}
                line = {"kind": kind, "G": groups, "sizes": distribution, "ms": ms, "auto is": chosen}
                line["tflops"] = {name: flops / t / 1e9 for name, t in ms.items()}
                line["of best other"] = min(others.values()) / ms["auto"]
                line["of dense"] = ms["dense"] / ms["auto"]
                lines.append(line)
        del a, b, dc
        torch.cuda.empty_cache()
    return lines


# Tuning


def check_tiles(kind: str, tiles: tuning.Tiles) -> bool:
    """Whether the kernel with these tiles is right (some combinations do not compile)."""
    sizes = [300, 0, 1, 77, 512, 130, 0, 45]
    a, b, dc = operands(sum(sizes) + 50, len(sizes), 256, 384, torch.bfloat16)
    a[sum(sizes) :], dc[sum(sizes) :] = float("nan"), float("nan")
    call = call_of(kind, a, b, dc, torch.tensor(sizes, device="cuda"))
    truth = truth_of(call)
    return all(error(load("triton").compute(call, tiles), truth) < 6e-3 for _ in range(5))


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
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
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


# Reports


def report(lines: list[dict]) -> None:
    names = ("dense", "loop", "torch", "cutlass", "triton", "auto")
    print(f"\n{'product':8}{'G':>4} {'sizes':9}" + "".join(f"{name:>9}" for name in names), end="")
    print(f"{'TFLOP/s':>9}{'of best':>9}{'of dense':>9}  auto is")
    for line in lines:
        cells = "".join(f"{line['ms'][name]:9.3f}" if name in line["ms"] else f"{'-':>9}" for name in names)
        print(f"{line['kind']:8}{line['G']:4} {line['sizes']:9}{cells}{line['tflops']['auto']:9.0f}", end="")
        print(f"{line['of best other']:9.2f}{line['of dense']:9.2f}  {line['auto is']}")
    for kind in KINDS:  # what preference.py should say
        cells = [line for line in lines if line["kind"] == kind and {"torch", "triton"} <= line["ms"].keys()]
        ratios = (f"G={x['G']} {x['sizes']} {x['ms']['torch'] / x['ms']['triton']:.2f}" for x in cells)
        print(f"time of torch / time of triton, {kind}: " + ", ".join(ratios))


def picture(lines: list[dict], path: pathlib.Path, title: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ("dense", "loop", "torch", "cutlass", "triton", "auto")
    colours = ("#bbbbbb", "#ddaa33", "#bb5566", "#7733aa", "#4477aa", "#004488")
    figure, axes = plt.subplots(2, 2, figsize=(13, 7), sharey=True, constrained_layout=True)
    for axis, kind in zip(axes.flat, (*KINDS, "train"), strict=True):
        cells = [line for line in lines if line["kind"] == kind]
        for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
            at = [c + (i - 2.5) * 0.14 for c in range(len(cells))]
            axis.bar(at, [line["tflops"].get(name, 0) for line in cells], 0.13, color=colour, label=name)
        axis.set_xticks(range(len(cells)), [f"G={line['G']}\n{line['sizes']}" for line in cells], fontsize=8)
        axis.set_title(kind, fontsize=10)
    axes[0, 0].legend(fontsize=8, ncols=3)
    axes[0, 0].set_ylabel("TFLOP/s")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_grouped"))
    parser.add_argument("--tune", action="store_true", help="time the tile candidates first and use the fastest")
    parser.add_argument("--rows", type=count, default=32768)
    parser.add_argument("--k", type=count, default=2048)
    parser.add_argument("--n", type=count, default=4096)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UnsupportedError("device", "a CUDA device", "none")
    torch.manual_seed(0)
    if options.probe:
        probe()
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    title = f"Grouped GEMM, {options.rows} × {options.k} by G × {options.k} × {options.n}, bf16, {device}"
    print(title)
    result: dict = {"title": title, "tuning": tune(options.k, options.n) if options.tune else []}
    save = lambda: (options.out / "grouped.json").write_text(json.dumps(result, indent=1))  # noqa: E731
    result["checks"] = check_all() + check_training()
    save()
    wrong = [line for line in result["checks"] if not line.get("ok", True)]
    print(f"{sum('ok' in line for line in result['checks'])} checks, {len(wrong)} wrong", *wrong, sep="\n")
    result["times"] = measure(options.rows, options.k, options.n)
    save()
    report(result["times"])
    picture(result["times"], options.out / "grouped.png", title)
    return 1 if wrong else 0


if __name__ == "__main__":
    from .main import main

    sys.exit(main(["bench", "grouped", *sys.argv[1:]]))
