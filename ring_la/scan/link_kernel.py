"""A link of the ring in one kernel: take the state that enters, apply the link's map, put the result to the next rank.

The state goes through the mailboxes of `comm.copy_kernel` in units, each on a lane of its own, so that a unit may be
two ranks further while another has not left; nothing of the host stands between hops. Where the link's transition is
below TINY, nothing of what enters can leave, to rounding (the forgetting horizon): that unit is sent on before anything
is waited for, and farther ranks are not in its way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..comm.copy_kernel import EMPTY, FULL, wait_for

TINY = 9.3e-14
"""e⁻³⁰: ln of the unit roundoff of fp32, and 14 more."""
NAN = tl.constexpr(float("nan"))


@triton.jit
def _lane(own, mailboxes, owner, sender, lane, P: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
          FLAG: tl.constexpr):  # fmt: skip
    """Flag and room of a lane in the mailboxes of `owner`, for what `sender` sends."""
    base = own + tl.load(mailboxes + owner) * 4
    n = sender * LANES + lane
    room = base + P * LANES * FLAG + n.to(tl.int64) * CHUNK
    return base + n * FLAG, room.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _ready(flag, value, peer, broken, report, patience, CLOCK: tl.constexpr):
    """Wait for a flag; a peer that is late is marked, and not waited for again."""
    patience = tl.where(tl.load(broken + peer) != 0, 0, patience.to(tl.int64) * 1000)
    ready = wait_for(flag, value, patience, CLOCK)
    if not ready:
        tl.store(broken + peer, 1)
        tl.store(report + peer, 1)
    tl.debug_barrier()
    return ready


@triton.jit
def _put(flag, room, at, x, live, ready):
    """Store a unit in a peer's mailbox and raise the flag."""
    if ready:
        tl.store(room + at, x, live)
        tl.debug_barrier()
        tl.atomic_xchg(flag, FULL, sem="release", scope="sys")


@triton.jit
def _take(flag, room, at, live, ready):
    """A unit from this rank's mailbox, whose flag is lowered; NaN if it did not come."""
    x = tl.load(room + at, live & ready, other=NAN, cache_modifier=".cg")
    tl.debug_barrier()
    if ready:
        tl.atomic_xchg(flag, EMPTY, sem="release", scope="sys")
    return x


@triton.jit(do_not_specialize=["me", "source", "target", "rows", "patience"])
def link_kernel(
    A, b_, before, entering, leaving, own, mailboxes, broken, report, me, source, target, rows, patience,
    KIND: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr,
    TRANSPOSED: tl.constexpr, RECEIVES: tl.constexpr, HAS_BEFORE: tl.constexpr, PASSES: tl.constexpr,
    SENDS: tl.constexpr, KEEPS: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
    FLAG: tl.constexpr, CLOCK: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """`rows` states [K, V] under the maps (A, b) of one link; `me`, `source` and `target` are ranks.

    KIND: 0 A is the identity, 1 [rows], 2 [rows, K], 3 dense [rows, K, K] (TRANSPOSED: its transpose). What enters is
    from `source` (RECEIVES) and is stored in `entering`, or is `before` (HAS_BEFORE), or nothing. What leaves goes to
    `target` (SENDS) and to `leaving` (KEEPS). A unit is UNIT words of a state, or UNIT of its columns under dense maps.
    `patience` is in microseconds.
    """
    UNITS: tl.constexpr = (V + UNIT - 1) // UNIT if KIND == 3 else (K * V + UNIT - 1) // UNIT
    lane = tl.program_id(0)
    give, there = _lane(own, mailboxes, target, me, lane, P, LANES, CHUNK, FLAG)
    get, here = _lane(own, mailboxes, me, source, lane, P, LANES, CHUNK, FLAG)
    for u in range(lane.to(tl.int64), rows * UNITS, LANES):
        row = u // UNITS
        if KIND == 3:
            k = tl.arange(0, BK)
            v = (u % UNITS) * UNIT + tl.arange(0, UNIT)
            at = k[:, None] * V + v[None, :]
            unit = k[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
            live = (k < K)[:, None] & (v < V)[None, :]
            j = tl.arange(0, BK)
            of = j[None, :] * K + k[:, None] if TRANSPOSED else k[:, None] * K + j[None, :]
            a = tl.zeros([BK, BK], tl.float32)
            if PASSES:
                a = tl.load(A + row * (K * K) + of, (k < K)[:, None] & (j < K)[None, :], other=0.0)
        else:
            unit = tl.arange(0, UNIT)
            at = (u % UNITS) * UNIT + unit
            live = at < K * V
            a = tl.full([UNIT], 1.0, tl.float32)
            if PASSES and KIND == 1:
                a *= tl.load(A + row)
            if PASSES and KIND == 2:
                a = tl.load(A + row * K + at // V, live, other=0.0)
        b = tl.load(b_ + row * (K * V) + at, live, other=0.0)
        early = True
        if PASSES and (RECEIVES or HAS_BEFORE):
            early = tl.max(tl.max(tl.abs(a), 1), 0) < TINY if KIND == 3 else tl.max(tl.abs(a), 0) < TINY
        free = True
        if SENDS:
            free = _ready(give, EMPTY, target, broken, report, patience, CLOCK)
            if early:
                _put(give, there, unit, b, live, free)
        x = tl.zeros_like(b)
        if RECEIVES:
            come = _ready(get, FULL, source, broken, report, patience, CLOCK)
            x = _take(get, here, unit, live, come)
            tl.store(entering + row * (K * V) + at, x, live)
        if HAS_BEFORE:
            x = tl.load(before + row * (K * V) + at, live, other=0.0)
        if PASSES and (SENDS or KEEPS):
            if not early:
                if KIND == 3:
                    b = tl.dot(a, tl.where(live, x, 0.0), b, input_precision="tf32x3")
                else:
                    b += a * x
                if SENDS:
                    _put(give, there, unit, b, live, free)
        if KEEPS:
            tl.store(leaving + row * (K * V) + at, b, live)
