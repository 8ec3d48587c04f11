"""Train a hybrid of Transformers on long, packed sequences with the library's own Trainer.

    torchrun --standalone --nproc_per_node 4 examples/trainer_hybrid.py --context 2 --seq_len 1024 --source docs \
        --output_dir runs/trainer --max_steps 20 --per_device_train_batch_size 2 --learning_rate 0.01 \
        --logging_steps 5 --ddp_find_unused_parameters false

Each sequence is split over `--context` ranks, the others have different sequences. With `--shard` (and `--model`, a
folder of safetensors) each rank reads and keeps its shards of the weights, and `--resume_from_checkpoint` goes on with
other axes. All options of TrainingArguments are there too (`--help`). Without `--model` a Qwen3-Next of 0.3 M
parameters is trained from scratch, on bytes; the command above takes about a minute on two CPU cores, and its loss
falls. Without
torchrun it runs on one process: --context 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, PreTrainedModel, Qwen3NextConfig
from transformers import TrainingArguments as Arguments

from ring_la import ContextParallel
from ring_la.integrations.transformers import ContextTrainer, parallelize
from ring_la.integrations.transformers.weights import load_weights
from ring_la.training import Corpus, PackedSequences, TrainingMesh, shard_parameters


@dataclass
class Options:
    """What is trained on what."""

    context: int = field(default=2, metadata={"help": "ranks each sequence is split over"})
    source: str = field(default="docs", metadata={"help": "a text or parquet file, or a folder of them"})
    tokenizer: str = field(default="bytes", metadata={"help": "bytes, a tokenizer.json, or a name"})
    seq_len: int = field(default=4096, metadata={"help": "tokens of a sequence, all ranks' together"})
    sequences: int = field(default=1000, metadata={"help": "of an epoch"})
    model: str | None = field(default=None, metadata={"help": "a folder or name with weights"})
    shard: bool = field(default=False, metadata={"help": "weights of --model, a folder, over all ranks"})


class Packed(Dataset):
    """Sequences of packed documents, which positions tell apart."""

    def __init__(self, corpus: Corpus, seq_len: int, count: int) -> None:
        self.sequences, self.count = PackedSequences(corpus, seq_len), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids, cu = self.sequences[i]
        positions = torch.cat([torch.arange(b - a) for a, b in zip(cu, cu[1:])])
        return {"input_ids": ids, "labels": ids, "position_ids": positions}


def make_model(options: Options, vocab_size: int) -> PreTrainedModel:
    """The model named, or a small hybrid."""
    if options.shard:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=torch.float32)
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(options.model)
    torch.manual_seed(0)  # the same on every rank
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    shape = dict(vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    return AutoModelForCausalLM.from_config(Qwen3NextConfig(**shape, **heads, **linear, **experts))


def join(arguments: Arguments, context: int) -> TrainingMesh:
    """The ranks torchrun started as fsdp × context; without torchrun a job of one."""
    kind, ranks = arguments.device.type, arguments.world_size  # asking for the device joins the ranks
    if ranks % context:
        start = f"start it with torchrun --standalone --nproc_per_node {context}, or say --context 1"
        raise SystemExit(f"--context: expected a divisor of the number of ranks, {ranks}, got {context}; {start}")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return TrainingMesh.make(kind, fsdp=ranks // context, context=context)


def main(args: list[str] | None = None) -> ContextTrainer:
    args = [*(sys.argv[1:] if args is None else args), *([] if torch.cuda.is_available() else ["--use_cpu"])]
    options, arguments = HfArgumentParser((Options, Arguments)).parse_args_into_dataclasses(args)
    mesh = join(arguments, options.context)
    with arguments.main_process_first(desc="tokenising"):
        corpus = Corpus(Corpus.prepare(options.source, f"{arguments.output_dir}/corpus", options.tokenizer))
    model = make_model(options, corpus.vocab_size)
    cp = ContextParallel(mesh.context, scan="all_to_all")  # named: "auto" would measure the group at every start
    parallelize(model, cp, average=True, loss_chunk=8192)
    if options.shard:
        shard_parameters(model, mesh, blocks=model.base_model.layers, methods=(), average=True)
        load_weights(model, options.model, device=arguments.device)
    dataset = Packed(corpus, options.seq_len, options.sequences)
    trainer = ContextTrainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train(arguments.resume_from_checkpoint)
    return trainer


if __name__ == "__main__":
    main()
