"""`parallelize`: a model of Transformers whose calls run on this rank's tokens."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...choices import SoftmaxBackend
from ...context import ContextParallel
from ...errors import ArgumentError
from .attention import NAME, AttentionNames, attend
from .batches import Batches
from .call import Current
from .checks import Checks, refuse_by_config, refuse_head, refuse_other_bits
from .forward import model_forward
from .head import after_backbone, backbone_forward
from .masks import make_mask
from .mixers import entry_of, number_layers, uncached
from .modules import ModuleForwards, mixer_forward
from .names import cache_name
from .norms import NormForms, norm_forward
from .rotary import goes_by_length, rotary_forward
from .settings import Settings
from .split import CacheSupport, SplitModel


def parallelize(
    model: PreTrainedModel,
    cp: ContextParallel,
    *,
    kind: Literal["zigzag", "contiguous"] = "zigzag",
    average: bool = False,
    loss_chunk: int | None = None,
    check: bool = True,
    backend: SoftmaxBackend | None = None,
    kv_comm_dtype: torch.dtype | None = None,
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
        cp: the group the sequence is split over. With a deterministic one the model runs on 64 tokens at a time, and
            has the same bits on any number of ranks.
        kind: the layout of whole batches, "zigzag" or "contiguous".
        average: gradients averaged over the group, not summed, are those of one process: for DDP, FSDP, Accelerate and
            the Trainer, which average over all ranks.
        loss_chunk: with labels, logits exist for about this many tokens at once, forward and backward, and are not
            returned; None: for all of this rank's.
        check: run the model a few times on a few tokens to see that nothing else crosses the sequence. Where a rank's
            model is without memory (device "meta") all do it in the first call; what is put in later (adapters) is
            checked in the next one.
        backend: the kernel of split softmax attention, by `ring_la.attention`'s name; None: the fastest that can do it.
        kv_comm_dtype: in what its keys and values travel, torch.float8_e4m3fn or float8_e5m2, in calls without
            gradients (one that wants them is refused); None: in their own dtype.

    Raises:
        ArgumentError, UnsupportedError: a wrong argument; a model that cannot run split, by the module's name, which is
            then left as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("model", "a PreTrainedModel", type(model).__name__, "Wrap it (PEFT, DDP, FSDP) afterwards")
    settings = Settings(cp, kind, average, loss_chunk, check, backend, kv_comm_dtype)  # type: ignore[arg-type]
    if hasattr(model, "_ring_la"):
        raise ArgumentError("model", "one that is not parallelized", "one that is")
    refuse_by_config(model)
    refuse_head(model, _backbone(model), model.loss_function)
    if cp.deterministic:
        refuse_other_bits(model, settings)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    with ExitStack() as undo:
        split = _adopt(model, settings, undo)
        split.checks.first(model)
        undo.pop_all()  # accepted
    return model


def _adopt(model: PreTrainedModel, settings: Settings, undo: ExitStack) -> SplitModel:
    """Turn the model's attention, mixers, loss and call to ours; `undo` takes the way back."""
    attention = AttentionNames(model)
    undo.callback(attention.use, split=False)
    attention.use(split=True)
    current = Current()
    forwards = ModuleForwards(current)
    number_layers(model, undo)
    _put_forwards(model, forwards, undo, norms=not settings.cp.deterministic)
    split = SplitModel(
        settings=settings,
        current=current,
        batches=Batches(settings),
        forwards=forwards,
        attention=attention,
        checks=Checks(settings, current, forwards),
        cache=CacheSupport(cache_name(type(model).forward), uncached(model)),  # type: ignore[arg-type]
        loss=model.loss_function,
        model=weakref.ref(model),  # type: ignore[arg-type]
    )
    for module in model.modules():
        module._ring_la = split  # type: ignore[assignment]
        undo.callback(delattr, module, "_ring_la")
        undo.callback(vars(module).pop, "_ring_la_mask", None)  # `masks.mask_of` leaves it when a layer has run
    model._supports_logits_to_keep = lambda: True  # type: ignore[assignment]  # generate asks for the sequence's last logits, not this rank's
    undo.callback(delattr, model, "_supports_logits_to_keep")
    if "_loss_function" in vars(model):
        undo.callback(setattr, model, "_loss_function", split.loss)
    else:
        undo.callback(delattr, model, "_loss_function")
    model.loss_function = split.loss_function
    return split


def _put_forwards(model: PreTrainedModel, forwards: ModuleForwards, undo: ExitStack, norms: bool) -> None:
    """Give the model, its backbone, its mixers, its rotary embeddings and, if asked for, its norms forwards of ours."""
    backbone, forms = _backbone(model), NormForms()
    for name, module in model.named_modules():
        if module is model:
            forward = model_forward(forwards.of(model))
        elif module is backbone:
            forward = backbone_forward
            undo.callback(module.register_forward_hook(after_backbone).remove)
        elif entry_of(type(module)) is not None:
            forward = mixer_forward
        elif goes_by_length(module):
            forward = rotary_forward
        elif norms and "forward" not in vars(module) and (form := forms.of(module)) is not None:
            forward = norm_forward(type(module), form)
        else:
            continue
        forwards.put(module, name, forward, undo)


def _backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head."""
    if model.base_model is not model:
        return model.base_model  # type: ignore[return-value]
    return next((m for m in model.children() if isinstance(m, PreTrainedModel)), model)
