"""A server under load for minutes: `python -m benchmarks.soak [--seconds 600] [--clients 32] [--ranks 2] [--kills 0]`.

It starts ranks of `ring-la serve` on this machine's CPUs with a small model of its own, in fp64 so that rounding
decides no token, and asks from as many clients as are wanted: short and long prompts, greedy and seeded, streamed and
whole, texts and chats. Of ten requests one is broken off by its client after some tokens, and one has its connection
reset. What every request must be answered is known beforehand, from `generate` on the whole prompt in this process.

With `--kills N` a rank is killed (SIGKILL), another one each time, at N moments of the run's first third. The others
must end by themselves with status 2 within `DEATH` seconds, every request under way must end or break off, and the
server is started again; what is asked before and after is held to the same answers. States kept on disk outlive it.

It fails if an answer is wrong or missing (but where a rank was killed), if the server still works on something when all
clients are gone, if it does not end with status 0, or if the ranks' memory in the last quarter of the time since the
last start is more than 5 % above that in the second. Only 127.0.0.1 is asked, and it ends by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

from ring_la.inference import Sampler, generate
from ring_la.models import HybridConfig, HybridLM
from ring_la.testing.processes import free_port

from .rows import save

ASKED = 24
"""Different requests."""
LONG = 3000
"""Tokens of a long prompt, about; a short one has up to 60."""
DEATH = 60
"""Seconds after a rank's death in which the others have ended."""
GROWTH = 1.05
"""Of memory, from the second quarter to the last."""


def model() -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(256, 32, ["gdn", "attention"], 2, mlp_dim=32)).double()


def tasks(own: HybridLM) -> list[dict[str, Any]]:
    """Requests, each with the tokens that must come."""
    dice, out = random.Random(0), []
    for i in range(ASKED):
        long, chat, sampled = i % 6 == 5, i % 4 == 3, i % 2
        said = "".join(dice.choices("abcdefgh \n", k=LONG + dice.randrange(500) if long else dice.randrange(1, 60)))
        body: dict[str, Any] = {"max_tokens": dice.randrange(4, 30), "temperature": 0.8 if sampled else 0, "seed": i}
        body |= {"messages": [{"role": "user", "content": said}]} if chat else {"prompt": said}
        ids = list((f"user:\n{said}\n\nassistant:\n" if chat else said).encode())
        sampler = Sampler(body["temperature"], generator=torch.Generator().manual_seed(i))
        want = generate(own, torch.tensor([ids]), body["max_tokens"], sampler)[0].tolist()
        out.append({"body": body, "chat": chat, "long": long, "want": want})
    return out


class Clients:
    """Threads that ask until time is up, and what became of it."""

    def __init__(self, port: int, asked: list[dict[str, Any]], until: float) -> None:
        self.port, self.asked, self.until = port, asked, until
        self.down = threading.Event()  # a rank was killed, and the server is not there again
        self.counts: Counter[str] = Counter()
        self.first: list[float] = []  # seconds to the first token of short prompts, streamed
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def run(self, number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < self.until and not self.errors:
            if self.down.is_set():
                time.sleep(0.2)
                continue
            fate = dice.choices(["answered", "broken off", "reset"], [8, 1, 1])[0]
            try:
                got = self.ask(dice.choice(self.asked), fate, dice.random() < 0.6, dice.randrange(1, 4))
            except Exception as error:  # whatever it is, the soak has failed, but where a rank was killed
                got = "killed" if self._killed() else "lost"
                if got == "lost":
                    self.errors.append(f"{type(error).__name__}: {error}")
            with self._lock:
                self.counts[got] += 1

    def _killed(self) -> bool:
        """Whether a rank was killed, which a client may hear of before those who killed it."""
        return self.down.wait(2.0)

    def ask(self, task: dict[str, Any], fate: str, stream: bool, after: int) -> str:
        connection, start = HTTPConnection("127.0.0.1", self.port, timeout=120), time.monotonic()
        path = "/v1/chat/completions" if task["chat"] else "/v1/completions"
        stream = stream or fate == "broken off"
        connection.request("POST", path, json.dumps(task["body"] | {"stream": stream}))
        if fate == "reset":
            time.sleep(0.01 * after)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            return fate
        answer = connection.getresponse()
        if answer.status == 429:
            connection.close()
            time.sleep(0.2)
            return "told to wait"
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read()!r}")
        if not stream:
            got = json.loads(answer.read())["choices"][0]["token_ids"]
        else:
            got = []
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                said = json.loads(line[6:])
                if "choices" not in said:
                    raise RuntimeError(f"an error in a stream: {said}")
                got += said["choices"][0]["token_ids"]
                if len(got) == 1 and not task["long"]:
                    self.first.append(time.monotonic() - start)
                if fate == "broken off" and len(got) >= after:
                    answer.close()
                    break
        connection.close()
        short = fate == "answered" and len(got) < len(task["want"])
        if short and got == task["want"][: len(got)]:
            raise RuntimeError(f"{len(got)} of {len(task['want'])} tokens")
        if got != task["want"][: len(got)]:
            self.errors.append(f"wrong tokens of {task['body']}: {got}, not {task['want']}")
            return "wrong"
        return fate


def start(folder: str, ranks: int, log: Path, port: str = "0") -> tuple[list[subprocess.Popen[str]], int]:
    """The ranks of a server, and its port."""
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ring_la", "serve", folder, "--port", port, "--piece", "1024", "--keep", "2"]
    command += ["--request-log", str(log), "--max-tokens-total", "8192", "--keep-host", "1", "--keep-disk", "4"]
    command += ["--keep-folder", f"{folder}/kept"]
    started = [
        subprocess.Popen(command, env=os.environ | job | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=-1, text=True)
        for r in range(ranks)
    ]
    said = started[0].stdout.readline()
    return started, int(said.split(",")[0].rsplit(":", 1)[1])


def memory(pid: int) -> float:
    """MiB of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def health(port: int) -> dict[str, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())


def idle(port: int) -> bool:
    deadline = time.monotonic() + 30
    while (now := health(port))["running"] + now["waiting"] and time.monotonic() < deadline:
        time.sleep(0.2)
    return now["running"] + now["waiting"] == 0


def kill(clients: Clients, started: list[subprocess.Popen[str]], rank: int) -> list[int]:
    """Kill a rank; how the others end."""
    clients.down.set()
    started[rank].kill()
    return [process.wait(DEATH) for i, process in enumerate(started) if i != rank]


def soak(seconds: float, number: int, ranks: int, folder: Path, kills: int = 0) -> dict[str, Any]:
    own = model()
    torch.save({"config": own.config.to_dict(), "model": own.state_dict()}, folder / "checkpoint.pt")
    asked = tasks(own)
    started, port = start(str(folder), ranks, folder / "log.jsonl")
    try:
        clients = Clients(port, asked, time.monotonic() + seconds)
        threads = [threading.Thread(target=clients.run, args=[i]) for i in range(number)]
        for thread in threads:
            thread.start()
        sizes: list[list[float]] = []
        at: list[float] = []
        begin, ends = time.monotonic(), []
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(2.0, seconds / 40))
            if len(ends) < kills and time.monotonic() - begin > seconds / 3 * (len(ends) + 1) / kills:
                ends.append(kill(clients, started, len(ends) % ranks))
                started, _ = start(str(folder), ranks, folder / "log.jsonl", str(port))
                clients.down.clear()
                sizes.clear()
                at.clear()
            at.append((time.monotonic() - begin) / 60)
            sizes.append([memory(process.pid) for process in started])
        done = idle(port)
        started[0].send_signal(signal.SIGTERM)
        status = [process.wait(60) for process in started]
    finally:
        for process in started:
            process.kill()
    quarter = max(1, len(sizes) // 4)
    before, after = (
        [statistics.mean(x) for x in zip(*part)] for part in (sizes[quarter : 2 * quarter], sizes[-quarter:])
    )
    first, logged = sorted(clients.first), (folder / "log.jsonl").read_text().splitlines()
    return {
        "seconds": seconds,
        "clients": number,
        "ranks": ranks,
        "requests": dict(clients.counts),
        "status of the ranks that were left, after each kill": ends,
        "lines of the log by outcome": Counter(json.loads(line)["outcome"] for line in logged),
        "errors": clients.errors[:5],
        "idle at the end": done,
        "status of the ranks": status,
        "MiB of each rank, second quarter": [round(x, 1) for x in before],
        "MiB of each rank, last quarter": [round(x, 1) for x in after],
        "MiB a minute of each rank, from the second quarter on": [
            round(statistics.linear_regression(at[quarter:], x[quarter:]).slope, 2) for x in zip(*sizes)
        ],
        "minutes and MiB of each rank": [[round(t, 2), *(round(x, 1) for x in now)] for t, now in zip(at, sizes)],
        "short prompts, s to the first token, median": round(statistics.median(first), 3),
        "short prompts, s to the first token, p95": round(first[int(0.95 * len(first))], 3),
        "sound": done
        and not clients.errors
        and not any(status)
        and all(code == 2 for left in ends for code in left)
        and all(b <= GROWTH * a for a, b in zip(before, after)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=0, help="times a rank is killed and the server started again")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(args.seconds, args.clients, args.ranks, Path(folder), args.kills)
    print(json.dumps(found, indent=1))
    save(args.out, found)
    if not found["sound"]:
        raise SystemExit("not sound")


if __name__ == "__main__":
    main()
