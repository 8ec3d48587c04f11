"""Keys that stay where they were read, beside keys on every rank: bytes of a rank, bytes and time of a token.

    PYTHONPATH=. torchrun --standalone --nproc_per_node 2 -m benchmarks.shared_keys --tokens 4096

A `HybridLM` of two gated delta nets and two softmax layers (4 heads, 2 key heads, K = V = 64), in fp32 on gloo, bf16 on
NCCL; one JSON object from rank 0.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist

import ring_la
from ring_la.inference import Prefilled, key_store, prefill, step
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import KVCache

STEPS = 32


def per_token(model: HybridLM, prompt: Prefilled, cp: ring_la.ContextParallel) -> dict[str, float]:
    """What a token more takes, once it is warm."""
    tokens = prompt.logits.argmax(-1)
    for i in range(STEPS + 4):
        if i == 4:
            cp.comm.all_reduce(torch.zeros(1, device=cp.device)).wait()
            sent, start = cp.comm.bytes_sent, time.perf_counter()
        prompt = step(model, tokens, prompt.states, in_place=i > 0)
        tokens = prompt.logits.argmax(-1)
    float(tokens[0])
    ms = 1e3 * (time.perf_counter() - start) / STEPS
    return {"sent": (cp.comm.bytes_sent - sent) / STEPS, "ms": round(ms, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    cp = ring_la.ContextParallel()
    options = {"attention": {"num_kv_heads": 2}}
    config = HybridConfig(256, 256, ["gdn", "attention"] * 2, 4, options=options)
    model = HybridLM(config).to(cp.device, torch.bfloat16 if cuda else torch.float32).eval()
    ids, layout = torch.randint(256, (args.batch, args.tokens), device=cp.device), cp.layout(args.tokens)
    whole = prefill(model, layout.shard(ids), layout=layout)
    found = {"ranks": cp.size, "tokens": args.tokens, "batch": args.batch}
    kept = sum(x.nbytes for state in whole.states if isinstance(state, KVCache) for x in (state.k, state.v))
    found["everywhere"] = {"bytes": kept} | per_token(model, whole, cp)
    keys = key_store(model, cp)
    shared = prefill(model, layout.shard(ids), layout=layout, keys=keys)
    assert torch.equal(shared.logits.argmax(-1), whole.logits.argmax(-1))
    rows = next(state.rows for state in shared.states if hasattr(state, "rows"))
    found["on their ranks"] = {"bytes": rows.nbytes, "taken": keys.nbytes} | per_token(model, shared, cp)
    if cp.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
