"""Prefill and decoding whose logits are those of one forward pass, bit for bit.

    reader = BlockReader(model, ContextParallel(group_of_this_rank, deterministic=True))
    logits = reader.prefill(ids)                 [N, vocab_size]
    logits = reader.step(tokens)                 the next token of each document

Under ``deterministic=True`` a token's results depend on the state that enters its block of 64 tokens and on the tokens
of the block before it. So what is kept is the state at the last border of blocks and the tokens since; a step computes
these again, at most 64 tokens of each document, as the forward pass would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..blockwise import BLOCK, fixed
from ..checks import check_kind
from ..context import ContextParallel, ShardedLayout
from ..errors import ArgumentError, UnsupportedError, describe_tensor
from ..models import HybridLM
from ..models.checks import check_model
from ..nn.layer import Layer


class BlockReader:
    """What a model remembers of N documents of one length, read block by block.

    Args:
        model: its layers may be of any kind that goes on from a state under a deterministic layout.
        cp: deterministic, of this rank alone: reading on takes no other.

    Raises:
        ArgumentError: another cp. UnsupportedError: a layer of another kind, by name.
    """

    def __init__(self, model: HybridLM, cp: ContextParallel) -> None:
        check_model(model)
        check_kind("cp", cp, ContextParallel)
        if not cp.deterministic or cp.size != 1:
            raise ArgumentError("cp", "one with deterministic=True, of one rank", repr(cp))
        for part in model.modules():
            cuts = part.cuts if isinstance(part, Layer) else ""
            if cuts or (isinstance(part, Layer) and not part.same_bits):
                expected = "layers that go on from a state under a deterministic layout"
                raise UnsupportedError("model", expected, type(part).__name__, cuts)
        self.model, self.cp = model, cp
        self.states: list[Any] | None = None
        self.since: Tensor | None = None
        """Tokens since the last border, int64 ``[N, fewer than 64]``."""

    @torch.no_grad()
    def prefill(self, ids: Tensor, *, layout: ShardedLayout | None = None) -> Tensor:
        """Read whole documents from their first token; returns the logits after the last, ``[N, vocab_size]``.

        Args:
            ids: int ``[N, T]``, T ≥ 1, all of them on every rank.
            layout: a deterministic layout of the prompt's ``T // 64 * 64`` first tokens over more ranks, which share
                the work; None: this rank reads all. Collective.

        Raises:
            ArgumentError: by name.
        """
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 1:
            raise ArgumentError("ids", "an int tensor [N, T] with a token", describe_tensor(ids))
        border = ids.shape[1] // BLOCK * BLOCK
        if layout is not None and (not fixed(layout) or layout.seq_len != border or layout.packed):
            raise ArgumentError("layout", f"a deterministic one of {border} tokens, not packed", repr(layout))
        self.states, self.since = None, ids[:, border:]
        if not border:
            return self._read(self.since)
        over = self.cp.layout(border, "contiguous") if layout is None else layout
        x, self.states = self.model.hidden(over.shard(ids[:, :border]), output_states=True, layout=over)
        if self.since.shape[1]:
            return self._read(self.since)
        last = over.gather(x)[:, -BLOCK:]
        return self.model.logits(last, self.cp.layout(BLOCK, "contiguous"))[:, -1]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each document, ``tokens [N]``; returns the logits after it.

        Raises:
            ArgumentError: before `prefill`, or tokens of other documents.
        """
        if self.since is None:
            raise ArgumentError("tokens", "a call of prefill first", "none")
        if not isinstance(tokens, Tensor) or tokens.shape != self.since.shape[:1]:
            raise ArgumentError("tokens", f"ints [{len(self.since)}]", describe_tensor(tokens))
        self.since = torch.cat([self.since, tokens[:, None].to(self.since.dtype)], 1)
        return self._read(self.since)

    def _read(self, ids: Tensor) -> Tensor:
        """The tokens since the border, again."""
        layout, full = self.cp.layout(ids.shape[1], "contiguous"), ids.shape[1] == BLOCK
        x, after = self.model.hidden(ids, states=self.states, output_states=full, layout=layout)
        if full:
            self.states, self.since = after, ids[:, BLOCK:]
        return self.model.logits(x, layout)[:, -1]
