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


@triton.jit
def _columns(A, k, j, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A[k, j] of a matrix, or of its transpose."""
    at = j[None, :] * K + k[:, None] if TRANSPOSED else k[:, None] * K + j[None, :]
    return tl.load(A + at, (k < K)[:, None] & (j < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["me", "source", "target", "rows", "patience"])
def link_kernel(
    A, b_, before, entering, leaving, own, mailboxes, broken, report, me, source, target, rows, patience,
    KIND: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
    UNIT: tl.constexpr, TRANSPOSED: tl.constexpr, RECEIVES: tl.constexpr, HAS_BEFORE: tl.constexpr,
    PASSES: tl.constexpr, SENDS: tl.constexpr, KEEPS: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, FLAG: tl.constexpr, CLOCK: tl.constexpr, TINY: tl.constexpr,
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
        early = True
        if KIND == 3:
            k = tl.arange(0, BK)
            v = (u % UNITS) * UNIT + tl.arange(0, UNIT)
            at = k[:, None] * V + v[None, :]
            unit = k[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
            live = (k < K)[:, None] & (v < V)[None, :]
            if PASSES and (RECEIVES or HAS_BEFORE):
                largest = 0.0
                for c in range(0, K, BJ):
                    a = _columns(A + row * (K * K), k, c + tl.arange(0, BJ), K, TRANSPOSED)
                    largest = tl.maximum(largest, tl.max(tl.max(tl.abs(a), 1), 0))
                early = largest < TINY
        else:
            unit = tl.arange(0, UNIT)
            at = (u % UNITS) * UNIT + unit
            live = at < K * V
            a = tl.full([UNIT], 1.0, tl.float32)
            if PASSES and KIND == 1:
                a *= tl.load(A + row)
            if PASSES and KIND == 2:
                a = tl.load(A + row * K + at // V, live, other=0.0)
            if PASSES and (RECEIVES or HAS_BEFORE):
                early = tl.max(tl.abs(a), 0) < TINY
        b = tl.load(b_ + row * (K * V) + at, live, other=0.0)
        free = True
        if SENDS:
            free = _ready(give, EMPTY, target, broken, report, patience, CLOCK)
            if early:
                _put(give, there, unit, b, live, free)
        x = tl.zeros_like(b)
        if RECEIVES:
            x = _take(get, here, unit, live, _ready(get, FULL, source, broken, report, patience, CLOCK))
            tl.store(entering + row * (K * V) + at, x, live)
        if HAS_BEFORE and KIND != 3:
            x = tl.load(before + row * (K * V) + at, live, other=0.0)
        if PASSES and (SENDS or KEEPS):
            if not early:
                if KIND == 3:
                    tl.debug_barrier()  # what was stored is read again, in rows
                    come = (before if HAS_BEFORE else entering) + row * (K * V)
                    for c in range(0, K, BJ):
                        j = c + tl.arange(0, BJ)
                        a = _columns(A + row * (K * K), k, j, K, TRANSPOSED)
                        part = tl.load(
                            come + j[:, None] * V + v[None, :], (j < K)[:, None] & (v < V)[None, :], other=0.0
                        )
                        b = tl.dot(a, part, b, input_precision="tf32x3")
                else:
                    b += a * x
                if SENDS:
                    _put(give, there, unit, b, live, free)
        if KEEPS:
            tl.store(leaving + row * (K * V) + at, b, live)
