"""What ptxas makes of every kind of launch that tests make in Triton's interpreter; no GPU.

    LAUNCHES=FILE python -m pytest -p tests.gpu.check_launches tests/kernels tests/softmax     # notes them
    python -m tests.gpu.check_launches FILE [--part 0 --parts 2]                               # compiles and searches

A kind is a kernel, its constants, dtypes, and what Triton specialises of its sizes. Each is compiled for sm_90 and
searched as `check_registers` does, whose cases are chosen; here odd head sizes come, too. Ranks of their own are not
noted. What only the interpreter takes (tiles of 8 rows, helpers of kernels) does not compile and is counted. One to
three seconds a kind. Exits 1 if any kernel is found.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any

import pytest
import torch

NOTED: set[str] = set()
NAMES = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "int32": "i32", "int64": "i64",
    "int8": "i8", "uint8": "u8", "bool": "i1", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip
KEPT = int, float, bool, str, type(None)


def _kind(x: Any) -> list:
    """Of an argument what a kernel is compiled for."""
    if isinstance(x, torch.Tensor):
        return ["tensor", str(x.dtype)[6:]]
    if type(x).__name__ == "TensorDescriptor":
        return ["described", str(x.base.dtype)[6:], [*x.block_shape]]
    if isinstance(x, int) and not isinstance(x, bool):
        return ["size", 1 if x == 1 else 16 if x % 16 == 0 else 3]
    return [type(x).__name__]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have every module's `launch` note what it launches."""
    from ring_la.kernels.runtime import launch as module

    plain = module.launch

    def noting(kernel, grid, *args, **constants):
        function = getattr(kernel, "fn", kernel)
        kept = {n: c for n, c in constants.items() if isinstance(c, KEPT)}
        line = json.dumps([function.__module__, function.__name__, [_kind(x) for x in args], kept])
        if line not in NOTED:
            NOTED.add(line)
            with open(os.environ["LAUNCHES"], "a") as file:
                file.write(f"{line}\n")
        return plain(kernel, grid, *args, **constants)

    for one in [m for m in sys.modules.values() if getattr(m, "launch", None) is plain]:
        vars(one)["launch"] = noting


def compiled(kernel: Any, arguments: list[list], constants: dict[str, Any]) -> Any:
    """The kernel as such a launch would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .check_registers import OPTIONS

    names, free = kernel.arg_names, {*(kernel.do_not_specialize or ())}
    fixed: dict[str, Any] = {n: c for n, c in constants.items() if n in names}
    types, wide = dict.fromkeys(fixed, "constexpr"), {}
    for i, (name, (what, *more)) in enumerate(zip(names, arguments)):
        if what == "NoneType" or (what == "size" and more[0] == 1 and not {name, i} & free):
            fixed[name], types[name] = (None if what == "NoneType" else 1), "constexpr"
            continue
        kinds = {"size": "i32", "bool": "i1", "float": "fp32"}
        described = f"tensordesc<{NAMES[more[0]]}{more[1]}>" if what == "described" else ""
        types[name] = f"*{NAMES[more[0]]}" if what == "tensor" else described or kinds[what]
        if what == "tensor" or (what == "size" and more[0] == 16 and not {name, i} & free):
            wide[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, {n: types[n] for n in names}, {(names.index(n),): c for n, c in fixed.items()}, wide)
    options = {n: c for n, c in constants.items() if n in OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--part", type=int, default=0, help="of --parts, this one alone")
    parser.add_argument("--parts", type=int, default=1)
    options = parser.parse_args()
    from .check_registers import adrift, disassembled, torn, unwritten

    searched = left = bad = 0
    with open(options.file) as file:
        lines = file.readlines()[options.part :: options.parts]
    for line in lines:
        where, name, arguments, constants = json.loads(line)
        try:
            binary = compiled(getattr(importlib.import_module(where), name), arguments, constants)
        except Exception as error:
            left += 1
            print("not compiled", name, str(error).strip().splitlines()[-1][:100], flush=True)
            continue
        sass = disassembled(binary.asm["cubin"], "nvdisasm", "-c")
        found = unwritten(sass) + torn(sass) + adrift(sass)
        searched, bad = searched + 1, bad + bool(found)
        if found:
            print("BAD", where, name, constants, *found[:2], flush=True)
    print(
        f"{searched} kinds of launches, {bad} with a register or an address that nothing defines; {left} not compiled"
    )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
