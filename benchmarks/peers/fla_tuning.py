"""fla-core's autotuning made ready in minutes: its configurations compiled in parallel, then timed alone.

At the first call of a kernel fla-core compiles and times every configuration, one after the other: tens of minutes for
this benchmark. Here the ops are first called on fake tensors to see which kernels they launch; processes compile a
share of the configurations each, launching nothing; then one process calls the ops as they are measured, and tunes on
compiled kernels, with fewer repetitions. No configuration is left out. Triton's cache on disk keeps both; its
``*.autotune.json`` files can be carried to another machine of the same kind and versions.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .. import environment
from ..ops.cases import CASES, Shape, inputs
from ..ops.measure import TOKENS, results
from . import ops as peers

ENVIRONMENT = {"TRITON_CACHE_AUTOTUNING": "1"}
"""For every process that runs fla-core: all its kernels keep on disk what they tuned, also those that would not."""
FEW = "BENCHMARKS_FLA_CONFIGURATIONS"
"""In a process's environment: configurations a kernel that fla-core chooses among (`few`)."""
DONE = "tuned:"
"""How a line begins that says that a row is; libraries print others."""
ENOUGH, MOST = 8e-3, 10
"""Seconds and calls after which a configuration has been timed."""
Rows = Sequence[tuple[str, str]]
Call = Callable[[str, str], None]
"""Makes a row's calls."""


def tune(rows: Rows, seconds: float, jobs: int, program: str = "benchmarks.peers.fla_tuning") -> dict[str, Any]:
    """Compile with `jobs` processes, then tune, the rows in their order, for at most so long; what was done.

    Needs a GPU, Triton and fla-core. What is not compiled after 2/3 of the time is compiled as it is tuned. `program`
    is a module whose `main` is the one below.
    """
    start = time.monotonic()
    command = [sys.executable, "-c", f"from {program} import main; main()"]
    env = environment(**ENVIRONMENT, OMP_NUM_THREADS="1")
    listed = ",".join(f"{name}:{shape}" for name, shape in rows)
    compiling = [
        subprocess.Popen([*command, "compile", str(n), str(jobs), listed], env=env, stdout=subprocess.PIPE, text=True)
        for n in range(jobs)
    ]
    ended = [_wait(process, start + seconds * 2 / 3 - time.monotonic()) for process in compiling]
    said = [int(text.split()[-1]) for code, text in ended if code == 0]  # one that was stopped has said other things
    found = {"compile_s": round(time.monotonic() - start, 1), "compiled": sum(said), "unfinished": 0, "failed": []}
    found["unfinished"] = sum(code != 0 for code, _ in ended)
    done, rest = 0, list(rows)
    while rest and time.monotonic() - start < seconds:
        listed = ",".join(f"{name}:{shape}" for name, shape in rest)
        process = subprocess.Popen([*command, "tune", listed], env=env, stdout=subprocess.PIPE, text=True)
        code, text = _wait(process, start + seconds - time.monotonic())
        steps = sum(line.startswith(DONE) for line in text.splitlines())
        done, rest = done + steps, rest[steps:]
        if code and rest and time.monotonic() - start < seconds:  # a configuration took the process down
            found["failed"].append(":".join(rest.pop(0)))
    return found | {"tuned": done, "of": len(rows), "seconds": round(time.monotonic() - start, 1)}


def _wait(process: subprocess.Popen, seconds: float) -> tuple[int | None, str]:
    """(its exit status, or None if it had to be stopped; what it printed)."""
    try:
        text, _ = process.communicate(timeout=None if process.poll() is not None else max(0.0, seconds))
        return process.returncode, text
    except subprocess.TimeoutExpired:
        process.kill()
        return None, process.communicate()[0]


# -- the processes -------------------------------------------------------------------------------------------


def call(name: str, shape: str) -> None:
    """An operator's forward and backward by fla-core at the shape it is timed at, and at that of its errors."""
    op, timed = peers.load("fla", name), Shape.parse(shape)
    for s in (timed, timed._replace(B=1, T=min(timed.T, TOKENS))):
        results(op, inputs(CASES[name], s, "cuda"))


@contextmanager
def launching(tuned: Callable, plain: Callable) -> Iterator[None]:
    """Within, kernels that are tuned and others call these in place of being launched."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    whole = Autotuner.run, JITFunction.run
    Autotuner.run, JITFunction.run = tuned, plain
    try:
        yield
    finally:
        Autotuner.run, JITFunction.run = whole


def launches(rows: Rows, call: Call, fake: bool) -> list[tuple[Any, tuple, dict[str, Any]]]:
    """What the rows' calls need compiled: (kernel, arguments, named arguments), each once, in the calls' order."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.runtime.jit import MockTensor

    found: dict[tuple, tuple[Any, tuple, dict[str, Any]]] = {}

    def mock(x: Any) -> Any:
        return MockTensor(x.dtype) if isinstance(x, torch.Tensor) else x

    def add(kernel: Any, args: tuple, named: dict[str, Any]) -> None:
        args, named = tuple(map(mock, args)), {n: mock(x) for n, x in named.items() if n not in ("grid", "warmup")}
        found.setdefault(_class_of(kernel, args, named), (kernel, args, named))

    def tuned(self, *args: Any, **named: Any) -> None:
        for config in _untimed(self, args, named, tried):
            add(self.fn, args, named | config.all_kwargs())

    tried: set[tuple] = set()

    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    with mode, launching(tuned, lambda self, *a, **n: add(self, a, n)):
        for name, shape in rows:
            call(name, shape)
    return list(found.values())


def _untimed(tuner: Any, args: tuple, named: dict[str, Any], tried: set[tuple]) -> list[Any]:
    """The configurations a call would try: none if another call tries them, the best alone where Triton's cache on disk
    knows it."""
    tuner.nargs = dict(zip(tuner.arg_names, args))
    given = {n: x for n, x in {**tuner.nargs, **named}.items() if n in tuner.arg_names}
    key = [given[n] for n in tuner.keys if n in given]
    key = tuple(key + [str(x.dtype) for x in given.values() if hasattr(x, "dtype")])
    configs = tuner.prune_configs(named)
    try:
        tuner.check_disk_cache(key, configs, _unknown)
    except LookupError:
        first = (id(tuner), key) not in tried
        tried.add((id(tuner), key))
        return configs if first else []
    return [tuner.cache[key]]


def _unknown() -> None:
    raise LookupError


def _class_of(kernel: Any, args: tuple, named: dict[str, Any]) -> tuple:
    """Equal for launches that Triton compiles once: dtypes, constants, and what it sees of other integers."""
    from triton.runtime.jit import JITFunction

    function = kernel
    while not isinstance(function, JITFunction):
        function = function.fn
    constants = {p.name for p in function.params if p.is_constexpr}
    seen: list[tuple[str, str]] = []
    for name, x in {**dict(zip(function.arg_names, args)), **named}.items():
        if hasattr(x, "dtype"):
            x = x.dtype
        elif isinstance(x, int) and x > 1 and name in function.arg_names and name not in constants:
            x = (x % 16 == 0, x < 2**31)
        seen.append((name, str(x)))
    return function, *sorted(seen)


def compile_share(part: int, parts: int, rows: Rows, call: Call, fake: bool) -> int:
    """Every `parts`-th configuration, and its launcher."""
    from triton.runtime import driver

    share = launches(rows, call, fake)[part::parts]
    for kernel, args, named in share:
        try:
            compiled = kernel.warmup(*args, grid=(1, 1, 1), **named)
            driver.active.launcher_cls(compiled.src, compiled.metadata)
        except Exception as e:  # what fla-core tries need not compile; it drops that configuration, too
            print(f"{type(e).__name__}: {str(e)[:200]}", file=sys.stderr, flush=True)
    return len(share)


def quick(kernel: Callable[[], Any], quantiles: Sequence[float] | None = None, **_: Any) -> list[float]:
    """Triton's interface to time a configuration, ms; the smallest counts."""
    kernel()
    torch.cuda.synchronize()
    start, marks = time.perf_counter(), []
    while len(marks) < 2 or (len(marks) < MOST and time.perf_counter() - start < ENOUGH):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        kernel()
        pair[1].record()
        torch.cuda.synchronize()
        marks.append(pair[0].elapsed_time(pair[1]))
    return [sorted(marks)[len(marks) // 2]] * len(quantiles or (0.5,))


def settle_for_the_first() -> None:
    """From now on kernels take the first configuration that runs, and keep that nowhere: where results are compared and
    not times."""
    from triton.runtime.autotuner import Autotuner

    prune, bench, never = Autotuner.prune_configs, Autotuner._bench, float("inf")

    def once(kernel: Callable[[], Any], quantiles: Sequence[float] | None = None, **_: Any) -> list[float]:
        kernel()
        return [0.0] * len(quantiles or (0.5,))

    def pruned(self: Any, named: dict[str, Any]) -> Any:
        self.settled, self.cache_results = False, False
        return prune(self, named)

    def benched(self: Any, *args: Any, config: Any, **named: Any) -> list[float]:
        if self.settled:
            return [never] * 3
        times = bench(self, *args, config=config, **named)
        self.settled = times[0] < never
        return times

    Autotuner.prune_configs, Autotuner._bench, Autotuner.do_bench = pruned, benched, property(lambda self: once)


def few() -> None:
    """From now on kernels choose among as many configurations as the environment says, if it does: where there is no
    time to compile all. First those of four warps, then the nearest; of these first three stages."""
    most = os.environ.get(FEW)
    if most is None:
        return
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def far(config: Any) -> tuple[float, int]:
        return abs(math.log2(config.num_warps / 4)), abs(config.num_stages - 3)

    Autotuner.prune_configs = lambda self, named: sorted(prune(self, named), key=far)[: int(most)]


def tune_all(rows: Rows, call: Call) -> None:
    """Tunes each in turn; a line on stdout when one is done."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = property(lambda self: quick)
    for name, shape in rows:
        try:
            call(name, shape)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError as e:
            print(f"{name} {shape}: {e}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        print(DONE, name, shape, flush=True)


def main(call: Call = call, fake: bool = True) -> None:
    """One of the processes: ``compile PART PARTS OP:SHAPE,…`` or ``tune OP:SHAPE,…``. Where `call` reads values on the
    host its tensors cannot be `fake`."""
    few()
    what, *more, listed = sys.argv[1:]
    rows = [tuple(row.split(":")) for row in listed.split(",")]
    if what == "compile":
        part, parts = map(int, more)
        print(compile_share(part, parts, rows, call, fake), flush=True)
    else:
        tune_all(rows, call)
