"""`parallelize`, for a transformer or a whole pipeline, and `restore`, the way back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...choices import SoftmaxBackend
from ...context import ContextParallel
from ...errors import ArgumentError, UnsupportedError
from ...softmax.backends import BACKENDS
from ...softmax.options import check_comm_dtype
from .adoption import adopt
from .ahead import FAMILIES, has_family
from .catalogue import find_plan
from .graphs import adopt_captured
from .kernels import kernel_named
from .model import SplitDenoiser
from .pipeline import Axes, SplitPipeline, agree_on, axes_of, controlnets_of, is_pipeline, transformers_of
from .plans import ModelPlan


def parallelize(
    transformer: Any,
    cp: ContextParallel,
    *,
    backend: SoftmaxBackend | None = None,
    kv_comm_dtype: torch.dtype | None = None,
    average: bool = False,
    plan: ModelPlan | None = None,
    cfg: int | dist.ProcessGroup | DeviceMesh = 1,
    vae: bool = False,
    text: bool = False,
    capture: bool = False,
    keys_first: bool = False,
) -> Any:
    """Make a transformer of Diffusers, or a pipeline, run on a split sequence; changed in place and returned.

    The call stays as it was: every rank gives the whole inputs, the same on all of them (seed the generators that draw
    latents alike), and gets the whole output. Parameters' and inputs' gradients of a loss that every rank computes from
    the whole output are parts, whose sum over the group is the gradient of one process.

    Args:
        transformer: a model with an entry in `PLANS`, with its own attention processors. LoRA's layers may be in it,
            or come and go afterwards, the hooks of Diffusers' step caches that `caches.KNOWN` names, and Accelerate's
            that move the whole model; those that move its layers (sequential and group offloading) may not. Or a
            pipeline, all of whose transformers are split.
        cp: the group the sequence is split over; its `attention` says how keys travel.
        backend: the kernel of split attention, by `ring_la.attention`'s name; None: the one that is named to Diffusers,
            or the fastest that can do it.
        kv_comm_dtype: in what keys and values travel, torch.float8_e4m3fn or float8_e5m2, without gradients; None: in
            their own dtype.
        average: gradients averaged over the group, not summed, are those of one process: for DDP and FSDP. Of a
            ControlNet before a transformer that averages, it stays False: what comes back is averaged already.
        plan: what of the model is split, where it is not one of `PLANS` or another version of it.
        cfg: for a pipeline: over how many parts of cp's ranks guidance is split (a call's rows, or a step's calls), the
            tokens of each over one part. Or the axis itself, with a cp of the axes beside it. Guidance by several calls
            has no gradients.
        vae: for a pipeline: its decoder works by rows of the image, over all ranks.
        text: for a pipeline: prompts are encoded on the first rank alone, and sent.
        capture: on GPUs calls without gradients become replays of CUDA graphs (`ring_la.capture`): of each kind of call
            (shapes, values that are no tensors) the first three run as ever, the next is captured. Not with step
            caches, masks that leave keys out, or validate="always". Inputs' values that differ among the ranks make the
            output of a replay NaN, and raise nothing.
        keys_first: without gradients, keys and values leave before queries and a block's wide layer are computed, and
            one kernel call attends to all of them; for cp's "auto", "ring" and "all_gather", and models with one of the
            processors in `ahead.FAMILIES` (Flux, Chroma, Flux 2, Qwen-Image, HunyuanVideo and more). On GPUs it holds
            two times all keys and values of a layer. On four H200 a step of Flux is slower so.

    Raises:
        ArgumentError, UnsupportedError: a wrong argument; a model that cannot run split, by the module's name, which is
            then left as it was. In a call: arguments that have no part in a split one, by name and on every rank.
        DisagreementError: in a call, inputs that differ among the ranks, by name and on every rank. Shapes and the
            first call's values are compared before anything is computed, later values with the output: on a GPU
            that output is NaN, and a later call raises. With validate="always" all are compared before; with "never"
            none.
    """
    if not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel", type(cp).__name__)
    flags = dict(average=average, vae=vae, text=text, capture=capture, keys_first=keys_first)
    if is_pipeline(transformer):
        agree_on(cp, cfg, flags | dict(backend=backend, kv_comm_dtype=kv_comm_dtype))
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentError(name, "True or False", repr(flag))
    if backend not in (None, *BACKENDS):
        raise ArgumentError("backend", f"None or one of {', '.join(BACKENDS)}", repr(backend))
    check_comm_dtype(kv_comm_dtype)
    if capture and cp.validate == "always":
        raise UnsupportedError("capture", 'False with validate="always", which waits for the device', True)
    if keys_first and cp.attention in ("ulysses", "usp"):
        raise UnsupportedError("keys_first", f"False with attention={cp.attention!r}, where heads travel", True)
    how: dict[str, Any] = dict(backend=backend, kv_comm_dtype=kv_comm_dtype)
    if is_pipeline(transformer):
        more = dict(average=average, plan=plan, capture=capture, keys_first=keys_first)
        return _parallelize_pipeline(transformer, axes_of(cp, cfg), (vae, text), how | more)
    if (cfg, vae, text) != (1, False, False):
        raise ArgumentError("transformer", "a pipeline with cfg, vae or text", type(transformer).__name__)
    if not isinstance(transformer, nn.Module):
        got = type(transformer).__name__
        raise ArgumentError("transformer", "a pipeline or its model", got, "pipeline.transformer")
    if plan is not None and not isinstance(plan, ModelPlan):
        raise ArgumentError("plan", "a ModelPlan", type(plan).__name__)
    if cp.deterministic:
        raise UnsupportedError("cp", "deterministic=False", "a deterministic one", "Text and image mix by rank")
    if hasattr(transformer, "_ring_la"):
        hint = "A second pipeline of its parts is called as it is"
        raise ArgumentError("transformer", "one that is not parallelized", "one that is", hint)
    if getattr(transformer, "_parallel_config", None) is not None:
        raise UnsupportedError("transformer", "one without Diffusers' own parallelism", "enable_parallelism was called")
    known = plan or find_plan(transformer)
    if keys_first and not has_family(known):
        expected = f"False for a model without any of {', '.join(FAMILIES)}"
        raise UnsupportedError("keys_first", expected, type(transformer).__name__)
    split = SplitDenoiser(transformer, known, cp, how, cp.size if average else 1, keys_first)
    kernel_named((), backend)
    with ExitStack() as undo:
        adopt(split, transformer, undo)
        if capture:
            adopt_captured(transformer, undo.callback)
        split.undo = undo.pop_all()  # accepted
    return transformer


def _parallelize_pipeline(pipe: Any, axes: Axes, parts: tuple[bool, bool], how: dict[str, Any]) -> Any:
    """All of a pipeline, or nothing of it."""
    if hasattr(pipe, "_ring_la"):
        raise ArgumentError("transformer", "a pipeline that is not parallelized", "one that is")
    split = SplitPipeline(axes)
    with split.undo as undo:
        for model in transformers_of(pipe).values():
            undo.callback(restore, parallelize(model, axes.sequence, **how))
        for net in controlnets_of(pipe):  # what the transformer's residuals bring back is averaged already
            own = dict(average=False, plan=None, capture=False, keys_first=False)
            undo.callback(restore, parallelize(net, axes.sequence, **how | own))
        split.adopt(pipe, *parts)
        split.undo = undo.pop_all()  # accepted
    return pipe


def restore(model: Any) -> Any:
    """The way back: what `parallelize` was given, as it was before; changed in place and returned.

    Raises:
        ArgumentError: it is not parallelized.
    """
    split = getattr(model, "_ring_la", None)
    if split is None:
        raise ArgumentError("model", "one that parallelize was given", type(model).__name__)
    split.undo.close()
    return model
