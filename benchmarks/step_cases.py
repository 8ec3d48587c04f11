"""The steps that `benchmarks.steps` measures: training steps of a `HybridLM` and of Qwen3-Next's layer shapes in
Transformers, a token of sequences decoded side by side, and a denoising step of Diffusers' Flux and Wan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

import ring_la
from ring_la.inference import prefill
from ring_la.keystore.static import StaticKeys, StaticRows
from ring_la.models import HybridConfig, HybridLM

from .diffusion.shapes import SHAPES, build, draw_inputs

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
PROMPT, COLUMNS = 256, 1024
"""Tokens before a step of decoding, and the columns of keys it reads."""


class StepCase(NamedTuple):
    """A step made of a function that a compiler takes, and its arguments.

    Attributes:
        function: what torch.compile is given. step: makes the step of it, or of what the compiler gave back.
    """

    function: Callable[..., Any]
    step: Callable[[Callable[..., Any]], Callable[..., torch.Tensor]]
    arguments: tuple[torch.Tensor, ...]


def model_of(name: str, layers: int | None) -> HybridLM:
    """The model of a configuration, with bytes or its own vocabulary, in bf16."""
    fields = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]
    fields["layers"] = (fields["layers"] * fields.pop("repeat", 1))[:layers]
    fields.setdefault("vocab_size", 32000 if name != "small" else 256)
    with torch.device("cuda"):
        return HybridLM(HybridConfig(**fields)).bfloat16()


def training(name: str, layers: int | None, T: int, cp: ring_la.ContextParallel | None) -> StepCase:
    """Forward and backward of a `HybridLM` on `T` tokens of this rank."""
    model, ranks = model_of(name, layers), 1 if cp is None else cp.size
    layout = None if cp is None else cp.layout(T * ranks)
    ids = torch.randint(256, (1, T), device="cuda")

    def with_loss(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            out = loss(ids, targets, layout=layout, total=T * ranks)
            out.backward()
            return out.detach()

        return step

    return StepCase(model.loss, with_loss, (ids, ids))


def qwen3_next(T: int, cp: ring_la.ContextParallel | None) -> StepCase:
    """The same of four layers of Qwen3-Next-80B-A3B's mixers (three gated delta nets, one softmax attention; 2,048
    channels), with plain MLPs of 5,120 and 32,000 words."""
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    from ring_la.integrations.transformers import parallelize

    if cp is None:
        raise SystemExit("qwen3_next takes a group: torchrun --nproc-per-node 1 -m benchmarks.steps --case qwen3_next")
    config = Qwen3NextConfig(
        num_hidden_layers=4, mlp_only_layers=[0, 1, 2, 3], intermediate_size=5120, vocab_size=32000, use_cache=False
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model, layout = parallelize(model, cp, check=False), cp.layout(T * cp.size)
    ids = torch.randint(32000, (1, T), device="cuda")

    def with_model(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def step(ids: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            out = call(input_ids=ids, labels=ids, layout=layout)
            out.loss.backward()
            return out.loss.detach()

        return step

    return StepCase(model, with_model, (ids,))


@torch.no_grad()
def decoding(name: str, layers: int | None, sequences: int, cp: ring_la.ContextParallel | None) -> StepCase:
    """A token of each of some sequences after a short prompt, with states of fixed addresses; keys are shared out."""
    model = model_of(name, layers).eval()
    prompt = prefill(model, torch.randint(256, (sequences, PROMPT), device="cuda"))
    rows = StaticRows(sequences, COLUMNS, cp, torch.device("cuda"))
    ranks, rank = rows.ranks, rows.rank
    mine, states = torch.arange(rank, PROMPT, ranks), []
    for n in range(sequences):
        rows.seat(n, mine, PROMPT)
    for block, state in zip(model.blocks, prompt.states):
        if hasattr(state, "k"):  # keys and values of attention
            keys = StaticKeys(rows, block.layer.key_size, torch.bfloat16)
            for n in range(sequences):
                carried = block.layer.carried_of(state.k[n : n + 1, -1])
                keys.fill(n, state.k[n, mine], state.v[n, mine], None if carried is None else carried[0])
            states.append(keys)
        else:
            states.append(state)

    def with_model(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        @torch.no_grad()
        def step(tokens: torch.Tensor) -> torch.Tensor:
            rows.begin(sequences, COLUMNS)
            logits, after = call(tokens[:, None], states=states, output_states=True, in_place=True)
            for old, new in zip(states, after):
                for buffer, x in zip(old, new) if isinstance(old, tuple) else ():
                    if buffer is not None and x.data_ptr() != buffer.data_ptr():
                        buffer.copy_(x)
            rows.advance()
            return logits

        return step

    return StepCase(model, with_model, (torch.zeros(sequences, dtype=torch.int64, device="cuda"),))


def denoising(
    name: str,
    size: tuple[int, ...] | None,
    layers: int | None,
    cp: ring_la.ContextParallel | None,
    device: torch.device,
    tiny: bool = False,
) -> StepCase:
    """One call of a transformer of Diffusers (a name of `SHAPES`, random weights) in bf16, whole inputs on every rank;
    `tiny`: a small one in fp32."""
    shape, dtype = SHAPES[name], torch.float32 if tiny else torch.bfloat16
    model: Any = build(shape, layers, tiny, device, dtype)
    if cp is not None:
        from ring_la.integrations.diffusers import parallelize

        model = parallelize(model, cp)
    inputs = draw_inputs(shape, size or (shape.small if tiny else shape.sizes[0]), tiny, device, dtype)
    names = [n for n, x in inputs.items() if isinstance(x, torch.Tensor)]
    rest = {n: x for n, x in inputs.items() if n not in names}

    def with_model(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        @torch.no_grad()
        def step(*tensors: torch.Tensor) -> torch.Tensor:
            return call(**dict(zip(names, tensors)), **rest, return_dict=False)[0]

        return step

    return StepCase(model, with_model, tuple(inputs[n] for n in names))
