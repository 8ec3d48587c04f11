"""Keys that stay where they were read, beside keys on every rank: bytes of a rank, bytes and time of a token.

    PYTHONPATH=. torchrun --standalone --nproc_per_node 2 -m benchmarks.shared_keys --tokens 4096

A `HybridLM` of two gated delta nets and two softmax layers (4 heads, 2 key heads, K = V = 64), or a Llama of
Transformers of two such layers (`--model llama`), in fp32 on gloo, bf16 on NCCL; one JSON object from rank 0.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la
from ring_la.inference import Prefilled, key_store, prefill, step
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import KVCache

STEPS = 32


Step = Callable[[Tensor, list[Any], bool], Prefilled]


class Prompts(NamedTuple):
    """A prompt read twice: with keys on every rank, and on the ranks that read them; and what goes on."""

    whole: Prefilled
    shared: Prefilled
    step: Step


def per_token(take: Step, prompt: Prefilled, cp: ring_la.ContextParallel) -> dict[str, float]:
    """What a token more takes, once it is warm."""
    tokens = prompt.logits.argmax(-1)
    for i in range(STEPS + 4):
        if i == 4:
            cp.comm.all_reduce(torch.zeros(1, device=cp.device)).wait()
            sent, start = cp.comm.bytes_sent, time.perf_counter()
        prompt = take(tokens, prompt.states, i > 0)
        tokens = prompt.logits.argmax(-1)
    float(tokens[0])
    ms = 1e3 * (time.perf_counter() - start) / STEPS
    return {"sent": (cp.comm.bytes_sent - sent) / STEPS, "ms": round(ms, 2)}


def of_hybrid(cp: ring_la.ContextParallel, ids: Tensor, dtype: torch.dtype) -> Prompts:
    options = {"attention": {"num_kv_heads": 2}}
    config = HybridConfig(256, 256, ["gdn", "attention"] * 2, 4, options=options)
    model = HybridLM(config).to(cp.device, dtype).eval()
    layout = cp.layout(ids.shape[1])

    def take(tokens: Tensor, states: list[Any], in_place: bool) -> Prefilled:
        return step(model, tokens, states, in_place=in_place)

    whole = prefill(model, layout.shard(ids), layout=layout)
    shared = prefill(model, layout.shard(ids), layout=layout, keys=key_store(model, cp))
    return Prompts(whole, shared, take)


def of_llama(cp: ring_la.ContextParallel, ids: Tensor, dtype: torch.dtype) -> Prompts:
    from transformers import LlamaConfig, LlamaForCausalLM

    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.sequences import Sequences

    heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    widths = dict(vocab_size=256, hidden_size=256, intermediate_size=512, max_position_embeddings=2**20)
    config = LlamaConfig(**widths, **heads)
    model = LlamaForCausalLM(config).to(cp.device, dtype).eval()
    parallelize(model, cp)
    apart, together = Sequences(model), Sequences(model)
    together.share(cp)

    def take(tokens: Tensor, states: list[Any], in_place: bool) -> Prefilled:
        return together.step(tokens, states, in_place)

    return Prompts(apart.read(ids, None), together.read(ids, None), take)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["hybrid", "llama"], default="hybrid")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    cp = ring_la.ContextParallel()
    ids = torch.randint(256, (args.batch, args.tokens), device=cp.device)
    make = of_llama if args.model == "llama" else of_hybrid
    prompts = make(cp, ids, torch.bfloat16 if cuda else torch.float32)
    found = {"model": args.model, "ranks": cp.size, "tokens": args.tokens, "batch": args.batch}
    kept = sum(x.nbytes for state in prompts.whole.states if isinstance(state, KVCache) for x in (state.k, state.v))
    found["everywhere"] = {"bytes": kept} | per_token(prompts.step, prompts.whole, cp)
    assert torch.equal(prompts.shared.logits.argmax(-1), prompts.whole.logits.argmax(-1))
    rows = next(state.rows for state in prompts.shared.states if hasattr(state, "rows"))
    taken = {"bytes": rows.nbytes, "taken": rows.store.nbytes}
    found["on their ranks"] = taken | per_token(prompts.step, prompts.shared, cp)
    if cp.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
