"""Whole images of Flux at published shapes with random weights: text encoders, denoising steps and decoder.

Tokenizers need files, so a stand-in draws a prompt's tokens from its letters. Seconds are those of the slowest rank's
second run, behind one of a few steps.
"""

from __future__ import annotations

import argparse
import types
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ring_la
from ring_la.comm import Group
from ring_la.errors import UnsupportedError
from ring_la.integrations.diffusers import parallelize

from ..errors import relative_error
from ..peers.diffusion import PEERS, diffusers_parallel
from ..timing import largest, now
from .book import Book
from .shapes import SHAPES, build, randomize

OURS = {"ours": "auto", "ours_ring": "ring", "ours_ulysses": "ulysses", "ours_all_gather": "all_gather"}
FIRST = "ours_keys_first"
OURS |= {FIRST: "auto"}
PROMPT = "a lighthouse at dusk, waves against the rocks"
WARM = 6  # steps, of which a captured transformer takes four before it replays


class Words:
    """A tokenizer without files: `length` numbers below `vocabulary`, drawn from the text."""

    added_tokens_encoder: dict[str, int] = {}

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.model_max_length = vocabulary, length

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def __call__(self, texts: list[str], *, max_length: int | None = None, **ways: object) -> Any:
        shape = (max_length or self.model_max_length,)
        rows = [torch.Generator().manual_seed(zlib.crc32(text.encode())) for text in texts]
        drawn = [torch.randint(3, self.vocabulary, shape, generator=row) for row in rows]
        return types.SimpleNamespace(input_ids=torch.stack(drawn))


def flux(tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """The pipeline, of the same random weights on all ranks."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    kinds = dict(down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4)
    vae = dict(
        block_out_channels=(8,) * 4 if tiny else (128, 256, 512, 512), norm_num_groups=4 if tiny else 32, **kinds
    )
    vae |= dict(latent_channels=1 if tiny else 16, use_quant_conv=False, use_post_quant_conv=False, sample_size=1024)
    vae |= dict(layers_per_block=1 if tiny else 2, scaling_factor=0.3611, shift_factor=0.1159)
    clip = dict(hidden_size=6, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    t5 = dict(d_model=12, d_ff=8, d_kv=4, num_heads=2, num_layers=1, vocab_size=50)
    if not tiny:
        clip = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        t5 = dict(d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, vocab_size=32128)

    def made(make: Callable[[], nn.Module]) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                return randomize(make(), device)
        finally:
            torch.set_default_dtype(before)

    return diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=made(lambda: diffusers.AutoencoderKL(**vae)),
        text_encoder=made(lambda: CLIPTextModel(CLIPTextConfig(**clip))),
        tokenizer=Words(clip.get("vocab_size", 49408), 77),
        text_encoder_2=made(lambda: T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **t5))),
        tokenizer_2=Words(t5["vocab_size"], 512),
        transformer=build(SHAPES["flux"], None, tiny, device, dtype),
    )


def images(options: argparse.Namespace, group: Group, book: Book) -> None:
    """A row for each arm, mode and size."""
    tiny = not group.on_cuda
    asked = options.sizes or {"": [(128, 128) if tiny else (1024, 1024)]}
    sizes = [size for each in asked.values() for size in each]
    wanted: dict[tuple[int, ...], Tensor] = {}
    for arm in options.arms:
        for mode in options.modes:
            rows = [dict(model="flux pipeline", arm=arm, mode=mode, size="x".join(map(str, s))) for s in sizes]
            if all(book.has(**row) for row in rows):
                continue
            prepared = partial(_prepared, arm, mode, tiny, group)
            pipe = book.attempt(dict(model="flux pipeline", arm=arm, mode=mode), prepared)
            for row, size in zip(rows, sizes) if pipe is not None else ():
                found = book.attempt(row, partial(_image, pipe, size, options.steps, group, wanted))
                if found is not None:
                    book.add(row | found)
            pipe = None
            if mode.startswith("compiled"):
                torch._dynamo.reset()  # whose limit of compilations counts those of all rows
            if group.on_cuda:
                torch.cuda.empty_cache()


def _prepared(arm: str, mode: str, tiny: bool, group: Group) -> Any:
    """The pipeline as an arm has it."""
    if arm not in ("one", *OURS, *PEERS) or (mode.endswith("graph") and arm not in OURS):
        raise UnsupportedError("arms", "another arm or mode for whole pipelines", f"{arm}, {mode}")
    pipe = flux(tiny, group.device, torch.float32 if tiny else torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    kernel = None if tiny else "_native_cudnn"
    if arm in PEERS:
        diffusers_parallel(pipe.transformer, arm, group.size, kernel)
    elif kernel is not None:
        pipe.transformer.set_attention_backend(kernel)
    if arm in OURS:
        cp = ring_la.ContextParallel(attention=OURS[arm])  # type: ignore[arg-type]
        parallelize(pipe, cp, vae=True, text=True, capture=mode.endswith("graph"), keys_first=arm == FIRST)
    if mode.startswith("compiled"):
        pipe.transformer.compile_repeated_blocks(dynamic=False)
    return pipe


def _image(
    pipe: Any, size: tuple[int, ...], steps: int, group: Group, wanted: dict[tuple[int, ...], Tensor]
) -> dict[str, float]:
    """Seconds of an image and of its parts, GiB, and the error beside the first arm's image."""
    parts = {"text": 0.0, "decoder": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            start = now()
            out = function(*args, **keywords)
            parts[name] = now() - start
            return out

        return run

    own = pipe.encode_prompt, pipe.vae.decode
    pipe.encode_prompt, pipe.vae.decode = timed("text", own[0]), timed("decoder", own[1])
    try:
        for count in (WARM, steps):
            start = now()
            how: dict[str, Any] = dict(height=size[0], width=size[1], num_inference_steps=count, output_type="pt")
            out = pipe(PROMPT, generator=torch.Generator().manual_seed(0), **how).images.float()
            parts["seconds"] = now() - start
    finally:
        pipe.encode_prompt, pipe.vae.decode = own
    want = wanted.setdefault(size, out)
    found = dict(zip(parts, largest(parts.values())))
    found |= {"steps": found["seconds"] - found["text"] - found["decoder"]}
    found |= {"error": relative_error(out, want)}
    return found | ({"GiB": torch.cuda.max_memory_allocated() / 2**30} if group.on_cuda else {})
