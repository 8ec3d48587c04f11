"""What a split transformer exchanges, as registered operators, so that torch.compile sees nodes and no exchange.

    ring_la::diffusion_attention    q, k, v of this rank's tokens, whole sizes, the number of the model -> o
    ring_la::diffusion_post         k, v of this rank's tokens start for all ranks; a tensor of nothing, to wait for
    ring_la::diffusion_attend       the attention behind it
    ring_la::diffusion_linear       the same of linear attention, by one sum of states
    ring_la::whole_image            this rank's tokens of an image -> the image, the same on all ranks

and their gradients. Each finds the model by its number, and the call that is under way when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...context.handle import found
from ...context.operator import SplitOperator
from ...schemas import declared
from .keys import GivenMask


class AttentionOthers(NamedTuple):
    """What attention has beside q, k and v.

    Attributes:
        mask: of the streams of `masked`. model: its number. streams: names with commas between, of which there are
            `sizes` tokens on all ranks.
    """

    mask: Tensor | None
    model: int
    streams: str
    sizes: Sequence[int]
    masked: str
    scale: float | None


def _model(number: int) -> Any:
    """What `parallelize` made of a model, as long as that is there: its weights go when its owner lets go."""
    return found(number, keep=False)


def _attention(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """Attention ``[B, T, H, D]`` of this rank's tokens, in the call of the model that is under way."""
    x = AttentionOthers(*others)
    return _model(x.model).attend_now((q, k, v), x.streams, x.sizes, x.mask, x.masked, x.scale)


def _post(k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """A tensor of nothing, which orders the attention behind this."""
    x = AttentionOthers(*others)
    _model(x.model).posting.post_now((k, v), tuple(x.streams.split(",")), x.sizes, GivenMask.of(x.mask, x.masked))
    return k.new_empty(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, token: Tensor, *others: Any) -> Tensor:
    """Attention ``[B, T, H, D]`` over keys that have gone."""
    x = AttentionOthers(*others)
    given = GivenMask.of(x.mask, x.masked)
    return _model(x.model).posting.attend_now((q, k, v), tuple(x.streams.split(",")), x.sizes, given)


def _like_values(q, k, v, *_) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _linear(
    q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor | None, normalizer_k: Tensor | None, model: int
) -> Tensor:
    """Linear attention ``[B, T, H, D]`` of this rank's tokens, in the call of `model` that is under way."""
    return _model(model).linear_now(q, k, v, normalizer_q, normalizer_k)


def _whole_image(x: Tensor, model: int, dim: int, counts: Sequence[int]) -> Tensor:
    """All rows of the image along `dim`, `counts` of each rank; the checksums of the call's inputs travel with them."""
    return _model(model).whole_now(x, counts)


def _of_size(x, model, dim, counts) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(counts)
    return x.new_empty(shape)


def _own_rows(grads: Sequence[Tensor], wanted, x: Tensor, model: int, dim: int, counts: Sequence[int]) -> list[Tensor]:
    return [_model(model).own_gradient(grads[0], counts)]


diffusion_attention = SplitOperator(
    "diffusion_attention",
    _attention,
    _like_values,
    3,
    schema=f"(Tensor q, Tensor k, Tensor v, {declared(AttentionOthers)}) -> Tensor",
)
diffusion_post = SplitOperator(
    "diffusion_post",
    _post,
    lambda k, *_: k.new_empty(1),
    2,
    schema=f"(Tensor k, Tensor v, {declared(AttentionOthers)}) -> Tensor",
)
diffusion_attend = SplitOperator(
    "diffusion_attend",
    _attend,
    _like_values,
    3,
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor token, {declared(AttentionOthers)}) -> Tensor",
)
diffusion_linear = SplitOperator("diffusion_linear", _linear, _like_values, 5)
whole_image = SplitOperator("whole_image", _whole_image, _of_size, 1, _own_rows)
