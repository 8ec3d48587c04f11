"""Whether the wheel and the sdist in a folder have what they need: every file of the package, and nothing beside it.

python -m build && python .github/check_package.py dist [--version 1.2.3]
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", help="what the version must be")
    args = parser.parse_args()
    (wheel,), (sdist,) = args.folder.glob("*.whl"), args.folder.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    if args.version not in (None, version):
        sys.exit(f"version: expected {args.version}, got {version}")
    package = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("ring_la/**/*") if p.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as file:
        inside = set(file.namelist())
    compare(wheel.name, package, {name for name in inside if ".dist-info/" not in name})
    with tarfile.open(sdist) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    needed = package | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
    compare(sdist.name, needed, inside & needed)
    kinds = sorted({Path(name).suffix or Path(name).name for name in package})
    print(f"{wheel.name} and {sdist.name}: {len(package)} files of the package ({', '.join(kinds)})")


def compare(name: str, expected: set[str], found: set[str]) -> None:
    """Exit with the files that are missing, or too many."""
    wrong = [f"no {n}" for n in sorted(expected - found)] + [f"and {n}" for n in sorted(found - expected)]
    if wrong:
        sys.exit(f"{name}: expected the files of ring_la, got {', '.join(wrong)}")


if __name__ == "__main__":
    main()
