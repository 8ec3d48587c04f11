"""The recurrences' signatures in the generated reference: the stub's, with the keywords that all of them take."""

from __future__ import annotations

from pathlib import Path

import griffe

STUB = Path(__file__).parents[1] / "ring_la/recurrences/__init__.pyi"


class Signatures(griffe.Extension):
    """Gives each function of `ring_la.recurrences` the parameters and the result that callers see."""

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        if pkg.name != "ring_la":
            return
        stub = griffe.visit("stub", filepath=STUB, code=STUB.read_text())
        modules = [m for m in pkg["recurrences"].modules.values() if not m.is_alias]
        own = [(name, f) for module in modules for name, f in module.functions.items() if not f.is_alias]
        found = {name: f for name, f in own if name in stub.functions}
        assert found.keys() == stub.functions.keys(), "the stub names what the package defines"
        for name, function in found.items():
            function.parameters, function.returns = stub[name].parameters, stub[name].returns
