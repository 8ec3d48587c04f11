"""Whether another checkout compiles the same kernels, asked without a GPU: `python -m tests.gpu.compare_code OTHER`.

Each checkout's own `check_registers` says what is launched in all cases of `test_triton`, in a process of its own. Of
every kernel with its constants and classes of arguments is kept a digest of Triton's IR, all device functions inlined
and names of kernels, variables and lines left out, with the options it is compiled with: behind it the same compiler
does the same. Of one in --sass N (the same ones in both checkouts, by digest; 0: none) the machine code for sm_90 is
made and compared, too. A tenth of a second a kernel, and a second or two where machine code is made. Exits 1 where
OTHER compiles something that this checkout does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parents[2]


def intermediate(source, target, options):
    """Triton's IR before layouts are chosen (of a kernel in Gluon, which chooses them: behind that), and options."""
    from triton.compiler.compiler import ir, make_backend

    backend, stages = make_backend(target), {}
    options = backend.parse_options(options | source.parse_options())
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    text = next(iter(stages.values()))(module, asdict(options)).str_nodebug()
    return re.sub(r"@[\w.$]+", "@kernel", text) + repr(options)


def digests(rules: list[str], part: int, file: Path) -> None:
    """A line of JSON a kernel of the checkout that this process imports from."""
    import triton

    from tests.gpu import check_registers as checkout

    triton.knobs.compilation.always_compile = True  # and so what a cache holds of another checkout is not found
    real, made = triton.compile, SimpleNamespace()

    def compile(source, target, options):
        made.ir = hashlib.sha256(intermediate(source, target, options).encode()).hexdigest()[:16]
        wanted = part and int(made.ir, 16) % part == 0
        made.cubin = real(source, target=target, options=options).asm["cubin"] if wanted else None

    checkout.prepare()
    triton.compile, seen = compile, set()
    with open(file, "w") as out:
        for case in checkout.cases(rules):
            for kernel, tensors, constants in checkout.launched(case):
                classes = [checkout.class_of(x, True) for x in tensors]
                key = kernel.__name__, *constants.items(), *classes
                if key in seen:
                    continue
                seen.add(key)
                checkout.compiled(kernel, tensors, constants)
                sass = made.cubin and checkout.digest(kernel, checkout.disassembled(made.cubin, "nvdisasm", "-c"))
                about = {"kernel": kernel.__name__, "constants": str(constants), "arguments": str(classes)}
                print(json.dumps(about | {"rule": case.rule, "ir": made.ir, "sass": sass}), file=out, flush=True)


def compiled_in(checkout: Path, arguments: argparse.Namespace, file: Path) -> list[dict]:
    """What a process in a checkout notes."""
    command = [sys.executable, str(Path(__file__).resolve()), ".", "--rules", arguments.rules]
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"} | {"PYTHONPATH": "."}
    command += ["--sass", str(arguments.sass), "--digests", str(file.resolve())]
    subprocess.run(command, cwd=checkout, env=environment, check=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


def named(row: dict) -> dict:
    return {n: row[n] for n in ("rule", "kernel", "constants", "arguments")}


def compared(before: list[dict], now: list[dict]) -> dict:
    """How many kernels of a checkout the other compiles alike, by IR and by machine code, and which it does not."""
    ir, sass = ({row[kind]: row for row in now} for kind in ("ir", "sass"))
    made = [row for row in before if row["sass"]]
    return {
        "kernels_before": len(before),
        "kernels_now": len(now),
        "by_rule": dict(Counter(row["rule"] for row in before)),
        "of_equal_ir": sum(row["ir"] in ir for row in before),
        "machine_code_made": len(made),
        "of_equal_machine_code": sum(row["sass"] in sass for row in made),
        "other_ir": [named(row) for row in before if row["ir"] not in ir],
        "other_machine_code": [named(row) for row in made if row["sass"] not in sass],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout, or what git archive wrote of one")
    parser.add_argument("--rules", default="", help="of the recurrences, with commas; all")
    parser.add_argument("--sass", type=int, default=10, metavar="N", help="machine code of one kernel in N")
    parser.add_argument("--json", type=Path, help="a file that gets what was found")
    parser.add_argument("--digests", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.digests:
        from tests.support.triton_cases import RULES

        digests(arguments.rules.split(",") if arguments.rules else list(RULES), arguments.sass, arguments.digests)
        return
    with tempfile.TemporaryDirectory() as folder:
        files = (Path(folder) / name for name in ("before", "now"))
        found = compared(*(compiled_in(at, arguments, f) for at, f in zip((arguments.other, HERE), files)))
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(found["other_ir"] or found["other_machine_code"]))


if __name__ == "__main__":
    main()
