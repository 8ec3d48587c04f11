"""The planner's links against real ones: gloo between network namespaces behind a token bucket.

    python -m benchmarks.scan.links [--nodes 4 --per-node 1] [--mbit 100,20] [--out FILE.json]

Needs root on Linux and iproute2. Every namespace is a node with `--per-node` ranks behind a veth of `--mbit` (tc's
tbf; a delay would need netem). The cluster handed to the cost model is what was asked of tc (a GPU's share of its
node's link), and for the rest what was measured. Shown beside the times of every strategy: the predictions, the winner,
and the bytes that really crossed the interfaces over the bytes counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ring_la.algebra import Affine
from ring_la.cli.cluster import Cluster
from ring_la.cli.rates import H200
from ring_la.comm import Group
from ring_la.layout import Layout
from ring_la.scan import Chain, CostModel
from ring_la.scan.auto import Line

from ..rows import save
from ..timing import in_turns
from .arms import exchanges

STATES = (("identity", 8, 32), ("identity", 16, 64), ("scalar", 32, 64), ("dense", 4, 64), ("dense", 16, 64))
"""Shape of A, heads, K = V."""
PORT = 29631


def sh(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout


def build(nodes: int) -> None:
    sh("ip link add ringla0 type bridge && ip link set ringla0 up")
    for n in range(nodes):
        sh(f"ip netns add ringla{n} && ip link add rv{n} type veth peer name eth0 netns ringla{n}")
        sh(f"ip link set rv{n} master ringla0 up && ip -n ringla{n} addr add 10.77.0.{n + 1}/24 dev eth0")
        sh(f"ip -n ringla{n} link set eth0 up && ip -n ringla{n} link set lo up")


def shape(nodes: int, mbit: float) -> None:
    for n in range(nodes):
        subprocess.run(f"tc -n ringla{n} qdisc del dev eth0 root", shell=True, capture_output=True)
        sh(f"tc -n ringla{n} qdisc add dev eth0 root tbf rate {mbit}mbit burst 10kb latency 2000ms")


def tear_down(nodes: int) -> None:
    for n in range(nodes):
        subprocess.run(f"ip netns del ringla{n}", shell=True, capture_output=True)
    subprocess.run("ip link del ringla0", shell=True, capture_output=True)


def sent() -> int:
    """Bytes this namespace's interface has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def rank_main(rank: int, args: argparse.Namespace, mbit: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    world = args.nodes * args.per_node
    store = dist.TCPStore("10.77.0.1", PORT + int(mbit) % 997, world, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    group = Group(None, timedelta(seconds=60))
    own = CostModel.measure(group)
    mates = dist.new_subgroups(args.per_node)[0] if args.per_node > 1 else None
    near = CostModel.measure(Group(mates, timedelta(seconds=60))) if mates is not None else own
    share = mbit * 1e6 / 8 / args.per_node
    cluster = Cluster(args.per_node, near.hop, Line(near.hop.alpha, share), 0.0, 0.0)
    rates = replace(H200, groups={0: own})
    declared = cluster.model(world, rates)
    chain = Chain.of(Layout(64 * world, "contiguous", world, rank))
    rows = []
    for kind, heads, width in STATES:
        like = Affine(kind, None, torch.empty(1, heads, width, width))
        steps, counted, crossed = exchanges(group, like), {}, {}
        for name, step in steps.items():
            step()
            dist.barrier()
            before, wire = group.bytes_sent, sent()
            step()
            dist.barrier()
            time.sleep(0.05)
            counted[name], crossed[name] = group.bytes_sent - before, sent() - wire
        times = in_turns(steps, group, rounds=args.rounds, quantile=0.25)
        rows.append(
            dict(mbit=mbit, kind=kind, heads=heads, width=width, ms={n: t * 1e3 for n, t in times.items()},
                 declared_ms={n: t * 1e3 for n, t in declared.predict(chain, like).items()},
                 measured_ms={n: t * 1e3 for n, t in own.predict(chain, like).items()},
                 counted=counted, crossed=crossed)
        )  # fmt: skip
    found: list = [None] * world
    dist.all_gather_object(found, [(r["counted"], r["crossed"]) for r in rows])
    if rank == 0:
        for i, row in enumerate(rows):
            names = row["ms"]
            row["counted"] = {n: sum(f[i][0][n] for f in found) for n in names}
            row["crossed"] = {n: sum(f[i][1][n] for f in found[:: args.per_node]) for n in names}
        save(args.out, rows)
    dist.destroy_process_group()


def report(rows: list[dict]) -> None:
    for key in ("declared_ms", "measured_ms"):
        right = 0
        for row in rows:
            pick = min(row[key], key=row[key].get)
            right += row["ms"][pick] <= 1.05 * min(row["ms"].values())
        print(f"the pick by {key[:-3]} links is the winner or within 5 % in {right} of {len(rows)}")
    for row in rows:
        state = f"{row['kind']:9}{row['heads']:3} × {row['width']}²"
        print(f"{row['mbit']:6} Mbit/s {state}: ms real, by declared links, by measured links")
        for n, real in row["ms"].items():
            times = "".join(f"{t:9.1f}" for t in (real, row["declared_ms"][n], row["measured_ms"][n]))
            over = row["crossed"][n] / max(1, row["counted"][n])
            print(f"   {n:12}{times}   crossed / counted {over:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--per-node", type=int, default=1)
    parser.add_argument("--mbit", default="100,20")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/links.json"))
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return rank_main(args.rank, args, float(args.mbit))
    rows = []
    tear_down(args.nodes)
    try:
        build(args.nodes)
        for mbit in map(float, args.mbit.split(",")):
            shape(args.nodes, mbit)
            same = ("nodes", "per_node", "rounds", "out")
            options = [word for n in same for word in (f"--{n.replace('_', '-')}", str(getattr(args, n)))]
            command = [sys.executable, "-m", "benchmarks.scan.links", *options, "--mbit", str(mbit)]
            ranks = range(args.nodes * args.per_node)
            started = [
                subprocess.Popen(["ip", "netns", "exec", f"ringla{r // args.per_node}", *command, "--rank", str(r)])
                for r in ranks
            ]
            if any(process.wait(timeout=180) for process in started):
                raise RuntimeError("a rank failed")
            rows += json.loads(args.out.read_text())
    finally:
        tear_down(args.nodes)
    save(args.out, rows)
    report(rows)


if __name__ == "__main__":
    main()
