"""The peers of ``ring-la bench diffusion``: Diffusers' own context parallelism, and the transformers of xDiT 0.7.

xDiT's are its wrappers of Diffusers' classes, given its runtime's state as its runners make it. It needs CUDA, and the
packages xfuser, yunchang and distvae: an arm that lacks one says which. Written from its code at 175e0bf. On CPUs, with
PyTorch told that there is a GPU and its kernel named "SDPA", Flux, Qwen-Image and Wan of tiny shape are one process's
under its Ulysses on two ranks (2e-7); its HunyuanVideo is 4 % off.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from ring_la.errors import ArgumentError, UnsupportedError

PEERS = ("diffusers_ulysses", "diffusers_ring", "diffusers_usp", "diffusers_ulysses_anything")
XDIT = ("xdit_ulysses", "xdit_ring", "xdit_usp")

PACKAGES = ("xfuser", "yunchang", "distvae")
"""What xDiT's arms import."""

WORDS = {"flux": 512, "qwen": 256, "wan": 512, "hunyuan_video": 256}
"""Tokens of text that its runners say before a run, as `SHAPES` draw them."""

WRAPPERS = {
    "flux": ("transformer_flux", "xFuserFlux1Transformer2DWrapper", "FluxPipeline"),
    "qwen": ("transformer_qwen", "xFuserQwenImageTransformerWrapper", "QwenImagePipeline"),
    "wan": ("transformer_wan", "xFuserWanTransformer3DWrapper", "WanPipeline"),
    "hunyuan_video": ("transformer_hunyuan_video", "xFuserHunyuanVideoTransformer3DWrapper", "HunyuanVideoPipeline"),
}
"""xDiT's module and class of a model, and the name of the pipeline that its runtime asks about."""


def degrees(arm: str, ranks: int) -> tuple[int, int]:
    """How many ranks Ulysses and the ring have in an arm."""
    if arm.endswith("usp"):
        if ranks < 4 or ranks % 2:
            raise ArgumentError("arms", f"ranks that two axes divide, 4 at least, for {arm}", ranks)
        return 2, ranks // 2
    return (1, ranks) if arm.endswith("ring") else (ranks, 1)


def diffusers_parallel(model: nn.Module, arm: str, ranks: int, kernel: str | None) -> nn.Module:
    """The model under Diffusers' parallelism, which uses the default group."""
    from diffusers import ContextParallelConfig

    if kernel is not None:
        model.set_attention_backend(kernel)
    ulysses, ring = degrees(arm, ranks)
    how: dict[str, Any] = dict(ulysses_degree=ulysses, ring_degree=ring)
    if arm == "diffusers_ulysses_anything":
        how["ulysses_anything"] = True
    model.enable_parallelism(config=ContextParallelConfig(**how))
    return model


def xdit_model(model: str, arm: str, ranks: int, on_cuda: bool) -> Callable[..., nn.Module]:
    """xDiT's class of a model, whose runtime is then set to this arm."""
    if not on_cuda:
        raise UnsupportedError("arms", "GPUs for xDiT, whose groups want them", "a CPU")
    if model not in WRAPPERS:
        raise UnsupportedError("model", f"one of {', '.join(WRAPPERS)} for xDiT", model)
    ulysses, ring = degrees(arm, ranks)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]  # said now: xfuser's import is long
    if missing:
        raise UnsupportedError("arms", f"{', '.join(PACKAGES)} installed for {arm}", f"no {', '.join(missing)}")
    xfuser = importlib.import_module("xfuser")
    parallel = importlib.import_module("xfuser.core.distributed")
    state = importlib.import_module("xfuser.core.distributed.parallel_state")
    runtime = importlib.import_module("xfuser.core.distributed.runtime_state")
    module, name, pipeline = WRAPPERS[model]
    kind = getattr(importlib.import_module(f"xfuser.model_executor.models.transformers.{module}"), name)
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    parallel.init_distributed_environment()
    args = xfuser.xFuserArgs(model=model, ulysses_degree=ulysses, ring_degree=ring, attention_backend="CUDNN")
    config, _ = args.create_config()

    def made(**given: Any) -> nn.Module:
        transformer = kind(**given)
        pipe = type(pipeline, (types.SimpleNamespace,), {})(transformer=transformer)
        pipe.vae_scale_factor = pipe.vae_scale_factor_spatial = 8
        pipe.vae_scale_factor_temporal = 4
        parallel.initialize_runtime_state(pipe, config)
        now = runtime.get_runtime_state()
        now.max_condition_sequence_length, now.split_text_embed_in_sp = WORDS[model], True
        return transformer

    return made
