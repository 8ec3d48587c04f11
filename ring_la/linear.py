"""The one path of all linear recurrences, on one device and on a split sequence, with exact gradients.

On one device: the registered operator. On a split sequence, forward and backward are the same three moves:

    summarise   each segment's map (A, b) of the state, from this rank's tokens alone
    exchange    an exclusive scan over the segments of all ranks gives the state entering each of mine
    finish      outputs (forward) or gradients (backward) given the entering states

Where kernels exchange states by themselves (`MailboxBorder`), the three are launches of one call of the kernels'.

The gradient of the state obeys ``G_in = Aᵀ G_out + c`` from right to left, with the A of the forward pass kept and c
the gradient this rank's outputs send to its entering state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from .algebra import Affine, Rule, Transition, transpose
from .autograd import first_derivative_only, full_precision, traced, wanting
from .comm import Group, Pending
from .context import CANONICAL_CHUNK, ShardedLayout
from .kernels import Inputs, Local, linear_recurrence, linear_recurrence_in_place, make_local, state_dtype
from .outputs import LinearAttentionOutput
from .scan import STRATEGIES, Chain, Exchange, Horizon, Link, MailboxBorder, carries


def run(
    rule: Rule,
    inputs: Inputs,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    layout: ShardedLayout | None,
    cu_seqlens: Tensor | None,
    mode: str,
    backend: str | None,
    in_place: bool = False,
    decays: tuple[float, ...] | None = None,
) -> LinearAttentionOutput:
    """Run a rule over checked inputs; see `recurrences.recurrence` for the arguments. States are ``[N, H, K, V]``.

    `decays` are the heads' log-decays, where every token's are the same and the host knows them.
    """
    if layout is None:
        packed = cu_seqlens is not None
        S0 = None if initial_state is None else _with_rows(initial_state, packed)
        if in_place:
            o = linear_recurrence_in_place(*inputs, S0, cu_seqlens, str(rule), scale, mode, backend)
            return LinearAttentionOutput(o, initial_state)
        o, S_end = _one_device(rule, inputs, S0, cu_seqlens, scale, mode, backend, output_final_state)
        return LinearAttentionOutput(o, _without_rows(S_end, packed) if output_final_state else None)
    keep = wanting(*inputs, initial_state)
    call = ShardedCall(rule, layout, scale, mode, backend, output_final_state, decays, keep)
    with full_precision(inputs.q):
        o, final = _Sharded.apply(call, initial_state, *inputs)
    return LinearAttentionOutput(o, final if output_final_state else None)


def _one_device(
    rule: Rule, inputs: Inputs, S0: Tensor | None, cu: Tensor | None, scale: float, mode: str, backend: str | None,
    final: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """o and the states leaving the pieces, if `final`. What traces the call sees the registered operator; an eager one
    spares its dispatch, and its backward has what the forward made."""
    if traced(inputs.q) or inputs.q.shape[1] == 0:
        return linear_recurrence(*inputs, S0, cu, str(rule), scale, mode, backend)
    with full_precision(inputs.q):
        if wanting(*inputs, S0):
            return _OneDevice.apply((rule, scale, mode, backend, final), cu, S0, *inputs)
        return make_local(rule, inputs, cu, scale, mode, backend, final=final).output(S0)


class _OneDevice(torch.autograd.Function):
    """`linear_recurrence` and its gradients for eager calls."""

    @staticmethod
    def forward(ctx, call: tuple[Rule, float, str, str | None, bool], cu: Tensor | None, S0: Tensor | None, *tensors):
        rule, scale, mode, backend, final = call
        local = make_local(rule, Inputs(*tensors), cu, scale, mode, backend, keep=True, final=final)
        o, S_end = local.output(S0)
        ctx.call = call
        ctx.save_for_backward(cu, S0, *tensors, *local.kept())
        ctx.set_materialize_grads(False)
        return o, S_end if final else None

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dS_end: Tensor | None):
        rule, scale, _, backend, _ = ctx.call
        cu, S0, *rest = ctx.saved_tensors
        inputs, kept = Inputs(*rest[: len(Inputs._fields)]), tuple(rest[len(Inputs._fields) :])
        local = make_local(rule, inputs, cu, scale, "chunk", backend, kept=kept)
        do = torch.zeros_like(inputs.v) if do is None else do
        gate = ctx.needs_input_grad[3 + Inputs._fields.index("g")]
        grads, dS0 = local.gradients(S0, do, dS_end, gate)
        return None, None, None if S0 is None else dS0.to(S0.dtype), *_in_dtypes(inputs, grads)


def _in_dtypes(inputs: Inputs, grads: Inputs) -> list[Tensor | None]:
    """Gradients in the dtypes of what they belong to."""
    return [
        None if x is None or d is None else d if d.dtype == x.dtype else d.to(x.dtype) for x, d in zip(inputs, grads)
    ]


def _with_rows(state: Tensor, packed: bool) -> Tensor:
    """``[N, …]`` as ``[B, pieces, …]``: documents are pieces of one row, or the rows themselves."""
    return state[None] if packed else state[:, None]


def _without_rows(state: Tensor, packed: bool) -> Tensor:
    return state[0] if packed else state[:, 0]


class Seams:
    """Where a rank's pieces meet: documents' ends, and the segments whose state comes from another rank.

    `starts` and `ends` pair local pieces with the documents that start or end in them, as index tensors (pieces,
    documents) on the layout's device, and `empty` the documents without a token; `segments` gives the first and
    last local piece of each owned segment; `lead` says how far each piece begins behind a canonical chunk's start.
    `alone`: no state goes from one segment to another, on any rank.
    """

    def __init__(self, layout: ShardedLayout) -> None:
        pieces, cu = layout.pieces, layout.cu_seqlens

        def index(numbers: Iterable[int]) -> Tensor:
            return torch.tensor(list(numbers), dtype=torch.int64, device=layout.cp.device)

        def paired(chosen: list[int]) -> tuple[Tensor, Tensor]:
            return index(chosen), index(pieces[i].document for i in chosen)

        self.chain = Chain.of(layout)
        self.lead = index([p.start % CANONICAL_CHUNK for p in pieces] or [0])
        self.starts = paired([i for i, p in enumerate(pieces) if p.first])
        self.ends = paired([i for i, p in enumerate(pieces) if p.last])
        self.empty = index(n for n in range(layout.num_documents) if cu[n] == cu[n + 1])
        self.links = layout.local_segments()
        where = [[i for i, p in enumerate(pieces) if p.segment == s] for s in self.links]
        self.segments = [(w[0], w[-1]) for w in where]
        self.pieces = max(1, len(pieces))
        self.crossings: dict[object, Crossing] = {}
        self.alone = not any(self.chain.needs)
        self._horizons: dict[object, Horizon | None] = {}
        self._border: MailboxBorder | None = None
        self._device, self._deterministic = layout.cp.device, layout.cp.deterministic
        lengths = [s.stop - s.start for s in layout.segments]
        self._shortest = min((n for n, passes in zip(lengths, self.chain.passes) if passes), default=0)

    def horizon(self, decays: tuple[float, ...], dtype: torch.dtype) -> Horizon | None:
        """The heads of these log-decays that forget within every link; None: there are none, or the canonical fold
        goes through every chunk."""
        if self._deterministic:
            return None
        if (decays, dtype) not in self._horizons:
            self._horizons[decays, dtype] = Horizon.of(decays, self._shortest, dtype, self._device)
        return self._horizons[decays, dtype]

    def border(self, group: Group) -> MailboxBorder:
        """The exchange as launches of the kernels', made once."""
        if self._border is None:
            self._border = MailboxBorder(group, self.chain, self.segments, self.pieces)
        return self._border

    @classmethod
    def of(cls, layout: ShardedLayout) -> Seams:
        """The seams of a layout, made once."""
        return layout.kept("seams", lambda: cls(layout))


class Crossing(NamedTuple):
    """A map of a link's shape, without values; bytes of its state; where kernels exchange states by themselves."""

    maps: Affine
    size: int
    border: MailboxBorder | None


@dataclass(frozen=True)
class ShardedCall:
    """Everything about one sharded call but its tensors."""

    rule: Rule
    layout: ShardedLayout
    scale: float
    mode: str
    backend: str | None
    output_final_state: bool
    decays: tuple[float, ...] | None = None
    keep: bool = True
    """Whether a backward pass may follow (within a Function this cannot be asked)."""

    @cached_property
    def seams(self) -> Seams:
        return Seams.of(self.layout)

    @property
    def canonical(self) -> dict[str, object]:
        """Chunks at fixed places of the sequence, where results must not depend on the split."""
        if not self.layout.cp.deterministic:
            return {}
        return {"size": CANONICAL_CHUNK, "lead": self.seams.lead}

    @property
    def kind(self) -> Transition:
        return self.rule.transition

    def local(self, inputs: Inputs, mode: str, kept: tuple[Tensor | None, ...] = (), keep: bool = False) -> Local:
        """What computes this rank's tokens; `kept` is what `Local.kept` of the forward's (`keep`) gave."""
        layout = self.layout
        single = len(layout.pieces) <= 1 and (not self.canonical or not layout.pieces)
        cu = None if single else layout.cu_pieces.to(inputs.q.device)
        canonical = {} if single else self.canonical
        if layout.cp.deterministic and mode == "auto":
            mode = "chunk"  # whatever this rank's length
        return make_local(self.rule, inputs, cu, self.scale, mode, self.backend, kept=kept, keep=keep, **canonical)

    def exchange(self, links: list[Link], like: Tensor) -> Exchange:
        """Post the scan of `links`; its result is the state entering each owned link, in chain order."""
        cp, chain, maps = self.layout.cp, self.seams.chain, Affine(self.kind, None, like)
        horizon = self._split(maps)
        if horizon is not None:
            return horizon.start(chain, links, maps, cp.comm, cp.strategy)
        return cp.strategy(chain, maps).start(chain, links, maps, cp.comm)

    def exchange_back(self, links: list[Link], like: Tensor, kept: Sequence[Tensor | None]) -> Pending:
        """Post the scan of gradients, right to left, given what `exchange` kept."""
        cp, chain, maps = self.layout.cp, self.seams.chain, Affine(self.kind, None, like)
        horizon = self._split(maps)
        if horizon is not None:
            return horizon.start_back(chain, links, maps, cp.comm, kept, cp.strategy)
        return cp.strategy(chain, maps).start_back(chain, links, maps, cp.comm, kept)

    def crossing(self, inputs: Inputs) -> Crossing:
        """What is known of the exchange for inputs of these shapes, found once."""
        q, v, seams = inputs.q, inputs.v, self.seams
        key = self.kind, q.shape[0], v.shape[2], q.shape[3], v.shape[3], state_dtype(*inputs)
        found = seams.crossings.get(key)
        if found is None:
            maps = Affine(self.kind, None, torch.empty(key[1:5], dtype=key[5], device="meta"))
            apart = self.kind == "dense" and key[1] > 1 and seams.pieces > 1  # pieces' maps do not lie together
            border = None if apart or seams.alone else self.border(maps)
            seams.crossings[key] = found = Crossing(maps, maps.b.nbytes, border)
        return found

    def border(self, maps: Affine) -> MailboxBorder | None:
        """The exchange as launches of the kernels', where the ring goes by mailboxes: on all ranks or on none."""
        cp, seams = self.layout.cp, self.seams
        by_ring = (
            not cp.deterministic and carries(cp.comm, maps) and cp.strategy(seams.chain, maps) is STRATEGIES["ring"]
        )
        return seams.border(cp.comm) if by_ring else None

    def _split(self, maps: Affine) -> Horizon | None:
        """The horizon, if heads within it go by an exchange of their own."""
        cp, horizon = self.layout.cp, self.horizon(maps)
        pays = horizon is not None and horizon.pays(self.seams.chain, maps, cp.strategy, cp.price)
        return horizon if pays else None

    def horizon(self, maps: Affine) -> Horizon | None:
        """Which heads forget within every segment, under decays the host knows. Mailboxes find out themselves."""
        if self.decays is None or self.border(maps) is not None:
            return None
        return self.seams.horizon(self.decays, maps.b.dtype)


class _Sharded(torch.autograd.Function):
    """Forward and backward of a recurrence on this rank's tokens."""

    @staticmethod
    def forward(ctx, call: ShardedCall, initial_state: Tensor | None, *tensors: Tensor | None):
        inputs, packed = Inputs(*tensors), call.layout.packed
        local = call.local(inputs, call.mode, keep=call.keep)
        S0 = entering_states(call, inputs, initial_state)
        _, size, border = call.crossing(inputs)
        ctx.border, maps, sent = border if local.crosses else None, (), ()
        if call.seams.alone:
            o, S_end = local.output(S0)
        elif ctx.border is not None:
            border.begin(size, reverse=False)
            o, S_end = local.output(S0, border)
        else:
            S0, maps, sent = _exchanged(call, local, S0, inputs)
            o, S_end = local.output(S0)
        final = None
        if call.output_final_state:
            final = _without_rows(final_states(call, S_end, initial_state), packed)
            ctx.final_shape = final.shape
        ctx.call, ctx.has_initial = call, initial_state is not None
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.parts = len(maps), len(inputs), len(sent)
        if call.keep:
            ctx.save_for_backward(S0, *maps, *inputs, *sent, *local.kept())
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dfinal: Tensor | None):
        call: ShardedCall = ctx.call
        packed, comm = call.layout.packed, call.layout.cp.comm
        S0, *rest = ctx.saved_tensors
        transitions, inputs, sent, kept = _cut(rest, ctx.parts)
        inputs = Inputs(*inputs)
        do = torch.zeros_like(inputs.v) if do is None else do
        local = call.local(inputs, "chunk", kept)
        dS_end = None
        if call.output_final_state:  # on every rank, used or not: the sum is collective
            dS_end = inputs.q.new_zeros(states_shape(call, inputs), dtype=state_dtype(*inputs))
            used = dS_end.new_zeros(ctx.final_shape) if dfinal is None else dfinal.to(dS_end.dtype)
            dfinal = _with_rows(comm.all_reduce(used).wait(), packed)
            place(dS_end, call.seams.ends[0], dfinal, call.seams.ends[1])
        gate = ctx.needs_input_grad[2 + Inputs._fields.index("g")]
        if ctx.border is not None:
            ctx.border.begin(call.crossing(inputs).size, reverse=True)
            grads, dS0 = local.gradients(S0, do, dS_end, gate, ctx.border)
        else:
            if not call.seams.alone:
                dS_end = _exchanged_back(call, local, (S0, do, dS_end, gate), transitions, sent)
            grads, dS0 = local.gradients(S0, do, dS_end, gate)
        dinitial = None
        if ctx.has_initial and ctx.needs_input_grad[1]:
            dinitial = initial_gradient(call, dS0, dfinal).to(ctx.initial_dtype)
        return None, dinitial, *_in_dtypes(inputs, grads)


def _exchanged(
    call: ShardedCall, local: Local, S0: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, list[Tensor | None], Sequence[Tensor | None]]:
    """The states entering all pieces, the transitions of the owned segments, and what the exchange kept."""
    seams = call.seams
    horizon = call.horizon(call.crossing(inputs).maps)
    through = any(seams.chain.passes[s] for s in seams.links) and not (horizon and horizon.all_near)
    A, S_end = local.summary(S0, through)
    links = _links(call, A, S_end, lambda piece: _push(local, S0, S_end, piece))
    with call.layout.cp.comm.streams.in_order(not local.prepares):
        pending = call.exchange(links, S_end[:, 0])
    local.prepare()
    S0 = with_arrived(S0, S_end, [first for first, _ in seams.segments], pending.wait())
    return S0, [link.map.A for link in links], pending.kept


def _exchanged_back(
    call: ShardedCall,
    local: Local,
    given: tuple[Tensor | None, Tensor, Tensor | None, bool],
    transitions: Sequence[Tensor | None],
    sent: Sequence[Tensor | None],
) -> Tensor | None:
    """The gradients of the states leaving all pieces; `given`: S0, do, dS_end and gate of `Local.gradients`."""
    S0, do, dS_end, gate = given
    segments, kind = call.seams.segments, call.kind
    dS0 = local.adjoint(do, dS_end)
    maps = [Affine(kind, transpose(kind, A), dS0[:, first]) for (first, _), A in zip(segments, transitions)]
    pending = call.exchange_back([Link(m) for m in maps[::-1]], dS0[:, 0], sent)
    local.prepare_gradients(S0, do, gate)
    return with_arrived(dS_end, dS0, [last for _, last in segments], pending.wait()[::-1])


def _cut(tensors: list[Tensor | None], lengths: Sequence[int]) -> Iterator[tuple[Tensor | None, ...]]:
    """Runs of these lengths, and the rest."""
    rest = iter(tensors)
    return iter([*(tuple(islice(rest, n)) for n in lengths), tuple(rest)])


def place(into: Tensor, at: Tensor, source: Tensor, taken: Tensor) -> None:
    """``into[:, at] = source[:, taken]``, without the host."""
    into.index_copy_(1, at, source.index_select(1, taken).to(into.dtype))


def with_arrived(S: Tensor | None, like: Tensor, pieces: list[int], arrived: list[Tensor | None]) -> Tensor | None:
    """The states of all pieces (None: zero), with those that a message brought for some `pieces`. Overwrites `S`."""
    if all(state is None for state in arrived):
        return S
    if like.shape[1] == 1:
        return next(state for state in arrived if state is not None)[:, None]
    S = torch.zeros_like(like) if S is None else S
    for piece, state in zip(pieces, arrived):
        if state is not None:
            S[:, piece] = state
    return S


def states_shape(call: ShardedCall, inputs: Inputs) -> tuple[int, ...]:
    """Shape of the states of this rank's pieces, ``[B, pieces, H, K, V]``."""
    q, v = inputs.q, inputs.v
    return q.shape[0], call.seams.pieces, v.shape[2], q.shape[3], v.shape[3]


def entering_states(call: ShardedCall, inputs: Inputs, initial_state: Tensor | None) -> Tensor | None:
    """States entering this rank's pieces as far as they are known without a message; None: all are zero."""
    if initial_state is None:
        return None
    S0 = inputs.q.new_zeros(states_shape(call, inputs), dtype=state_dtype(*inputs))
    place(S0, call.seams.starts[0], _with_rows(initial_state, call.layout.packed), call.seams.starts[1])
    return S0


def final_states(call: ShardedCall, S_end: Tensor, initial_state: Tensor | None) -> Tensor:
    """Every document's final state on every rank, ``[B, documents, H, K, V]``: each comes from the rank it ends on."""
    seams, layout = call.seams, call.layout
    final = S_end.new_zeros(S_end.shape[0], layout.num_documents, *S_end.shape[2:])
    place(final, seams.ends[1], S_end, seams.ends[0])
    if initial_state is not None and layout.rank == 0:
        place(final, seams.empty, _with_rows(initial_state, layout.packed), seams.empty)
    return layout.cp.comm.all_reduce(final).wait()


def initial_gradient(call: ShardedCall, dS0: Tensor, dfinal: Tensor | None) -> Tensor:
    """The whole gradient of the documents' initial states, on every rank."""
    seams, layout = call.seams, call.layout
    grad = dS0.new_zeros(dS0.shape[0], layout.num_documents, *dS0.shape[2:])
    place(grad, seams.starts[1], dS0, seams.starts[0])
    if dfinal is not None and layout.rank == 0:
        place(grad, seams.empty, dfinal, seams.empty)
    return _without_rows(layout.cp.comm.all_reduce(grad).wait(), layout.packed)


def _links(call: ShardedCall, A: Tensor | None, S_end: Tensor, push: Callable) -> list[Link]:
    """The map of each owned segment: its only piece's transition where a state passes, its last piece's state."""
    seams, kind = call.seams, call.kind
    deterministic = call.layout.cp.deterministic
    out = []
    for s, (first, last) in zip(seams.links, seams.segments):
        passes = seams.chain.passes[s]
        transition = A[:, first] if passes and A is not None else None
        out.append(Link(Affine(kind, transition, S_end[:, last]), push(first) if passes and deterministic else None))
    return out


def _push(local: Local, S0: Tensor | None, like: Tensor, piece: int) -> Callable[[Tensor], Tensor]:
    """A state through one piece, chunk by chunk: the canonical fold."""

    def push(state: Tensor) -> Tensor:
        S = torch.zeros_like(like) if S0 is None else S0.clone()
        S[:, piece] = state
        return local.summary(S, False)[1][:, piece]

    return push
