"""Flags in memory that every rank of a host reaches: "it is there" and "I am here".

A flag is raised by one rank and lowered by the one that waits for it, so nothing is counted on the host and a captured
graph replays as it ran. A peer that does not come in time is marked in `broken` (it is not waited for again) and, for
the host, in `report`; what it should have brought is made NaN, so that nothing false is taken for true.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLAG = 8  # words a flag takes: a memory sector of its own
DOWN, UP = tl.constexpr(0), tl.constexpr(1)
POISON = tl.constexpr(0x7FFF7FFF)  # NaN in every float format


@triton.jit
def swap(flag, old, new, patience, CLOCK: tl.constexpr):
    """Set a flag from `old` to `new` as soon as it is `old`; whether that came within `patience` nanoseconds (without a
    clock, as in the interpreter, nothing is ever late but what is not waited for at all)."""
    seen = tl.atomic_cas(flag, old, new, sem="acq_rel", scope="sys")
    late = (patience <= 0).to(tl.int32)
    if CLOCK:
        start = tl.extra.cuda.globaltimer()
    while (seen != old) & (late == 0):
        seen = tl.atomic_cas(flag, old, new, sem="acq_rel", scope="sys")
        if CLOCK:
            late = (tl.extra.cuda.globaltimer() - start > patience).to(tl.int32)
    return seen == old


@triton.jit
def _give_up(own, broken, report, peer, first, units, STEP: tl.constexpr):
    """Mark a peer, and make NaN of `units` times 16 bytes, as far behind `own` as `first` says."""
    tl.store(broken + peer, 1)
    tl.store(report + peer, 1)
    room, words = own + first.to(tl.int64) * 4, units.to(tl.int64) * 4
    for at in range(0, words, STEP):
        i = at + tl.arange(0, STEP)
        tl.store(room + i, tl.full([STEP], POISON, tl.int32), i < words)


@triton.jit(do_not_specialize=["peers", "first", "units", "patience"])
def arrived(
    own, broken, report, peers, first, units, patience,
    P: tl.constexpr, FLAG: tl.constexpr, STEP: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Wait until the ranks whose bits are set in `peers` have said that what they bring is there: `units` times 16
    bytes, as far behind `own` as `first` says. One program a peer."""
    peer = tl.program_id(0)
    if (peers >> peer) & 1 == 0:
        return
    if tl.load(broken + peer) != 0:
        patience = patience * 0
    if not swap(own + peer * FLAG, UP, DOWN, patience, CLOCK):
        _give_up(own, broken, report, peer, first, units, STEP)


@triton.jit(do_not_specialize=["me", "first", "units", "patience"])
def meet(
    own, away, broken, report, me, first, units, patience,
    P: tl.constexpr, FLAG: tl.constexpr, STEP: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks are here; `first` and `units` as in `arrived`. `away` holds how far each rank's memory lies
    from `own`, in 16 bytes. One program a peer."""
    peer = tl.program_id(0)
    if peer == me:
        return
    if tl.load(broken + peer) != 0:
        patience = patience * 0
    theirs = own + tl.load(away + peer) * 4
    in_time = swap(theirs + (P + me) * FLAG, DOWN, UP, patience, CLOCK)
    if in_time:
        in_time = swap(own + (P + peer) * FLAG, UP, DOWN, patience, CLOCK)
    if not in_time:
        _give_up(own, broken, report, peer, first, units, STEP)
