"""Between a model's backbone and its loss: what is needed of the whole sequence, and logits that never exist whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from ...errors import UnsupportedError
from .call import HeadWork, ModelCall
from .loss import gather_router_logits, gather_tokens, whole_loss


def backbone_forward(self: Any, *args, **keywords) -> ModelOutput:
    """The backbone's forward, or what it returned before where only the head is to run."""
    call = self._ring_la.call
    if call is not None and call.head_only:
        return call.head.backbone
    return self._ring_la.forwards.of(self)(self, *args, **keywords)


def after_backbone(module: Any, args: tuple, output: object) -> None:
    """Forward hook of the backbone: what the head is to get."""
    call = module._ring_la.call
    if call is None or call.layout is None or call.head_only:
        return
    if not isinstance(output, ModelOutput) or "last_hidden_state" not in output:
        raise UnsupportedError("model", "a backbone that returns last_hidden_state", type(output).__name__)
    x = output["last_hidden_state"] = call.poisoned(output["last_hidden_state"])
    routers = output.get("router_logits")
    if routers:
        if call.padded:
            raise UnsupportedError("attention_mask", "ones with output_router_logits", "zeros", "Or pack documents")
        whole = (None if r is None else gather_router_logits(r, len(x), call.layout) for r in routers)
        output["router_logits"] = tuple(whole)
    if call.keep is not None:
        output["last_hidden_state"] = gather_tokens(x, call.keep, call.layout)
    if call.head is not None:
        call.head.hidden, call.head.result = x, type(output)
        output["last_hidden_state"] = x[:, call.head.chunk]


@functools.partial(torch._dynamo.disable, recursive=False)
def loss_in_chunks(run: Callable[[ModelCall, bool], ModelOutput], call: ModelCall, tokens: int) -> ModelOutput:
    """A call whose head works on about `tokens` tokens at once and computes them again in the backward pass.

    Args:
        run: ``(call, head only) → `` the model's result.

    Returns:
        What the model returns, without logits.
    """
    batch, length = (
        call.targets.labels.shape[0],
        max(call.layout.lengths),
    )  # as often on every rank: FSDP may gather the head
    step = max(1, tokens // batch)
    call.head = HeadWork(slice(0, step))
    out = run(call, False)
    loss = out["loss"].new_zeros(())
    for start in range(step, length, step):
        chunk = slice(start, start + step)
        loss = loss + checkpoint(_part, run, call.head.hidden[:, chunk], call, chunk, use_reentrant=False)
    fields = {n: x for n, x in out.items() if n != "logits"}
    return type(out)(**fields | {"loss": out["loss"] + whole_loss(loss, call.layout.cp, call.fingerprint)})


@functools.partial(torch._dynamo.disable, recursive=False)
def _part(run: Callable, hidden: Tensor, call: ModelCall, chunk: slice) -> Tensor:
    """This rank's part of the loss at a chunk of its tokens."""
    return run(call.of_head(hidden, chunk), True)["loss"]
