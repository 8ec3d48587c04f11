"""A reader of some ranks and a vLLM in one process, both on CPUs; prints what vLLM's requests got as JSON.

python -m tests.vllm.live equal MODEL RANKS FOLDER      what both read, and what comes of states that are spoiled
python -m tests.vllm.live hosts MODEL RANKS FOLDER      the same, as if on two hosts: by NIXL, over TCP alone
python -m tests.vllm.live decoded MODEL RANKS FOLDER    Transformers' tokens, of models that vLLM cannot read on a CPU
python -m tests.vllm.live faults POLICY FOLDER          a reader that stands still, is given up, and dies
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
LEAST = 100
NEW = 12
"""Tokens decoded of each prompt."""


class ReaderGroup:
    """The processes of a reader."""

    def __init__(self, folder: Path, ranks: int, hosts: bool) -> None:
        self.address, self._log = f"unix:{folder}/reader.sock", folder / "reader.log"
        if hosts:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.address = f"127.0.0.1:{free.getsockname()[1]}"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command = [sys.executable, *launch, "-m", "ring_la", "reader", str(folder / "model"), "--listen", self.address]
        command += ["--hosts"] * hosts
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> None:
        """Until it listens."""
        while "rank(s)" not in self._log.read_text():
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.2)

    def ranks(self) -> list[int]:
        """The process of each rank."""
        return list(map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()))

    def read(self) -> int:
        """Prompts that it has read so far."""
        return self._log.read_text().count(" tokens in ")


@contextmanager
def group(folder: Path, ranks: int, hosts: bool = False):
    """A reader, until the block ends."""
    reader = ReaderGroup(folder, ranks, hosts)
    try:
        yield reader
    finally:
        reader.process.send_signal(signal.SIGTERM)
        reader.process.wait(60)


def engine(folder: Path, reader: ReaderGroup, dtype: str, policy: str = "fail", workers: int = 1, plain: bool = False):
    """A vLLM with the connector to that reader."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="RingLAConnector",
        kv_role="kv_consumer",
        kv_connector_module_path="ring_la.integrations.vllm.connector",
        kv_connector_extra_config={"reader": reader.address, "least": LEAST, "timeout": 120},
        kv_load_failure_policy=policy,
    )
    found = LLM(
        str(folder / "model"), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024,
        max_num_seqs=4, kv_transfer_config=connector, enable_prefix_caching=False, tensor_parallel_size=workers,
        **({"compilation_config": {"custom_ops": ["none"]}, "attention_backend": "CPU_MLA"} if plain else {}),
    )  # fmt: skip
    reader.wait()
    return found


def prompts(*lengths: int) -> list[dict]:
    import torch

    torch.manual_seed(1)
    return [{"prompt_token_ids": torch.randint(3, 250, (n,)).tolist()} for n in lengths]


def greedy(by_reader: bool = True):
    from vllm import SamplingParams

    extra = None if by_reader else {"kv_transfer_params": {"reader": False}}
    return SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, extra_args=extra)


def hosts(model: str, ranks: str, folder: Path) -> dict:
    """As `equal`."""
    os.environ["UCX_TLS"] = "tcp"  # no memory of the host, which others do not have
    return equal(model, ranks, folder, apart=True)


def equal(model: str, ranks: str, folder: Path, apart: bool = False) -> dict:
    """Tokens after prompts that vLLM read itself, that the ranks read, and of states set to zero."""
    from ring_la.integrations.vllm import fetching
    from tests.vllm.models import dtype, plain, save

    save(model, folder / "model")
    with group(folder, int(ranks), apart) as reader:
        llm = engine(folder, reader, dtype(model), plain=plain(model))

        def tokens(by_reader: bool) -> list[list[int]]:
            found = llm.generate(prompts(301, 150, 37), greedy(by_reader), use_tqdm=False)
            return [list(each.outputs[0].token_ids) for each in found]

        said = {"own": tokens(False), "ours": tokens(True), "read": reader.read()}
        whole = fetching.HandedOver

        class Spoiled(whole):
            def __init__(self, *args) -> None:
                super().__init__(*args)
                kept = [x for state in self.states.values() for x in state.values()]  # latents are keys too
                for x in (*kept, *(x for layer in self.keys.values() for _, k, v in layer for x in (k, v))):
                    x.zero_()

        fetching.HandedOver = Spoiled
        return said | {"spoiled": tokens(True)}


def mamba_token(state, x, dt, A, B, C, D, dt_bias, z=None, state_batch_indices=None, out=None, **_) -> None:
    """In place of vLLM's kernel of a token of Mamba-1: that for CPUs takes Mamba-2's states alone (0.32.0)."""
    import torch.nn.functional as F

    dt, at = F.softplus(dt + dt_bias), state_batch_indices.flatten().long()
    state[at] = state[at] * (dt[..., None] * A).exp() + (dt * x)[..., None] * B[:, None]
    out.copy_(((state[at] * C[:, None]).sum(-1) + D * x) * F.silu(z))


def decoded(model: str, ranks: str, folder: Path) -> dict:
    """Tokens after prompts that the ranks read, and those of Transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.model_executor.layers.mamba import mamba_mixer

    mamba_mixer.selective_state_update = mamba_token
    from tests.vllm.models import dtype, save

    save(model, folder / "model")
    asked, kind = prompts(301, 150), dtype(model)
    with group(folder, int(ranks)) as reader:
        found = engine(folder, reader, kind).generate(asked, greedy(), use_tqdm=False)
        said = {"ours": [list(each.outputs[0].token_ids) for each in found], "read": reader.read()}
    theirs, own = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, kind)), []
    for prompt in asked:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        keywords = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None)
        own.append(theirs.generate(ids, attention_mask=torch.ones_like(ids), **keywords)[0, ids.shape[1] :].tolist())
    return said | {"own": own}


def workers(model: str, folder: Path) -> dict:
    """Tokens after prompts that vLLM's two workers read themselves, and that two ranks read."""
    from tests.vllm.models import dtype, plain, save

    save(model, folder / "model")
    with group(folder, 2) as reader:
        llm = engine(folder, reader, dtype(model), workers=2, plain=plain(model))
        found = [llm.generate(prompts(301, 150), greedy(by), use_tqdm=False) for by in (False, True)]
        own, ours = ([list(each.outputs[0].token_ids) for each in outputs] for outputs in found)
        llm.llm_engine.engine_core.shutdown()
        return {"own": own, "ours": ours, "read": reader.read()}


def faults(policy: str, folder: Path) -> dict:
    """While a rank stands still a short request is answered and a long one given up; then the reader dies."""
    from tests.support.reader_health import health
    from tests.vllm.models import save

    save("qwen3_next", folder / "model")
    said: dict = {}
    with group(folder, 2) as reader:
        llm = engine(folder, reader, "bfloat16", policy)
        own = llm.generate(prompts(301)[0], greedy(False), use_tqdm=False)[0]
        core, (long, other, short) = llm.llm_engine, prompts(301, 200, 37)
        stopped = reader.ranks()[1]
        os.kill(stopped, signal.SIGSTOP)
        for name, prompt in (("long", long), ("given up", other), ("short", short)):
            core.add_request(name, prompt, greedy())
        ended: dict = {}

        def until(name: str) -> None:
            limit = time.monotonic() + 60
            while name not in ended and time.monotonic() < limit:
                ended.update({out.request_id: out.outputs[0] for out in core.step() if out.finished})

        until("short")
        said["before the long one"] = "long" not in ended and len(ended["short"].token_ids)
        core.abort_request(["given up"])
        for _ in range(5):
            core.step()
        if policy == "recompute":  # goes on and is then asked for nothing any more
            os.kill(stopped, signal.SIGCONT)
            until("long")
            said["after"] = list(ended.pop("long").token_ids)
            while health(reader.address)["held"]:
                time.sleep(0.2)
            os.kill(stopped, signal.SIGSTOP)
            core.add_request("long", long, greedy())
            for _ in range(5):
                core.step()
        os.kill(reader.ranks()[0], signal.SIGKILL)
        until("long")
        os.kill(stopped, signal.SIGCONT)
        core.add_request("later", short, greedy())
        until("later")
        said["own"], said["long"] = list(own.outputs[0].token_ids), list(ended["long"].token_ids)
        return said | {"reason": ended["long"].finish_reason, "later": len(ended["later"].token_ids)}


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ |= QUIET | (apart if what == "workers" else {})
    known = {"equal": equal, "hosts": hosts, "decoded": decoded, "faults": faults, "workers": workers}
    result = known[what](*arguments[:-1], Path(arguments[-1]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # vLLM's threads have nothing more to say
