"""What the pages show is so: their code runs as it stands, their commands are commands, their links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ring_la
from benchmarks import pictures
from ring_la.cli import main as cli
from ring_la.nn import LAYERS
from ring_la.recurrences import RECURRENCES
from tests.support import pages
from tests.support.pages import PAGES, ROOT
from tests.support.pool import group

PYTHON = [page for page in PAGES if pages.blocks(page, "python")]
LOOP, OWN = "docs/users/guides/training.md", "docs/users/tutorials/own_recurrence.md"
"""Pages whose blocks have a test of their own."""


@pytest.mark.parametrize("page", [page for page in PYTHON if not pages.on_ranks(page) and page not in (LOOP, OWN)])
def test_code_runs(page):
    shown = pages.blocks(page, "python")
    if pages.in_a_group_of_one(page):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert pages.run(page) == sum(not block.said.startswith("compiled") for block in shown)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_on_a_rank(rank: int, page: str) -> int:
    torch.manual_seed(0)
    return pages.run(page)


@pytest.mark.parametrize("page", [page for page in PYTHON if pages.on_ranks(page) and page not in (LOOP, OWN)])
def test_code_runs_on_ranks(ranks, page):
    found = ranks.run(4, run_on_a_rank, page)
    assert found == [found[0]] * 4
    assert found[0] > 0


def loop(rank: int) -> tuple[list[str], float]:
    """In the pool, which has joined the ranks: the loop of the page on training, two steps of it."""
    (block,) = pages.blocks(LOOP, "python")
    text, joins = re.subn(r"dist\.(init|destroy)_process_group\([^)\n]*\)", "pass", block.text)
    assert joins == 2, "the loop joins the ranks, and leaves them"
    text, shorter = re.subn(r"range\(10\)", "range(2)", text)
    assert shorter == 1
    names: dict = {}
    exec(text, names)
    return [str(p.device_mesh.shape) for p in names["model"].parameters()][:1], float(names["loss"].detach())


def test_the_training_loop_runs(ranks):
    found = ranks.run(4, loop)
    assert all(shape == ["(4,)"] and 0 < loss < 6 for shape, loss in found), found


def test_code_that_is_only_compiled_says_why():
    said = [block.said for page in PYTHON for block in pages.blocks(page, "python") if "compiled" in block.said]
    assert all(len(reason.partition(", ")[2]) > 10 for reason in said), said


@pytest.mark.parametrize("page", [page for page in PAGES if pages.blocks(page, "bash")])
def test_commands_are_commands(page):
    """Each parses; scripts and modules it names are there, extras it installs too, and ring-la knows its options."""
    shown = pages.commands(page)
    assert shown
    for line in shown:
        assert subprocess.run(["bash", "-n", "-c", re.sub(r"<[^>]*>", "it", line)], capture_output=True).returncode == 0
        words = shlex.split(line.replace("&&", " "))
        for word in words:
            if word.endswith((".py", ".sh", ".yaml", ".sbatch")) and "/" in word:
                assert (ROOT / word).exists(), line
            for extra in re.findall(r"^\.\[(.*)\]$", word):
                assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(), line
        if "ring_la" in words and words[words.index("ring_la") - 1] == "-m":
            known(words[words.index("ring_la") + 1 :])
        elif words[0] == "ring-la":
            known(words[1:])


def known(words: list[str]) -> None:
    """Words of a ring-la command, parsed by it."""
    command = next(c for c in cli.COMMANDS if tuple(words[: len(c)]) == c)
    parser = argparse.ArgumentParser(exit_on_error=False)
    cli._module(command).add_arguments(parser)
    parser.parse_args([word for word in words[len(command) :] if word not in ("...", "…")])


def exported(package: str) -> set[str]:
    """What `__all__` says in a file, without importing it."""
    for node in ast.parse((ROOT / package).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_every_guide_is_found_from_the_first_page():
    """By whoever reads the README, and on the site's first page."""
    for first in ("README.md", "docs/index.md"):
        text = (ROOT / first).read_text()
        guides = [page for page in PAGES if re.match("docs/users/(guides|tutorials|concepts)/", page)]
        text += (ROOT / "docs/index.md").read_text() if "(docs/index.md)" in text else ""
        assert not [page for page in guides if page.removeprefix("docs/") not in text], first


def test_the_reference_is_complete():
    text = "".join((ROOT / page).read_text() for page in PAGES if page.startswith("docs/users/reference/"))
    missing = [r.name for r in RECURRENCES if f"`{r.name}`" not in text or f".{r.name}\n" not in text]
    missing += [layer.__name__ for layer in LAYERS.values() if f"::: ring_la.nn.{layer.__name__}\n" not in text]
    named = {name for name in ring_la.__all__ if name not in ("reference", "__version__")}
    named |= exported("ring_la/integrations/diffusers/__init__.py") - {"PLANS"}  # the guide's table
    named |= {"enable_tea_cache", "disable_tea_cache"}
    missing += sorted(name for name in named if not re.search(rf"^::: ring_la\.([\w.]+\.)?{name}$", text, re.MULTILINE))
    assert not missing


def headings(page: Path) -> set[str]:
    """What `#` in a link may name: a page's headings as GitHub and MkDocs spell them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in found}


def test_links_lead_somewhere():
    """Links between the pages of docs/ and the others' at the root, and the headings they name; MkDocs checks those
    of the generated reference."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    assert len(found) > 20
    for page in found:
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            path, _, heading = link.partition("#")
            if ":" in path:
                continue
            to = (page.parent / path) if path else page
            assert to.exists(), f"{page}: {link}"
            assert not heading or heading.startswith("ring_la.") or heading in headings(to), f"{page}: {link}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # Material's advertisement
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "gated_delta_rule" in (tmp_path / "users/reference/recurrences.html").read_text()


def test_pictures_show_the_results():
    for name, draw in pictures.PICTURES.items():
        kept = (pictures.IMAGES / f"measured-{name}.svg").read_text()
        assert kept == draw(), "python -m benchmarks.pictures draws them anew"


def test_pages_are_short():
    """Developers' pages at most 150 lines, the README 120, and at most fifteen bullets a release."""
    developers = [ROOT / f"docs/developers/{name}.md" for name in ("architecture", "kernels", "communication")]
    for page, most in [*((page, 150) for page in developers), (ROOT / "README.md", 120)]:
        assert len(page.read_text().splitlines()) <= most, page
    for release in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert len(re.findall(r"^- ", release, re.MULTILINE)) <= 15, release.splitlines()[0]


def test_the_readme_names_every_recurrence():
    names = [r.name for r in RECURRENCES] + ["log_linear_attention", "forgetting_attention"]
    assert [n for n in names if f"`{n}`" not in (ROOT / "README.md").read_text()] == []


def own_recurrence(rank: int) -> float:
    """In the pool, which has joined the ranks: OWN on all of them."""
    define, check, split, layer = (block.text for block in pages.blocks(OWN, "python"))
    split, joins = re.subn(r'dist\.init_process_group\("gloo"\)', "pass", split)
    assert joins == 1
    split = split.replace("dist.group.WORLD", "pool_group").replace("ContextParallel()", "ContextParallel(pool_group)")
    names: dict = {"pool_group": group()}
    exec(define + "\n".join([check] if rank == 0 else ["from ring_la.testing import check_recurrence"]), names)
    exec(split, names)
    kinds, before = names["ring_la"].nn.LAYERS, set(names["ring_la"].nn.LAYERS)
    exec(layer, names)
    for name in set(kinds) - before:  # the pool goes on without it
        del kinds[name]
    return float(names["m"].grad.norm())


def test_a_recurrence_of_one_s_own_is_split_and_checked(ranks):
    assert min(ranks.run(2, own_recurrence)) > 0
