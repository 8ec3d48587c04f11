"""Train a small hybrid language model on one sequence split over ranks, show that the split changes nothing, use it.

    bash launch/demo.sh                                # set-up included; or, where ring_la is installed:
    torchrun --standalone --nproc_per_node 4 examples/train_demo.py
    python examples/train_demo.py                      # one rank, which has the whole sequence

Every step is one sequence of bytes of real text (Python's standard library, or --data), split zigzag over the ranks:
each rank holds an eighth from the front and the matching one from the back. Three layers in four are gated delta
nets, whose states travel from rank to rank; the fourth is softmax attention. The first steps are then repeated by one
process without any split. At the end a prompt is read by all ranks together and continued by one of them.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import sysconfig
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ring_la import ContextParallel, capture
from ring_la.comm import is_exchange
from ring_la.inference import Sampler, decode, prefill
from ring_la.models import HybridConfig, HybridLM

STEPS = ("eager", "compiled", "captured")
ALLOWED = 1e-5
"""Relative difference between the losses of the split and of the whole sequence, in fp32."""
ROUNDING = "In a small model rounding grows from step to step: --dtype float64 tells it from a fault"


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    cp = join()
    say = print if cp.rank == 0 else (lambda *_, **__: None)
    text = read_text(args.data, args.max_bytes)
    train, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    batches = Batches(train, args.seq_len, args.seed, cp.device)
    config = HybridConfig(vocab_size=256, dim=args.dim, layers=args.layers.split(","), num_heads=args.heads)
    layout = cp.layout(args.seq_len, kind="zigzag")
    say(describe(cp, args, config, len(text)))

    model, optimizer, losses = run(f"training on {cp.size} ranks", cp, config, batches, args, layout)
    same = True
    if cp.rank == 0 and args.compare:
        alone = run("the same on 1 rank", None, config, batches, args, None, steps=min(args.compare, args.steps))[2]
        same = compare(losses, alone, cp.size)
    same = from_rank_0(same)

    if cp.rank == 0:
        save(Path(args.out), model, optimizer, losses, say)
    continue_prompt(cp, model, args, held_out, say)
    say(f"\nall of it took {time.perf_counter() - began:.0f} s")
    dist.destroy_process_group()
    if not same:
        hint = f". {ROUNDING}" if args.dtype == "float32" else ""
        raise SystemExit(f"the losses differ by more than {ALLOWED}{hint}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=sysconfig.get_paths()["stdlib"], help="a file, or a folder of text files")
    parser.add_argument("--out", default="runs/demo", help="where the checkpoint and the loss curve go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compare", type=int, default=20, help="steps to repeat on one rank; 0: none")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--layers", default="gdn,gdn,gdn,attention", help="names from ring_la.nn.LAYERS")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--step",
        default="eager",
        choices=STEPS,
        help="captured: on GPUs a step is one CUDA graph, exchanges and optimizer in it; compiled: by torch.compile",
    )
    parser.add_argument("--max-bytes", type=int, default=8 << 20, help="of the text")
    parser.add_argument("--prompt", help="text to continue (default: some 4,000 bytes the training did not see)")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    return parser.parse_args()


def join() -> ContextParallel:
    """This process's rank: one GPU and NCCL where there are GPUs, else gloo and a share of the cores.

    Without torchrun it is the only one.
    """
    rank = int(os.environ.get("LOCAL_RANK", 0))
    job = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **job)
    else:
        dist.init_process_group("gloo", timeout=timedelta(minutes=30), **job)
        torch.set_num_threads(max(1, cores() // dist.get_world_size()))
    return ContextParallel()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(cp: ContextParallel, args: argparse.Namespace, config: HybridConfig, size: int) -> str:
    where = f"{cp.size} GPUs (NCCL)" if cp.device.type == "cuda" else f"{cores()} CPU cores (gloo)"
    lines = [
        f"{size / 2**20:.1f} MiB of text from {args.data}",
        f"{args.seq_len:,} tokens a step, split zigzag over {cp.size} ranks on {where}",
        f"layers: {' '.join(config.layers)}, {config.dim} channels, {config.num_heads} heads",
    ]
    if cp.size == 1:
        lines.append("one rank only: nothing is split here, so the comparison below is between two unsplit runs")
    return "\n".join(lines)


# -- data --------------------------------------------------------------------------------------------------


SKIPPED = {"site-packages", "test", "tests", "encodings"}
"""Folders left out: other people's code, and what is more table than text."""


def read_text(source: str, limit: int) -> bytes:
    """Up to `limit` bytes of a file, or of a folder's text files: its .py files if it has any."""
    path, text = Path(source), bytearray()
    if path.is_file():
        return path.read_bytes()[:limit]
    files = [f for f in path.rglob("*") if f.is_file() and not SKIPPED & set(f.relative_to(path).parts)]
    files.sort(key=lambda f: zlib.crc32(str(f.relative_to(path)).encode()))  # folders mixed, alike everywhere
    for file in [f for f in files if f.suffix == ".py"] or files:
        content = file.read_bytes()
        if 0 not in content[:1024]:  # not a binary
            text += content
        if len(text) >= limit:
            break
    return bytes(text[:limit])


class Batches:
    """Step i's tokens: a run of the text whose place depends on the seed and i alone."""

    def __init__(self, text: bytes, seq_len: int, seed: int, device: torch.device) -> None:
        if len(text) <= seq_len:
            raise SystemExit(f"--data: {len(text):,} bytes of text are too few for sequences of {seq_len:,}")
        self.text, self.seq_len, self.seed, self.device = text, seq_len, seed, device

    def __getitem__(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000003 * self.seed + step)
        start = int(torch.randint(len(self.text) - self.seq_len, (1,), generator=generator))
        return tokens(self.text[start : start + self.seq_len], self.device)


def tokens(text: bytes, device: torch.device) -> Tensor:
    """A token a byte, ``[1, T]``."""
    return torch.tensor(list(text), device=device)[None]


# -- training ----------------------------------------------------------------------------------------------


def run(
    title: str,
    cp: ContextParallel | None,
    config: HybridConfig,
    batches: Batches,
    args: argparse.Namespace,
    layout,
    steps: int | None = None,
) -> tuple[HybridLM, torch.optim.Optimizer, list[float]]:
    """Train from scratch; without a ContextParallel this process does it alone, with all cores."""
    torch.manual_seed(args.seed)
    model = HybridLM(config).to(batches.device, getattr(torch, args.dtype))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    rate, captured = args.lr, args.step == "captured" and batches.device.type == "cuda"
    if captured:  # a graph would repeat a number; a tensor it reads again
        rate = torch.tensor(rate, device=batches.device)
    adam = dict(betas=(0.9, 0.95), eps=1e-6, capturable=captured)  # eps above rounding: Adam divides by it
    optimizer = torch.optim.AdamW(groups, lr=rate, **adam)
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warmup) * max(0.1, 1 - i / args.steps)
    )
    exchange, losses = Exchange(cp), []
    step = train_step(model, optimizer, cp, layout, args.step)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if cp else cores())
    bar = tqdm(range(args.steps if steps is None else steps), desc=title, disable=bool(cp and cp.rank), unit="step")
    for i in bar:
        start = time.perf_counter()
        losses.append(exchange.measure(i, lambda: step(batches[i])))  # noqa: B023
        schedule.step()
        speed = args.seq_len / (time.perf_counter() - start)
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s, exchanging {exchange.share:.0%}")
    torch.set_num_threads(threads)
    return model, optimizer, losses


def train_step(
    model: HybridLM, optimizer: torch.optim.Optimizer, cp: ContextParallel | None, layout, how: str
) -> Callable[[Tensor], float]:
    """One step: of the tokens of the whole sequence, which returns its loss."""
    loss_of = torch.compile(model.loss, fullgraph=True) if how == "compiled" else model.loss

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        if layout is not None:
            ids = layout.shard(ids)
        loss = loss_of(ids, layout=layout)
        loss.backward()
        if cp is not None:  # parts summed over the ranks are the gradient, and the loss, of one process
            parameters = list(model.parameters())
            parts = torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in parameters)])
            loss, *grads = cp.comm.all_reduce(parts).wait().split([1, *(p.numel() for p in parameters)])
            for p, grad in zip(parameters, grads):
                p.grad = grad.view_as(p)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    if how != "captured":
        return lambda ids: step(ids).item()
    captured = capture(step, cp)

    def run(ids: Tensor) -> float:
        loss = captured(ids)
        captured.wait()  # a rank that died is named here
        return loss.item()

    return run


class Exchange:
    """The share of a step spent exchanging: what this rank's host waits for messages on CPU; on GPUs the time of
    kernels and copies that exchange, profiled in one step of 25 (they may overlap computing)."""

    def __init__(self, cp: ContextParallel | None) -> None:
        self.cp, self.share = cp if cp and cp.size > 1 else None, 0.0

    def measure(self, i: int, step: Callable[[], float]) -> float:
        if self.cp is None:
            return step()
        start = time.perf_counter()
        if self.cp.device.type == "cpu":
            before = self.cp.comm.wait_seconds
            loss = step()
            waited = self.cp.comm.wait_seconds - before
        elif i % 25 == 3:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                start = time.perf_counter()
                loss = step()
                seconds = time.perf_counter() - start
            kernels = [e for e in profile.key_averages() if is_exchange(e.key)]
            self.share = sum(e.self_device_time_total for e in kernels) / 1e6 / seconds
            return loss
        else:
            return step()
        self.share = 0.8 * self.share + 0.2 * waited / (time.perf_counter() - start) if i else 0.0
        return loss


# -- the split changes nothing -----------------------------------------------------------------------------


def compare(split: list[float], alone: list[float], ranks: int) -> bool:
    """Print both runs' losses side by side; whether they are the same."""
    print(f"\nstep   loss on {ranks} ranks    loss on 1 rank    relative difference")
    worst = 0.0
    for i, (a, b) in enumerate(zip(split, alone)):
        difference = abs(a - b) / abs(b)
        worst = max(worst, difference)
        print(f"{i:4d}   {a:15.7f}   {b:15.7f}    {difference:.1e}")
    verdict = "the same" if worst < ALLOWED else "NOT the same"
    print(f"largest relative difference {worst:.1e} (allowed {ALLOWED:.0e}): {verdict}\n")
    return worst < ALLOWED


def from_rank_0(value: object) -> object:
    """Rank 0's value, on every rank. The others wait here meanwhile."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# -- what it leaves ----------------------------------------------------------------------------------------


def save(out: Path, model: HybridLM, optimizer: torch.optim.Optimizer, losses: list[float], say: Callable) -> None:
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = {"config": model.config.to_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(checkpoint, out / "checkpoint.pt")
    (out / "losses.json").write_text(json.dumps(losses))
    try:
        import matplotlib
    except ImportError:
        say(f"left {out / 'checkpoint.pt'} and {out / 'losses.json'}; no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(losses, alpha=0.4, label="each step (another piece of text)")
    axes.plot(
        [sum(part) / len(part) for part in (losses[max(0, i - 9) : i + 1] for i in range(len(losses)))],
        label="mean of the last ten",
    )
    axes.legend()
    axes.set(xlabel="step", ylabel="cross-entropy (nats a byte)", title="Hybrid on one split sequence")
    axes.grid(alpha=0.3)
    figure.savefig(out / "loss.png", dpi=150)
    say(f"left {out / 'checkpoint.pt'}, {out / 'loss.png'} and {out / 'losses.json'}")


def continue_prompt(
    cp: ContextParallel, model: HybridLM, args: argparse.Namespace, held_out: bytes, say: Callable
) -> None:
    """Prefill over all ranks; every rank gets the states; rank 0 decodes from them."""
    end = held_out.rfind(b"def ", 0, 4096) + 4  # 3 where there is none
    prompt = args.prompt.encode() if args.prompt else held_out[: end if end > 3 else 4096]
    layout, start = cp.layout(len(prompt), kind="zigzag"), time.perf_counter()
    read = prefill(model, layout.shard(tokens(prompt, cp.device)), layout=layout)
    seconds = time.perf_counter() - start
    size = sum(t.nbytes for state in read.states for t in state if t is not None)
    say(f"\nprefill: {len(prompt):,} tokens over {cp.size} ranks in {seconds:.2f} s")
    say(f"hand-over: {size / 2**20:.1f} MiB of states on every rank; rank 0 decodes\n")
    if cp.rank == 0:
        torch.set_num_threads(cores())
        generator = torch.Generator(cp.device).manual_seed(args.seed)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        print("…" + prompt[-160:].decode(errors="replace") + "▌", end="")
        start = time.perf_counter()
        for token in decode(model, read, args.new_tokens, Sampler(args.temperature, generator=generator)):
            print(decoder.decode(bytes(token.tolist())), end="", flush=True)
        seconds = time.perf_counter() - start
        print(f"\n\ndecoding: {args.new_tokens} tokens, {1000 * seconds / max(1, args.new_tokens):.1f} ms each")
    from_rank_0(None)


if __name__ == "__main__":
    main()
