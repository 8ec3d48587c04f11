"""Keys before queries: blocks whose keys and values leave first, and travel while the rest is computed.

A processor of the library makes q, k and v and then attends. Those here make k and v, let them go, and then make q;
in a block with a wide layer beside its attention (`WideLayer`) they leave before that layer, which needs none of them.
What goes into attention is the library's, to the bit. With gradients, or fused projections, its order stays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import operators
from .ahead_families import FAMILIES, KeysFirst, rotated
from .call import DenoiserCall
from .keys import GivenMask
from .plans import BlockPlan, ModelPlan

Streams = tuple[str, ...]
PARALLEL = "Flux2ParallelSelfAttnProcessor"


class PostingModel(Protocol):
    """What of the split model is asked: the call under way, and the number operators know it by."""

    number: int
    call: DenoiserCall


class Posting:
    """Keys of one split model that leave before their queries."""

    def __init__(self, running: PostingModel) -> None:
        self._running = running
        self._hooks: dict[Streams, Callable] = {}  # one for all blocks, so that torch.compile compiles them once

    def adopt(self, block: nn.Module, spec: BlockPlan, undo: ExitStack) -> None:
        """Let keys go before the block's wide layer, if it has one; `undo` takes the way back."""
        wide, parts = spec.wide, dict(block.named_modules())
        if wide is None or wide.layer not in parts:
            return
        layer, attn = parts[wide.layer], parts[wide.attention]
        order = spec.attention[wide.attention].streams
        if order is not None and hasattr(attn.processor, "ring_la_keys"):
            layer.__dict__["ring_la_attention"] = attn  # no submodule: its parameters are the block's
            undo.callback(layer.__dict__.pop, "ring_la_attention")
            hook = self._hooks.setdefault(order, functools.partial(self._before, order))
            undo.callback(layer.register_forward_pre_hook(hook).remove)

    def goes(self, attn: nn.Module) -> bool:
        """Whether keys leave first here."""
        return not torch.is_grad_enabled() and not getattr(attn, "fused_projections", False)

    @property
    def gone(self) -> bool:
        """Whether keys of this block are on their way."""
        return self._running.call.posted is not None

    def _before(self, order: Streams, layer: nn.Module, args: tuple) -> None:
        """Before a block's wide layer: the keys of its attention, which is given the same."""
        attn: Any = layer.ring_la_attention
        if self.goes(attn):
            call = self._running.call
            behind = call.streams.local("text") if order[-1] == "text" else 0
            self.post(order, *attn.processor.ring_la_keys(attn, args[0], None, call.rotary, behind))

    def post(self, order: Streams, k: Tensor, v: Tensor) -> None:
        """Let keys and values ``[B, T, H, D]`` of this rank's tokens go."""
        call, token = self._running.call, None
        if torch.compiler.is_compiling():
            token = operators.diffusion_post(k, v, *self._others(order))
        else:
            self.post_now((k, v), order, self._sizes(order), call.masked)
        call.posted = k, v, token

    def attend(self, order: Streams, q: Tensor) -> Tensor:
        """Attention over what went, ``[B, T, H, D]``."""
        call = self._running.call
        assert call.posted is not None
        (k, v, token), call.posted, call.rotary = call.posted, None, None  # a compiled block leaves no tensor here
        if torch.compiler.is_compiling():
            return operators.diffusion_attend(q, k, v, token, *self._others(order))
        return self.attend_now((q, k, v), order, self._sizes(order), call.masked)

    def post_now(
        self, kv: tuple[Tensor, Tensor], order: Streams, sizes: Sequence[int], given: GivenMask | None
    ) -> None:
        """The same when a graph runs."""
        call = self._running.call
        call.on_the_way = call.keys.post(kv, order, sizes, given, call.posts == 0, call.how)
        call.posts += call.on_the_way is not None

    def attend_now(
        self, qkv: tuple[Tensor, Tensor, Tensor], order: Streams, sizes: Sequence[int], given: GivenMask | None
    ) -> Tensor:
        """The same when a graph runs; where keys could not go alone, with them."""
        call = self._running.call
        posted, call.on_the_way = call.on_the_way, None
        if posted is None:
            return call.keys.attend(qkv, order, sizes, given, None, call.how)
        return posted.attend(qkv[0])

    def _sizes(self, order: Streams) -> list[int]:
        return self._running.call.streams.whole(order)

    def _others(self, order: Streams) -> tuple[Any, ...]:
        """What the operators take beside tensors."""
        masked = self._running.call.masked
        mask, streams = (None, ()) if masked is None else (masked.mask, masked.streams)
        return mask, self._running.number, ",".join(order), self._sizes(order), ",".join(streams), None


def keys_first_class(kind: type, plain: type, order: Streams, posting: Posting) -> type:
    """The same class of split processors, which lets keys go first; `plain` where there is no such way."""
    if kind.__name__ == PARALLEL:
        call = _parallel_call(plain.__call__, order, posting)
        return type(kind.__name__, (plain,), {"__call__": call, "__module__": kind.__module__})
    if kind.__name__ not in FAMILIES:
        return plain
    family = FAMILIES[kind.__name__]
    call = _call(plain.__call__, order, posting, family)
    return type(
        kind.__name__,
        (plain,),
        {"__call__": call, "__module__": kind.__module__, "ring_la_keys": staticmethod(family.keys)},
    )


def _call(plain: Callable, order: Streams, posting: Posting, family: KeysFirst) -> Callable:
    """In place of a processor's ``__call__``, with its arguments: the library reads their names."""

    def first(attn, x, text, rotary):
        if not posting.gone:
            posting.post(order, *family.keys(attn, x, text, rotary, 0))
        q = family.queries(attn, x, text, rotary)
        o = posting.attend(order, q)
        return family.out(attn, o.flatten(2, 3).to(q.dtype), text)

    def call(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        if posting.goes(attn):
            return first(attn, hidden_states, encoder_hidden_states, image_rotary_emb)
        return plain(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    def masked(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        encoder_hidden_states_mask=None,
        attention_mask=None,
        image_rotary_emb=None,
    ):
        if posting.goes(attn):
            return first(attn, hidden_states, encoder_hidden_states, image_rotary_emb)
        masks = encoder_hidden_states_mask, attention_mask
        return plain(self, attn, hidden_states, encoder_hidden_states, *masks, image_rotary_emb)

    return masked if "encoder_hidden_states_mask" in inspect.signature(plain).parameters else call


def _parallel_call(plain: Callable, order: Streams, posting: Posting) -> Callable:
    """The same of Flux 2's single blocks, whose one matrix makes q, k, v and what the wide layer takes: by rows, those
    of k and v first."""

    def call(self, attn, hidden_states, attention_mask=None, image_rotary_emb=None):
        layer = attn.to_qkv_mlp_proj
        if not posting.goes(attn) or type(layer) is not nn.Linear:  # an adapter has no rows of its own
            return plain(self, attn, hidden_states, attention_mask=attention_mask, image_rotary_emb=image_rotary_emb)
        inner = attn.inner_dim

        def rows(start: int, stop: int | None) -> Tensor:
            bias = None if layer.bias is None else layer.bias[start:stop]
            return F.linear(hidden_states, layer.weight[start:stop], bias)

        k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in rows(inner, 3 * inner).chunk(2, dim=-1))
        posting.post(order, rotated(attn.norm_k(k), image_rotary_emb), v)
        q = rotated(attn.norm_q(rows(0, inner).unflatten(-1, (-1, attn.head_dim))), image_rotary_emb)
        wide = attn.mlp_act_fn(rows(3 * inner, None))
        o = posting.attend(order, q).flatten(2, 3).to(q.dtype)
        return attn.to_out(torch.cat([o, wide], dim=-1))

    return call


def has_family(plan: ModelPlan) -> bool:
    """Whether any attention of a model's blocks can let keys go first."""
    attention = [one for block in plan.classes.values() for one in block.attention.values()]
    return any(name in (PARALLEL, *FAMILIES) for one in attention for name in one.processors)
