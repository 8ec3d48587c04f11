"""Nothing unpickles what others wrote: every place that could, by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
AMONG_RANKS = {
    "ring_la/training/checkpoint.py": {"all_gather_object", "broadcast_object_list"},
    "ring_la/integrations/transformers/trainer.py": {"all_gather_object"},
    "ring_la/integrations/transformers/weights/parts.py": {"all_gather_object"},
    "ring_la/integrations/diffusers/pipeline.py": {"broadcast_object_list"},
    "examples/train_hybrid.py": {"broadcast_object_list", "all_gather_object"},
    "examples/train_demo.py": {"broadcast_object_list"},
}
"""torch.distributed's collectives of objects send pickles: from rank to rank of one job, who trust each other."""
RESTRICTED = {"ring_la/reading.py": {"Unpickler"}}
"""A table of contents, by an unpickler that knows a checkpoint's names alone (tests/training/test_reading.py)."""
WRITTEN = {"ring_la/kernels/runtime/written.py": {"exec"}}
"""Code that this process writes from numbers of its own launches; nothing of it comes from outside."""
OBJECTS = {f"{what}_object{s}" for what in ("all_gather", "gather", "send", "recv") for s in ("", "_list")}
OBJECTS |= {"broadcast_object_list", "scatter_object_list", "recv_object_list", "send_object_list"}
ALWAYS = {"loads", "Unpickler", "read_pickle", "unsafe_load", "full_load"}
"""Calls and bases that run what they read, whatever they are given; `json.loads` is none."""


def suspects(tree: ast.AST) -> Iterator[str]:
    """Names of what could unpickle or run data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (name_of(base) for base in node.bases if name_of(base) in ALWAYS)
        if not isinstance(node, ast.Call):
            continue
        name, owner = name_of(node.func), name_of(getattr(node.func, "value", node.func))
        given = {k.arg: k.value for k in node.keywords}
        run = isinstance(node.func, ast.Name) and name in ("eval", "exec")
        if run or name in OBJECTS or (name in ALWAYS and owner != "json"):
            yield name
        safe = isinstance(given.get("weights_only"), ast.Constant) and given["weights_only"].value is True
        if (name, owner) == ("load", "torch") and not safe:
            yield "torch.load"
        if (name, owner) in {("load", "pickle"), ("load", "marshal"), ("load", "yaml"), ("open", "shelve")}:
            yield f"{owner}.{name}"
        if any(isinstance(given.get(flag), ast.Constant) and given[flag].value is True
               for flag in ("allow_pickle", "trust_remote_code")):  # fmt: skip
            yield "allow_pickle"


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_nothing_unpickles_what_others_wrote():
    found = {}
    for folder in ("ring_la", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            names = set(suspects(ast.parse(file.read_text())))
            if names:
                found[file.relative_to(ROOT).as_posix()] = names
    assert found == AMONG_RANKS | RESTRICTED | WRITTEN


def test_what_would_unpickle_is_found():
    for text in (
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "pickle.loads(b)",
        "pickle.load(f)",
        "import pickle\nclass A(pickle.Unpickler): pass",
        "dist.gather_object(x)",
        "yaml.load(f)",
        "numpy.load(f, allow_pickle=True)",
        "eval(text)",
    ):
        assert [*suspects(ast.parse(text))], text
    assert not [
        *suspects(ast.parse("torch.load(f, weights_only=True); json.loads(t); model.eval(); yaml.safe_load(f)"))
    ]
