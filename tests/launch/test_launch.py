"""The launch scripts: their syntax, and what they start."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.pytorchjob import job
from tests.support.train_example import ROOT, example, parsed, train

SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_scripts_are_sound(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck:
        done = subprocess.run([shellcheck, "-x", str(script)], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout


@pytest.fixture
def started(tmp_path):
    """Runs a launch script where python3, srun and scontrol are stand-ins: what torchrun would be started with."""
    stubs = {
        "python3": 'case "$1" in -) cat >/dev/null ;; -c) echo 8 ;; ex*) ;; *) env | grep ^TORCH_; echo "$@" ;; esac',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "scontrol": '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def start(script: str, *arguments: str, **environment: str):
        from torch.distributed.run import get_args_parser

        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", str(ROOT / "launch" / script), *arguments]
        done = subprocess.run(command, env={"PATH": path} | environment, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        words = shlex.split(done.stdout)
        assert words[-len(arguments) :] == list(arguments)
        module = words.index("torch.distributed.run")
        return words[:module], get_args_parser().parse_args(words[module + 1 :])

    return start


def test_slurm_starts_one_torchrun_a_node(started):
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[3-4]", "SLURM_JOB_NUM_NODES": "2"}
    before, args = started("train.sbatch", "--run.steps", "5", SLURM_SUBMIT_DIR=str(ROOT), **slurm)
    assert before == ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "-m"]  # a fresh store for each start of the ranks
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2", "8", 3)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("c10d", "node3:23456", "slurm-123456")
    assert parsed(args.training_script_args).run.folder == "runs/slurm-123456"
    assert (ROOT / args.training_script).exists()


def test_one_node_and_a_range_of_nodes(started):
    _, args = started("train.sh", "--run.steps", "5", RANKS="3", RESTARTS="0")
    assert (args.standalone, args.nproc_per_node, args.max_restarts) == (True, "3", 0)
    _, args = started("train_nodes.sh", "--run.steps", "5", HEAD="a:1", NODES="2:4")
    assert (args.nnodes, args.rdzv_endpoint, args.nproc_per_node) == ("2:4", "a:1", "8")


@pytest.mark.slow
def test_what_cannot_work_is_not_retried(tmp_path):
    """A typo is told once, and torchrun is not started; the second script gets what the first was told."""
    pytest.importorskip("jsonargparse")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path), "RANKS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = "*) echo started torch.distributed >&2; exit 2"
    said = f'ex*) exec {shlex.quote(sys.executable)} "$@"'
    for script in ("train.sh", "train_nodes.sh"):
        (tmp_path / "python3").write_text(
            f'#!/usr/bin/env bash\ncase "$1" in -) cat >/dev/null ;; -c) echo 0 ;; {said} ;; {other} ;; esac\n'
        )
        (tmp_path / "python3").chmod(0o755)
        command = ["bash", str(ROOT / "launch" / script), "--run.stepz=3", f"--run.folder={tmp_path / 'run'}"]
        nodes = {"HEAD": "localhost:29555", "NODES": "1", "RESTARTS": "1"}
        done = subprocess.run(command, env=environment | nodes, capture_output=True, text=True, cwd=ROOT, timeout=200)
        assert done.returncode not in (0, 1)
        assert done.stderr.count("unrecognized arguments: --run.stepz") == 1, done.stderr
        assert "torch.distributed" not in done.stderr, done.stderr
        (tmp_path / "said").write_text(done.stderr)
        said = f'ex*) [ "$2" = --check ] && cat {tmp_path / "said"} >&2; exit {done.returncode}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.clip=0"], "optimizer.clip: expected more than 0"),
        (["--parallel.context=3"], "data, fsdp, context: expected a product of 4"),
        (["--parallel.data=2"], "data.sequences: expected a multiple of data × fsdp = 2"),
        (["--data.source=nowhere"], "data.source: expected a file or a folder"),
        (["--model.layers=[banana]"], "layers: expected names out of"),
        (["--model.num_heads=3"], "num_heads: expected a divisor of 128"),
        (["--memory.recompute=[banana]"], "memory.recompute: expected mlp, block, norm or names out of"),
        (["--run.folder=FOLDER", "--model.dim=64"], "run.folder: expected a folder of its own .* dim=64"),
        (["--run.folder=FOLDER/config.json"], "run.folder: expected a folder, there or to be made"),
        (["--parallel.head_groups=0"], "parallel.head_groups: expected auto or at least 1"),
        ([], ""),
    ],
)
def test_what_cannot_work_is_found_before_ranks_start(arguments, message, tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text('{"model": {"dim": 32}}')
    words = [word.replace("FOLDER", str(tmp_path)) for word in ["--run.folder=runs/none", *arguments]]
    if not message:
        assert example().main(["--check", "4", *words]) is None
        return
    with pytest.raises(SystemExit, match=message):
        example().main(["--check", "4", *words])


@pytest.mark.parametrize("words", [[], ["x"], ["0"], ["-2"]])
def test_a_check_is_of_a_number_of_ranks(words):
    with pytest.raises(SystemExit, match="--check: expected a number of ranks"):
        example().main(["--check", *words])


SMALL = [f"--data.source={ROOT / 'docs'}", "--data.seq_len=64", "--data.sequences=1", "--memory.dtype=float32"]
SMALL += ["--model.dim=16", "--model.layers=[gdn]", "--model.repeat=1", "--model.num_heads=2"]
SMALL += ["--model.vocab_size=257", "--model.options={}", "--parallel.context=2", "--parallel.data=1"]
SMALL += ["--run.rehearse=null", "--run.save_every=2"]


MEETING = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(met := torch.ones(1))
sys.stdout.write(f"rank {dist.get_rank()} of {int(met)}: {' '.join(sys.argv[1:])}\\n")  # at once, as the other does
dist.destroy_process_group()
"""


def free_port() -> int:
    """One of those a batch file picks that the system gives to nobody who asks for any."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise RuntimeError("no port is free")


def test_two_nodes_meet_under_slurm_and_two_pods_train(ranks, tmp_path):
    """The batch file, run by bash, and the pods' command and environment: two torchruns each, meeting over loopback.

    Under Slurm SCRIPT is one that meets and says what it got. The pods go on where four ranks were.
    """
    pytest.importorskip("jsonargparse")
    port = free_port()
    stubs = {
        "python3": f'case "$1" in -) cat >/dev/null ;; *) exec {shlex.quote(sys.executable)} "$@" ;; esac',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; "$@" & first=$!; "$@"; wait $first',
        "scontrol": "printf 'localhost\\nlocalhost\\n'",
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    common = {"PATH": path, "HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[3-4]"}
    slurm |= {"SLURM_JOB_ID": str(port - 20000), "RANKS": "1", "RESTARTS": "0", "SCRIPT": str(tmp_path / "meeting.py")}
    (tmp_path / "meeting.py").write_text(MEETING)
    command = ["bash", str(ROOT / "launch/train.sbatch"), "--run.steps=1"]
    done = subprocess.run(command, env=common | slurm, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    passed = f"--run.folder runs/slurm-{slurm['SLURM_JOB_ID']} --run.steps=1"
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: {passed}" for rank in (0, 1)]

    ranks.run(4, train, [*SMALL, "--parallel.context=4", "--run.steps=1", f"--run.folder={tmp_path / 'run'}"])
    spec = job()["spec"]
    elastic = spec["elasticPolicy"]
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    operator = {  # what Kubeflow's operator adds to the environment
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"localhost:{port}",
        "PET_RDZV_ID": "ring-la",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        "PET_NPROC_PER_NODE": "1",  # of 8
    }
    own = {variable["name"]: variable["value"] for variable in container["env"]}
    here = [*SMALL, "--run.steps=2", f"--run.folder={tmp_path / 'run'}"]
    command, environment = [*container["command"], *container["args"], *here], common | operator | own
    both = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    pods = [subprocess.Popen(command, **both) for _ in range(spec["pytorchReplicaSpecs"]["Worker"]["replicas"])]
    try:
        said = "".join(pod.communicate(timeout=200)[0] for pod in pods)
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert "0.0 M parameters, data 1 × fsdp 1 × context 2" in said
    assert "going on from step 1 of 2" in said
    logged = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [1, 2]


SETUP = """
has_all() {{ [[ "$1" == {python} ]] || return 1; shift; for m; do [[ " {there} " == *" $m "* ]] || return 1; done; }}
install() {{ echo install "$1"; return 1; }}
setup {arguments} && echo "$PYTHON"
"""


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("einops tqdm matplotlib", ["python3"]),
        ("einops tqdm", ["install demo", "python3"]),  # without network: without what was only wished for
        ("einops", ["install demo"]),
    ],
)
def test_set_up_takes_what_is_there(there, said):
    source = (ROOT / "launch/setup.sh").read_text()
    function = source[source.index("setup() {") : source.index('setup "$@"')]
    script = SETUP.format(python="python3", there=there, arguments="demo tqdm 'matplotlib?'")
    done = subprocess.run(["bash", "-u", "-c", f"ROOT=/nowhere\n{function}{script}"], capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == said, done.stderr
    assert ("Needed: torch >= 2.9 and einops tqdm;" in done.stderr) == (there == "einops")
