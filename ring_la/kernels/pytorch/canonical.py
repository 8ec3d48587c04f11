"""The PyTorch backend with results of the same bits wherever a chunk stands.

Every chunk of every batch row is computed by itself, in tensors of one shape, and states go from chunk to chunk in
order; so nothing depends on how many chunks a rank has, of which documents, or beside which rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...algebra import act, outer
from ..protocol import Inputs
from .chunked import ChunkedRecurrence, ChunkTerms, Differentiable, recording
from .terms import Decay, StateTerms, output_terms, state_terms


class CanonicalRecurrence(ChunkedRecurrence):
    """`ChunkedRecurrence`, chunk by chunk."""

    # -- the chunks' terms ---------------------------------------------------------------------------------

    def _terms(self) -> ChunkTerms:
        x = Inputs(*(None if t is None else self.chunks.split(t.to(self.dtype)) for t in self.inputs))
        made = [self._of_chunk(Inputs(*(None if t is None else own(t[i]) for t in x))) for i in places(x.q)]
        A, b, Q, p = (None if t[0] is None else _rows(t, x.q) for t in zip(*made))
        return ChunkTerms(x, None, StateTerms(A, b), (Q, p))

    def _of_chunk(self, x: Inputs) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """A, b, Q and p of one chunk, whose tensors are ``[1, 1, heads, C, …]``."""
        heads = self.inputs.v.shape[2]
        x = Inputs(*(t if t is None or t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], 2) for t in x))
        decay = Decay(self.rule, x)
        state = state_terms(self.rule, x, decay)
        return state.A, state.b, *output_terms(self.rule, x, decay, self.scale, state)

    def _differentiable(self, S0: Tensor | None) -> Differentiable:
        """The terms with a graph for each chunk."""
        x = Inputs(*(None if t is None else self.chunks.split(t.detach().to(self.dtype)) for t in self.inputs))
        graphs = []
        with recording():
            for i in places(x.q):
                leaves = Inputs(*(None if t is None else own(t[i]).requires_grad_() for t in x))
                graphs.append((leaves, self._of_chunk(leaves)))

        def back(*cotangent: Tensor | None) -> Inputs:
            found: list[list[Tensor]] = []
            for i, (leaves, values) in zip(places(x.q), graphs):
                pairs = [(t, own(d[i])) for t, d in zip(values, cotangent) if t is not None and d is not None]
                present = [t for t in leaves if t is not None]
                with recording():
                    found.append(list(torch.autograd.grad([t for t, _ in pairs], present, [d for _, d in pairs])))
            grads = iter([self.chunks.merge(_rows(t, x.q)) for t in zip(*found)])
            return Inputs(*(None if t is None else next(grads).to(t.dtype) for t in self.inputs))

        values = zip(*(made for _, made in graphs))
        A, b, Q, p = (None if t[0] is None else _rows([v.detach() for v in t], x.q) for t in values)
        terms = ChunkTerms(x, None, StateTerms(A, b), (Q, p))
        return Differentiable(terms, back, self._scan(terms, S0)[0])

    # -- products of the chunks' maps ----------------------------------------------------------------------

    def _read(self, Q: Tensor, p: Tensor, entering: Tensor) -> Tensor:
        return each(lambda Q, p, S: Q @ S + p, Q, p, entering)

    def _of_maps(self, leaving: Tensor, entering: Tensor, do: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        kind = self.rule.transition
        dA = None if kind == "identity" else each(lambda G, S: outer(kind, G, S), leaving, entering)
        return dA, leaving, each(lambda d, S: d @ S.mT, do, entering)

    def _act(self, A: Tensor | None, S: Tensor) -> Tensor:
        kind, at = self.rule.transition, [slice(b, b + 1) for b in range(len(S))]
        return S if A is None else torch.cat([act(kind, own(A[b]), own(S[b])) for b in at])

    def _read_back(self, Q: Tensor, do: Tensor) -> Tensor:
        return each(lambda Q, d: Q.mT @ d, Q, do)


def places(like: Tensor) -> list[tuple[slice, slice]]:
    """Where each chunk of each batch row is in ``[B, chunks, …]``."""
    B, chunks = like.shape[:2]
    return [(slice(b, b + 1), slice(c, c + 1)) for b in range(B) for c in range(chunks)]


def own(x: Tensor) -> Tensor:
    """A copy in memory of its own: libraries choose by alignment, too."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def each(f: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """``f`` of each chunk of ``[B, chunks, …]`` by itself."""
    return _rows([f(*(own(t[i]) for t in x)) for i in places(x[0])], x[0])


def _rows(parts: Sequence[Any], like: Tensor) -> Tensor:
    """Chunks ``[1, 1, …]`` as ``[B, chunks, …]``."""
    return torch.cat(list(parts)).view(*like.shape[:2], *parts[0].shape[2:])
