"""What ptxas made of every Triton kernel, read without a GPU: `python -m tests.gpu.check_registers [--rules …]`.

ptxas 12.8, which comes with Triton 3.6, at times drops the instruction that defines a uniform register and keeps those
that read it. A product that takes its operand's address from there reads outside of shared memory, or what lies
elsewhere. Here every launch of `test_triton`'s cases, and of `OTHERS`, is compiled for sm_90, disassembled, and
searched for uniform registers that are read where no earlier line has written them, for sums of 64 bits that take
both halves from one register, where an earlier line had written something else, and for operands' addresses that come
from a kernel's arguments. Prints what it finds, or with --show
the registers, spilled bytes and shared memory of every kernel, and exits 1 if there is any. A second or two a kernel.

`--arch 80` (Ampere), 89 (Ada), 100 or 120 (Blackwell) compiles what such a GPU runs instead, the forms in Triton, and
finds kernels that want more shared memory than a program gets there.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ring_la.algebra import Rule
from ring_la.kernels import gpu, in_order
from ring_la.kernels.families import recurrence
from ring_la.kernels.protocol import Backward, Inputs, Local, OutputUse, SpanMaps
from ring_la.kernels.runtime.triton_version import class_of
from ring_la.kernels.spans import plan, table
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.runs import Runs
from tests.gpu.test_triton import cases
from tests.support.launches import launched_by
from tests.support.line_of_ranks import groups
from tests.support.triton_cases import RULES, Case

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}
LARGE = table.DESCRIBED
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KB of shared memory a program gets at most, by architecture (CUDA C++ programming guide)."""
OPTIONS = "num_warps", "num_stages", "maxnreg", "enable_fp_fusion"
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")


def recorded(launches: list) -> AbstractContextManager[None]:
    """Launches of every module that makes any noted instead of made."""
    return launched_by(lambda kernel, grid, *args, tensors="", **constants: launches.append((kernel, args, constants)))


def launched(case: Case) -> list:
    """The launches of one forward and one backward, with states and without."""
    return [one for launches in forms(case).values() for one in launches]


def forms(case: Case) -> dict[str, list]:
    """The launches of a call by the ways it may go: all in one, its backward with what its forward saved and without,
    with an exchange of states between its parts, with no states, for the queries' gradient alone, and with states that
    go from chunk to chunk."""
    x, rule = case.inputs(), Rule.parse(case.rule)
    table.DESCRIBED = 0 if case.bulk else LARGE
    pieces = 1 if case.cu is None else len(case.cu) - 1
    S = torch.zeros(case.B, pieces, case.H, case.K, case.V) if case.states else None
    cu = None if case.cu is None else torch.tensor(case.cu)
    do, out = torch.zeros_like(x.v), {}

    def made(saved: bool = False) -> Local:
        return recurrence(rule, x, cu, 1.0, OutputUse(saved))

    def check() -> None:
        run = made(not case.states)
        saved = run.output(S).saved
        made().gradients(Backward(S, do, saved, case.gate), S)
        if case.states:
            run.adjoint(Backward(None, do), S)
            run.summary(None, True)

    def whole() -> None:
        saved = made(True).output(S).saved
        made().gradients(Backward(S, do, saved, case.gate), S)

    def split() -> None:
        run = made(True)
        backward = Backward(S, do, run.output(S, run.prepare(run.summary(S, True))).saved, case.gate)
        run = made()
        run.gradients(backward, S, run.prepare_gradients(backward, run.adjoint(backward, S)))

    def bare() -> None:
        made().output(None)
        made().gradients(Backward(None, do, (), case.gate), None)

    def queries() -> None:
        if rule.decay == "diagonal" and rule.write in ("additive", "delta"):
            for q in (x.q, x.q.float()):
                recurrence(rule, x._replace(q=q), cu, 1.0, OutputUse()).gradients(Backward(S, do, queries=True), None)

    def deterministic() -> None:
        if not in_order.reason_against(rule, x, case.T):
            offsets = torch.tensor(case.cu or (0, case.T), dtype=torch.int32)
            run = in_order.Pieces.of(case.T, offsets)
            start = torch.zeros(case.B, len(offsets) - 1, case.H, case.K, case.V)
            in_order.forward(rule, x, run, 1.0, start, False)
            saved = in_order.forward(rule, x, run, 1.0, start, True).saved
            in_order.gradients(rule, x, run, 1.0, Backward(start, do, saved), start)

    for form in (check, whole, split, bare, queries, deterministic):
        with recorded(out.setdefault(form.__name__, [])):
            form()
    return out


def momentum() -> Iterator[tuple[str, list]]:
    """The launches of the momentum delta rule at head sizes of every pair of tiles that it takes, in both dtypes."""
    import ring_la.kernels.momentum.chunks as taken
    from ring_la.kernels.momentum import after, before, gates, gradients, squares, walks  # noqa: F401

    some = (taken.SIZES[0], 64, 128)
    for dtype, K, V in itertools.product(taken.NARROW, some, some):
        for B, cu in ((1, (0, 70, 200)), (2, (0, 200))):
            tokens = [torch.zeros(B, 200, 2, D, dtype=dtype).requires_grad_() for D in (K, K, V, K)]
            tokens += [torch.zeros(B, 200, 2).requires_grad_() for _ in range(4)]
            states = tuple(torch.zeros(2, 2, K, V).requires_grad_() for _ in range(2)) if B == 1 else None
            with recorded(launches := []):
                sum(x.sum() for x in taken.chunks(tokens, states, cu, 0.5)).backward()
            yield f"{K}x{V}", launches


def mesa() -> Iterator[tuple[str, list]]:
    """Those of MesaNet's solver."""
    from ring_la.kernels.conjugate_gradients.solve import System, solved

    for dtype, K in itertools.product((torch.bfloat16, torch.float16, torch.float32), (64, 128)):
        k, g, lam = torch.zeros(1, 200, 2, K, dtype=dtype), torch.zeros(1, 200, 2), torch.ones(2, K)
        with recorded(launches := []):
            solved(k, System(k, g, g, lam, torch.zeros(2, 2, K, K)), (0, 70, 200), 30)
        yield str(K), launches


def slots() -> Iterator[tuple[str, list]]:
    """Those of gated slot attention: gated linear attention that reads the other side, and one of wide queries."""
    import ring_la
    from ring_la.kernels import choice, families

    taken = choice.unsupported
    choice.unsupported = lambda rule, x, recurrent=False: families.unsupported(rule, x)
    half = torch.float16, torch.bfloat16
    sizes = [(M, K, d, True) for M, K in ((32, 64), (32, 128), (64, 64), (16, 128)) for d in half]
    sizes += [(64, 128, torch.bfloat16, True), (128, 128, torch.float16, True), (32, 64, torch.float16, False)]
    sizes.append((32, 64, torch.float32, True))
    try:
        for M, K, dtype, states in sizes:
            tokens = [torch.zeros(1, 63, 1, D, dtype=dtype).requires_grad_() for D in (K, K, K, M, M)]
            first = (torch.zeros(1, 1, K, M), torch.zeros(1, 1, M, K)) if states else None
            with recorded(found := []):
                out = ring_la.gated_slot_attention(
                    *tokens, initial_state=first, output_final_state=states, backend="triton"
                )
                sum(x.sum() for x in (out.o, *(out.final_state or ()))).backward()
            yield f"{M} of {K}", found
    finally:
        choice.unsupported = taken


def across() -> Iterator[tuple[str, list]]:
    """Those of the scans over spans whose maps say which transitions are 0, as kernels in CUDA C++ find them."""
    from ring_la.kernels.spans.prefix import dense_transitions_of_pieces, prefix

    x = torch.zeros(1, 256, 2, 128, dtype=torch.bfloat16)
    inputs = Inputs(x, x, x, torch.zeros(1, 256, 2), torch.zeros(1, 256, 2))
    for cu in (None, torch.tensor((0, 100, 256), dtype=torch.int32)):
        runs = Runs(64, 32, 5, 1 if cu is None else 2, *((None, None) if cu is None else torch.zeros(2, 5, 6).int()))
        made = SpanPlan.of(Rule("delta", "scalar"), inputs, cu, 1.0, (runs, runs))
        states, zero = torch.zeros(1, 5, 2, 128, 128), torch.zeros(1, 5, 2, dtype=torch.int32)
        maps, S = SpanMaps("dense", states, states, True, zero), made.states_of_pieces()
        with recorded(found := []):
            for S0, reverse, enter in itertools.product((None, S), (False, True), (False, True)):
                prefix(made, maps, S0, reverse, enter)
            dense_transitions_of_pieces(made, maps)
        yield "128x128", found


def links() -> Iterator[tuple[str, list]]:
    """Those of a link of the ring under dense maps: first, in the middle, last, of a rank's own states and packed."""
    from ring_la.scan.mailbox_ring import DenseMaps, Hop, LinkStates, launch_dense

    (group,) = groups(1, torch.device("cpu"))
    group.mailboxes.constants["CLOCK"] = True
    ends = Hop(None, 1, False), Hop(1, 1, True), Hop(1, None, False), Hop(None, 1, True, earlier=0)
    for K, V in ((128, 128), (16, 16), (64, 128), (256, 128)):
        A, b, S = torch.zeros(1, 5, 2, K, K), torch.zeros(1, 5, 2, K, V), torch.zeros(1, 1, 2, K, V)
        with recorded(found := []):
            flags = torch.zeros(1, 5, 2, dtype=torch.int32)
            known = [dict(through=(A[:, :1], S)), dict(zero=flags, squares=torch.zeros(1, 5, 2, 8))]
            for hop, more, packed, reverse in itertools.product(ends, known, (False, True), (False, True)):
                first = torch.zeros(1, 2, dtype=torch.int32)
                maps = DenseMaps(A, b, first=first if packed else None, **more)
                for leaving in (None, S):
                    states = LinkStates(None if hop.earlier is None else S, b, leaving)
                    launch_dense(group, maps, states, hop, reverse=reverse)
            launch_dense(group, DenseMaps(None, b), LinkStates(None, b, None), Hop(1, 1, False))
        yield f"{K}x{V}", found


def attention() -> Iterator[tuple[str, list]]:
    """Softmax attention of every score, heads of every pair of widths; and in blocks at fixed places."""
    from ring_la.softmax.backends import QueryRows
    from ring_la.softmax.backends.triton import CanonicalTriton, TritonBackend, kernels  # noqa: F401
    from ring_la.softmax.geometry import Pair, Tokens
    from ring_la.softmax.merging import Gradients, Partial
    from ring_la.softmax.scores import Scores

    tokens, scores = Tokens.whole(170, torch.device("cpu"), (0, 70, 170)), Scores(0.3, softcap=5.0, right=0)
    pair = Pair(tokens, tokens, scores.reach)
    for dtype, K, V in itertools.product((torch.bfloat16, torch.float32), (16, 24, 64, 96), (5, 24, 64)):
        q, k, v = (torch.zeros(1, 170, 3, D, dtype=dtype) for D in (K, K, V))
        lse, x = torch.zeros(1, 3, 170), torch.zeros(1, 170, 3, V, dtype=dtype)
        rows = QueryRows(q, x, x, lse, lse)
        with recorded(launches := []):
            for backend in (TritonBackend(), CanonicalTriton()):
                backend.forward(q, k, v, scores, pair, Partial(x.shape, dtype, q.device))
            TritonBackend().backward(rows, k, v, scores, pair, Gradients.of(q, k, v))
            CanonicalTriton().query_gradients(rows, k, v, scores, pair)
            CanonicalTriton().key_gradients(rows, k, v, scores, pair)
        yield f"{K}x{V}", launches


OTHERS = {"momentum": momentum, "mesa": mesa, "slots": slots, "across": across, "links": links, "attention": attention}
"""Kernels that no rule of the algebra has, and launches of rules that only others make."""


def launches(rules: list[str]) -> Iterator[tuple[str, list]]:
    """What a line says of launches, and these."""
    for case in cases([r for r in rules if r not in OTHERS]):
        yield f"{case.rule} {case.K}x{case.V}", launched(case)
    for name in OTHERS.keys() & rules:
        for sizes, found in OTHERS[name]():
            yield f"{name} {sizes}", found


def prepare(arch: int = 90) -> None:
    """Small inputs take the ways of large ones, and of an H200 or another GPU."""
    table.LEAST_CHUNKS, table.SAVED_WEIGHED, plan.hopper = 1, 0, lambda device: arch == 90
    plan.little_shared, gpu.copies_tiles = lambda device: SHARED[arch] < 128, lambda device: arch >= 90


def compiled(kernel, args: tuple, constants: dict, arch: int = 90):
    """The kernel as a launch with these arguments would compile it."""
    names = kernel.arg_names
    given = dict(zip(names, args))
    fixed = {n: c for n, c in constants.items() if n not in OPTIONS} | {n: a for n, a in given.items() if a is None}
    signature = {n: "constexpr" for n in fixed}
    for name, value in given.items():
        if value is not None:
            kind = {float: "fp32", int: "i32"}.get(type(value))
            if isinstance(value, TensorDescriptor):
                kind = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
            signature[name] = kind or "*" + TYPES[value.dtype]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, {n: signature[n] for n in names}, {(names.index(n),): c for n, c in fixed.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")},
    )  # fmt: skip
    options = {n: c for n, c in constants.items() if n in OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def disassembled(cubin: bytes, tool: str, *flags: str) -> str:
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([folder / tool, *flags, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def unwritten(sass: str) -> list[str]:
    """Instructions that read a uniform register no earlier line writes."""
    written, found = set(), []
    for line in filter(None, map(INSTRUCTION.match, sass.splitlines())):
        name, operands = line[2], re.split(r",(?![^\[]*\])", line[3])
        if name.startswith("ULOP3") and operands[0].startswith("UP"):  # a predicate beside its result
            operands = operands[1:]
        target = re.fullmatch(r"UR(\d+)", operands[0].strip())
        reads = set()
        for operand in operands[bool(target) :]:
            for n in map(int, re.findall(r"\bUR(\d+)\b", operand)):
                if "gdesc" in operand:  # four registers; where the left operand is in registers, the last two
                    reads |= {n + 2, n + 3} if re.match(r"\s*R\d+", operands[1]) else set(range(n, n + 4))
                else:
                    reads |= {n, n + 1} if (".64" in name + operand and name[0] == "U") or ".64" in operand else {n}
        if reads - written:
            found.append(line[0].strip())
        if target:
            wide = 2 if ".64" in name or ".WIDE" in name else 1
            written |= {int(target[1]) + i for i in range(wide)}
    return found


def torn(sass: str) -> list[str]:
    """Instructions that make the upper half of a 64-bit sum from the register that the lower half was made from: a
    product's operand is then wherever a register says that an earlier line wrote for something else."""
    lower: dict[str, set[str]] = {}
    found = []
    for line in filter(None, map(INSTRUCTION.match, sass.splitlines())):
        name, operands = line[2], [x.strip() for x in line[3].split(",")]
        read = {x for x in operands[1:] if re.fullmatch(r"UR\d+", x)}
        carries = [x for x in operands if re.fullmatch(r"UP\d", x)]
        if name == "UIADD3.X" and any(read & lower.get(x, set()) for x in carries):
            found.append(line[0].strip())
        written = {operands[0]}
        if re.search(r"\.(WIDE|64)\b", name) and (target := re.fullmatch(r"UR(\d+)", operands[0])):
            written.add(f"UR{int(target[1]) + 1}")  # of a pair
        for reads in lower.values():
            reads -= written
        if name == "UIADD3":
            lower |= {x: read for x in carries}
    return found


def adrift(sass: str) -> list[str]:
    """Products whose operand's address is made from an argument of the kernel: it should come from a field of 14 bits,
    or out of a register that kept it."""
    arguments: set[int] = set()
    found = []
    for line in filter(None, map(INSTRUCTION.match, sass.splitlines())):
        name, operands = line[2], [x.strip() for x in re.split(r",(?![^\[]*\])", line[3])]
        for described in (re.match(r"gdesc\[UR(\d+)\]", x) for x in operands):
            if described:
                first = int(described[1])  # four registers; where the left operand is in registers, the last two
                lower = {first + 2} if re.match(r"R\d+", operands[1]) else {first, first + 2}
                found += [line[0].strip()] if lower & arguments else []
        if not (target := re.fullmatch(r"UR(\d+)", operands[0])):
            continue
        read = {int(n) for x in operands[1:] for n in re.findall(r"\bUR(\d+)\b", x)}
        wrong = name.startswith("ULDC") or (re.match(r"UMOV|UIADD3(?!\.X)", name) and read and read <= arguments)
        for n in range(int(target[1]), int(target[1]) + 1 + bool(re.search(r"\.(WIDE|64)\b", name))):
            (arguments.add if wrong else arguments.discard)(n)
    return found


def digest(kernel, sass: str) -> str:
    """Of machine code, whatever its kernel is called: two versions of the package compare what they compile."""
    code = [line for line in sass.replace(kernel.__name__, "").splitlines() if not line.lstrip().startswith("//")]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default=",".join((*RULES, *OTHERS)))
    parser.add_argument("--show", action="store_true", help="print every kernel")
    parser.add_argument("--digest", help="a file that gets every kernel's name, constants and digest of its code")
    parser.add_argument("--arch", type=int, default=90, choices=SHARED)
    args = parser.parse_args()
    prepare(args.arch)
    seen, bad = set(), 0
    for name, found_launches in launches(args.rules.split(",")):
        for kernel, tensors, constants in found_launches:
            key = kernel.__name__, *constants.items(), *(class_of(x, True) for x in tensors)
            if key in seen:
                continue
            seen.add(key)
            binary = compiled(kernel, tensors, constants, args.arch)
            if args.arch != 90:
                over = binary.metadata.shared > SHARED[args.arch] * 1024
                bad += over
                if over or args.show:
                    what = "BAD" if over else "ok ", name, kernel.__name__, constants
                    print(*what, f"shared {binary.metadata.shared}", flush=True)
                continue
            sass = disassembled(binary.asm["cubin"], "nvdisasm", "-c")
            found = unwritten(sass) + torn(sass) + adrift(sass)
            if args.digest:
                with open(args.digest, "a") as file:
                    print(kernel.__name__, digest(kernel, sass), constants, file=file)
            bad += bool(found)
            if found or args.show:
                used = re.search(r"REG:(\d+) STACK:(\d+)", disassembled(binary.asm["cubin"], "cuobjdump", "-res-usage"))
                print("BAD" if found else "ok ", name, kernel.__name__, constants,
                      f"registers {used[1]} spilled {used[2]} shared {binary.metadata.shared}", *found[:2],
                      flush=True)  # fmt: skip
    fault = "read a uniform register that nothing wrote" if args.arch == 90 else "want more shared memory than there is"
    print(f"{len(seen)} kernels, {bad} {fault}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
