"""Linear recurrences on a split sequence: every exchange beside the bound and beside what others do, in one run.

    torchrun --nproc_per_node 4 -m ring_la bench scan [--ranks 2,4] [--lengths 16384,4096] [--out runs/bench_scan]

Arms are those of arms.py. Each is first compared with an fp64 run of the whole sequence and not timed if it is
off. Times are of the slowest rank, medians over rounds in which the arms take turns; no barrier stands inside what is
timed. "share" is the local arm's time over the arm's. Two tracks: as shipped (ring_la's auto, FLA CP), and one kernel
under every exchange (all others). On CUDA also replayed as CUDA graphs with --graph.

Tokens: --lengths are per rank (weak scaling over --ranks), --totals are split over the ranks (strong scaling).
Writes bench_scan.json as it goes, a table, and bench_scan.png. The JSON is what ``ring-la plan --rates`` reads.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import time
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from ring_la.algebra import Affine
from ring_la.cli.job import job
from ring_la.cli.options import amount, count
from ring_la.cli.transitions import TRANSITIONS
from ring_la.comm import Group
from ring_la.comm.group import TRANSPORTS
from ring_la.errors import ArgumentError
from ring_la.scan import Chain

from ..options import counts, names
from ..peers import fla_tuning
from ..rows import reason
from ..timing import Step, captured, in_turns, speeds
from .arms import OPS, UNSPLIT, Call, Gates, Team, error, exchanges, gate_kinds, tokens, truth
from .report import Case, Report

LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
CHECKED = {"cuda": 1024, "cpu": 192}
"""Tokens a rank when an arm is compared: on GPUs enough for retention's first heads to forget within one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", type=names(OPS), default=",".join(OPS))
    gates = (
        'half-lives of 16 to 65,536 tokens ("trained"), none, those of the production rows of bench ops; "mixed", KDA: '
        "these, but one head of eight forgets nothing"
    )
    parser.add_argument("--gates", type=names(get_args(Gates)), default="trained,none", help=gates)
    parser.add_argument("--ranks", type=counts, default=[], help="group sizes, comma-separated; default: all ranks")
    lengths = "tokens a rank, comma-separated; default 16384,4096 (CPU: 256)"
    parser.add_argument("--lengths", type=counts, default=[], help=lengths)
    parser.add_argument("--totals", type=counts, default=[], help="tokens of the whole sequence, comma-separated")
    parser.add_argument("--arms", default="", help="only arms whose names start with one of these, comma-separated")
    parser.add_argument("--skip", type=pairs, default=[], help="op:arm, comma-separated, such as kda:FLA")
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS)
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--keys", type=count, help="heads of q and k (default: as many as --heads)")
    parser.add_argument("--width", type=count, default=128, help="K and V")
    parser.add_argument("--checked", type=count, help="tokens a rank when arms are compared (default 1024, CPU: 192)")
    parser.add_argument("--peer-limit", type=float, help="errors beyond which FLA and FlashQLA are not timed")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--inner", type=count, default=8, help="calls in a row between two barriers")
    parser.add_argument("--lead", type=amount, default=8, help="calls before those, untimed: ranks are in step then")
    parser.add_argument("--quantile", type=float, default=0.5, help="of the rounds; lower where others use the machine")
    parser.add_argument("--graph", action="store_true", help="also replayed as CUDA graphs")
    parser.add_argument("--compile", action="store_true", help="only run the kernels once, on one device; no torchrun")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case is started")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_scan"), help="folder")


def run(args: argparse.Namespace) -> int:
    if args.compile:
        compile_all(args.ops, (CHECKED["cuda"], args.heads, args.width))
        return 0
    with job():
        if (most := max(args.ranks, default=1)) > dist.get_world_size():
            raise ArgumentError("--ranks", f"at most {dist.get_world_size()}, the ranks there are", most)
        report = Report(args)
        fla_tuning.few()
        for P in sorted(set(args.ranks) or {dist.get_world_size()}, reverse=True):
            group = dist.new_group(list(range(P)))
            alone = [dist.new_group([rank]) for rank in range(P)]
            if dist.get_rank() < P:
                bench(Team(group, alone[dist.get_rank()], args.transport), args, report)
        dist.barrier()
        report.finish()
    return 1 if report.wrong else 0


def compile_all(ops: list[str], shape: tuple[int, int, int]) -> None:
    """Run each op's kernels as a split call would, with states that enter and leave: what Triton compiles, it keeps."""
    device = torch.device("cuda", torch.cuda.current_device())
    for name in ops:
        x = tokens(name, "trained", shape, torch.bfloat16, device, seed=0)
        state = torch.zeros(1, shape[1], shape[2], shape[2], device=device, requires_grad=True)
        for keywords in ({}, {"initial_state": state, "output_final_state": True}):
            out = getattr(ring_la, name)(*x, **keywords)
            sum(t.float().sum() for t in out if t is not None).backward()


def pairs(text: str) -> list[tuple[str, str]]:
    """op:arm, comma-separated; none of an empty text."""
    found = [(word, *word.partition(":")) for word in text.split(",") if word]
    for word, op, _, arm in found:
        if op not in OPS or not arm:
            raise argparse.ArgumentTypeError(f"expected op:arm, ops out of {', '.join(OPS)}, got {word!r}")
    return [(op, arm) for _, op, _, arm in found]


def bench(team: Team, args: argparse.Namespace, report: Report) -> None:
    """All cases of one group size."""
    P, cuda = team.group.size, team.group.on_cuda
    cost = team.contexts["auto"].cost if P > 1 else None
    report.group(P, cost)
    if not report.speeds:
        report.speeds = speeds(team.group)
    lengths = args.lengths + [n // P for n in args.totals]
    for T in lengths or ([16384, 4096] if cuda else [256]):
        for name in args.ops:
            for gates in gate_kinds(name, args.gates):
                late = torch.tensor([time.monotonic() - report.start > args.budget], device=team.group.device)
                if team.group.all_reduce(late.float()).wait().item():
                    report.say(f"{name} {gates} P={P} T={T}: no time left")
                    continue
                measure(team, Case(name, gates, P, T, ""), args, report)
                if cuda:
                    torch.cuda.empty_cache()
    for kind in dict.fromkeys(TRANSITIONS[name] for name in args.ops) if P > 1 else ():
        like = Affine(kind, None, torch.empty(1, args.heads, args.width, args.width, device="meta"))
        case = Case(kind, "", P, 0, "exchange")
        report.add(case, in_turns(exchanges(team.group, like), team.group, **how(args)), predictions(team, like), {})


def how(args: argparse.Namespace) -> dict[str, Any]:
    return dict(rounds=args.rounds, inner=args.inner, quantile=args.quantile, warm=2, lead=args.lead)


def measure(team: Team, case: Case, args: argparse.Namespace, report: Report) -> None:
    """One case: arms that are right, timed forward and with backward, eager and as graphs."""
    group = team.group
    dtype = torch.bfloat16 if group.on_cuda else torch.float32
    calls, failed = checked(team, case, dtype, args)
    shape = (case.T, args.heads, args.width)
    x = tokens(case.op, case.gates, shape, dtype, group.device, seed=group.rank, keys=args.keys)
    do = torch.randn_like(x[2])
    state = torch.empty(1, args.heads, args.width, args.width, device="meta")
    like = Affine(TRANSITIONS[case.op], None, state)
    for what, steps in passes(calls, x, do).items():
        case, predicted = case._replace(what=what), predictions(team, like, "backward" in what)
        errors = team.errors.get((case.op, case.gates), {})
        report.add(case, in_turns(steps, group, **how(args)), predicted, failed, errors=errors)
        if args.graph and group.on_cuda:
            graphs, refused = agreed(group, *captured(steps))
            report.add(case, in_turns(graphs, group, **how(args)), {}, refused, "graph")


def agreed(group: Group, graphs: dict[str, Step], refused: dict[str, str]) -> tuple[dict[str, Step], dict[str, str]]:
    """What `captured` gives, less what another rank could not capture: it would be waited for. Collective."""
    labels = sorted({*graphs, *refused})
    mine = torch.tensor([float(label in graphs) for label in labels], device=group.device)
    everywhere = group.all_reduce(mine, op=dist.ReduceOp.MIN).wait().tolist()
    for label, had in zip(labels, everywhere):
        if not had and label in graphs:
            refused[label] = "not capturable on another rank"
    return {label: replay for label, replay in graphs.items() if label not in refused}, refused


def checked(
    team: Team, case: Case, dtype: torch.dtype, args: argparse.Namespace
) -> tuple[dict[str, Call], dict[str, str]]:
    """(arms to time, {arm: why it is not timed}): an arm must agree with the whole sequence's fp64 run first."""
    calls = team.arms(case.op, case.gates, case.T, which := [word for word in args.arms.split(",") if word])
    if not calls:
        every = ", ".join(team.arms(case.op, case.gates, case.T))
        raise ArgumentError("--arms", f"beginnings of {every}", ",".join(which))
    known = team.refused.setdefault((case.op, case.gates), {})
    for op, arm in args.skip:
        known |= {label: "skipped" for label in calls if op == case.op and label.startswith(arm)}
    for label, why in refusals(team, case, dtype, args, [n for n in calls if n not in (*UNSPLIT, *known)]).items():
        known[label] = why
    if (least := args.keys or args.heads) % team.group.size or args.heads % team.group.size:
        known["Ulysses pattern"] = f"{least} heads do not divide among {team.group.size} ranks"
    failed = {label: known[label] for label in calls if known.get(label)}
    return {label: call for label, call in calls.items() if label not in failed}, failed


def refusals(team: Team, case: Case, dtype: torch.dtype, args: argparse.Namespace, labels: list[str]) -> dict[str, str]:
    """Why each of these arms must not be timed, or an empty string: on a short sequence, against the whole in fp64."""
    if not labels:
        return {}
    P, device = team.group.size, team.group.device
    T, more = args.checked or CHECKED[device.type], P // math.gcd(args.keys or args.heads, P)
    shape, keys = (T * P, more * args.heads, args.width), more * args.keys if args.keys else None
    whole = tokens(case.op, case.gates, shape, dtype, device, seed=7, keys=keys)
    draw = torch.Generator(device).manual_seed(8)
    do = torch.randn(whole[2].shape, generator=draw, device=device).to(dtype)
    true, calls, why = truth(case.op, whole, do), team.arms(case.op, case.gates, T, labels), {}
    for label in labels:
        limit = args.peer_limit if args.peer_limit and label.startswith("F") else LIMITS[dtype]
        try:
            off = error(calls[label], whole, true, do, team.group)
            why[label] = "" if off <= limit else f"wrong: error {off:.1e}"
            team.errors.setdefault((case.op, case.gates), {})[label] = off
        except Exception as e:  # the same on every rank: what cannot run is a line of the table
            why[label] = reason(e)
    return why


def passes(calls: dict[str, Call], x: list[Tensor], do: Tensor) -> dict[str, dict[str, Step]]:
    """A step for each arm: forward without gradients, and forward with backward."""

    def forward(call: Call) -> Step:
        def step() -> None:
            with torch.no_grad():
                call(*x)

        return step

    def both(call: Call) -> Step:
        return lambda: torch.autograd.grad(call(*x), x, do)

    return {
        "forward": {label: forward(call) for label, call in calls.items()},
        "forward+backward": {label: both(call) for label, call in calls.items()},
    }


def predictions(team: Team, like: Affine, backward: bool = False) -> dict[str, float]:
    """Seconds the cost model gives the exchange of each strategy, one link a rank."""
    cp = team.contexts.get("auto")
    return cp.cost.predict(Chain.of(cp.layout(cp.size, "contiguous")), like, backward) if cp else {}
