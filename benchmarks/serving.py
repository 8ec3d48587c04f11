"""What requests to the engine take: `python -m benchmarks.serving [--out FILE]`, or under torchrun.

A bf16 model of 8 layers (gated delta nets, every fourth softmax attention): reading 131,072 tokens, the next turn of
that conversation, a token of 1 and of 8 sequences. That the tokens are right and memory suffices is for
tests/gpu/test_serving.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.options import need_gpus
from benchmarks.rows import save
from benchmarks.timing import wall
from ring_la import ContextParallel
from ring_la.cli.job import job
from ring_la.inference import Prefilled
from ring_la.serving import Engine, Hybrid, NoText
from tests.support.serving import GIB, Timed, answer, make, prompt


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
    for _ in range(3):
        call()
    return wall(call, times)


def one_step(model: Hybrid, read: Prefilled) -> Prefilled:
    return model.step(torch.tensor([1], device="cuda"), read.states, in_place=False)


class Growing:
    """Step after step."""

    def __init__(self, model: Hybrid, read: Prefilled) -> None:
        self.model, self.read = model, read

    def __call__(self) -> None:
        self.read = one_step(self.model, self.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/serving.json"))
    args = parser.parse_args()
    need_gpus(parser)
    with job():
        cp = ContextParallel(validate="never")
        found = times(cp)
        if cp.rank == 0:
            save(args.out, found)


if __name__ == "__main__":
    main()
