"""What the package looks like from outside, counted: files, long functions, circles, names used twice.

python -m tests.support.rooms                     # this checkout, as a column of a table
python -m tests.support.rooms OTHER --draw F.svg  # a box a file of OTHER, then of this checkout
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[2]
LONG_FILE, LONG_FUNCTION, MANY = 300, 40, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


class House:
    """The package of a checkout, its files parsed once.

    Args:
        root: the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        files = {f: f.read_text() for f in sorted((root / "ring_la").rglob("*.py"))}
        self.lines = {f: len(text.splitlines()) for f, text in files.items()}
        self.trees = {f: ast.parse(text) for f, text in files.items()}
        self.nodes = {f: list(ast.walk(tree)) for f, tree in self.trees.items()}

    def functions(self) -> Iterator[Function]:
        """Those that run on the host: not in Triton's language, nor inside one that is."""

        def below(node: ast.AST) -> Iterator[Function]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, Function):
                    if any("jit" in ast.unparse(d) for d in child.decorator_list):
                        continue
                    yield child
                yield from below(child)

        for tree in self.trees.values():
            yield from below(tree)

    def classes_twice(self) -> dict[str, list[str]]:
        """Class names that several files or places use, and the files."""
        found: dict[str, list[str]] = defaultdict(list)
        for file, nodes in self.nodes.items():
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(file.relative_to(self.root)))
        return {name: where for name, where in found.items() if len(where) > 1}

    def circles(self) -> list[list[str]]:
        """Files that import each other in a loop, for types alone or late in a function too."""
        names = {f: ".".join(f.relative_to(self.root).with_suffix("").parts) for f in self.trees}
        modules = {name.removesuffix(".__init__"): f for f, name in names.items()}
        uses = {m: self._imports(f, names[f].split(".")[:-1], modules) - {m} for m, f in modules.items()}
        reach = {m: _reached(m, uses) for m in uses}
        found = {tuple(sorted(n for n in reach[m] if m in reach[n])) for m in uses if m in reach[m]}
        return sorted(map(list, found))

    def _imports(self, file: Path, package: list[str], modules: dict[str, Path]) -> set[str]:
        found: set[str] = set()
        for node in self.nodes[file]:
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *(node.module.split(".") if node.module else [])])
                parts = {f"{module}.{alias.name}" for alias in node.names} & modules.keys()
                found |= parts or {module} & modules.keys()
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & modules.keys()
        return found

    def table(self) -> dict[str, object]:
        """What is counted, by what it is called in docs/notebook."""
        functions = list(self.functions())
        cli = sum(n for f, n in self.lines.items() if f.parent.name == "cli")
        return {
            "files, lines": f"{len(self.lines)}, {sum(self.lines.values()):,}",
            "median lines of a file": median(self.lines.values()),
            f"files over {LONG_FILE} lines": sum(n > LONG_FILE for n in self.lines.values()),
            f"functions over {LONG_FUNCTION} lines, on the host": sum(_size(f) > LONG_FUNCTION for f in functions),
            "the same without their docstrings": sum(_size(f) - _doc(f) > LONG_FUNCTION for f in functions),
            f"functions over {MANY} parameters, on the host": sum(_parameters(f) > MANY for f in functions),
            "class names used twice or more": len(self.classes_twice()),
            "import circles between files": len(self.circles()),
            "lines of `ring_la/cli`": cli,
        }


def _reached(module: str, uses: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [module]
    while todo:
        new = uses[todo.pop()] - found
        found |= new
        todo += new
    return found


def _size(f: Function) -> int:
    return f.end_lineno - f.lineno + 1


def _doc(f: Function) -> int:
    return f.body[0].end_lineno - f.body[0].lineno + 1 if ast.get_docstring(f) else 0


def _parameters(f: Function) -> int:
    names = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def drawn(houses: dict[str, House]) -> str:
    """A box a file, as wide as its lines, a row a room: SVG."""
    out, y = [], 10
    for title, house in houses.items():
        rooms: dict[str, list[int]] = defaultdict(list)
        for file, n in house.lines.items():
            parts = file.relative_to(house.root / "ring_la").parts
            deep = 3 if parts[0] in ("integrations", "kernels", "softmax") else 2
            rooms["/".join(parts[: deep - 1][: len(parts) - 1]) or "."].append(n)
        y += 14
        out.append(f'<text x="0" y="{y}" class="t">{title}: a box a file, as wide as its lines; dark: over 300</text>')
        for name, sizes in rooms.items():
            x, y = 200.0, y + 18
            out.append(f'<text x="192" y="{y + 11}" text-anchor="end">{name}</text>')
            for n in sorted(sizes, reverse=True):
                kind = "l" if n > LONG_FILE else "f"
                out.append(f'<rect x="{x:.0f}" y="{y}" width="{n / 14:.1f}" height="14" class="{kind}"/>')
                x += n / 14 + 1
        y += 24
    style = ".t{font-size:13px;font-weight:bold}.f{fill:#8fb3d9}.l{fill:#1f3f66}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {y}" font-family="sans-serif" font-size="10">'
    return f'{head}<style>{style}</style><rect width="1000" height="{y}" fill="white"/>{"".join(out)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="another checkout to count before this one")
    parser.add_argument("--draw", type=Path, help="SVG of both")
    args = parser.parse_args()
    houses = {"before": House(args.other)} if args.other else {}
    houses["now"] = House(HERE)
    tables = [house.table() for house in houses.values()]
    for name in tables[0]:
        print(f"| {name} | {' | '.join(str(table[name]) for table in tables)} |")
    if args.draw:
        args.draw.write_text(drawn(houses))


if __name__ == "__main__":
    main()
