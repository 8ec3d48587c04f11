"""A 1.2B hybrid of Transformers trained on long sequences: `torchrun -m tests.gpu.bench_transformers`.

Qwen3.5's layers, three gated delta nets to one of softmax attention.

FSDP2 over all ranks, bf16, gradient checkpointing, logits in chunks. For each length a few steps; rank 0 prints time,
tokens a second, FLOPs used (6 a weight and token, attention's own, none for what is computed again) and peak memory,
and writes `OUT/bench_transformers.json` as it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ring_la
from ring_la.integrations.transformers import parallelize

PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 or H200."""


def make(layers: int) -> transformers.PreTrainedModel:
    """A dense Qwen3.5 of `layers` layers, in bf16."""
    config = transformers.Qwen3_5TextConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
        tie_word_embeddings=True,
        max_position_embeddings=2**21,
    )
    with torch.device("cuda"):
        return transformers.Qwen3_5ForCausalLM(config).bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=[65536, 262144, 524288])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=100, help="no length is begun after these")
    args = parser.parse_args()
    begin = time.monotonic()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = make(args.layers)
    parallelize(model, ring_la.ContextParallel(mesh), average=True, loss_chunk=8192)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    out, results = Path(os.environ.get("OUT", ".")), []
    for length in args.lengths:
        late = torch.tensor(float(time.monotonic() - begin > args.seconds), device="cuda")
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late:
            break
        generator = torch.Generator("cuda").manual_seed(length)
        ids = torch.randint(0, 151936, (1, length), device="cuda", generator=generator)
        torch.cuda.reset_peak_memory_stats()
        times, losses = [], []
        for _ in range(args.steps):
            torch.cuda.synchronize()
            start = time.monotonic()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            torch.cuda.synchronize()
            times.append(time.monotonic() - start)
        attention = 12 * (args.layers // 4) * 16 * 128 * length / 2  # a token, forward and backward
        flops = (6 * weights + attention) * length
        result = {
            "gpus": dist.get_world_size(),
            "weights": weights,
            "tokens": length,
            "seconds": [round(t, 3) for t in times],
            "tokens_per_second": round(length / min(times)),
            "mfu": round(flops / min(times) / dist.get_world_size() / PEAK, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            "losses": losses,
        }
        results.append(result)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
            (out / "bench_transformers.json").write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
