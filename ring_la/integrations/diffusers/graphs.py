"""A transformer's calls as CUDA graphs: no Python between the kernels of a denoising step.

A graph repeats what was there when it was captured. What a call may find changed is therefore part of which graph it
takes: shapes and plain values of its arguments, modules, where their weights are, scales of adapters, kernels named to
Diffusers. Values of tensors are the graph's inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...capturing import capture
from ...errors import UnsupportedError
from .compare import mapped
from .kernels import active_kernel


class CapturedCalls:
    """The calls of one model, captured.

    Attributes:
        step: the captured step; its first argument is the number of the model's version.
    """

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        split = model._ring_la
        self._split = split
        self._versions: dict[object, int] = {}
        self.step = capture(lambda version, given: call(model, **given), split.cp)

    def __call__(self, model: nn.Module, given: Mapping[str, Any]) -> Any:
        """The model's call with arguments by name; the output is the caller's own."""
        if getattr(model, "is_cache_enabled", False) or getattr(model, "_is_cached", False):  # the latter by cache-dit
            expected = "False with a step cache, whose decisions a graph would repeat"
            raise UnsupportedError("capture", expected, True, "parallelize without capture, or disable_cache()")
        split = self._split
        split.comparison.shapes(given)  # a replay compares none, and ranks at different graphs would wait for ever
        version = self._versions.setdefault(_as_it_is(model), len(self._versions))
        here = mapped(dict(given), lambda x: x.to(split.cp.device))  # what the host read would be the graph's for ever
        return mapped(self.step(version, here), Tensor.clone)  # a step's next call would overwrite it


def captured_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class of models, whose calls without gradients are captured. Those with gradients run as ever."""

    def call(self: Any, *args: object, **keywords: object) -> object:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return kind.__call__(self, *args, **keywords)
        given = dict(self._ring_la.signature.bind(*args, **keywords).arguments)
        return self._ring_la_captured(self, given)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def adopt_captured(model: Any, undo: Callable[..., object]) -> None:
    """Capture the calls of a split model; `undo` takes the way back, a function and its arguments at a time."""
    kind = type(model)
    model._ring_la_captured = CapturedCalls(model, kind.__call__)
    undo(functools.partial(delattr, model, "_ring_la_captured"))
    model.__class__ = captured_class(kind)
    undo(functools.partial(setattr, model, "__class__", kind))
    undo(model._ring_la_captured.step.release)


def _as_it_is(model: nn.Module) -> tuple[object, ...]:
    """What a graph takes for granted of the model: its modules, where their weights are, adapters, kernels."""
    found: list[object] = [active_kernel()]
    for module in model.modules():
        own = module.__dict__
        found += [id(module), *(p.data_ptr() for p in own["_parameters"].values() if p is not None)]
        if "processor" in own:
            found += [id(own["processor"]), str(getattr(own["processor"], "_attention_backend", None))]
        if "scaling" in own:  # an adapter of PEFT's
            found += [str(own["scaling"]), str(own.get("_active_adapter")), own.get("_disable_adapters")]
    return tuple(found)
