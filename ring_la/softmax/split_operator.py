"""Softmax attention on a split sequence as registered operators, so that torch.compile sees one opaque node.

    ring_la::split_attention            tensors, the layouts' numbers -> (o, lse)
    ring_la::split_attention_backward   their gradients, from o and lse: keys travel again, heads as well

Every strategy, of latents and chosen keys, too. Arguments are the fields of `Tensors` and `Scores`, and what else a
split call has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_nan
from ..choices import ChosenChoice, LatentForm
from ..context import ShardedLayout
from ..context.handle import found
from ..context.operator import own_memory
from ..errors import Facts, RingLAError
from ..schemas import declared, taken_apart
from .call import AttentionCall, KnownCalls
from .merging import wide
from .operator import differentiable
from .options import AttentionOptions, check_split
from .plan import Moves
from .scores import Scores
from .tensors import Tensors, check_tensors, name_of
from .wire import COMM_NAMES


class SplitOthers(NamedTuple):
    """What a split call has beside tensors and scores; layouts by number, `kv_layout` 0 where it is `layout`; dtypes by
    name."""

    joint: str
    backend: str | None
    strategy: ChosenChoice
    form: LatentForm | None
    layout: int
    kv_layout: int
    gradients: bool
    kv_comm_dtype: str | None


def flat(x: Tensors, scores: Scores, options: AttentionOptions, layout: ShardedLayout) -> tuple:
    """A call's arguments as the operator takes them."""
    others = SplitOthers(
        joint=options.joint,
        backend=options.backend,
        strategy=options.strategy or layout.cp.attention,
        form=options.form,
        layout=layout.number,
        kv_layout=0 if options.kv_layout is None else options.kv_layout.number,
        gradients=torch.is_grad_enabled(),
        kv_comm_dtype=COMM_NAMES.get(options.kv_comm_dtype),
    )
    return (*x, *scores, *others)


def _call_of(arguments: Iterable) -> tuple[Tensors, Scores, SplitOthers]:
    """What `flat` has taken apart."""
    x, scores, others = taken_apart(arguments, Tensors, Scores, SplitOthers)
    return x, scores, others


def _planned(x: Tensors, scores: Scores, others: SplitOthers) -> Moves:
    """The plan of a call, made once for each layout and kind of call."""
    layout = found(others.layout)
    shapes = tuple([None if t is None else (t.shape, t.dtype) for t in x])
    key = None if any(isinstance(s, Tensor) for s in scores) else ("operator", shapes, scores, others)
    known = KnownCalls.of(layout).plans
    if key is not None and key in known:
        return known[key]
    kv = found(others.kv_layout) if others.kv_layout else layout
    plan = AttentionCall(
        scores, others.joint, others.backend, form=others.form, layout=layout, kv_layout=kv, strategy=others.strategy,
        kv_comm_dtype=_comm_dtype(others),
    ).plan(x)  # fmt: skip
    if key is not None:
        known[key] = plan
    return plan


def _comm_dtype(others: SplitOthers) -> torch.dtype | None:
    return None if others.kv_comm_dtype is None else getattr(torch, others.kv_comm_dtype)


def _agree(x: Tensors, scores: Scores, others: SplitOthers, backward: bool = False) -> None:
    """What eager calls check and compare, when the graph runs."""
    layout, error, signature = found(others.layout), None, None
    kv = found(others.kv_layout) if others.kv_layout else None
    try:
        check_tensors(x, others.joint, None)
        given: dict[str, Any] = dict(
            strategy=others.strategy, backend=others.backend, kv_comm_dtype=_comm_dtype(others)
        )
        check_split(x, AttentionOptions(kv_layout=kv, **given), layout)
        if layout.cp.validate == "always":
            for name, t in x.named():
                if t is not None:
                    check_nan(name, t)
    except RingLAError as e:
        error = e
    if error is None:
        of_tokens = (*x.names_by_token, "chosen")
        tensors = [(n, None if t is None else Facts.of(t, 1 if n in of_tokens else None)) for n, t in x.named()]
        flags = [(n, Facts.of(s) if isinstance(s, Tensor) else s) for n, s in scores._asdict().items()]
        rest = [(n, s) for n, s in others._asdict().items() if "layout" not in n]
        signature = (*tensors, *flags, *rest, ("kv_layout", None if kv is None else kv.key))
    name = name_of(x)
    layout.agree(f"the backward pass of {name}" if backward else name, signature, error)


def _forward(*arguments) -> tuple[Tensor, Tensor]:
    """This rank's queries: o ``[B, Tq, H, V]`` and lse ``[B, H, Tq]``."""
    x, scores, others = _call_of(arguments)
    _agree(x, scores, others)
    o, lse, _ = _planned(x, scores, others).forward(x)
    return own_memory((o, lse), arguments)


ARGUMENTS = declared(Tensors, Scores, SplitOthers)

split_attention = torch.library.custom_op(
    "ring_la::split_attention", _forward, mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)"
)


@split_attention.register_fake
def _(*arguments):
    x, _, _ = _call_of(arguments)
    B, T, H, _ = x.q.shape
    return x.q.new_empty((B, T, H, x.value_width)), x.q.new_empty((B, H, T), dtype=wide(x.q.dtype))


def _gradients(do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, *arguments) -> list[Tensor]:
    """Gradients of the tensors that are present, in order."""
    x, scores, others = _call_of(arguments)
    _agree(x, scores, others, backward=True)
    plan = _planned(x, scores, others)
    grads = plan.backward(plan.saved(x, o, lse), do, dlse)
    return list(own_memory([g for g in grads if g is not None], (do, dlse, o, lse, *arguments)))


split_attention_backward = torch.library.custom_op(
    "ring_la::split_attention_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor? do, Tensor? dlse, Tensor o, Tensor lse, {ARGUMENTS}) -> Tensor[]",
)


@split_attention_backward.register_fake
def _(do, dlse, o, lse, *arguments):
    return [t.new_empty(t.shape) for t in _call_of(arguments)[0].differentiable if t is not None]


differentiable(split_attention, split_attention_backward)
