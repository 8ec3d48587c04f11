"""`parallelize`: a model of Transformers whose calls run on this rank's tokens."""

from __future__ import annotations

import functools
import inspect
import types
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from ...autograd import first_derivative_only
from ...context import ContextParallel, ShardedLayout
from ...errors import ArgumentError, PeerError, RingLAError, UnsupportedError
from . import probe
from .attention import NAME, attend
from .cache import Recorder
from .call import Call
from .inputs import read
from .loss import cross_entropy, gather_router_logits, gather_tokens
from .masks import make_mask
from .mixers import entry_of, make_forward, uncached


def parallelize(
    model: PreTrainedModel, cp: ContextParallel, *, kind: str = "zigzag", average: bool = False, check: bool = True
) -> PreTrainedModel:
    """Make a causal language model of Transformers run on a split sequence; changed in place and returned.

    The call stays as it was, the whole batch on every rank: ``model(input_ids, labels=…)``. Each rank takes its tokens
    by a layout of `kind`, the loss is that of the whole batch, the same on every rank, and logits and hidden states are
    this rank's tokens'. Parameter gradients summed over the group are those of one process.

    Keywords of the call:
        input_ids or inputs_embeds, position_ids, labels, num_items_in_batch, output_hidden_states,
        output_router_logits: as ever. Router losses are those of the whole batch.
        cu_seqlens: offsets of packed documents ``[N+1]``; without it positions that do not count on by one start a
            document, as in Transformers' flash attention; cu_seq_lens_q is understood too. Several rows of packed
            documents are put one after the other.
        attention_mask: ones, or zeros on the right, where labels must be ignored.
        shift_labels: the label each token should predict, instead of labels.
        layout: the tokens, labels and positions given are this rank's already.
        use_cache: in a first call without gradients every rank gets the cache one process would have, and
            logits_to_keep counts in the whole sequence; calls with a filled cache run whole on every rank.

    Args:
        model: any model whose softmax attention goes through the library's attention and mask functions and whose
            other mixers are in `mixers.MIXERS`.
        cp: the group the sequence is split over.
        kind: the layout of whole batches, "zigzag" or "contiguous".
        average: gradients averaged over the group, not summed, are those of one process: for DDP, FSDP, Accelerate and
            the Trainer, which average over all ranks.
        check: run the model a few times on a few tokens to see that nothing else crosses the sequence. On a model
            without memory (device "meta") it is done in the first call.

    Raises:
        ArgumentError, UnsupportedError: a wrong argument; a model that cannot run split, by the module's name.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("model", "a PreTrainedModel", type(model).__name__, "Wrap it (PEFT, DDP, FSDP) afterwards")
    if not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel", type(cp).__name__)
    if kind not in ("zigzag", "contiguous"):
        raise ArgumentError("kind", "zigzag or contiguous", repr(kind))
    if hasattr(model, "_ring_la"):
        raise ArgumentError("model", "one that is not parallelized", "one that is")
    _refuse_by_config(model)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    parallel = Parallel(cp, kind, cp.size if average else 1)
    parallel.adopt(model)
    parallel.unchecked = check
    if check and not any(p.is_meta for p in model.parameters()):
        _check(model, parallel)
    return model


class Parallel:
    """What `parallelize` leaves in a model, under the name ``_ring_la`` of each of its modules.

    Attributes:
        cp, kind: as given.
        scale: what gradients of a call's results are multiplied by.
        call: the split call under way, or whose backward pass is; None in a call that is not split.
        unchecked: whether the check is still to be done.
        cache: the name of the model's argument and result that is its cache.
        uncached: the class that keeps it from having one after a split call, or None.
        loss: the model's own loss function.
    """

    def __init__(self, cp: ContextParallel, kind: str, scale: int) -> None:
        self.cp, self.kind, self.scale = cp, kind, scale
        self.call: Call | None = None
        self.unchecked = False
        self.loss: Callable = ForCausalLMLoss
        self._compared = False
        self.cache, self.uncached = "past_key_values", None
        self._layouts: dict[tuple, ShardedLayout] = {}
        self._forwards: dict[type, Callable] = {}
        self._attention: list[tuple[object, str]] = []

    def __deepcopy__(self, memo: dict) -> Parallel:
        raise UnsupportedError("model", "a copy made before parallelize", "a parallelized one")

    def adopt(self, model: PreTrainedModel) -> None:
        """Turn the model's attention, mixers, loss and call to ours."""
        configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
        self._attention = [(c, c._attn_implementation) for c in configs.values()]
        model.set_attn_implementation(NAME)
        for module in model.modules():
            module._ring_la = self
            if entry_of(type(module)) is not None:
                self.forward_of(type(module))
                module.forward = types.MethodType(_mixer_forward, module)
            elif _goes_by_length(module):
                module.forward = types.MethodType(_rotary_forward, module)
        backbone = _backbone(model)
        if backbone is not model:
            backbone.register_forward_hook(_after_backbone)
        self.uncached = uncached(model)
        if "cache_params" in inspect.signature(type(model).forward).parameters:
            self.cache = "cache_params"
        self.loss = model.loss_function
        model.loss_function = functools.partial(_loss, self)
        model.forward = types.MethodType(_model_forward(type(model).forward), model)

    def forward_of(self, kind: type) -> Callable:
        """The forward of mixers of a class."""
        if kind not in self._forwards:
            self._forwards[kind] = make_forward(kind, self)
        return self._forwards[kind]

    def layout(self, seq_len: int, offsets: tuple[int, ...] | None) -> ShardedLayout:
        """The layout of a whole batch; the last one is kept."""
        key = (seq_len, offsets)
        if key not in self._layouts:
            layout = self.cp.layout(seq_len, self.kind, offsets)
            if min(layout.lengths) == 0:
                raise ArgumentError("input_ids", f"at least a token for each of {self.cp.size} ranks", seq_len)
            self._layouts = {key: layout}
        return self._layouts[key]

    def read(self, arguments: dict[str, object]) -> tuple[Call, dict[str, object]]:
        """This rank's part of a call. What one rank refuses all refuse; batches are compared as cp.validate says."""
        comm, validate = self.cp.comm, self.cp.validate
        try:
            call, local = read(self.layout, arguments)
        except RingLAError as error:
            if validate != "never":
                try:
                    comm.agree("the arguments of the model", f"refused: {error}")
                except PeerError:  # the others compared such a call before: this rank's own error
                    raise error from None
            raise
        if arguments.get("layout") is None and (validate == "always" or (validate == "first" and not self._compared)):
            tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and not x.is_floating_point()}
            sums = {n: zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes()) for n, x in tensors.items()}
            comm.agree("the whole batch, which every rank must be given", sums)
            self._compared = True
        return call, local

    def use_attention(self, split: bool) -> None:
        """Name our attention function in the model's configurations, or the one the model came with."""
        for config, name in self._attention:
            config._attn_implementation = NAME if split else name


def _mixer_forward(self: nn.Module, *args, **keywords):
    return self._ring_la.forward_of(type(self))(self, *args, **keywords)


def _loss(parallel: Parallel, logits: Tensor, labels: Tensor, vocab_size: int, **keywords):
    """The loss function of a parallelized model."""
    call = parallel.call
    if call is None:
        return parallel.loss(logits=logits, labels=labels, vocab_size=vocab_size, **keywords)
    call.losses += 1
    return cross_entropy(call, logits, vocab_size)


def _goes_by_length(module: nn.Module) -> bool:
    """Whether rotary frequencies depend on the largest position of a call."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def _rotary_forward(self: nn.Module, x: Tensor, position_ids: Tensor, *args, **keywords) -> tuple[Tensor, ...]:
    """Sines and cosines of this rank's positions, by frequencies for the longest document of the whole batch."""
    call, own = self._ring_la.call, type(self).forward
    if call is None or call.last_position is None:
        return own(self, x, position_ids, *args, **keywords)
    last = torch.as_tensor(call.last_position, device=position_ids.device).expand(*position_ids.shape[:-1], 1)
    out = own(self, x, torch.cat([position_ids, last.to(position_ids.dtype)], -1), *args, **keywords)
    return tuple(t[..., :-1, :] for t in out)


def _after_backbone(module: nn.Module, args: tuple, output: object) -> None:
    """Forward hook of the model without its head: what the head needs whole."""
    call = module._ring_la.call
    if call is None or call.layout is None or not isinstance(output, ModelOutput):
        return
    x = output[0]
    routers = output.get("router_logits")
    if routers:
        if call.padded:
            raise UnsupportedError("attention_mask", "ones with output_router_logits", "zeros", "Or pack documents")
        whole = (None if r is None else gather_router_logits(r, len(x), call.layout) for r in routers)
        output["router_logits"] = tuple(whole)
    if call.keep is not None:
        output["last_hidden_state"] = gather_tokens(x, call.keep, call.layout)


def _model_forward(original: Callable) -> Callable:
    """The forward of a parallelized model of a class."""
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    @_not_compiled
    def forward(self: PreTrainedModel, *args, **keywords):
        arguments = dict(zip(names, args)) | keywords
        parallel = self._ring_la
        cache = arguments.get(parallel.cache)
        if cache is not None and _filled(cache):
            return _whole(self, parallel, original, arguments)
        if parallel.unchecked:
            _check(self, parallel)
        return _split(self, parallel, original, arguments)

    return forward


def _not_compiled(function: Callable) -> Callable:
    """Run by the interpreter under torch.compile, while what it calls is compiled."""
    return torch._dynamo.disable(function, recursive=False)


def _filled(cache: object) -> bool:
    if getattr(cache, "linear_cache", None):  # MiniMax's, whose first layer may hold no keys
        return True
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # a cache of recurrent states only
        return cache.has_previous_state()


def _whole(model: PreTrainedModel, parallel: Parallel, original: Callable, arguments: dict) -> object:
    """A call that is not split: the tokens after a prefill, on every rank."""
    if arguments.get("layout") is not None or arguments.get("cu_seqlens") is not None:
        raise UnsupportedError("past_key_values", "an empty cache with layout or cu_seqlens", "a filled one")
    parallel.call = None
    parallel.use_attention(split=False)
    try:
        return original(model, **{n: x for n, x in arguments.items() if n not in ("layout", "cu_seqlens")})
    finally:
        parallel.use_attention(split=True)


def _split(model: PreTrainedModel, parallel: Parallel, original: Callable, arguments: dict) -> object:
    """A call on this rank's tokens."""
    call, local = parallel.read(arguments)
    if call.targets is not None and parallel.loss is not ForCausalLMLoss:
        raise UnsupportedError("labels", "a model with the loss of a causal language model", parallel.loss)
    recorder = Recorder() if _wants_cache(model, arguments, call) else None
    local |= {"use_cache": recorder is not None, parallel.cache: recorder, "return_dict": True}
    parallel.call = call
    out = original(model, **_known(original, local))
    if call.targets is not None and call.losses != 1:
        raise UnsupportedError("labels", "None for a model that does not call its loss_function once", call.losses)
    if recorder is not None:
        cache = arguments.get(parallel.cache)
        cache = recorder.new_cache(model.config) if cache is None else cache
        recorder.replay(cache, call.layout)
        out[parallel.cache] = cache
    for name, x in out.items():
        out[name] = _marked(x, parallel, call)
    return out.to_tuple() if arguments.get("return_dict") is False else out


def _wants_cache(model: PreTrainedModel, arguments: dict, call: Call) -> bool:
    asked = arguments.get("use_cache")
    if asked is None and arguments.get(model._ring_la.cache) is None:
        asked, explicit = getattr(model.config.get_text_config(), "use_cache", False), False
    else:
        asked, explicit = asked is not False, True
    against = {
        "gradients": torch.is_grad_enabled(),
        "labels": call.targets is not None,
        "packed documents": call.layout.packed,
        "padding": call.padded,
        f"layers like {model._ring_la.uncached}": model._ring_la.uncached is not None,
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
    def forward(ctx, x: Tensor, parallel: Parallel, call: Call) -> Tensor:
        ctx.parallel, ctx.call = parallel, call
        return x.view_as(x)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor):
        ctx.parallel.call = ctx.call
        return grad * ctx.parallel.scale, None, None


def _marked(x: object, parallel: Parallel, call: Call) -> object:
    if isinstance(x, Tensor) and x.requires_grad:
        return _Resume.apply(x, parallel, call)
    return tuple(_marked(y, parallel, call) for y in x) if type(x) is tuple else x


# -- before the first step -------------------------------------------------------------------------------------


def _refuse_by_config(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError("model", "a decoder", f"{name}, an encoder-decoder")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedError("model", "causal attention", f"{name} with is_causal=False")


def _check(model: PreTrainedModel, parallel: Parallel) -> None:
    """Refuse a model of which something uncovered crosses the sequence."""
    base = _backbone(model)
    embedding = model.get_input_embeddings()

    def run(ids: Tensor, positions: Tensor | None, offsets: Sequence[int]) -> object:
        parallel.call = Call(None, torch.tensor(offsets, dtype=torch.int32, device=ids.device))
        keywords = {"input_ids": ids, "position_ids": positions, "use_cache": False, "return_dict": True}
        return type(base).forward(base, **_known(type(base).forward, keywords))

    try:
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or probe.TOKENS
        probe.check(base, run, embedding.num_embeddings, longest, embedding.weight.device)
    finally:
        parallel.call = None
    parallel.unchecked = False


def _backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head."""
    if model.base_model is not model:
        return model.base_model
    return next((m for m in model.children() if isinstance(m, PreTrainedModel)), model)


def _known(function: Callable, keywords: dict[str, object]) -> dict[str, object]:
    """The keywords a model's forward takes. One without position_ids passes the check only if it needs none."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: x for n, x in keywords.items() if anything or n in parameters}
