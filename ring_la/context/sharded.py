"""`ShardedLayout`: a layout bound to the ranks it splits a sequence over, and the ways to move tokens between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, RingLAError
from ..layout import Segment
from . import moves
from .agreed import AgreedLayout
from .arguments import check_labels
from .bound import Bound
from .gather import Gather

T = TypeVar("T")


class ShardedLayout(AgreedLayout):
    """A `Layout` bound to its `ContextParallel`: the layout of an operator's arguments, and the ways to change it.

    Attributes:
        cp: the ContextParallel it belongs to.
        number: what compiled graphs know it by.
        positions: int64 ``[T_local]``, position of each local token in its document.
        bindings: how many models are bound to it.
    """

    def bind(self, model: nn.Module) -> Bound:
        """A model whose layers work on this layout until ``remove()``, or the end of a ``with`` block.

        It catches what no single call can: a layer that is given no layout or another one, tokens cut by another
        layout, ranks that cut different sequences; and its `compare` finds the module that mixes tokens in a way of its
        own. See `ring_la.context.bound`.

        Raises:
            ArgumentError: no module.
        """
        if not isinstance(model, nn.Module):
            raise ArgumentError("model", "a torch.nn.Module", type(model).__name__)
        return Bound(self, model)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence, on every rank, from its parts ``x [..., T_local, ...]`` along `dim`.

        Differentiable: gradients flowing into the result are summed over the ranks.
        """
        if torch.compiler.is_compiling():
            return moves.gather(x, self.number, dim, self.seq_len)
        self._agree_on_tokens("gather", x, dim)
        return Gather.apply(x.movedim(dim, 0), self, self.cp.comm).movedim(0, dim)

    def convert(self, x: Tensor, other: ShardedLayout, dim: int = 1) -> Tensor:
        """This rank's tokens under `other`, a layout of the same sequence, by one all-to-all. Differentiable."""
        if torch.compiler.is_compiling():
            self._check_other(other)
            return moves.convert(x, self.number, other.number, dim, other.local_length)
        split = other.split if isinstance(other, ShardedLayout) else None
        self._agree_on_tokens("convert", x, dim, ("other_layout", split), check=partial(self._check_other, other))
        if other.split == self.split:
            return x
        route = self.route(("convert", other.split), lambda: [other.tokens(r) for r in range(self.world_size)])
        out = route(x, dim)
        self.cp.marks.put(out, other)
        return out

    def _check_other(self, other: object) -> None:
        if not isinstance(other, ShardedLayout) or other.cp is not self.cp:
            raise ArgumentError("other_layout", "a layout made by the same ContextParallel", other)
        if other.seq_len != self.seq_len:
            raise ArgumentError("other_layout", f"a layout of {self.seq_len} tokens", f"one of {other.seq_len}")

    def targets(self, ids: Tensor, ignore_index: int = -100, dim: int = 1) -> Tensor:
        """Next-token labels of this rank's tokens: each token's successor in its document.

        Args:
            ids: token ids of this rank, ``[B, T_local]`` or ``[T_local]``, signed integers.
            ignore_index: the label of a document's last token.

        Returns:
            The labels, like `ids`.
        """
        if isinstance(ids, Tensor) and ids.dim() == 1:
            dim = 0
        if torch.compiler.is_compiling():
            return moves.targets(ids, self.number, ignore_index, dim)
        check = partial(check_labels, ids, ignore_index)
        self._agree_on_tokens("targets", ids, dim, ("ignore_index", ignore_index), name="ids", check=check)
        route = self.route("targets", lambda: [self.successors(r) for r in range(self.world_size)])
        following = route(ids, dim)
        last = self.kept(Tensor, lambda: (self.successors(self.rank) < 0).to(ids.device), "last", ids.device)
        shape = [1] * ids.dim()
        shape[dim] = -1
        return following.masked_fill(last.view(shape), ignore_index)


class FollowingLayout(ShardedLayout):
    """A layout whose segments belong to the owners of another's, whatever its kind makes of as many tokens.

    Args:
        layout: the other. lengths: of its segments here, ≥ 1. cu_seqlens, multiple_of: as of any layout.
    """

    def __init__(
        self,
        layout: ShardedLayout,
        lengths: Sequence[int],
        cu_seqlens: Sequence[int] | None = None,
        multiple_of: int = 1,
    ) -> None:
        ends = [*accumulate(lengths)]
        pairs = zip(lengths, ends, layout.segments, strict=True)
        self._given = tuple(Segment(stop - n, stop, s.owner) for n, stop, s in pairs)
        super().__init__(layout.cp, ends[-1], layout.kind, cu_seqlens, multiple_of)

    @property
    def split(self) -> tuple:
        return (*super().split, self._given)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return self._given


def check_together(
    call: str, layout: object, check: Callable[[], T], signature: Callable[[], tuple[tuple[str, object], ...]]
) -> T:
    """What `check` of a call's arguments returns. Under a layout all refuse what one rank refuses, and they compare
    what they bring, `signature`, by name."""
    found, error = None, None
    try:
        found = check()
    except RingLAError as e:
        error = e
    if isinstance(layout, ShardedLayout):
        layout.agree(call, None if error else signature(), error)
    elif error is not None:
        raise error
    return found  # type: ignore[return-value]
