"""What a release is made of fits together: the version, the Pythons, the workflows."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

import ring_la
from ring_la import errors, version

ROOT = Path(__file__).parents[1]


def test_there_is_a_version_with_and_without_an_installation(monkeypatch):
    assert re.match(r"\d+", ring_la.__version__)
    monkeypatch.setattr(version, "version", lambda name: f"of {name}")
    assert version.installed() == "of ring_la"

    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", nothing)
    assert version.installed() == "0.0.0+unknown"


def test_the_pythons_said_are_the_pythons_tested():
    yaml = pytest.importorskip("yaml")
    project = (ROOT / "pyproject.toml").read_text()
    said = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert set(jobs) == {"lint", "types", "tests", "docs", "wheels"}
    assert jobs["tests"]["strategy"]["matrix"]["python"] == said
    assert f'requires-python = ">={said[0]}"' in project


def test_what_workflows_run_is_there():
    """Scripts, extras and configurations that workflows and the Dockerfile name."""
    files = [*ROOT.glob(".github/workflows/*.yml"), ROOT / "Dockerfile"]
    assert len(files) == 4
    text = "\n".join(file.read_text() for file in files)
    paths = set(re.findall(r"(?<![\w/.])((?:\.ci|\.github|launch|examples)/[\w./]+\w)", text))
    assert {".ci/run", ".github/check_package.py", "launch/constraints.txt"} <= paths
    assert all((ROOT / path).exists() for path in paths), paths
    project = (ROOT / "pyproject.toml").read_text()
    extras = {name for found in re.findall(r"-e '\.\[([\w,]+)\]'", text) for name in found.split(",")}
    assert extras >= {"docs", "train"}
    assert all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extras), extras


def test_the_extra_export_brings_what_safetensors_does_not():
    """`safetensors.torch` imports NumPy, which neither it nor torch requires."""
    extra = re.search(r"^export = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra
    assert {"safetensors", "numpy"} == set(re.findall(r'"([\w-]+)>', extra[1]))


def test_what_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch):
    project = (ROOT / "pyproject.toml").read_text()
    for package, extra in errors.EXTRAS.items():
        brought = re.search(rf"^{extra} = \[(.*)\]", project, re.MULTILINE)
        assert brought, extra
        assert package in re.findall(r'"([\w-]+)', brought[1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for package, named in (("tokenizers", r"'ring_la\[train\]'"), ("jinja2", "jinja2")):
        said = f"model: expected an environment with {package} for text, got none. pip install {named}$"
        with pytest.raises(errors.UnsupportedError, match=said):
            errors.require(package, "model", "text")


def test_the_citation_is_one():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert json.dumps(found)  # plain values
    assert {"cff-version", "message", "title", "authors", "type", "license"} <= set(found)
    assert found["license"] in (ROOT / "pyproject.toml").read_text()


def test_no_result_names_a_place_of_one_machine():
    """Recorded commands are those that a reader gives, from the checkout's root."""
    found = {
        str(file.relative_to(ROOT)): place
        for file in (ROOT / "benchmarks" / "results").glob("*.json")
        for place in re.findall(r'[" =](/(?:home|root|work|tmp|Users)/[^" ]*)', file.read_text())
    }
    assert not found
