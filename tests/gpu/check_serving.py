"""The engine on GPUs: right tokens, its times, and whether what `memory.fitting` promises fits.

    python -m tests.gpu.check_serving [--out FOLDER]
    torchrun --nproc_per_node 2 -m tests.gpu.check_serving

tokens   an fp32 model whose prompts are read in pieces, decoded as a batch and go on from kept states, against
         `ring_la.inference.generate` of each prompt alone
times    a bf16 model of 8 layers (gated delta nets, every fourth softmax attention): reading 131,072 tokens, the next
         turn of that conversation, a token of 1 and of 8 sequences
memory   a GPU with 2 GiB left: a request of as many tokens as are said to fit is answered, and what it took

Each part's figures are kept in OUT/serving.json as they come.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ring_la import ContextParallel
from ring_la.cli.job import job
from ring_la.inference import Prefilled, generate
from ring_la.models import HybridConfig, HybridLM
from ring_la.serving import Completion, Ended, Engine, Event, Hybrid, NewToken, NoText, Request
from ring_la.serving.memory import fitting

GIB = 2**30


class Timed(Completion):
    """A request, its tokens and when each came."""

    def __init__(self, ids: Sequence[int], max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.end: Event | None = None
        super().__init__(Request(list(ids), max_tokens), self.hear)

    def hear(self, event: Event) -> None:
        if isinstance(event, NewToken):
            self.tokens.append(event.token)
            self.times.append(time.perf_counter())
        else:
            self.end = event


def answer(engine: Engine, jobs: Sequence[Completion]) -> float | None:
    """When the requests were made; returns after all are answered. None on ranks that follow the first."""
    if engine.ranks.leads:
        for each in jobs:
            engine.submit(each)
        engine.stop()
    start = time.perf_counter()
    engine.run()
    if not engine.ranks.leads:
        return None
    assert all(isinstance(each.end, Ended) for each in jobs), [each.end for each in jobs]
    return start


def make(dim: int, heads: int, layers: list[str], dtype: torch.dtype) -> HybridLM:
    torch.manual_seed(0)
    options = {"attention": {"num_kv_heads": max(1, heads // 4)}}
    with torch.device("cuda"):
        model = HybridLM(HybridConfig(257, dim, layers, heads, options=options))
        with torch.no_grad():  # logits that are far apart
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
    return model.to(dtype)


def prompt(length: int) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def tokens(cp: ContextParallel) -> dict:
    model = make(256, 4, ["gdn", "kda", "mamba2", "attention"], torch.float32)
    asked = [(1, 20), (3000, 9), (37, 15), (5000, 12), (3000, 9)]
    jobs = [Timed(prompt(length), n) for length, n in asked]
    if answer(Engine(Hybrid(model), NoText(), cp, piece=1024, batch=3, keep=GIB, patience=90), jobs) is None:
        return {}
    want = [generate(model, torch.tensor([prompt(length)], device="cuda"), n)[0].tolist() for length, n in asked]
    equal = [a.tokens == b for a, b in zip(jobs, want)]
    assert all(equal), [(a.tokens, b) for a, b in zip(jobs, want)]
    return {"requests equal": equal, "reused": [each.end.reused_tokens for each in jobs]}


def times(cp: ContextParallel) -> dict:
    model = Hybrid(make(2048, 16, ["gdn", "gdn", "gdn", "attention"] * 2, torch.bfloat16))
    long = prompt(131072)
    out = {"parameters": sum(p.numel() for p in model.model.parameters())}
    for name in ("cold", "warm"):
        first, turn = Timed(long, 64), Timed([*long, *prompt(500)], 64)
        start = answer(Engine(model, NoText(), cp, piece=32768, batch=1, keep=8 * GIB, patience=90), [first, turn])
        if start is None:
            continue
        out[f"{name}: first token after 131,072 tokens, s"] = first.times[0] - start
        out[f"{name}: first token of the next turn, s"] = turn.times[0] - first.times[-1]
        out[f"{name}: a token after 131,072, ms"] = 1e3 * (first.times[-1] - first.times[0]) / 63
        assert turn.end.reused_tokens == 131072
    for cudnn in (True, False, True):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        name = f"of 1,000{'' if cudnn else ' without cuDNN attention'}"
        for count in (1, 8):
            jobs = [Timed(prompt(1000 + i), 130) for i in range(count)]
            if answer(Engine(model, NoText(), cp, batch=8, patience=90), jobs) is None:
                continue
            spans = [each.times[-1] - each.times[29] for each in jobs]
            out[f"a token of {count} sequences {name}, ms"] = 10 * max(spans)
        read = model.read(torch.tensor([prompt(1000)], device="cuda"), None, cp)
        out[f"a step {name} that does not grow, ms"] = 1e3 * spent(lambda read=read: one_step(model, read), 50)
        out[f"a step {name} that grows, ms"] = 1e3 * spent(Growing(model, read), 50)
        print(out, flush=True)
    return out


def spent(call: Callable[[], None], times: int) -> float:
    """Seconds a call, after three."""
    for i in range(times + 3):
        if i == 3:
            torch.cuda.synchronize()
            start = time.perf_counter()
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def one_step(model: Hybrid, read: Prefilled) -> Prefilled:
    return model.step(torch.tensor([1], device="cuda"), read.states, in_place=False)


class Growing:
    """Step after step."""

    def __init__(self, model: Hybrid, read: Prefilled) -> None:
        self.model, self.read = model, read

    def __call__(self) -> None:
        self.read = one_step(self.model, self.read)


def memory(cp: ContextParallel) -> dict:
    assert fitting(Hybrid(make(256, 4, ["gdn", "mamba2"], torch.bfloat16)), cp, 8192, 0) is None  # any number
    model, out = Hybrid(make(1024, 8, ["gdn", "attention"], torch.bfloat16)), {}
    torch.cuda.empty_cache()
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 2 * GIB, dtype=torch.uint8, device="cuda")
    room = fitting(model, cp, 8192, 0)
    out["tokens said to fit in 2 GiB"] = room
    print(out, flush=True)
    torch.cuda.reset_peak_memory_stats()
    each = Timed(prompt(room - 40), 40)
    if (start := answer(Engine(model, NoText(), cp, piece=8192, room=room, patience=120), [each])) is None:
        return {}
    taken = torch.cuda.max_memory_reserved() - ballast.nbytes
    out |= {"GiB taken by a request of so many": taken / GIB, "its seconds": each.times[-1] - start}
    print(out, flush=True)
    return out


PARTS: dict[str, Callable[[ContextParallel], dict]] = {"tokens": tokens, "times": times, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    args = parser.parse_args()
    results = {}
    with job():
        cp = ContextParallel(validate="never")
        for name in args.parts:
            start = time.perf_counter()
            try:
                results[name] = PARTS[name](cp)
            except Exception:
                results[name] = {"failed": traceback.format_exc()[-1500:]}
            results[name]["seconds"] = time.perf_counter() - start
            torch.cuda.empty_cache()
            args.out.mkdir(parents=True, exist_ok=True)
            if cp.rank == 0:
                (args.out / "serving.json").write_text(json.dumps(results, indent=1))
                print(name, json.dumps(results[name], indent=1), flush=True)


if __name__ == "__main__":
    main()
