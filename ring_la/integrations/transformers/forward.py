"""The calls of a parallelized model: split over the ranks, or whole on every rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...autograd import first_derivative_only, outside_graphs
from ...blockwise import fixed
from ...context import agree_on_weights
from ...errors import ArgumentError, UnsupportedError
from .cache import CacheRecorder, ContinuedRecorder
from .call import Current, ModelCall
from .checks import refuse_by_places
from .foreign import told_as_theirs
from .head import loss_in_chunks
from .in_blocks import in_blocks
from .inputs import Words
from .loss import agreed
from .masks import documents_of_layout
from .modules import known
from .names import NAMES
from .split import CacheSupport, SplitModel


def model_forward(original: Callable) -> Callable:
    """The forward of a parallelized model of a class."""
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    @_not_compiled
    def forward(self: PreTrainedModel, *args, **keywords):
        split: SplitModel = self._ring_la  # type: ignore[assignment]
        arguments = _named(dict(zip(names, args)) | keywords, split.cache.name)
        way = _way(self, split, arguments)
        with told_as_theirs(split.settings.cp.device):
            out = (_split if way == "split" else _whole)(self, split, original, arguments)
        return _last_logits(out, arguments["logits_to_keep"]) if way == "prompt" else out

    return forward


def _named(arguments: dict, name: str) -> dict:
    """A model's arguments, a cache by this name whatever other version's name it came by."""
    caches = [other for other in NAMES if arguments.get(other) is not None]
    if len(caches) > 1:
        raise ArgumentError(caches[1], f"one cache, as {name}", f"{caches[0]}, too")
    others = {n: x for n, x in arguments.items() if n not in NAMES}
    return others | {name: arguments[caches[0]]} if caches else others


def _not_compiled(function: Callable) -> Callable:
    """Run by the interpreter under torch.compile, while what it calls is compiled."""
    return torch._dynamo.disable(function, recursive=False)


@outside_graphs
def _way(model: PreTrainedModel, split: SplitModel, arguments: dict) -> str:
    """Whether a call is split, or whole on every rank: after a prefill, or a prompt shorter than the ranks."""
    split.attention.check()
    if getattr(model.config, "output_attentions", False):
        arguments.setdefault("output_attentions", True)
    cache = arguments.get(split.cache.name)
    if cache is not None and _filled(cache):
        return "split" if _goes_on(split, arguments["input_ids"]) else "whole"
    if _short_prompt(split, arguments):
        return "prompt"
    split.checks.before(model)
    return "split"


def _filled(cache: Any) -> bool:
    if getattr(cache, "linear_cache", None):  # MiniMax's, whose first layer may hold no keys
        return True
    if isinstance(cache, list):  # RWKV-4's
        return bool(cache)
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # a cache of recurrent states only
        return cache.has_previous_state()


def _goes_on(split: SplitModel, ids: Tensor) -> bool:
    """Whether tokens after a prefill are split: where that is wanted, and no rank takes its only token for a step of
    decoding."""
    return split.current.goes_on and split.batches.least(ids.shape[1]) > 1


def _short_prompt(split: SplitModel, arguments: dict) -> bool:
    """Whether this is a prompt that leaves a rank without a token, of which every rank wants the same."""
    given = {n for n, x in arguments.items() if x is not None and x is not False}
    ours = {"layout", "cu_seqlens", "labels", "shift_labels", "output_hidden_states", "output_router_logits"}
    if split.settings.cp.deterministic:  # a call that is whole has other bits
        return False
    if torch.is_grad_enabled() or given & ours or not {"input_ids", "use_cache", "logits_to_keep"} <= given:
        return False
    ids, keep = arguments["input_ids"], arguments["logits_to_keep"]
    if (isinstance(keep, int) and keep == 0) or not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] == 0:
        return False
    return split.batches.too_short(ids.shape[1])


def _last_logits(out: ModelOutput, keep: int | Tensor) -> ModelOutput:
    """Those of the tokens asked for, from a model that may not know the question."""
    wanted = keep if isinstance(keep, int) else len(keep)
    if out["logits"].shape[1] > wanted:
        out["logits"] = out["logits"][:, -keep:] if isinstance(keep, int) else out["logits"][:, keep]
    return out


@_not_compiled
def _whole(model: PreTrainedModel, split: SplitModel, original: Callable, arguments: dict) -> Any:
    """A call that is not split: the tokens after a prefill, on every rank."""
    if arguments.get("layout") is not None or arguments.get("cu_seqlens") is not None:
        raise UnsupportedError(split.cache.name, "an empty cache with layout or cu_seqlens", "a filled one")
    if torch.is_grad_enabled():
        raise UnsupportedError(split.cache.name, "none, or an empty one, with gradients", "a filled cache")
    ours = {"layout", "cu_seqlens"} | ({"logits_to_keep"} - known(original, {"logits_to_keep": None}).keys())
    arguments = {n: x for n, x in arguments.items() if n not in ours}
    split.current.leave()
    split.attention.use(split=False)
    try:
        return original(model, **arguments)
    finally:
        split.attention.use(split=True)


@_not_compiled
def _split(model: PreTrainedModel, split: SplitModel, original: Callable, arguments: dict) -> Any:
    """A call on this rank's tokens: what reads values or asks other ranks, the model as one graph, what it returns."""
    call, run, recorder = _prepared(model, split, original, arguments)
    chunked = call.targets is not None and split.settings.loss_chunk is not None
    out = loss_in_chunks(run, call, split.settings.loss_chunk) if chunked else run(call)
    return _finished(model, split, call, recorder, arguments, out)


@dataclass(frozen=True)
class ModelRun:
    """The model's own forward on this rank's tokens, in a call or on a chunk of its head's work.

    Attributes:
        local: its arguments. of_head: those that are others where only the head runs.
    """

    model: PreTrainedModel
    original: Callable
    current: Current
    local: dict
    of_head: dict

    @_not_compiled
    def __call__(self, call: ModelCall, head_only: bool = False) -> ModelOutput:
        keywords = self.local | self.of_head if head_only else self.local
        before = self.current.call
        try:
            run = _in_blocks if fixed(call.layout) else _in_call
            with documents_of_layout():
                out = run(self.original, self.model, self.current, call, keywords)
        finally:
            self.current.call = before
        if call.targets is not None:
            _check_loss(self.model, call, out)
        return out


def _in_call(original: Callable, model: PreTrainedModel, current: Current, call: ModelCall, keywords: dict) -> Any:
    """The model itself, whose layers find this call. Under torch.compile a graph begins here: what is an argument may
    differ from call to call, the layout's number and lengths among it."""
    current.call = call
    return original(model, **keywords)


@outside_graphs
def _in_blocks(original: Callable, model: PreTrainedModel, current: Current, call: ModelCall, keywords: dict) -> Any:
    """The same under a deterministic layout."""
    current.call = call
    return in_blocks(original, model, call, keywords)


@outside_graphs
def _prepared(
    model: PreTrainedModel, split: SplitModel, original: Callable, arguments: dict
) -> tuple[ModelCall, ModelRun, CacheRecorder | None]:
    """How a call is split, what runs the model in it, and what keeps the cache it is to return."""
    refuse_by_places(model)
    call, local = split.batches.read(arguments, Words.of(model))
    agree_on_weights(model, call.layout.cp.comm, call.layout.cp.validate)
    if call.targets is None:
        call.agreed = agreed(call.layout.cp.comm, call.fingerprint)
    recorder: CacheRecorder | None = None
    if _wants_cache(model, split.cache, arguments, call):
        cache = arguments.get(split.cache.name)
        if cache is not None and _filled(cache):
            recorder = call.earlier = ContinuedRecorder(cache)
        else:
            recorder = CacheRecorder()
    local |= known(original, {"use_cache": recorder is not None, split.cache.name: recorder, "return_dict": True})
    if "position_ids" not in known(original, {"position_ids": None}):
        del local["position_ids"]
    names = inspect.signature(original).parameters
    extra = ("output_hidden_states", "output_router_logits")
    of_head = {n: False for n in extra if n in local or n in names}
    return call, ModelRun(model, original, split.current, local, of_head), recorder


@outside_graphs
def _finished(
    model: PreTrainedModel,
    split: SplitModel,
    call: ModelCall,
    recorder: CacheRecorder | None,
    arguments: dict,
    out: ModelOutput,
) -> Any:
    """What the caller gets: the cache, and results whose backward pass finds its call."""
    if recorder is not None:
        cache = arguments.get(split.cache.name)
        cache = recorder.new_cache(model.config) if cache is None else cache
        recorder.replay(cache, call.layout)
        out[split.cache.name] = cache
    if model.base_model is model and "last_hidden_state" in out:
        out["last_hidden_state"] = call.poisoned(out["last_hidden_state"])
    for name, x in out.items():
        out[name] = _marked(x, split, call)
    out.layout = call.layout
    return out.to_tuple() if arguments.get("return_dict") is False else out


@outside_graphs
def _check_loss(model: PreTrainedModel, call: ModelCall, out: ModelOutput) -> None:
    """Refuse a loss that is not the cross-entropy of the whole batch, and its routers' loss where it has one."""
    if len(call.losses) != 1:
        expected = "None for a model that does not call its loss_function once"
        raise UnsupportedError("labels", expected, f"{len(call.losses)} calls")
    if out.get("aux_loss") is None and not call.losses[0].unchanged(out["loss"]):
        got = f"{type(model).__name__}, which adds to its loss_function's"
        hint = "What it adds is this rank's tokens' alone: set its coefficient to 0"
        raise UnsupportedError("labels", "None for a model with a loss of its own", got, hint)


def _wants_cache(model: PreTrainedModel, support: CacheSupport, arguments: dict, call: ModelCall) -> bool:
    asked = arguments.get("use_cache")
    if asked is None and arguments.get(support.name) is None:
        asked, explicit = getattr(model.config.get_text_config(), "use_cache", False), False
    else:
        asked, explicit = asked is not False, True
    against = {
        "gradients": torch.is_grad_enabled(),
        "labels": call.targets is not None,
        "packed documents": call.layout.packed,
        "deterministic=True": fixed(call.layout),
        "padding": call.padded,
        f"layers like {support.without}": support.without is not None,
    }
    reasons = [name for name, holds in against.items() if holds]
    if asked and explicit and reasons:
        raise UnsupportedError("use_cache", f"False with {' and '.join(reasons)}", True)
    return bool(asked) and not reasons


class _Resume(torch.autograd.Function):
    """The identity on a result of a call; its backward makes that call the current one again, and scales.

    It is the first step of the call's backward pass, before any checkpointed layer is computed again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, current: Current, call: ModelCall, scale: int) -> Tensor:
        ctx.current, ctx.call, ctx.scale = current, call, scale
        return x.clone() if x.dim() == 0 else x.view_as(x)  # into a view nobody may write, and trainers scale a loss

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor):
        ctx.current.call = ctx.call
        torch.autograd.Variable._execution_engine.queue_callback(ctx.current.leave)  # when the whole pass is done
        return grad * ctx.scale, None, None, None


def _marked(x: Any, split: SplitModel, call: ModelCall) -> Any:
    if isinstance(x, Tensor) and x.requires_grad:
        return _Resume.apply(x, split.current, call, split.settings.scale)
    return tuple(_marked(y, split, call) for y in x) if type(x) is tuple else x
