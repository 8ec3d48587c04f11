"""examples/train_hybrid.py as a module, and its options without jsonargparse, which machines with GPUs may lack."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ring_la.errors import ArgumentError

from . import ROOT


def load() -> Any:
    """The script."""
    if "train_hybrid" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_hybrid", ROOT / "examples" / "train_hybrid.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["train_hybrid"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["train_hybrid"])
    return sys.modules["train_hybrid"]


def config(script: Any, words: Sequence[str]) -> Any:
    """The script's Config of a command line: ``--config FILE`` and ``--part.option VALUE`` (or ``=VALUE``), in order.

    Values are YAML; where a default is a number or a word, they become one.

    Raises:
        ArgumentError: an option that does not exist, or without a value.
    """
    import yaml

    given: dict[str, Any] = {}
    rest = iter([part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])])
    for word in rest:
        value = next(rest, None)
        if not word.startswith("--") or value is None:
            raise ArgumentError("options", "--part.option VALUE", f"{word} {value or ''}")
        name = word.removeprefix("--")
        if name == "config":
            _merge(given, yaml.safe_load(Path(value).read_text()))
            continue
        new: Any = yaml.safe_load(value)
        for key in reversed(name.split(".")):
            new = {key: new}
        _merge(given, new)
    return script.Config(**{part: _part(script, part, options) for part, options in given.items()})


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    """Options of `new` over those there, down to the options of one layer."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _part(script: Any, part: str, options: dict[str, Any]) -> Any:
    kinds = {f.name: f.default_factory for f in fields(script.Config)}
    if part not in kinds:
        raise ArgumentError("options", f"parts out of {', '.join(kinds)}", part)
    known = {f.name: type(f.default) for f in fields(kinds[part])}  # type: ignore[arg-type]
    several = {f.name for f in fields(kinds[part]) if "|" in str(f.type)}  # type: ignore[arg-type]
    for name, value in options.items():
        if name not in known:
            raise ArgumentError(f"--{part}", f"options out of {', '.join(known)}", name)
        if known[name] in (int, float, str) and name not in several and value is not None:
            options[name] = known[name](value)  # 1e-3 is a word in YAML
    return kinds[part](**options)  # type: ignore[misc,call-arg]
