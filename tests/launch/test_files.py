"""The files for clusters and servers: that what they call exists and is called as it should be."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.launch.pytorchjob import job
from tests.support.train_example import ROOT, parsed


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


def test_the_served_group_fits_itself():
    """LeaderWorkerSet's file: the commands are torchrun's and ours, and what refers to something finds it."""
    import argparse

    from torch.distributed.run import get_args_parser

    from ring_la.cli import serve

    yaml = pytest.importorskip("yaml")
    group, service = yaml.safe_load_all((ROOT / "launch/kubernetes/serve.yaml").read_text())
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{role}Template"]["spec"] for role in ("leader", "worker"))
    (first,), (other,) = leader["containers"], worker["containers"]
    assert first == other | {key: first[key] for key in ("ports", "startupProbe", "readinessProbe")}
    assert template["leaderTemplate"]["metadata"]["labels"] == service["spec"]["selector"]
    assert "metadata" not in template["workerTemplate"]  # no request comes to those that do not listen
    ports = {port["name"]: port["containerPort"] for port in first["ports"]}
    words = [word.replace("$(LWS_GROUP_SIZE)", str(template["size"])) for word in first["args"]]
    torchrun = get_args_parser().parse_args([word.replace("$(LWS_WORKER_INDEX)", "0") for word in words])
    assert (torchrun.training_script, torchrun.training_script_args[0], torchrun.module) == ("ring_la", "serve", True)
    serve.add_arguments(parser := argparse.ArgumentParser())
    ours = parser.parse_args(torchrun.training_script_args[1:])
    assert ports == {"http": ours.port, "torchrun": int(torchrun.master_port)}
    assert int(service["metadata"]["annotations"]["prometheus.io/port"]) == ours.port
    assert {first[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe")} == {"http"}
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert first["resources"]["limits"]["nvidia.com/gpu"] == int(torchrun.nproc_per_node)
    assert first["env"][0]["name"] == serve.KEYS
    waits = int(first["lifecycle"]["preStop"]["exec"]["command"][1])
    for pod in (leader, worker):
        assert ours.drain < torchrun.shutdown_timeout < pod["terminationGracePeriodSeconds"] - waits
        assert {m["name"] for m in first["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_reader_beside_vllm_fits_itself():
    """LeaderWorkerSet's file: the GPUs are shared out, and what refers to something finds it."""
    yaml = pytest.importorskip("yaml")
    group, service = yaml.safe_load_all((ROOT / "launch/kubernetes/vllm.yaml").read_text())
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    worker = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert worker["metadata"]["labels"] == service["spec"]["selector"]
    (container,) = worker["spec"]["containers"]
    script = ROOT / container["command"][1]
    options = dict(word.removeprefix("--").split("=") for word in container["args"][1:])
    said = {variable["name"]: variable.get("value") for variable in container["env"]}
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(options["tensor-parallel-size"]) + int(said["READ_GPUS"]) == gpus
    assert all(f"${{{name}:-" in script.read_text() for name in ("READ_GPUS", "LEAST"))
    assert container["ports"] == [{"name": "http", "containerPort": int(options["port"])}]
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in worker["spec"]["volumes"]}


def test_ray_serve_s_file_fits_its_application():
    """What the file names is a function of launch/ray_serve.py that knows its arguments, and ours their options."""
    import argparse
    import ast

    from ring_la.cli import serve

    yaml = pytest.importorskip("yaml")
    file = yaml.safe_load((ROOT / "launch/ray_serve.yaml").read_text())
    tree = ast.parse((ROOT / "launch/ray_serve.py").read_text())
    functions = {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = {each["import_path"]: each["args"] for each in file["applications"]}
    assert found.keys() == {"launch.ray_serve:server", "launch.ray_serve:reader_and_vllm"}
    for path, args in found.items():
        assert all(re.search(rf"\b{name}\b", functions[path.split(":")[1]]) for name in args), path
    serve.add_arguments(parser := argparse.ArgumentParser())
    options = found["launch.ray_serve:server"]["options"]
    assert parser.parse_args(["model", *shlex.split(options)]).name == "model"


def test_a_reader_and_vllm_are_started_as_they_are_read(tmp_path):
    """With stand-ins for Python and vLLM: the reader has the last GPUs first, and ends with vLLM."""
    from torch.distributed.run import get_args_parser

    said = tmp_path / "said"
    reader = 'echo "$CUDA_VISIBLE_DEVICES $@" > SAID.new; mv SAID.new SAID; exec sleep 60'.replace("SAID", str(said))
    stubs = {
        "python3": f'[ "$1" = -c ] && echo 8 && exit; {reader}',
        "vllm": f'while ! [ -e {said} ]; do sleep 0.05; done; printf "%s\n" "$@"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "READ_GPUS": "2",
        "SOCKET": "/tmp/s",
        "LEAST": "9",
    }
    command = ["bash", str(ROOT / "launch/read_and_decode.sh"), "/models/model", "--port", "8000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:3] == ["serve", "/models/model", "--kv-transfer-config"]
    assert words[-2:] == ["--port", "8000"]
    connector = json.loads("\n".join(words[3:-2]))
    assert connector["kv_connector_extra_config"] == {"reader": "unix:/tmp/s", "least": 9}
    gpus, *reader = said.read_text().split()
    assert gpus == "6,7,0,1,2,3,4,5"
    torchrun = get_args_parser().parse_args(reader[2:])
    assert torchrun.nproc_per_node == "2"
    assert torchrun.training_script_args == ["reader", "/models/model", "--listen", "unix:/tmp/s"]
