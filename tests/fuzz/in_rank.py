"""What a rank does with cases: the truth of its share of them, every split call, and what is off in its tensors."""

from __future__ import annotations

import functools
import math
import time
import traceback
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from tests.support.pool import group

from . import symmetric
from .bits import bits
from .case import DTYPES, Case
from .problem import Here, Problem, Tensors, make
from .resuming import resume
from .rounding import Rounded, rounded
from .strides import lain, level
from .training import training

FLOOR = {"fp32": 5e-5, "bf16": 2.0**-6}
"""What low precision may always be off by, where the rounded loop happens to be right or its errors cancel."""
HARD = 2e-4
"""The same for fp32 where log-decays are of −40: kernels sum them, and a sum of some hundreds is right to 3e-5."""
TIMES = 2.0
"""Times the error of the rounded loop that a result may be off."""
LEAST = {"fp64": 1e-4, "fp32": 0.1, "bf16": 1.0}
"""What an element counts as at least. Inputs and what flows back are of size 1: where a gradient is the difference of
two numbers of that size (one key: softmax has none), low precision leaves their rounding."""


BY_ITSELF = {"bits": bits, "training": training}
"""Operations that are held to a call of ring_la's own; they say what differs."""


class Told(NamedTuple):
    """What came of a case on a rank.

    Attributes:
        kind: "right", "wrong", "refused" (an error of ring_la's that names an argument) or "raised".
        words: what is wrong, or the error. ratio: the largest error, as a part of what it may be.
    """

    kind: str
    words: str = ""
    ratio: float = 0.0


class Truth(NamedTuple):
    """Of a case: outputs and gradients in fp64, and how far off the rounded loop is, by name."""

    outputs: Tensors
    gradients: Tensors
    budget: dict[str, float]
    error: str = ""


def context(case: Case) -> ring_la.ContextParallel:
    """One ContextParallel for each group and strategies."""
    scan = "ring" if case.is_softmax or case.deterministic else case.scan
    attention = case.attention if case.op == "forgetting_attention" else "auto"  # others are told with the call
    how = (scan, attention, case.head_groups if case.is_softmax else 1, case.deterministic, case.validate)
    return _context(case.P, case.transport, *how)


@functools.cache
def _context(
    P: int, transport: str, scan: str, attention: str, head_groups: int | str, deterministic: bool, validate: str
) -> ring_la.ContextParallel:
    how: Any = dict(scan=scan, attention=attention, head_groups=head_groups)
    how |= dict(deterministic=deterministic, validate=validate)
    cp = ring_la.ContextParallel(group(P), **how, timeout=60.0)
    if transport == "symmetric":
        symmetric.carry(cp)
    return cp


def judge(rank: int, lines: list[str]) -> tuple[list[Told], float]:
    """Cases of one number of ranks: what came of each here, up to one that raised, and the CPU seconds it took."""
    start, cases = time.process_time(), [Case.parse(line) for line in lines]
    P, told = cases[0].P, []
    if cases[0].op == "resume":
        return [_told(lambda: resume(cases[0]))], time.process_time() - start
    mine = {i: truth_of(case) for i, case in enumerate(cases) if i % P == rank and case.op not in BY_ITSELF}
    shared: list[Any] = [None] * P
    dist.all_gather_object(shared, mine, group=group(P))
    truths = {i: t for part in shared for i, t in part.items()}
    for i, case in enumerate(cases):
        own = BY_ITSELF.get(case.op)
        with symmetric.memory() if case.transport == "symmetric" else nullcontext():
            told.append(
                _told(
                    functools.partial(own, case, context(case)) if own else functools.partial(compare, case, truths[i])
                )
            )
        if told[-1].kind == "raised":
            break
    return told, time.process_time() - start


def _told(run) -> Told:
    try:
        out = run()
    except (ring_la.ArgumentError, ring_la.UnsupportedError) as error:
        return Told("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Told("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    if isinstance(out, Told):
        return out
    return Told("wrong", out) if out else Told("right")


# -- the truth ---------------------------------------------------------------------------------------------


def truth_of(case: Case) -> Truth:
    """The fp64 loop of a case and, in low precision, the rounded one."""
    try:
        problem = make(case)
        leaves = _quantised(case, problem)
        outputs, gradients = _run(case, problem, leaves)
        budget = {}
        if case.works_in != "fp64":
            with Rounded(DTYPES[case.works_in]):
                low_outputs, low_gradients = _run(case, problem, leaves)
            pairs = _of_both(case, problem, (low_outputs, low_gradients), (outputs, gradients))
            budget = {n: error(*x, _coarsest(case, problem, n), _rms(x[1])) for n, x in pairs.items()}
        return Truth(outputs, gradients, budget)
    except Exception as error_:
        return Truth({}, {}, {}, f"{type(error_).__name__}: {error_}")


def _of_both(case: Case, problem: Problem, low: tuple, high: tuple) -> dict[str, tuple[Tensor, Tensor]]:
    """The rounded loop's results in the dtypes they come in, beside the truth."""
    given, own = problem.dtypes, DTYPES[case.works_in]
    out = {n: (rounded(x, problem.results.get(n, own)), high[0][n]) for n, x in low[0].items()}
    return out | {f"d{n}": (rounded(x, given.get(n, own)), high[1][n]) for n, x in low[1].items()}


def _quantised(case: Case, problem: Problem) -> Tensors:
    """All inputs in fp64, as numbers that their dtype holds."""
    own = DTYPES[case.works_in]
    given = {n: level(case, x) if n in problem.tokens else x for n, x in problem.inputs.items()}
    return {n: rounded(x, problem.dtypes.get(n, own)) for n, x in given.items()}


def _run(case: Case, problem: Problem, leaves: Tensors) -> tuple[Tensors, Tensors]:
    leaves = {n: x.clone().requires_grad_(problem.gradients) for n, x in leaves.items()}
    outputs = problem.truth(leaves)
    if not problem.gradients:
        return outputs, {}
    loss = sum((outputs[n] * d).sum() for n, d in cotangents(case, problem, outputs).items())
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return _detached(outputs), {n: torch.zeros_like(x) for n, x in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return _detached(outputs), {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found)}


def _detached(x: Tensors) -> Tensors:
    return {n: t.detach() for n, t in x.items()}


def cotangents(case: Case, problem: Problem, outputs: Tensors) -> Tensors:
    """What flows back into each output of the whole sequence, in numbers that its dtype holds."""
    rng = torch.Generator().manual_seed(case.seed + 1)
    drawn = {n: torch.randn(outputs[n].shape, generator=rng, dtype=torch.float64) for n in problem.where}
    return {n: rounded(level(case, d), DTYPES[case.works_in]) for n, d in drawn.items()}


# -- the split call ----------------------------------------------------------------------------------------


def compare(case: Case, truth: Truth) -> Told:
    """Run a case's split call and hold this rank's tensors to the truth."""
    problem = make(case)
    cp = context(case)
    layout = cp.layout(case.T, case.kind, case.cu, case.multiple_of, case.how.get("seen"))
    others = {n: make(cp) for n, make in problem.layouts.items()}
    here = Here(cp, layout, others)
    if case.how.get("inference"):  # before the call that is trained: what is kept of it is of use there
        with torch.inference_mode():
            outputs = _call(case, problem, here, _local(case, problem, here, gradients=False))
        told = _judged(case, problem, here, outputs, {}, truth)
        if told.kind != "right":
            return told._replace(words=f"in inference mode: {told.words}")
    local = _local(case, problem, here, problem.gradients)
    outputs = _call(case, problem, here, local)
    gradients = _gradients(case, problem, here, local, outputs, truth) if problem.gradients else {}
    return _judged(case, problem, here, outputs, gradients, truth)


def _call(case: Case, problem: Problem, here: Here, local: Tensors) -> Tensors:
    cast = torch.autocast("cpu", torch.bfloat16, enabled=bool(case.how.get("autocast")))
    with torch.set_grad_enabled(problem.gradients and not torch.is_inference_mode_enabled()), cast:
        return problem.ours(local, here)


def _local(case: Case, problem: Problem, here: Here, gradients: bool) -> Tensors:
    """This rank's inputs."""
    leaves = {}
    for n, x in _quantised(case, problem).items():
        x = x.to(problem.dtypes.get(n, case.torch_dtype))
        x = here.of(problem.of.get(n)).shard(x) if n in problem.tokens else x
        leaves[n] = lain(case, n, x).requires_grad_(gradients and case.wants(n))
    return leaves


def _gradients(case: Case, problem: Problem, here: Here, local: Tensors, outputs: Tensors, truth: Truth) -> Tensors:
    """Of this rank's inputs that want one; those of shared ones summed over ranks."""
    back: Tensors = {}
    for n, d in cotangents(case, problem, {} if truth.error else truth.outputs).items():
        dim, y = problem.where[n], outputs[n]
        if isinstance(dim, int):
            d = here.of(problem.of.get(n)).shard(d, dim)
        if y.requires_grad:
            back[n] = lain(case, f"d{n}", (d / (case.P if dim is None else 1)).to(y.dtype))
    leaves = {n: x for n, x in local.items() if x.requires_grad}
    if not back or not leaves:
        return {}
    ys = [outputs[n] for n in back]
    found = dict(zip(leaves, torch.autograd.grad(ys, list(leaves.values()), list(back.values()), allow_unused=True)))
    for n, g in found.items():
        g = torch.zeros_like(leaves[n]) if g is None else g
        assert g.dtype == leaves[n].dtype, f"the gradient of {n} is {g.dtype}"
        found[n] = here.cp.comm.all_reduce(g.double()).wait() if n in problem.shared else g
    return found


def _judged(case: Case, problem: Problem, here: Here, outputs: Tensors, gradients: Tensors, truth: Truth) -> Told:
    if truth.error:
        return Told("wrong", f"the reference raises {truth.error}, the split call does not")
    wrong, worst = [], 0.0
    for n, got in (outputs | {f"d{n}": g for n, g in gradients.items()}).items():
        whole, part = _wanted(problem, here, n, truth)
        if n in problem.where and problem.where[n] == "part":
            got = here.cp.comm.all_reduce(got.detach()).wait()
        if n in outputs and got.dtype != (dtype := problem.results.get(n, DTYPES[case.works_in])):
            wrong.append(f"{n} is {got.dtype}, not {dtype}")
        off = error(got, part, _coarsest(case, problem, n), _rms(whole))
        bound = 1e-300 if n in problem.exact else _bound(case, problem, truth, n)
        worst = max(worst, off / bound)
        if not off <= bound:
            wrong.append(f"{n} is off by {off:.1e} of at most {bound:.1e}")
    return Told("wrong" if wrong else "right", "; ".join(wrong), worst)


def _bound(case: Case, problem: Problem, truth: Truth, name: str) -> float:
    coarse = _coarsest(case, problem, name)
    if coarse == "fp64":
        return problem.bound
    floor = HARD if coarse == "fp32" and case.how.get("hard") else FLOOR[coarse]
    return floor + TIMES * truth.budget.get(name, 0.0)


def _coarsest(case: Case, problem: Problem, name: str) -> str:
    """Of the dtypes that a result is computed and comes in."""
    own = problem.results.get(name) if name in problem.where else problem.dtypes.get(name[1:])
    return [d for d in DTYPES if d == case.works_in or DTYPES[d] == own][-1]


def _wanted(problem: Problem, here: Here, name: str, truth: Truth) -> tuple[Tensor, Tensor]:
    """The truth of an output or gradient, whole and of this rank."""
    if name in problem.where:
        whole, dim = truth.outputs[name], problem.where[name]
        return whole, here.of(problem.of.get(name)).shard(whole, dim) if isinstance(dim, int) else whole
    own = name[1:]
    whole = truth.gradients[own]
    return whole, here.of(problem.of.get(own)).shard(whole) if own in problem.tokens else whole


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def error(got: Tensor, want: Tensor, coarsest: str, rms: float) -> float:
    """‖got − want‖ / ‖want‖; a part counts as at least a tenth of an average one, an element as LEAST of a dtype."""
    if got.shape != want.shape:
        return math.inf
    got, want = got.detach().double(), want.double()
    if not want.numel():
        return 0.0
    if not bool(torch.isfinite(got).all()):
        return math.inf
    size = max(float(want.norm()), max(0.1 * rms, LEAST[coarsest]) * math.sqrt(want.numel()))
    return float((got - want).norm()) / size
