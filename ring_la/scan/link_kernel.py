"""A link of the ring in one kernel: take the state that enters, apply the link's map, put the result to the next rank.

The state goes through mailboxes in units, each on a lane of its own, so that a unit may be two ranks further while
another has not left; nothing of the host stands between hops. A rank takes a lane by a flag in its own memory and then
writes the words alone into the next rank's: one that is still UNSENT has not come. So a hop takes as long as a store
over the link, with no fence and no flag behind it. Who has read the words makes them UNSENT again and gives the lane
back. Where the link's transition is below TINY, nothing of what enters can leave, to rounding (the forgetting horizon):
that unit is sent on before anything is waited for, and farther ranks are not in its way.

Two kernels: `link_kernel` for maps that act on the words of a state one by one, which folds the maps of a link's
spans itself and leaves the state that enters each of them; `dense_link_kernel` for dense ones, of whole links.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..comm.copy_kernel import EMPTY, FULL, UNSENT
from ..comm.flag_kernels import swap

TINY = 9.3e-14
"""e⁻³⁰: ln of the unit roundoff of fp32, and 14 more."""
INTEGERS = ["me", "source", "target", "rows", "H", "N", "NS", "piece", "earlier", "lines", "skip", "patience"]


@triton.jit
def _flag(own, mailboxes, sender, receiver, lane, skip, LANES: tl.constexpr, FLAG: tl.constexpr):
    """The flag of a lane, in the mailboxes of who sends, `skip` words on: FULL from when it takes the lane until who
    receives gives it back."""
    return own + tl.load(mailboxes + sender) * 4 + skip + (receiver * LANES + lane) * FLAG


@triton.jit
def _room(own, mailboxes, sender, receiver, lane, skip, P: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
          FLAG: tl.constexpr):  # fmt: skip
    """The room of a lane, in the mailboxes of who receives."""
    base = own + tl.load(mailboxes + receiver) * 4 + skip + P * LANES * FLAG
    room = base + (sender * LANES + lane).to(tl.int64) * CHUNK
    return tl.multiple_of(room.to(tl.pointer_type(tl.float32), bitcast=True), 16)


@triton.jit
def _late(peer, broken, report):
    """Mark a peer; it is not waited for again."""
    tl.store(broken + peer, 1)
    tl.store(report + peer, 1)


@triton.jit
def _patience(peer, broken, patience):
    """Nanoseconds to wait for a peer."""
    return tl.where(tl.load(broken + peer) != 0, 0, patience.to(tl.int64) * 1000)


@triton.jit
def _claim(flag, peer, broken, report, patience, CLOCK: tl.constexpr):
    """Take a lane to a peer; whether it was given back in time."""
    ready = swap(flag, EMPTY, FULL, _patience(peer, broken, patience), CLOCK)
    if not ready:
        _late(peer, broken, report)
    tl.debug_barrier()
    return ready


@triton.jit
def _put(room, at, x, live, ready):
    """Store a unit in a lane that was taken."""
    x = tl.where(x.to(tl.int32, bitcast=True) == UNSENT, float("nan"), x)
    tl.store(room + at, x, live & ready)


@triton.jit
def _unsent(room, at, live):
    """A unit's words, and whether all have come."""
    words = tl.load(room + at, live, other=0.0, volatile=True)
    missing = (words.to(tl.int32, bitcast=True) == UNSENT).to(tl.int32)
    if len(missing.shape) == 2:
        missing = tl.max(missing, 1)
    return words, tl.max(missing, 0)


@triton.jit
def _take(room, at, live, peer, broken, report, patience, CLOCK: tl.constexpr):
    """A unit, as soon as a peer has sent all of it; one that is late is marked, and what it did not send is NaN."""
    patience = _patience(peer, broken, patience)
    words, missing = _unsent(room, at, live)
    late = (patience <= 0).to(tl.int32)
    if CLOCK:
        start = tl.extra.cuda.globaltimer()
    while (missing != 0) & (late == 0):
        words, missing = _unsent(room, at, live)
        if CLOCK:
            late = (tl.extra.cuda.globaltimer() - start > patience).to(tl.int32)
    if missing != 0:
        _late(peer, broken, report)
    return tl.where(words.to(tl.int32, bitcast=True) == UNSENT, float("nan"), words)


@triton.jit
def _give_back(flag, room, at, x, live):
    """Empty a lane whose unit `x` was read; after it was sent on, which is what others wait for."""
    tl.store(room + at, tl.full(x.shape, UNSENT, tl.int32).to(tl.float32, bitcast=True), live)
    tl.debug_barrier()
    tl.atomic_xchg(flag, EMPTY, sem="release", scope="sys")


@triton.jit
def _factor(A, row, at, live, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, LOG: tl.constexpr):
    """What a span's transition does to the words `at` of its state."""
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
    """The spans of one piece of this rank, `rows` = B·H states [K, V] each; `me`, `source`, `target` are ranks.

    Spans add b [B, NS, H, K, V] and have transitions A. KIND: 0 the identity, 1 [B, NS, H], 2 [B, NS, H, K]; LOG:
    their log2. Those of the piece are `first` [N, 2] (VARLEN: where they start, how many) or all. What enters is from
    `source` (RECEIVES), or is the state `earlier` of `before` [B, N, H, K, V] (HAS_BEFORE), or nothing; PASSES: some of
    it may leave. What leaves goes to `target` (SENDS) and to the piece in `leaving`, of the shape of `before` (KEEPS).
    ENTERS: `entering` takes what enters each span. REVERSE: from the last to the first. `patience` is in
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
        lane = u % LANES
        give = _flag(own, mailboxes, me, target, lane, skip, LANES, FLAG)
        there = _room(own, mailboxes, me, target, lane, skip, P, LANES, CHUNK, FLAG)
        get = _flag(own, mailboxes, source, me, lane, skip, LANES, FLAG)
        here = _room(own, mailboxes, source, me, lane, skip, P, LANES, CHUNK, FLAG)
        row = u // UNITS
        b = row // H
        at = (u % UNITS) * UNIT + unit
        live = at < K * V
        begin = (b * NS + lo) * H + row % H
        own_piece = ((b * N + piece) * H + row % H) * (K * V)
        free = True
        if SENDS:
            free = _claim(give, target, broken, report, patience, CLOCK)
        left = tl.zeros([UNIT], tl.float32)
        a = 1.0
        if KIND == 2:
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
            early = (tl.max(tl.abs(a), 0) if KIND == 2 else tl.abs(a)) < TINY
        if SENDS:
            if early:
                _put(there, unit, left, live, free)
        x = tl.zeros([UNIT], tl.float32)
        if RECEIVES:
            x = _take(here, unit, live, source, broken, report, patience, CLOCK)
        if HAS_BEFORE:
            x = tl.load(before + ((b * N + earlier) * H + row % H) * (K * V) + at, live, other=0.0)
        if PASSES and GETS and (SENDS or KEEPS):
            if not early:
                left += a * x
                if SENDS:
                    _put(there, unit, left, live, free)
        if RECEIVES:
            _give_back(get, here, unit, x, live)
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
    A, b_, zero, before, entering, leaving, own, mailboxes, broken, report, me, source, target, rows, lines,
    skip, patience, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, UNIT: tl.constexpr,
    TRANSPOSED: tl.constexpr, KNOWN: tl.constexpr, RECEIVES: tl.constexpr, HAS_BEFORE: tl.constexpr,
    PASSES: tl.constexpr, SENDS: tl.constexpr, KEEPS: tl.constexpr, ENTERS: tl.constexpr, P: tl.constexpr,
    LANES: tl.constexpr, CHUNK: tl.constexpr, FLAG: tl.constexpr, CLOCK: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """`rows` states [K, V] under the maps (A [rows, K, K], b) of one link (TRANSPOSED: Aᵀ), UNIT columns a unit. KNOWN:
    A is 0, and not read, where `zero` is not, which has the link's rows from `lines` on.

    What enters is from `source` (RECEIVES), or is `before` (HAS_BEFORE), or nothing, and is stored in `entering`
    (ENTERS; always if it was received); `leaving` may be `b_`. The rest is as for `link_kernel`.
    """
    UNITS: tl.constexpr = (V + UNIT - 1) // UNIT
    lane = tl.program_id(0)
    give = _flag(own, mailboxes, me, target, lane, skip, LANES, FLAG)
    there = _room(own, mailboxes, me, target, lane, skip, P, LANES, CHUNK, FLAG)
    get = _flag(own, mailboxes, source, me, lane, skip, LANES, FLAG)
    here = _room(own, mailboxes, source, me, lane, skip, P, LANES, CHUNK, FLAG)
    k = tl.arange(0, BK)
    for u in range(lane.to(tl.int64), rows * UNITS, LANES):
        row = u // UNITS
        v = (u % UNITS) * UNIT + tl.arange(0, UNIT)
        at = k[:, None] * V + v[None, :]
        unit = k[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        live = (k < K)[:, None] & (v < V)[None, :]
        free = True
        if SENDS:
            free = _claim(give, target, broken, report, patience, CLOCK)
        early = True
        if PASSES and (RECEIVES or HAS_BEFORE):
            largest = 0.0
            read = K
            if KNOWN:
                read = tl.where(tl.load(zero + lines + row) != 0, 0, K)
            for c in range(0, read, BJ):
                a = _columns(A + row * (K * K), k, c + tl.arange(0, BJ), K, TRANSPOSED)
                largest = tl.maximum(largest, tl.max(tl.max(tl.abs(a), 1), 0))
            early = largest < TINY
        b = tl.load(b_ + row * (K * V) + at, live, other=0.0)
        if SENDS:
            if early:
                _put(there, unit, b, live, free)
        x = tl.zeros_like(b)
        if RECEIVES:
            x = _take(here, unit, live, source, broken, report, patience, CLOCK)
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
                    _put(there, unit, b, live, free)
        if RECEIVES:
            _give_back(get, here, unit, x, live)
        if KEEPS:
            tl.store(leaving + row * (K * V) + at, b, live)
