"""The package's shape: imports go upward only, the public names are these, and importing does nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import ring_la
from ring_la.recurrences import RECURRENCES
from tests.support.rooms import House

ROOT = Path(ring_la.__file__).parent

LEVELS = [
    {"errors", "outputs", "choices", "version"},
    {"algebra", "autograd", "balanced", "kept", "schemas"},
    {"layout", "reference"},
    {"kernels"},
    {"comm"},
    {"scan", "grouped_gemm"},
    {"context"},
    {"checks", "nans", "capturing", "reading"},
    {"blockwise"},
    {"running_sum", "levels"},
    {"linear", "softmax"},
    {"indexers", "log_linear"},
    {"keystore"},
    {"nsa"},
    {"conv"},
    {"recurrences"},
    {"define"},
    {"testing"},
    {"nn"},
    {"models"},
    {"inference"},
    {"integrations"},
    {"training"},
    {"serving"},
    {"reporting"},
    {"cli"},
]
"""Bottom to top; a module may import what stands below it, and its own package."""

PUBLIC = {
    "ArgumentError",
    "AttentionOutput",
    "Buckets",
    "ContextParallel",
    "DisagreementError",
    "GridLayout",
    "Halo",
    "LinearAttentionOutput",
    "MLAOutput",
    "NSAOutput",
    "NotFiniteError",
    "PeerError",
    "RingLAError",
    "SecondDerivativeError",
    "ShardedLayout",
    "ShortConvOutput",
    "TokenShiftOutput",
    "UnsupportedError",
    "attention",
    "by_block",
    "capture",
    "find_nans",
    "forgetting_attention",
    "grouped_gemm",
    "log_linear_attention",
    "mla",
    "nsa",
    "reference",
    "short_conv",
    "sparse_attention",
    "token_shift",
} | {r.name for r in RECURRENCES}


@cache
def house() -> House:
    """The package, parsed once."""
    return House(ROOT.parent)


def nodes(file: Path) -> list[ast.AST]:
    """All there is in a file."""
    return house().nodes.get(file) or list(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> set[str]:
    """First-level ring_la modules a file imports."""
    package = ["ring_la", *file.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in nodes(file):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [module] if len(module) > 1 else [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        found |= {name[1] for name in names if name[:1] == ["ring_la"] and len(name) > 1}
    return found


def uses() -> set[tuple[str, str]]:
    """Which module or package of ring_la imports which."""
    found = set()
    for file in ROOT.rglob("*.py"):
        module = file.relative_to(ROOT).parts[0].removesuffix(".py")
        found |= {(module, used) for used in imports(file) - {module}}
    return found


def test_imports_go_upward_only():
    level = {module: i for i, modules in enumerate(LEVELS) for module in modules}
    wrong, checked = [], 0
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).parts
        module = parts[0].removesuffix(".py")
        if module in ("__init__", "__main__"):
            continue
        assert module in level, f"{module} has no place in LEVELS"
        checked += 1
        for used in imports(file) - {module, "__version__"}:
            assert used in level, f"{file}: imports {used}, which has no place in LEVELS"
            if level[used] >= level[module]:
                wrong.append(f"{'/'.join(parts)} imports {used}")
    assert checked > 20
    assert not wrong, wrong


def test_no_circles_and_one_name_for_one_class():
    """No file imports itself by way of others, for types alone or late in a function either."""
    assert house().circles() == []
    assert house().classes_twice().keys() == {"LongContextAttention"}, "two libraries' users import it"


def test_architecture_is_true_of_the_files():
    """docs/developers/architecture.md names every module of the package, and neither it nor files.md one that is not
    there."""
    pages = [(ROOT.parent / f"docs/developers/{page}.md").read_text() for page in ("architecture", "files")]
    first, named = (set(re.findall(r"`([\w./]+)`", text)) for text in (pages[0], "".join(pages)))
    assert set().union(*LEVELS) <= first
    map_ = pages[0].split("## The map")[1].split("\n## ")[0]
    rows = [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in map_.splitlines() if line.startswith("| `")]
    row = {module: i for i, modules in enumerate(rows) for module in modules}
    late = [pair for pair in uses() if set(pair) <= set(row) and row[pair[1]] > row[pair[0]]]
    assert not late, f"imports of what comes later on the map: {late}"
    files = [
        f"/{p.relative_to(ROOT.parent).as_posix()}"
        for p in (*ROOT.rglob("*"), *ROOT.parent.glob("*"), *ROOT.parent.glob("tests/*.py"))
    ]
    for path in (name for name in named if "/" in name or name.endswith(".py")):
        assert any(file.endswith(f"/{path.rstrip('/')}") for file in files), path


def test_kernels_do_not_communicate():
    for folder in ("kernels", "reference"):
        for file in (ROOT / folder).rglob("*.py"):
            found = [n for n in nodes(file) if isinstance(n, (ast.Import, ast.ImportFrom))]
            names = {getattr(n, "module", None) or "" for n in found} | {a.name for n in found for a in n.names}
            assert not any(name.startswith("torch.distributed") for name in names), file


def test_the_package_does_not_need_its_checkout():
    """Benchmarks, examples and tests are no part of an installation."""
    outside = {"benchmarks", "examples", "tests"}
    for file in ROOT.rglob("*.py"):
        found = [n for n in nodes(file) if isinstance(n, (ast.Import, ast.ImportFrom))]
        names = {a.name for n in found if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in found if isinstance(n, ast.ImportFrom) and not n.level}
        assert not outside & {name.split(".")[0] for name in names}, file


def test_what_tests_share_is_in_support():
    """A test module imports from its own package and from tests.support, which imports from no other; benchmarks import
    from tests.support alone."""
    tests, wrong = ROOT.parent / "tests", []
    for file in (*tests.rglob("*.py"), *(ROOT.parent / "benchmarks").rglob("*.py")):
        package = list(file.relative_to(ROOT.parent).parts[:-1])
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = [*base, *(node.module.split(".") if node.module else [])]
                names = [[*module, alias.name] for alias in node.names]
            else:
                names = [alias.name.split(".") for alias in node.names] if isinstance(node, ast.Import) else []
            for name in (n for n in names if n[0] == "tests"):
                own = len(package) > 1 and name[: len(package)] == package
                if not own and name[1:2] != ["support"]:
                    wrong.append(f"{file.relative_to(ROOT.parent)} imports {'.'.join(name)}")
    assert not wrong, wrong


def test_public_names():
    assert set(ring_la.__all__) == PUBLIC
    assert all(getattr(ring_la, name).__doc__ for name in PUBLIC)


def test_import_is_quiet_and_light():
    """No prints, no environment, no CUDA, no Triton, no Transformers."""
    code = (
        "import os, sys; before = dict(os.environ); import ring_la, torch; assert dict(os.environ) == before;"
        "assert not torch.cuda.is_initialized();"
        "assert not {'triton', 'transformers', 'fla'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
