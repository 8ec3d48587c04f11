"""Build flash-attn 2 from its source distribution for this GPU: bf16, head widths 64 and 128, no dropout, no ALiBi.

    python -m benchmarks.attention.build_flash_attn SOURCE SITE [--jobs 16] [--widths 128]

SOURCE is the unpacked source distribution (``pip download --no-binary flash-attn flash-attn==2.8.3.post2``), SITE the
folder that PYTHONPATH then names. The whole package has 72 kernel files; a width of this dtype has six.
Needs nvcc and ninja.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import time
from collections.abc import Sequence

NAME = "flash_attn_2_cuda"
DEFINES = tuple(f"-DFLASHATTENTION_DISABLE_{what}" for what in ("DROPOUT", "ALIBI", "UNEVEN_K"))
UNDEFINED = tuple(f"-U__CUDA_NO_{what}__" for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS"))
FLAGS = ("-O3", *UNDEFINED, "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "--expt-relaxed-constexpr", "--use_fast_math")
SWITCHES = """
#undef FP16_SWITCH
#define FP16_SWITCH(COND, ...)                                            \\
  [&] {                                                                   \\
    TORCH_CHECK(!(COND), "flash-attn was built for bf16 alone");          \\
    using elem_type = cutlass::bfloat16_t;                                \\
    return __VA_ARGS__();                                                 \\
  }()
#undef HEADDIM_SWITCH
#define HEADDIM_SWITCH(HEADDIM, ...)                                   \\
  [&] {                                                                \\
    TORCH_CHECK(WIDTHS, "flash-attn was built without this head width"); \\
BRANCHES
  }()
"""
"""What dispatches to kernels that are not built, put behind the package's own."""
BRANCH = """\
    if ((HEADDIM) == {0}) {{                                             \\
      constexpr static int kHeadDim = {0};                               \\
      return __VA_ARGS__();                                            \\
    }}                                                                  \\"""


def switches(widths: Sequence[int]) -> str:
    """What dispatches to these widths alone; the last needs no condition, as C++ wants a value from every path."""
    *first, last = (BRANCH.format(D) for D in widths)
    last = "\n".join(last.splitlines()[1:-1])
    known = " || ".join(f"(HEADDIM) == {D}" for D in widths)
    return SWITCHES.replace("WIDTHS", known).replace("BRANCHES", "\n".join([*first, last]))


def sources(folder: pathlib.Path, widths: Sequence[int]) -> list[pathlib.Path]:
    """The files to compile, the longest first."""
    passes = ("bwd", "fwd_split", "fwd")
    masks = ("_causal", "")
    names = [f"flash_{p}_hdim{D}_bf16{mask}_sm80.cu" for p in passes for D in sorted(widths)[::-1] for mask in masks]
    return [*(folder / "src" / name for name in names), folder / "flash_api.cpp"]


def build(source: pathlib.Path, site: pathlib.Path, jobs: int, widths: Sequence[int]) -> None:
    """Compile the extension into `site` and put the package's Python files beside it."""
    from torch.utils.cpp_extension import load

    code = source / "csrc" / "flash_attn"
    switch = code / "src" / "static_switch.h"
    if (added := switches(widths)) not in switch.read_text():
        switch.write_text(switch.read_text() + added)
    site.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source / "flash_attn", site / "flash_attn", dirs_exist_ok=True, ignore=_not_version_4)
    work = site.with_name(site.name + "-build")
    work.mkdir(exist_ok=True)
    os.environ |= dict(MAX_JOBS=str(jobs), TORCH_CUDA_ARCH_LIST="9.0")
    load(
        NAME,
        [str(x) for x in sources(code, widths)],
        extra_cflags=["-O3", *DEFINES],
        extra_cuda_cflags=[*FLAGS, "--expt-extended-lambda", *DEFINES],
        extra_include_paths=[str(x) for x in (code, code / "src", source / "csrc" / "cutlass" / "include")],
        build_directory=str(work),
        verbose=True,
    )
    shutil.copy(work / f"{NAME}.so", site / f"{NAME}.so")


def _not_version_4(folder: str, names: list[str]) -> list[str]:
    """The source distribution carries an older flash_attn.cute, which flash-attn-4 brings itself."""
    return [name for name in names if name == "cute" and pathlib.Path(folder).name == "flash_attn"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128], choices=(64, 128), help="of heads")
    args = parser.parse_args()
    start = time.time()
    build(args.source, args.site, args.jobs, args.widths)
    print(f"built in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
