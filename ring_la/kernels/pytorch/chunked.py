"""The PyTorch backend: chunks as affine systems (`terms`), scanned in order. Runs anywhere, in fp32 or fp64.

Forward over chunks c:  ``S_{c+1} = A_c S_c + b_c``,  ``o_c = Q_c S_c + p_c``.
Backward, right to left: ``G_c = A_cᵀ G_{c+1} + Q_cᵀ do_c``; then the chunk's own terms get the gradients
``dA = G_{c+1} S_cᵀ``, ``db = G_{c+1}``, ``dQ = do S_cᵀ``, ``dp = do``, and the tokens theirs through `terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...algebra import Rule, act, outer, product, transpose
from ...autograd import full_precision
from ..protocol import Adjoint, Backward, Border, InputGradients, Inputs, Output, Summary
from .chunks import Chunks
from .terms import Decay, StateTerms, output_terms, state_terms

CHUNK = {"none": 64, "scalar": 64, "diagonal": 32}
"""Tokens a chunk by decay; measured on two x86 cores at T 2048, K = V = 64 (fp32)."""


class CanonicalChunks(NamedTuple):
    """Chunks at fixed places of a sequence, however it is split: their length, and how many places of each piece's
    first chunk stay empty ``[N]`` (see `Chunks`)."""

    size: int
    lead: Tensor | None = None


class ChunkTerms(NamedTuple):
    """Every chunk's maps of the state, and Q and p where the output has asked for them; the inputs in chunks."""

    inputs: Inputs
    decay: Decay
    state: StateTerms
    out: tuple[Tensor, Tensor] | None = None


class Differentiable(NamedTuple):
    """Terms whose gradient can be taken, `back` the map from it to the inputs' gradients, and the states that enter the
    chunks."""

    terms: ChunkTerms
    back: Callable[..., Inputs]
    entering: Tensor


class ChunkedRecurrence:
    """One rank's tokens under one rule; see `protocol.Local`. `canonical` overrides the chunk length and aligns
    chunks."""

    prepares: ClassVar[bool] = True
    crosses: ClassVar[bool] = False

    def __init__(
        self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, canonical: CanonicalChunks | None = None
    ) -> None:
        self.rule, self.inputs, self.scale = rule, inputs, scale
        q = inputs.q
        size, lead = canonical or (CHUNK[rule.decay], None)
        with torch.inference_mode(False):  # autograd saves what `_cut` goes by
            self.chunks = Chunks(q.shape[1], size, cu, lead, q.device)
        wide = any(x is not None and x.dtype == torch.float64 for x in inputs)
        self.dtype = torch.float64 if wide else torch.float32
        self.state_shape = (q.shape[0], self.chunks.pieces, *inputs.state)

    # -- the protocol --------------------------------------------------------------------------------------

    def summary(
        self, S0: Tensor | None, through: bool, known: Summary[ChunkTerms] | None = None
    ) -> Summary[ChunkTerms]:
        with full_precision(self.inputs.q):
            terms = self._terms() if known is None else known.found
            _, S_end = self._scan(terms, S0)
            return Summary(self._through(terms) if through else None, S_end, terms)

    def prepare(self, summary: Summary[ChunkTerms]) -> Summary[ChunkTerms]:
        with full_precision(self.inputs.q):
            return replace(summary, found=self._with_output(summary.found))

    def output(
        self, S0: Tensor | None, summary: Summary[ChunkTerms] | None = None, border: Border | None = None
    ) -> Output:
        assert border is None  # see `crosses`
        with full_precision(self.inputs.q):
            terms = self._with_output(self._terms() if summary is None else summary.found)
            entering, S_end = self._scan(terms, S0)
            o = self._read(*terms.out, entering)
            return Output(self.chunks.merge(o).to(self.inputs.v.dtype), S_end)

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[Differentiable | None]:
        with full_precision(self.inputs.q):
            terms = self._with_output(self._terms())
            return Adjoint(self._scan_back(terms, self._cotangent(backward.do), dS_end)[1], None)

    def prepare_gradients(
        self, backward: Backward, adjoint: Adjoint[Differentiable | None]
    ) -> Adjoint[Differentiable | None]:
        with full_precision(self.inputs.q):
            return replace(adjoint, found=self._differentiable(backward.S0))

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[Differentiable | None] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        assert border is None
        with full_precision(self.inputs.q):
            found = None if adjoint is None else adjoint.found
            terms, back, entering = self._differentiable(backward.S0) if found is None else found
            do = self._cotangent(backward.do)
            leaving, dS0 = self._scan_back(terms, do, dS_end)
            return InputGradients(back(*self._of_maps(leaving, entering, do), do), dS0)

    # -- the chunks' terms ---------------------------------------------------------------------------------

    def _terms(self) -> ChunkTerms:
        x, decay = self._cut(self.inputs)
        return ChunkTerms(x, decay, state_terms(self.rule, x, decay))

    def _with_output(self, terms: ChunkTerms) -> ChunkTerms:
        if terms.out is not None:
            return terms
        return terms._replace(out=output_terms(self.rule, terms.inputs, terms.decay, self.scale, terms.state))

    def _cut(self, inputs: Inputs) -> tuple[Inputs, Decay]:
        heads = inputs.v.shape[2]
        x = Inputs(*(self._chunked(x, heads) for x in inputs))
        return x, Decay(self.rule, x)

    def _chunked(self, x: Tensor | None, heads: int) -> Tensor | None:
        if x is None:
            return None
        x = self.chunks.split(x.to(self.dtype))
        return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)

    def _differentiable(self, S0: Tensor | None) -> Differentiable:
        """The terms computed so that their gradient can be taken."""
        with recording():
            leaves = Inputs(*(None if x is None else _leaf(x) for x in self.inputs))
            x, decay = self._cut(leaves)
            state = state_terms(self.rule, x, decay)
            values = (state.A, state.b, *output_terms(self.rule, x, decay, self.scale, state))

        def back(*cotangent: Tensor | None) -> Inputs:
            pairs = [(t, d) for t, d in zip(values, cotangent) if t is not None]
            present = [x for x in leaves if x is not None]
            with recording():
                grads = iter(torch.autograd.grad([t for t, _ in pairs], present, [d for _, d in pairs]))
            return Inputs(*(None if x is None else next(grads) for x in leaves))

        A, b, Q, p = (None if t is None else t.detach() for t in values)
        terms = ChunkTerms(x, decay, StateTerms(A, b), (Q, p))
        return Differentiable(terms, back, self._scan(terms, S0)[0])

    def _cotangent(self, do: Tensor) -> Tensor:
        return self.chunks.split(do.to(self.dtype))

    # -- scans over chunks ---------------------------------------------------------------------------------

    def _scan(self, terms: ChunkTerms, S0: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state entering each chunk ``[B, chunks, H, K, V]``, and leaving each piece."""
        t, c = terms.state, self.chunks
        start = self._states(S0, t.b)
        entering, leaves, S = [], [], start[:, 0]
        for i in range(c.count):
            if c.packed:
                S = torch.where(c.first[i], start.index_select(1, c.known[i : i + 1])[:, 0], S)
            entering.append(S)
            S = self._act(None if t.A is None else t.A[:, i], S) + t.b[:, i]
            leaves.append(S)
        if not c.packed:
            return torch.stack(entering, 1), S[:, None]
        leaving = torch.stack(leaves, 1).index_select(1, c.final.clamp(min=0))
        return torch.stack(entering, 1), torch.where(_per_piece(c.empty), start, leaving)

    def _scan_back(self, terms: ChunkTerms, do: Tensor, dS_end: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradient of the state leaving each chunk, and of the state entering each piece."""
        c, kind = self.chunks, self.rule.transition
        A = transpose(kind, terms.state.A)
        own = self._read_back(terms.out[0], do)
        end = self._states(dS_end, own)
        leaving: list[Tensor] = []
        G = end[:, -1]
        into: list[Tensor] = []
        for i in reversed(range(c.count)):
            if c.packed:
                G = torch.where(c.last[i], end.index_select(1, c.known[i : i + 1])[:, 0], G)
            leaving.append(G)
            G = self._act(None if A is None else A[:, i], G) + own[:, i]
            into.append(G)
        leaving.reverse()
        into.reverse()
        if not c.packed:
            return torch.stack(leaving, 1), into[0][:, None]
        dS0 = torch.stack(into, 1).index_select(1, c.begin.clamp(max=c.count - 1))
        return torch.stack(leaving, 1), torch.where(_per_piece(c.empty), end, dS0)

    def _through(self, terms: ChunkTerms) -> Tensor | None:
        """The product of each piece's transitions."""
        t, c, kind = terms.state, self.chunks, self.rule.transition
        if t.A is None:
            return None
        unit = t.A.new_ones(()) if kind != "dense" else torch.eye(t.A.shape[-1], dtype=t.A.dtype, device=t.A.device)
        products, P = [], unit.expand_as(t.A[:, 0])
        for i in range(c.count):
            if c.packed:
                P = torch.where(c.first[i], unit, P)
            P = product(kind, t.A[:, i], P)
            products.append(P)
        if not c.packed:
            return P[:, None]
        A = torch.stack(products, 1).index_select(1, c.final.clamp(min=0))
        return torch.where(c.empty.view(1, -1, *[1] * (A.dim() - 2)), unit, A)

    def _act(self, A: Tensor | None, S: Tensor) -> Tensor:
        """The transitions of one chunk of each batch row, ``A S``."""
        return act(self.rule.transition, A, S)

    def _read_back(self, Q: Tensor, do: Tensor) -> Tensor:
        """What the chunks' outputs send to the states that enter them, ``Qᵀ do``."""
        return Q.mT @ do

    def _read(self, Q: Tensor, p: Tensor, entering: Tensor) -> Tensor:
        """The chunks' outputs, ``Q S + p``."""
        return Q @ entering + p

    def _of_maps(self, leaving: Tensor, entering: Tensor, do: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """The gradients of A, b and Q of the chunks."""
        return outer(self.rule.transition, leaving, entering), leaving, do @ entering.mT

    def _states(self, S: Tensor | None, like: Tensor) -> Tensor:
        return like.new_zeros(self.state_shape) if S is None else S.to(self.dtype)


def _per_piece(mask: Tensor) -> Tensor:
    return mask.view(1, -1, 1, 1, 1)


@contextmanager
def recording() -> Iterator[None]:
    """Autograd on, also in inference mode, and inside a registered operator, where the dispatcher has it off."""
    keys = torch._C.DispatchKey
    with torch.inference_mode(False):
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in (keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradOther, keys.ADInplaceOrView):
            excluded = excluded.remove(key)
        guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
        with guard, torch.enable_grad(), _own_graph():
            yield


def _own_graph() -> AbstractContextManager:
    """What others do with tensors that graphs save, such as to compute them again, is not for the graph of a call."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)


def _leaf(x: Tensor) -> Tensor:
    """x as autograd may record it, which of a tensor of inference mode is a copy."""
    return (x.clone() if x.is_inference() else x).detach().requires_grad_()
