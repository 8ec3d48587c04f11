"""States of documents, the same on all ranks, and of this rank's pieces, which start and end some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..context import ShardedLayout
from ..kernels import Inputs, state_dtype
from .seams import Seams


def with_rows(state: Tensor, packed: bool) -> Tensor:
    """``[N, …]`` as ``[B, pieces, …]``: documents are pieces of one row, or the rows themselves."""
    return state[None] if packed else state[:, None]


def without_rows(state: Tensor, packed: bool) -> Tensor:
    return state[0] if packed else state[:, 0]


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


def states_shape(layout: ShardedLayout, inputs: Inputs) -> tuple[int, ...]:
    """Shape of the states of this rank's pieces, ``[B, pieces, H, K, V]``."""
    return inputs.q.shape[0], Seams.of(layout).pieces, *inputs.state


def entering_states(layout: ShardedLayout, inputs: Inputs, initial_state: Tensor | None) -> Tensor | None:
    """States entering this rank's pieces as far as they are known without a message; None: all are zero."""
    if initial_state is None:
        return None
    pieces, documents = Seams.of(layout).starts
    S0 = inputs.q.new_zeros(states_shape(layout, inputs), dtype=state_dtype(*inputs))
    place(S0, pieces, with_rows(initial_state, layout.packed), documents)
    return S0


def final_states(layout: ShardedLayout, S_end: Tensor, initial_state: Tensor | None) -> Tensor:
    """Every document's final state on every rank, ``[B, documents, H, K, V]``: each comes from the rank it ends on."""
    seams = Seams.of(layout)
    final = S_end.new_zeros(S_end.shape[0], layout.num_documents, *S_end.shape[2:])
    place(final, seams.ends[1], S_end, seams.ends[0])
    if initial_state is not None and layout.rank == 0:
        place(final, seams.empty, with_rows(initial_state, layout.packed), seams.empty)
    return layout.cp.comm.all_reduce(final).wait()


def initial_gradient(layout: ShardedLayout, dS0: Tensor, dfinal: Tensor | None) -> Tensor:
    """The whole gradient of the documents' initial states, on every rank."""
    seams = Seams.of(layout)
    grad = dS0.new_zeros(dS0.shape[0], layout.num_documents, *dS0.shape[2:])
    place(grad, seams.starts[1], dS0, seams.starts[0])
    if dfinal is not None and layout.rank == 0:
        place(grad, seams.empty, dfinal, seams.empty)
    return without_rows(layout.cp.comm.all_reduce(grad).wait(), layout.packed)


def leaving_gradients(
    layout: ShardedLayout, inputs: Inputs, dfinal: Tensor | None, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """The gradients of the states leaving this rank's pieces, and the documents' summed over the ranks ``[B,
    documents, H, K, V]``; `dfinal` is this rank's, of `shape`, None: zero."""
    pieces, documents = Seams.of(layout).ends
    dS_end = inputs.q.new_zeros(states_shape(layout, inputs), dtype=state_dtype(*inputs))
    used = dS_end.new_zeros(shape) if dfinal is None else dfinal.to(dS_end.dtype)
    dfinal = with_rows(layout.cp.comm.all_reduce(used).wait(), layout.packed)
    place(dS_end, pieces, dfinal, documents)
    return dS_end, dfinal
