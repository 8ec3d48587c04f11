"""`parallelize`: a model of Transformers whose calls run on this rank's tokens."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...context import ContextParallel, ShardedLayout
from ...errors import ArgumentError, PeerError, RingLAError, UnsupportedError
from . import probe
from .attention import NAME, attend
from .averaging import refuse_averaging
from .call import Call, Returned
from .forward import known, model_forward
from .head import after_backbone, backbone_forward
from .inputs import read
from .loss import cross_entropy
from .masks import make_mask
from .mixers import entry_of, make_forward, uncached
from .rotary import goes_by_length, rotary_forward


def parallelize(
    model: PreTrainedModel,
    cp: ContextParallel,
    *,
    kind: str = "zigzag",
    average: bool = False,
    loss_chunk: int | None = None,
    check: bool = True,
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
        layout: the tokens, labels and positions given are this rank's already. The result's `layout` says in any case
            which tokens its logits and hidden states are of.
        use_cache: in a first call without gradients every rank gets the cache one process would have, and
            logits_to_keep counts in the whole sequence; calls with a filled cache run whole on every rank, as do
            prompts that leave a rank without a token (with logits_to_keep, as generate gives it).

    Args:
        model: any model whose softmax attention goes through the library's attention and mask functions and whose
            other mixers are in `mixers.MIXERS`.
        cp: the group the sequence is split over.
        kind: the layout of whole batches, "zigzag" or "contiguous".
        average: gradients averaged over the group, not summed, are those of one process: for DDP, FSDP, Accelerate and
            the Trainer, which average over all ranks.
        loss_chunk: with labels, logits exist for about this many tokens at once, forward and backward, and are not
            returned; None: for all of this rank's.
        check: run the model a few times on a few tokens to see that nothing else crosses the sequence. Where a rank's
            model is without memory (device "meta") all do it in the first call; what is put in later (adapters) is
            checked in the next one.

    Raises:
        ArgumentError, UnsupportedError: a wrong argument; a model that cannot run split, by the module's name, which is
            then left as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("model", "a PreTrainedModel", type(model).__name__, "Wrap it (PEFT, DDP, FSDP) afterwards")
    if not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel", type(cp).__name__)
    if kind not in ("zigzag", "contiguous"):
        raise ArgumentError("kind", "zigzag or contiguous", repr(kind))
    if loss_chunk is not None and (not isinstance(loss_chunk, int) or loss_chunk < 1):
        raise ArgumentError("loss_chunk", "an int ≥ 1 or None", repr(loss_chunk))
    if hasattr(model, "_ring_la"):
        raise ArgumentError("model", "one that is not parallelized", "one that is")
    _refuse_by_config(model)
    _refuse_head(model, model.loss_function)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    parallel = Parallel(cp, kind, average, loss_chunk)
    with ExitStack() as undo:
        parallel.adopt(model, undo)
        parallel.wanted = parallel.unchecked = check
        if check and not parallel.somewhere(any(p.is_meta for p in model.parameters())):
            parallel.check(model)
        undo.pop_all()  # accepted
    return model


class Parallel:
    """What `parallelize` leaves in a model, under the name ``_ring_la`` of each of its modules.

    Attributes:
        cp, kind, loss_chunk: as given.
        scale: what gradients of a call's results are multiplied by.
        call: the split call under way, or whose backward pass is; None in a call that is not split.
        wanted: whether to check at all; unchecked: whether that is still to be done.
        cache: the name of the model's argument and result that is its cache.
        uncached: the class that keeps it from having one after a split call, or None.
        loss: the model's own loss function.
    """

    def __init__(self, cp: ContextParallel, kind: str, average: bool, loss_chunk: int | None) -> None:
        self.cp, self.kind, self.scale, self.loss_chunk = cp, kind, cp.size if average else 1, loss_chunk
        self.call: Call | None = None
        self.wanted = self.unchecked = False
        self.loss: Callable = ForCausalLMLoss
        self._compared, self._summed = False, average
        self._adapters: list[tuple[str, int]] | None = None
        self.cache, self.uncached = "past_key_values", None
        self._layouts: dict[tuple, ShardedLayout] = {}
        self._forwards: dict[type, Callable] = {}
        self._attention: list[tuple[object, str]] = []
        self._model: Callable[[], nn.Module | None] = lambda: None

    def __deepcopy__(self, memo: dict) -> Parallel:
        """Copies of parts, which adapters make, belong to the same model; a copy of the model would share its calls."""
        if id(self._model()) in memo:
            raise UnsupportedError("model", "a copy made before parallelize", "a parallelized one")
        return self

    def adopt(self, model: PreTrainedModel, undo: ExitStack) -> None:
        """Turn the model's attention, mixers, loss and call to ours; `undo` takes the way back."""
        self._model = weakref.ref(model)
        found = (getattr(module, "config", None) for module in model.modules())  # an adapter's copy has one of its own
        configs = {id(c): c for c in found if isinstance(c, PreTrainedConfig)}
        self._attention = [(c, c._attn_implementation) for c in configs.values()]
        undo.callback(self.use_attention, split=False)
        self.use_attention(split=True)
        for module in model.modules():
            module._ring_la = self
            undo.callback(delattr, module, "_ring_la")
        backbone = _backbone(model)
        for name, module in model.named_modules():
            if module is model:
                forward = model_forward(self.forward_of(type(model)))
            elif module is backbone:
                forward = backbone_forward
                undo.callback(module.register_forward_hook(after_backbone).remove)
            elif entry_of(type(module)) is not None:
                forward = _mixer_forward
            elif goes_by_length(module):
                forward = rotary_forward
            else:
                continue
            if "forward" in vars(module):
                got = f"{name or type(model).__name__} with a forward of its own"
                raise UnsupportedError("model", "modules as their classes make them, no hooks of Accelerate", got)
            self.forward_of(type(module))
            module.forward = types.MethodType(forward, module)
            undo.callback(delattr, module, "forward")
        self.uncached = uncached(model)
        if "cache_params" in inspect.signature(type(model).forward).parameters:
            self.cache = "cache_params"
        model._supports_logits_to_keep = lambda: True  # generate asks for the sequence's last logits, not this rank's
        undo.callback(delattr, model, "_supports_logits_to_keep")
        self.loss = model.loss_function
        if "_loss_function" in vars(model):
            undo.callback(setattr, model, "_loss_function", self.loss)
        else:
            undo.callback(delattr, model, "_loss_function")
        model.loss_function = functools.partial(_loss, self)

    def forward_of(self, kind: type) -> Callable:
        """The forward of modules of a class, ours inside where it has an entry."""
        if kind not in self._forwards:
            self._forwards[kind] = kind.forward if entry_of(kind) is None else make_forward(kind, self)
        return self._forwards[kind]

    def layout(self, seq_len: int, offsets: tuple[int, ...] | None) -> ShardedLayout:
        """The layout of a whole batch; the last one is kept."""
        if self.too_short(seq_len, offsets):
            raise ArgumentError("input_ids", f"at least a token for each of {self.cp.size} ranks", seq_len)
        return self._layouts[seq_len, offsets]

    def too_short(self, seq_len: int, offsets: tuple[int, ...] | None = None) -> bool:
        """Whether a rank would get no token of a whole batch."""
        key = (seq_len, offsets)
        if key not in self._layouts:
            self._layouts = {key: self.cp.layout(seq_len, self.kind, offsets)}
        return min(self._layouts[key].lengths) == 0

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

    def somewhere(self, here: bool) -> bool:
        """Whether something holds on any rank: FSDP loads weights on one, and the check may gather them. Collective."""
        with self.cp.device:
            return bool(self.cp.comm.all_reduce(torch.tensor(float(here))).wait() > 0)

    def check_again(self, model: PreTrainedModel) -> None:
        """Check what has come since: in the first call, and where PEFT notes other adapters than in the last one."""
        if not self.wanted:
            return
        adapters = [(name, id(config)) for name, config in (getattr(model, "peft_config", None) or {}).items()]
        if adapters != self._adapters:
            self.unchecked |= any("_ring_la" not in vars(module) for module in model.modules())
            self._adapters = adapters
        if self.unchecked:
            self.check(model)

    def check_averaging(self, model: PreTrainedModel) -> None:
        """In the first call with gradients: refuse wrappers that average what is to be summed."""
        if self._summed or not torch.is_grad_enabled():
            return
        refuse_averaging(model, set(self.cp.comm.global_ranks))
        self._summed = True

    @torch.compiler.disable
    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model of which something uncovered crosses the sequence."""
        embedding, original = model.get_input_embeddings(), self.forward_of(type(model))
        inside = (
            [] if isinstance(embedding, nn.ModuleList) else embedding.modules()
        )  # an adapter's wrapper has it inside
        table = next((m for m in inside if hasattr(m, "num_embeddings")), None)
        if table is None:
            raise UnsupportedError("model", "one table of input embeddings", f"a {type(embedding).__name__} of them")

        def run(ids: Tensor, positions: Tensor | None, offsets: Sequence[int]) -> object:
            self.call = Call(None, torch.tensor(offsets, dtype=torch.int32, device=ids.device))
            keywords = {"position_ids": positions, "use_cache": False, "return_dict": True}
            return original(model, input_ids=ids, **known(original, keywords))

        try:
            longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
            longest = longest if longest > 0 else probe.TOKENS  # XLNet's -1: any
            probe.check(model, run, table.num_embeddings, longest, table.weight.device)
        finally:
            self.leave()
        self.unchecked = False

    def leave(self) -> None:
        """No call is under way any more."""
        self.call = None

    def use_attention(self, split: bool) -> None:
        """Name our attention function in the model's configurations, or the one the model came with."""
        for config, name in self._attention:
            config._attn_implementation = NAME if split else name

    def check_attention(self) -> None:
        """Refuse a call after someone else has named another attention function, which would see this rank's keys."""
        other = next((c._attn_implementation for c, _ in self._attention if c._attn_implementation != NAME), None)
        if other is not None:
            hint = "Choose one for calls that are not split before parallelize"
            raise UnsupportedError("config._attn_implementation", repr(NAME), repr(other), hint)


def _mixer_forward(self: nn.Module, *args, **keywords):
    return self._ring_la.forward_of(type(self))(self, *args, **keywords)


def _loss(parallel: Parallel, logits: Tensor, labels: Tensor, vocab_size: int, **keywords):
    """The loss function of a parallelized model."""
    call = parallel.call
    if call is None:
        return parallel.loss(logits=logits, labels=labels, vocab_size=vocab_size, **keywords)
    call.losses += 1
    loss = cross_entropy(call, logits, vocab_size)
    call.loss = Returned.of(loss)
    return loss


# -- before the first step -------------------------------------------------------------------------------------


def _refuse_by_config(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError("model", "a decoder", f"{name}, an encoder-decoder")
    if (getattr(model, "_tp_size", None) or 1) > 1 or any(isinstance(p, DTensor) for p in model.parameters()):
        hint = "Parallelize it first, then fully_shard; the library's tensor parallelism is not supported"
        raise UnsupportedError("model", "whole parameters", f"{name}, whose parameters are sharded", hint)
    for label, module in model.named_modules():
        if getattr(module, "layerdrop", None):
            got = f"{label} ({type(module).__name__}) with layerdrop={module.layerdrop}"
            raise UnsupportedError("model", "the same layers on every rank", got, "Set it to 0")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedError("model", "causal attention", f"{name} with is_causal=False")


def _refuse_head(model: PreTrainedModel, loss: Callable) -> None:
    """Refuse heads that pool tokens or compare labels in another way."""
    if _backbone(model) is not model and loss is not ForCausalLMLoss:
        got = f"{type(model).__name__} with {getattr(loss, '__name__', loss)}"
        raise UnsupportedError("model", "a language model's head with ForCausalLMLoss, or none", got)


def _backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head."""
    if model.base_model is not model:
        return model.base_model
    return next((m for m in model.children() if isinstance(m, PreTrainedModel)), model)
