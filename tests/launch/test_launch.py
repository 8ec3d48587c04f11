"""The launch scripts and files: their syntax, and that what they call exists and is called as it should be."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch")])
CONFIGS = sorted(ROOT.glob("examples/configs/*.yaml"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_scripts_are_sound(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck:
        done = subprocess.run([shellcheck, "-x", str(script)], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout


def job() -> dict:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "launch/kubernetes/pytorchjob.yaml").read_text())


def test_the_pytorchjob_fits_its_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parent / "pytorchjob.schema.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    good = job()
    assert not list(check.iter_errors(good))
    for path, value in (
        (("apiVersion",), "kubeflow.org/v2"),
        (("spec", "nprocPerNode"), 8),
        (("spec", "elasticPolicy", "rdzvEndpoint"), "x"),
        (("spec", "pytorchReplicaSpecs", "Workers"), {}),
        (("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0, "name"), "main"),
        (("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0, "env", 0, "value"), 1),
    ):
        bad = copy.deepcopy(good)
        at = bad
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        assert list(check.iter_errors(bad)), path


def test_the_pytorchjob_fits_itself():
    spec = job()["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["elasticPolicy"]["minReplicas"] <= worker["replicas"] <= spec["elasticPolicy"]["maxReplicas"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    config = parsed([*container["args"][1:]])
    assert (ROOT / container["args"][0]).exists()
    assert config.parallel.context == int(spec["nprocPerNode"])
    for nodes in range(spec["elasticPolicy"]["minReplicas"], worker["replicas"] + 1):
        assert config.data.sequences % nodes == 0


def parsed(arguments: list[str]):
    """The example's configuration of a command line, read in the repository."""
    from tests.examples.test_train_hybrid import example

    jsonargparse = pytest.importorskip("jsonargparse")
    here = os.getcwd()
    os.chdir(ROOT)
    try:
        return jsonargparse.auto_cli(example().Config, args=arguments, as_positional=False)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_configurations_are_the_example_s(config):
    from ring_la.training import StepFlops

    found = parsed([f"--config={config}"])
    size = StepFlops(found.model.config(257)).parameters
    said = re.search(r"([\d.]+) B parameters", config.read_text())
    assert said is None or abs(size / 1e9 - float(said[1])) < 0.006


def test_command_lines_in_comments_and_docs_are_the_example_s():
    """Every option that a page or a script shows is one."""
    pages = [*SCRIPTS, ROOT / "docs/training.md", ROOT / "examples/train_hybrid.py", *CONFIGS]
    seen = 0
    for page in pages:
        text = page.read_text().replace("\\\n#", "").replace("\\\n", "")
        for line in text.splitlines():
            shown = re.search(
                r"(?:train_hybrid\.py|train\.sh|train_nodes\.sh|train\.sbatch) (--(?!standalone)\S.*)", line
            )
            if shown and '"$@"' not in line:
                words = shlex.split(shown[1], comments=True)
                assert parsed([w for w in words if w != "..."]), line
                seen += 1
    assert seen >= 4
