"""A long prompt's first token, and tokens after it: `python -m benchmarks.long_prompts`, or under torchrun.

A bf16 model with random weights: of the shape of examples/configs/hybrid_1b.yaml, or a mixture of Transformers. Of
each length a prompt is read, and another one before, while kernels are compiled, room is made for so many keys and a
step is captured (with --once of the first length alone); then so many sequences go on from it side by side, as its
state is kept, until all are there and each has --tokens more: of those alone are a token's time and what stands beside
it. So many that a GPU has no memory for them are left out, and a row says so.
A first token is behind all that the engine does before it: the prompt's pieces, of which the last ones are short, as
states are kept before its end; these states, and their place in the batch; and a step, launched before a token is told.
With --sharded each rank has a part of the weights. Tokens are the likeliest; with --temperature they are drawn, with
--top-p of the likeliest alone, and the rows say so.
A row is written as soon as it is known, with the most memory rank 0 had; after --limit seconds nothing new is begun.
Of a token's times it has the smallest, the median ("milliseconds") and the 90th percentile; with --capture what a
replay takes on rank 0's GPU, messages to other ranks included, and for how long that GPU then waits for the next; and
for how long rank 0's host waits, a token: for other hosts, and for its GPU. Where replays follow each other at once,
the GPU is what a token waits for.
The bytes a step reads are weights (of experts those that one token chooses: the sequences are alike unless drawn)
and what this rank remembers of the sequences; that the tokens are right is for tests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ring_la import ContextParallel
from ring_la.cli.job import job
from ring_la.inference.sharded_weights import held_weights
from ring_la.models import HybridConfig, HybridLM
from ring_la.serving import Completion, Ended, Engine, Event, Hybrid, Keep, NewToken, NoText, Request
from ring_la.serving.load import sharded_hybrid
from ring_la.serving.memory import fitting, held
from ring_la.serving.model import Served

from .options import counts
from .replays import Replays, quantile
from .rows import Rows

GIB = 2**30
SPARE = 1.3
"""Of a sequence's bytes, what its columns take: up to a quarter of them are empty."""
CAPTURED = 5
"""Tokens of the prompt before: a step more than those that run before one is captured."""
COMING = 64
"""Tokens, at most, that those who are there get while one more comes: several steps are taken between two."""


class Asked(Completion):
    """A request, when its tokens came, its end, and what follows each of these."""

    def __init__(self, ids: Sequence[int], tokens: int, **sampling: float) -> None:
        self.times: list[float] = []
        self.end: Event | None = None
        self.then: Callable[[Asked], None] = lambda job: None
        super().__init__(Request(list(ids), tokens, **sampling), self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, NewToken):
            self.times.append(time.perf_counter())
        else:
            self.end = event
        self.then(self)


class Runs:
    """On rank 0: one request, or several at once, after the other, and a row of each."""

    def __init__(
        self,
        engine: Engine,
        args: argparse.Namespace,
        begun: float,
        rows: Rows,
        replays: Replays,
    ) -> None:
        self._engine, self._args, self._begun, self._rows, self._replays = engine, args, begun, rows, replays
        self._sampling = {"temperature": args.temperature, "top_p": args.top_p} if args.temperature else {}
        self._waited = self._waits()

    def start(self, length: int) -> None:
        """All of a prompt's length, and the engine's end."""
        dice = torch.Generator().manual_seed(length)
        cold, warm = torch.randint(self._engine.model.vocab_size, (2, length), generator=dice).tolist()
        steps: list[tuple[str, list[Asked]]] = [("first token", [Asked(warm, 2)])]
        if not self._args.once or "prompt" not in (self._rows.rows or [{}])[-1]:
            steps.insert(0, ("first token, cold", [Asked(cold, CAPTURED)]))
        for batch in self._args.batches:
            tokens = self._args.tokens + COMING * batch  # they come one after the other
            steps.append((f"a token of {batch}", [Asked(warm, tokens, **self._sampling) for _ in range(batch)]))
        self._next(length, steps)

    def _next(self, length: int, steps: list[tuple[str, list[Asked]]]) -> None:
        if not steps or time.perf_counter() - self._begun > self._args.limit:
            self._engine.stop()
            return
        (name, jobs), rest = steps[0], steps[1:]
        asked, coming = time.perf_counter(), len(jobs)
        last: Asked | None = None  # to come; of a step it is told last

        def then(job: Asked) -> None:
            nonlocal coming, last
            if job.end is None and len(job.times) == 1:
                coming -= 1
                if not coming:  # side by side from here
                    last, self._waited = job, self._waits()
                    self._replays.taken()
            more = job is last and name.startswith("a token") and len(job.times) > self._args.tokens
            if job.end is not None or more:
                self._note(length, name, jobs, asked, last)
                for each in jobs:
                    each.then = lambda job: None
                    each.cancel()
                self._next(length, rest)

        for each in jobs:
            each.then = then
        wanted = SPARE * len(jobs) * self._remembered() / GIB
        if len(jobs) > 1 and torch.cuda.is_available() and wanted > (free := _free() / GIB):
            self._rows.add({"prompt": length, "what": name, "GiB wanted": wanted, "GiB free": free})
            self._next(length, rest)
            return
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._engine.submit(*jobs)

    def _note(self, length: int, name: str, jobs: list[Asked], asked: float, last: Asked | None) -> None:
        row: dict[str, Any] = {
            "prompt": length,
            "what": name,
            "GiB weights": held_weights(self._engine.model.model) / GIB,
        }
        if torch.cuda.is_available():
            row["GiB"] = torch.cuda.max_memory_allocated() / GIB
        failed = [each.end for each in jobs if each.end is not None and not isinstance(each.end, Ended)]
        if failed:
            row["failed"] = str(failed[0])
        elif last is not None and name.startswith("first"):
            row["seconds"] = last.times[0] - asked
        elif last is None or len(last.times) <= self._args.tokens:
            row["failed"] = "one has ended before all had their tokens"
        else:
            gaps = [1e3 * (b - a) for a, b in zip(last.times, last.times[1:])]
            for what, part in (("smallest", 0.0), ("milliseconds", 0.5), ("90th percentile", 0.9)):
                row[what] = quantile(gaps, part)
            row |= {"steps": len(gaps)} | self._replays.taken()
            row |= {what: 1e3 * (now - self._waited[what]) / len(gaps) for what, now in self._waits().items()}
            row |= {"reused": last.reused, "all seconds": last.times[-1] - asked}
            row |= {"GiB read a step": self._bytes(jobs) / GIB}
            row |= {"graphs": self._engine.batch.graphs} | self._sampling
        self._rows.add(row)

    def _waits(self) -> dict[str, float]:
        """Seconds that this rank's host has waited so far, for what."""
        ranks, cp = self._engine.ranks.comm, self._engine.cp
        groups = {"waits for hosts": ranks, "waits for the GPU": None if cp is None or cp.comm is ranks else cp.comm}
        return {what: group.wait_seconds for what, group in groups.items() if group is not None}

    def _bytes(self, jobs: list[Asked]) -> float:
        return chosen_weights(self._engine.model.model) + len(jobs) * self._remembered()

    def _remembered(self) -> int:
        """Bytes of the longest sequence that is kept."""
        states = self._engine.states
        longest = max(states.kept, key=lambda key: states.kept[key].length, default=0)
        return held(states.before(longest)) if longest else 0


def _free() -> int:
    """Bytes of the GPU that nothing holds."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached


def chosen_weights(model: torch.nn.Module) -> float:
    """Bytes of a model's weights on this rank that one token needs."""
    from ring_la.integrations.transformers.experts import is_experts

    out = float(held_weights(model))
    config: Any = getattr(model, "config", None)
    for module in model.modules():
        if is_experts(module):
            experts = next(module.parameters(recurse=False)).shape[0]
            out -= held_weights(module) * (1 - config.get_text_config().num_experts_per_tok / experts)
    return out


def make(cp: ContextParallel, small: bool) -> HybridLM:
    torch.manual_seed(0)
    dim, heads, repeat, vocabulary = (64, 2, 1, 257) if small else (2560, 20, 3, 32768)
    options = {"attention": {"num_kv_heads": max(1, heads // 5)}}
    with torch.device(cp.device):
        layers = ["gdn", "gdn", "gdn", "attention"] * repeat
        model = HybridLM(HybridConfig(vocabulary, dim, layers, heads, options=options))
    return model.to(torch.float32 if small else torch.bfloat16)


def hybrid(cp: ContextParallel, args: argparse.Namespace) -> Served:
    model = make(cp, args.small)
    return sharded_hybrid(model, cp) if args.sharded and cp.size > 1 else Hybrid(model)


MIXTURES = {"qwen3_5_35b_a3b": "Qwen3_5MoeForCausalLM", "kimi_linear_48b": "KimiLinearForCausalLM"}
"""Shapes that are their classes' defaults: Qwen3.5-35B-A3B's and Kimi-Linear-48B-A3B's."""
SURE = 8.0
"""By how much routers are scaled up, so that rounding turns no choice that counts, as in trained ones."""
SMALL: dict[str, Any] = dict(vocab_size=257, hidden_size=64, num_hidden_layers=5, num_attention_heads=2)
SMALL |= dict(num_key_value_heads=2, moe_intermediate_size=32, num_experts_per_tok=2, pad_token_id=None)
SMALL_HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5_35b_a3b": dict(linear_num_key_heads=2, linear_num_value_heads=2),
    "kimi_linear_48b": dict(linear_num_heads=2, linear_head_dim=32),
}


def mixture(cp: ContextParallel, name: str, small: bool, sharded: bool) -> Served:
    """A mixture of Transformers, made on "meta" and drawn a module at a time."""
    if small:
        sys.modules["fla"] = None  # type: ignore[assignment]  # whose kernels need a GPU
    import transformers

    from ring_la.integrations.transformers.sharded import shard_weights
    from ring_la.integrations.transformers.weights import draw_weights
    from ring_la.serving.pretrained import Pretrained

    kind: Any = getattr(transformers, MIXTURES[name])
    config = kind.config_class(max_position_embeddings=2**21, **(SMALL | SMALL_HEADS[name] if small else {}))
    config.dtype = torch.float32 if small else torch.bfloat16
    with torch.device("meta"):
        model = kind(config).to(config.dtype)
    weights = shard_weights(model, cp) if sharded else None
    draw_weights(model, device=cp.device)
    for router in (p for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")):
        router.data.mul_(SURE)
    if weights is not None:
        weights.settle(model)
    return Pretrained(model, cp)


def measure(cp: ContextParallel, args: argparse.Namespace, begun: float, replays: Replays) -> None:
    if args.model == "hybrid_1b":
        model: Served = hybrid(cp, args)
    else:
        model = mixture(cp, args.model, args.small, args.sharded)
    rows = Rows(args.out)
    if args.longest:
        tokens = fitting(model, cp, args.piece * cp.size if model.goes_on else None, 0)
        if cp.rank == 0:
            rows.add({"what": "longest context", "ranks": cp.size, "tokens": tokens})
    for length in args.lengths:
        if cp.comm.agreement.tell(str(time.perf_counter() - begun > args.limit))[0] == "True":
            return  # rank 0's time
        keep, most = Keep(args.keep * GIB if torch.cuda.is_available() else GIB), max(args.batches)
        engine = Engine(
            model, NoText(), cp, piece=args.piece * cp.size, batch=most, keep=keep, patience=300, capture=args.capture
        )
        if engine.ranks.leads:
            Runs(engine, args, begun, rows, replays).start(length)
        engine.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["hybrid_1b", *MIXTURES], default="hybrid_1b", help="whose shape")
    parser.add_argument("--sharded", action="store_true", help="each rank has a part of the weights")
    parser.add_argument("--lengths", type=counts, default=[65536, 262144])
    parser.add_argument("--batches", type=counts, default=[1, 8, 64], help="sequences decoded side by side")
    parser.add_argument("--tokens", type=int, default=48, help="of each of them")
    parser.add_argument("--temperature", type=float, default=0.0, help="at which tokens are drawn; 0: the likeliest")
    parser.add_argument("--top-p", type=float, default=1.0, help="of them, those drawn from; 1: all")
    parser.add_argument("--piece", type=int, default=65536, help="tokens of a prompt each rank reads at once")
    parser.add_argument("--once", action="store_true", help="no prompt before that of each length but the first")
    parser.add_argument("--capture", action="store_true", help="a step of decoding is one CUDA graph")
    parser.add_argument(
        "--longest", action="store_true", help="first, the tokens that fit, as the server finds at its start (GPUs)"
    )
    parser.add_argument("--transport", choices=["auto", "torch", "symmetric"], default="auto", help="of messages")
    parser.add_argument("--keep", type=int, default=64, help="GiB of states kept on each GPU")
    parser.add_argument("--limit", type=float, default=50, help="seconds after which nothing new is begun")
    parser.add_argument("--small", action="store_true", help="a model for CPUs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.top_p != 1 and not args.temperature:
        parser.error("--top-p is of tokens that are drawn: it needs a --temperature")
    begun = time.perf_counter()
    with job(), (replays := Replays()).noted():
        measure(ContextParallel(validate="never", timeout=120, transport=args.transport), args, begun, replays)


if __name__ == "__main__":
    main()
