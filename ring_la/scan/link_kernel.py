"""A link of the ring in one kernel: take the state that enters, apply the link's map, put the result to the next rank.

The state goes through mailboxes in units, each on a lane of its own, so that a unit may be two ranks further while
another has not left; nothing of the host stands between hops. Where the link's transition is below TINY, nothing of
what enters can leave, to rounding (the forgetting horizon): that unit is sent on before anything is waited for, and
farther ranks are not in its way.

Two kernels: `link_kernel` for maps that act on the words of a state one by one, which folds the maps of a link's
segments itself and leaves the state that enters each of them; `dense_link_kernel` for dense ones, of whole links.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..comm.copy_kernel import EMPTY, FULL, wait_for

TINY = 9.3e-14
"""e⁻³⁰: ln of the unit roundoff of fp32, and 14 more."""
INTEGERS = ["me", "source", "target", "rows", "H", "N", "NS", "piece", "earlier", "skip", "patience"]


@triton.jit
def _lane(own, mailboxes, owner, sender, lane, skip, P: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
          FLAG: tl.constexpr):  # fmt: skip
    """Flag and room of a lane in the mailboxes of `owner`, `skip` words on, for what `sender` sends."""
    base = own + tl.load(mailboxes + owner) * 4 + skip
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
def _taken(flag, ready):
    """Lower the flag of a unit that was read from this rank's mailbox; after it was sent on, which is what others wait
    for."""
    tl.debug_barrier()
    if ready:
        tl.atomic_xchg(flag, EMPTY, sem="release", scope="sys")


@triton.jit
def _factor(A, row, at, live, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, LOG: tl.constexpr):
    """What a segment's transition does to the words `at` of its state."""
    if KIND == 1:
        a = tl.load(A + row)
    else:
        a = tl.load(A + row * K + at // V, live, other=0.0)
    return tl.exp2(a) if LOG else a


@triton.jit(do_not_specialize=INTEGERS)
def link_kernel(
    A, b_, before, entering, leaving, first, own, mailboxes, broken, report, me, source, target, rows, H, N, NS, piece,
    earlier, skip, patience, KIND: tl.constexpr, LOG: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    UNIT: tl.constexpr, RECEIVES: tl.constexpr, HAS_BEFORE: tl.constexpr, PASSES: tl.constexpr, SENDS: tl.constexpr,
    KEEPS: tl.constexpr, ENTERS: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr, P: tl.constexpr,
    LANES: tl.constexpr, CHUNK: tl.constexpr, FLAG: tl.constexpr, CLOCK: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """The segments of one piece of this rank, `rows` = B·H states [K, V] each; `me`, `source`, `target` are ranks.

    Segments add b [B, NS, H, K, V] and have transitions A. KIND: 0 the identity, 1 [B, NS, H], 2 [B, NS, H, K]; LOG:
    their log2. Those of the piece are `first` [N, 2] (VARLEN: where they start, how many) or all. What enters is from
    `source` (RECEIVES), or is the state `earlier` of `before` [B, N, H, K, V] (HAS_BEFORE), or nothing; PASSES: some of
    it may leave. What leaves goes to `target` (SENDS) and to the piece in `leaving`, of the shape of `before` (KEEPS).
    ENTERS: `entering` takes what enters each segment. REVERSE: from the last to the first. `patience` is in
    microseconds. LANES is a multiple of the number of programs, so that a lane's units are in order.
    """
    UNITS: tl.constexpr = (K * V + UNIT - 1) // UNIT
    GETS: tl.constexpr = RECEIVES or HAS_BEFORE
    lo = 0
    count = NS
    if VARLEN:
        lo = tl.load(first + piece * 2)
        count = tl.load(first + piece * 2 + 1)
    unit = tl.arange(0, UNIT)
    for u in range(tl.program_id(0).to(tl.int64), rows * UNITS, tl.num_programs(0)):
        give, there = _lane(own, mailboxes, target, me, u % LANES, skip, P, LANES, CHUNK, FLAG)
        get, here = _lane(own, mailboxes, me, source, u % LANES, skip, P, LANES, CHUNK, FLAG)
        row = u // UNITS
        b = row // H
        at = (u % UNITS) * UNIT + unit
        live = at < K * V
        begin = (b * NS + lo) * H + row % H
        own_piece = ((b * N + piece) * H + row % H) * (K * V)
        left = tl.zeros([UNIT], tl.float32)
        a = tl.full([UNIT], 1.0, tl.float32)
        for i in range(count):
            s = begin + (count - 1 - i if REVERSE else i) * H
            if KIND != 0:
                factor = _factor(A, s, at, live, K, V, KIND, LOG)
                left *= factor
                a *= factor
            left += tl.load(b_ + s * (K * V) + at, live, other=0.0)
        early = True
        if PASSES and GETS:
            early = tl.max(tl.abs(a), 0) < TINY
        free = True
        if SENDS:
            free = _ready(give, EMPTY, target, broken, report, patience, CLOCK)
            if early:
                _put(give, there, unit, left, live, free)
        x = tl.zeros([UNIT], tl.float32)
        if RECEIVES:
            come = _ready(get, FULL, source, broken, report, patience, CLOCK)
            x = tl.load(here + unit, live & come, other=float("nan"), cache_modifier=".cg")
        if HAS_BEFORE:
            x = tl.load(before + ((b * N + earlier) * H + row % H) * (K * V) + at, live, other=0.0)
        if PASSES and GETS and (SENDS or KEEPS):
            if not early:
                left += a * x
                if SENDS:
                    _put(give, there, unit, left, live, free)
        if RECEIVES:
            _taken(get, come)
        if KEEPS:
            tl.store(leaving + own_piece + at, left, live)
        if ENTERS:
            for i in range(count):
                s = begin + (count - 1 - i if REVERSE else i) * H
                tl.store(entering + s * (K * V) + at, x, live)
                if KIND != 0:
                    x *= _factor(A, s, at, live, K, V, KIND, LOG)
                x += tl.load(b_ + s * (K * V) + at, live, other=0.0)


@triton.jit
def _columns(A, k, j, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A[k, j] of a matrix, or of its transpose."""
    at = j[None, :] * K + k[:, None] if TRANSPOSED else k[:, None] * K + j[None, :]
    return tl.load(A + at, (k < K)[:, None] & (j < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=INTEGERS)
def dense_link_kernel(
    A, b_, before, entering, leaving, own, mailboxes, broken, report, me, source, target, rows, skip, patience,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, UNIT: tl.constexpr,
    TRANSPOSED: tl.constexpr, RECEIVES: tl.constexpr, HAS_BEFORE: tl.constexpr, PASSES: tl.constexpr,
    SENDS: tl.constexpr, KEEPS: tl.constexpr, ENTERS: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, FLAG: tl.constexpr, CLOCK: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """`rows` states [K, V] under the maps (A [rows, K, K], b) of one link (TRANSPOSED: Aᵀ), UNIT columns a unit.

    What enters is from `source` (RECEIVES), or is `before` (HAS_BEFORE), or nothing, and is stored in `entering`
    (ENTERS; always if it was received); `leaving` may be `b_`. The rest is as for `link_kernel`.
    """
    UNITS: tl.constexpr = (V + UNIT - 1) // UNIT
    lane = tl.program_id(0)
    give, there = _lane(own, mailboxes, target, me, lane, skip, P, LANES, CHUNK, FLAG)
    get, here = _lane(own, mailboxes, me, source, lane, skip, P, LANES, CHUNK, FLAG)
    k = tl.arange(0, BK)
    for u in range(lane.to(tl.int64), rows * UNITS, LANES):
        row = u // UNITS
        v = (u % UNITS) * UNIT + tl.arange(0, UNIT)
        at = k[:, None] * V + v[None, :]
        unit = k[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        live = (k < K)[:, None] & (v < V)[None, :]
        early = True
        if PASSES and (RECEIVES or HAS_BEFORE):
            largest = 0.0
            for c in range(0, K, BJ):
                a = _columns(A + row * (K * K), k, c + tl.arange(0, BJ), K, TRANSPOSED)
                largest = tl.maximum(largest, tl.max(tl.max(tl.abs(a), 1), 0))
            early = largest < TINY
        b = tl.load(b_ + row * (K * V) + at, live, other=0.0)
        free = True
        if SENDS:
            free = _ready(give, EMPTY, target, broken, report, patience, CLOCK)
            if early:
                _put(give, there, unit, b, live, free)
        x = tl.zeros_like(b)
        if RECEIVES:
            come = _ready(get, FULL, source, broken, report, patience, CLOCK)
            x = tl.load(here + unit, live & come, other=float("nan"), cache_modifier=".cg")
        if HAS_BEFORE and ENTERS:
            x = tl.load(before + row * (K * V) + at, live, other=0.0)
        if RECEIVES or (HAS_BEFORE and ENTERS):
            tl.store(entering + row * (K * V) + at, x, live)
        if PASSES and (SENDS or KEEPS):
            if not early:
                tl.debug_barrier()  # what was stored is read again, in rows
                state = (before if HAS_BEFORE else entering) + row * (K * V)
                for c in range(0, K, BJ):
                    j = c + tl.arange(0, BJ)
                    a = _columns(A + row * (K * K), k, j, K, TRANSPOSED)
                    part = tl.load(state + j[:, None] * V + v[None, :], (j < K)[:, None] & (v < V)[None, :], other=0.0)
                    b = tl.dot(a, part, b, input_precision="tf32x3")
                if SENDS:
                    _put(give, there, unit, b, live, free)
        if RECEIVES:
            _taken(get, come)
        if KEEPS:
            tl.store(leaving + row * (K * V) + at, b, live)
