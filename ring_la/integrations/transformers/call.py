"""One call of a parallelized model, as its layers see it, and which one is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ...context import FollowingLayout, ShardedLayout
from ...errors import UnsupportedError
from .cache import ContinuedRecorder, WatchedCache


class BlockwiseModel(Protocol):
    """What runs a model block by block (`in_blocks`), as its layers ask it."""

    def operator(self, function: Callable[..., Any], *tokens: Tensor, **shared: Any) -> Any:
        """A function of all tokens, and a block's part of its o."""

    def cross_entropy(self, call: ModelCall, logits: Tensor, vocab_size: int) -> Tensor:
        """The loss of the whole batch, given a block's logits."""


@dataclass(frozen=True, eq=False)
class Returned:
    """A tensor we returned, to be known again if nobody has changed it; within a compiled graph nobody can tell."""

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, x: Tensor) -> Returned:
        if torch.compiler.is_compiling():
            return cls(x, None)
        return cls(x, 0 if x.is_inference() else x._version)

    def unchanged(self, x: object) -> bool:
        """Whether `x` is that tensor, and nothing was written into it."""
        return x is self.tensor and self.version in (None, Returned.of(x).version)


@dataclass(frozen=True, eq=False)
class Targets:
    """What the loss of a call needs.

    Attributes:
        labels: the label each of this rank's tokens should predict, ``[B, T_local]``.
        divisor: what the summed cross-entropy of the whole batch is divided by.
        ignore_index: the label of a token that predicts nothing.
    """

    labels: Tensor
    divisor: Tensor | int
    ignore_index: int


@dataclass(eq=False)
class HeadWork:
    """The head's work on some of this rank's tokens.

    Attributes:
        chunk: these tokens.
        backbone: what the backbone is to return without running; None: it runs, and leaves its last hidden state
            ``[B, T_local, D]`` as `hidden` and its class as `result`.
    """

    chunk: slice
    backbone: ModelOutput | None = None
    hidden: Tensor | None = None
    result: type[ModelOutput] | None = None


@dataclass(eq=False)
class ModelCall:
    """How the tokens of this call are split, and what its loss needs.

    Attributes:
        layout: the split of the sequence; None in a probe, on one device.
        cu_seqlens: the documents of a probe.
        targets: what its loss needs; None without labels.
        last_position: the largest position of the whole batch.
        keep: the tokens of the whole sequence that logits are wanted of, int64 ``[n]``; None: this rank's.
        padded: whether there is padding.
        fingerprint: a number that is the same on all ranks if they were given the same batch.
        agreed: without labels, whether the fingerprint is the same on all ranks; a bool on this rank's device.
        losses: what the loss function answered, each time it was asked.
        head: where the head does not work on all of this rank's tokens at once, what it works on.
        earlier: where layers find what they remember of the tokens before these; None: there are none.
        blocks: what runs the model block by block, while it does (`in_blocks`); None: all tokens at once.
    """

    layout: ShardedLayout | None
    cu_seqlens: Tensor | None = None
    targets: Targets | None = None
    last_position: Tensor | int | None = None
    keep: Tensor | None = None
    padded: bool = False
    fingerprint: Tensor | int = 0
    agreed: Tensor | None = None
    losses: list[Returned] = field(default_factory=list)
    head: HeadWork | None = None
    earlier: ContinuedRecorder | WatchedCache | None = None
    blocks: BlockwiseModel | None = None
    _chunked: dict[int, dict] = field(default_factory=dict)

    @property
    def split(self) -> dict[str, Any]:
        """The keywords that tell ring_la's functions how the sequence is split.

        Raises:
            UnsupportedError: block by block, where `operator` is what calls them.
        """
        self._refuse_blocks()
        return {"cu_seqlens": self.cu_seqlens} if self.layout is None else {"layout": self.layout}

    def operator(self, function: Callable[..., Any], *tokens: Tensor, **options: Any) -> Any:
        """A function of ours on tokens ``[B, T, …]``, with options that all tokens share, and how they are split; block
        by block a result has o alone."""
        if self.blocks is not None:
            return self.blocks.operator(function, *tokens, **options)
        return function(*tokens, **options, **self.split)

    @property
    def head_only(self) -> bool:
        """Whether the head alone is run, on what the backbone returned before."""
        return self.head is not None and self.head.backbone is not None

    def poisoned(self, hidden: Tensor) -> Tensor:
        """The hidden states, or NaN where the ranks were not given the same batch."""
        return hidden if self.agreed is None else torch.where(self.agreed, hidden, torch.nan)

    def of_head(self, hidden: Tensor, chunk: slice) -> ModelCall:
        """A call that runs the head alone, on a chunk of what the backbone returned."""
        output = self.head.result(last_hidden_state=hidden)
        return replace(self, losses=[], head=HeadWork(chunk, output))

    def chunked(self, size: int) -> dict[str, Any]:
        """`split` with every document cut into parts of `size` tokens that do not see each other."""
        self._refuse_blocks()
        if size not in self._chunked:
            borders = self.cu_seqlens.tolist() if self.layout is None else self.layout.cu_seqlens
            cuts = [t for a, b in zip(borders, borders[1:]) for t in range(a, b, size)] + [borders[-1]]
            if self.layout is None:
                cu = torch.tensor(cuts, dtype=torch.int32, device=self.cu_seqlens.device)
                self._chunked[size] = {"cu_seqlens": cu}
            else:
                self._chunked[size] = {"layout": self._of_parts(self.layout, cuts)}
        return self._chunked[size]

    @staticmethod
    def _of_parts(layout: ShardedLayout, cuts: list[int]) -> ShardedLayout:
        """The layout with other documents; the tokens stay where they are, whatever its kind makes of these."""
        if not layout.has_runs:
            return layout.cp.layout(layout.seq_len, layout.kind, cuts, layout.multiple_of)
        return FollowingLayout(layout, [s.stop - s.start for s in layout.segments], cuts, layout.multiple_of)

    def _refuse_blocks(self) -> None:
        if self.blocks is not None:
            expected = "one without deterministic=True for a layer whose operators take no blocks of tokens"
            raise UnsupportedError("layout", expected, "a deterministic one")


class Current:
    """The call that the layers of a model find as theirs.

    Attributes:
        call: the split call under way, or whose backward pass is; None in a call that is not split.
        goes_on: whether calls with a filled cache are split, too, where each rank gets two tokens or more of them.
    """

    def __init__(self) -> None:
        self.call: ModelCall | None = None
        self.goes_on = False

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Calls with a filled cache are split."""
        self.goes_on = True
        try:
            yield
        finally:
            self.goes_on = False

    @contextmanager
    def during(self, call: ModelCall | None) -> Iterator[None]:
        """A call is under way."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def leave(self) -> None:
        """No call is under way any more."""
        self.call = None
