"""What runs of tokens do to the levels of log-linear attention, and levels to them (see `log_linear`).

A document's state after p tokens has a level for each bit of p: level ℓ, where bit ℓ − 1 is set, has the tokens before
p of the block of 2^(ℓ−1) positions that ends where the higher bits of p say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .comm.replicated import SumOverRanks
from .context import FollowingLayout, ShardedLayout
from .kernels.fenwick.plain import LogLinearInputs, level_of


class LocalRun(NamedTuple):
    """Consecutive local tokens of one document: the position of the first in it, and whether it starts and ends here;
    `fresh`: what comes before is the call's initial state."""

    start: int
    stop: int
    position: int
    document: int = 0
    fresh: bool = True
    last: bool = True


class LevelStates(NamedTuple):
    """Levels before each document ``[B, documents, H, L, K, V]`` (None: empty), how many there are, and whether those
    after each are wanted."""

    rows: Tensor | None
    levels: int
    final: bool


def runs_of(layout: ShardedLayout | None, cu: Sequence[int], seen: Sequence[int]) -> list[list[LocalRun]]:
    """The runs of each local segment, of one device where there is no layout; `seen`: tokens before each document."""
    if layout is None:
        return [[LocalRun(a, b, seen[n], n) for n, (a, b) in enumerate(zip(cu, cu[1:])) if b > a]]
    segments, at = [], 0
    for s in layout.local_segments():
        runs = []
        for p in layout.pieces_of(s):
            position = p.start - layout.cu_seqlens[p.document] + seen[p.document]
            runs.append(LocalRun(at, at + len(p), position, p.document, p.first, p.last))
            at += len(p)
        segments.append(runs)
    return segments


def cut(x: LogLinearInputs, run: LocalRun) -> LogLinearInputs:
    """The tokens of a run."""
    return LogLinearInputs(*(t[:, run.start : run.stop] for t in x))


def first_of(position: int, level: int) -> int | None:
    """The first token of the level that this position finds; None where it has none."""
    return (position >> level) << level if position >> (level - 1) & 1 else None


def one_device(
    x: LogLinearInputs, runs: Sequence[LocalRun], states: LevelStates, documents: int
) -> tuple[Tensor | None, Tensor | None]:
    """What the levels before documents add to outputs, and the levels after documents; None where there is nothing."""
    before, out, ends = states.rows, None, None
    if before is not None:
        out = torch.zeros_like(x.v)
    if states.final:
        B, H, K, V = x.v.shape[0], *x.k.shape[2:], x.v.shape[3]
        start = x.v.new_zeros(B, documents, H, states.levels, K, V) if before is None else before
        ends = list(start.unbind(1))
    for run in runs:
        part, entering = cut(x, run), None if before is None else before[:, run.document]
        if out is not None and entering is not None and run.position:
            out = torch.cat([out[:, : run.start], _read(part, run.position, entering), out[:, run.stop :]], 1)
        if ends is not None:
            ends[run.document] = _after(x, run, entering, states.levels)
    return out, None if ends is None else torch.stack(ends, 1)


def of_others(
    x: LogLinearInputs, segments: list[list[LocalRun]], layout: ShardedLayout, states: LevelStates
) -> tuple[Tensor, Tensor | None]:
    """What tokens see of what is before their runs, and the levels after documents: each segment as a map of levels,
    their exchange, and what the levels that enter add to outputs."""
    levels, before = states.levels, states.rows
    maps = [_segment(x, runs, states) for runs in segments]
    B, H, K, V = x.v.shape[0], *x.k.shape[2:], x.v.shape[3]
    # empty parts that depend on the inputs: so the exchange is in the graph of ranks without tokens, too
    given = 0.0 if before is None else before.sum()
    none = (
        x.v.new_zeros(B, 0, H, levels, levels) + x.g.sum(),
        x.v.new_zeros(B, 0, H, levels, K * V) + (x.k.sum() + x.v.sum() + given),
    )
    A, b = (torch.cat([empty, *(m[i][:, None] for m in maps)], 1) for i, empty in enumerate(none))
    borders = layout.kept(_of_segments, lambda: _of_segments(layout))
    entering = layout.cp.scan(A, b, borders, exclusive=True).unflatten(-1, (K, V))
    out, ends = [x.v[:, :0] + entering.sum()], _ends(x, layout, states) if states.final else None
    for i, runs in enumerate(segments):
        for run in runs:
            now = entering[:, i] if not run.fresh else None if before is None else before[:, run.document]
            part = cut(x, run)
            out.append(torch.zeros_like(part.v) if now is None else _read(part, run.position, now))
            if ends is not None and run.last:
                ends[run.document] = _after(x, run, now, levels)
    if ends is None:
        return torch.cat(out, 1), None
    whole = torch.stack(ends, 1) + entering[:, :0].sum()
    return torch.cat(out, 1), SumOverRanks.apply(whole, layout.cp.comm)


def _ends(x: LogLinearInputs, layout: ShardedLayout, states: LevelStates) -> list[Tensor]:
    """This rank's part of the levels after documents, before its runs: those of documents without tokens."""
    B, H, K, V = x.v.shape[0], *x.k.shape[2:], x.v.shape[3]
    zero = x.v.new_zeros(B, H, states.levels, K, V)
    cu, before = layout.cu_seqlens, states.rows
    empty = [before is not None and layout.rank == 0 and a == b for a, b in zip(cu, cu[1:])]
    return [before[:, n] if kept and before is not None else zero for n, kept in enumerate(empty)]


def _of_segments(layout: ShardedLayout) -> FollowingLayout:
    """One place a segment, split as they are."""
    return FollowingLayout(layout, [1] * len(layout.segments))


def _segment(x: LogLinearInputs, runs: list[LocalRun], states: LevelStates) -> tuple[Tensor, Tensor]:
    """What a segment does to the levels that enter it, as `_map` says."""
    B, H, K, V, levels = x.v.shape[0], *x.k.shape[2:], x.v.shape[3], states.levels
    if not runs:
        eye = torch.eye(levels, dtype=x.v.dtype, device=x.v.device)
        return eye.expand(B, H, -1, -1), x.v.new_zeros(B, H, levels, K * V)
    A, b = _map(x, runs[-1], levels)
    if not runs[-1].fresh:
        return A, b
    if states.rows is not None:
        b = b + A @ states.rows[:, runs[-1].document].flatten(-2)
    return torch.zeros_like(A), b


def _map(x: LogLinearInputs, run: LocalRun, levels: int) -> tuple[Tensor, Tensor]:
    """What a run does to levels 1 … `levels`: ``A [B, H, L, L]``, ``b [B, H, L, K·V]``."""
    part, end = cut(x, run), run.position + run.stop - run.start
    c = part.g.cumsum(1)
    k = part.k * (c[:, -1:] - c).exp()[..., None]
    written, moves = [], torch.zeros(levels, levels, dtype=x.v.dtype, device="cpu")
    for level in range(1, levels + 1):
        first = first_of(end, level)
        begin, stop = (0, 0) if first is None else (first - run.position, first + (1 << (level - 1)) - run.position)
        rows = slice(max(begin, 0), max(stop, 0))
        written.append(torch.einsum("bthk,bthv->bhkv", k[:, rows], part.v[:, rows]).flatten(2))
        before = first_of(run.position, level)
        if before is not None:
            moves[(end ^ before).bit_length() - 1, level - 1] = 1
    return c[:, -1].exp()[..., None, None] * moves.to(x.v.device), torch.stack(written, 2)


def _after(x: LogLinearInputs, run: LocalRun, entering: Tensor | None, levels: int) -> Tensor:
    """The levels ``[B, H, L, K, V]`` after a run."""
    A, b = _map(x, run, levels)
    if entering is not None:
        b = b + A @ entering.flatten(-2)
    return b.unflatten(-1, (x.k.shape[3], x.v.shape[3]))


def _read(x: LogLinearInputs, position: int, entering: Tensor) -> Tensor:
    """What the levels ``[B, H, L, K, V]`` that enter a run add to its outputs."""
    at = position + torch.arange(x.v.shape[1], device=x.v.device)
    decay, out = x.g.cumsum(1).exp(), torch.zeros_like(x.v)
    for level in range(1, entering.shape[2] + 1):
        first = first_of(position, level)
        if first is not None:
            now = level_of(at, first)[None, :, None, None].expand(*x.g.shape, 1)
            weight = x.lam.gather(-1, now) * decay[..., None]
            out = out + weight * torch.einsum("bthk,bhkv->bthv", x.q, entering[:, :, level - 1])
    return out
