"""A link of the ring in one kernel: take the state that enters, apply the link's map, put the result to the next rank.

The state goes through mailboxes in units, each on a lane of its own, so that a unit may be two ranks further while
another has not left; nothing of the host stands between hops. A rank takes a lane by a flag in its own memory and then
writes the words alone into the next rank's: one that is still UNSENT has not come. So a hop takes as long as a store
over the link, with no fence and no flag behind it. Who has read the words makes them UNSENT again and gives the lane
back. Where the link's transition is known to be below TINY, or a bound of dense ones below SMALL, nothing of what
enters can leave, to rounding (the forgetting horizon): that unit is sent on before anything is waited for, and farther
ranks are not in its way.

Two kernels, which fold the maps of a link's spans themselves and leave the state that enters each of them:
`link_kernel` for maps that act on the words of a state one by one, `dense_link_kernel` for dense ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..comm.copy_kernel import EMPTY, FULL, UNSENT
from ..comm.flag_kernels import swap
from ..kernels.spans.dense import STEP, products, runs, spans_of, tile, zeros_of

TINY = 9.3e-14
"""e⁻³⁰: ln of the unit roundoff of fp32, and 14 more."""
SMALL = -30.0
"""log2 of the bound of what is left of a state that counts as nothing, as in a span that forgets all (`FORGOTTEN` of
`wy/gdn.cuh`): the unit roundoff of fp32, and 6 more."""
INTEGERS = ["me", "source", "target", "rows", "N", "NS", "piece", "earlier", "skip", "patience"]


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
def _largest(A, k, K: tl.constexpr, BK: tl.constexpr):
    """The largest magnitude of a transition's elements."""
    WIDE: tl.constexpr = min(BK, STEP)
    found = tl.zeros([BK, WIDE], tl.float32)
    for c in tl.static_range(0, BK, WIDE):
        found = tl.maximum(found, tl.abs(tile(A, k, c + tl.arange(0, WIDE), K, False)))
    return tl.max(tl.max(found, 1), 0)


@triton.jit
def _measured(squares, spans, count, H: tl.constexpr, FLAGS: tl.constexpr):
    """log2 of a bound of what a piece's transitions together leave of a state: the product of their Frobenius norms."""
    PARTS: tl.constexpr = 8
    LEAST: tl.constexpr = 1e-30
    bound = 0.0
    for p in range(0, count, FLAGS):
        i = p + tl.arange(0, FLAGS)
        at = (spans + i * H)[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        sums = tl.sum(tl.load(squares + at, (i < count)[:, None], other=1 / PARTS), 1)
        sums = tl.where(sums < LEAST, LEAST, sums)  # squares may vanish where elements do not
        bound += 0.5 * tl.sum(tl.log2(sums), 0)
    return bound


@triton.jit
def _factor(A, row, at, live, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, LOG: tl.constexpr):
    """What a span's transition does to the words `at` of its state."""
    if KIND == 1:
        a = tl.load(A + row)
    else:
        a = tl.load(A + row * K + at // V, live, other=0.0)
    return tl.exp2(a) if LOG else a


@triton.jit(do_not_specialize=[*INTEGERS, "H"])
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


@triton.jit(do_not_specialize=INTEGERS)
def dense_link_kernel(
    A, b_, zero, squares, through, added, before, entering, leaving, first, own, mailboxes, broken, report, me,
    source, target, rows, N, NS, piece, earlier, skip, patience, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BJ: tl.constexpr, UNIT: tl.constexpr, FLAGS: tl.constexpr, GONE: tl.constexpr,
    FORWARDS: tl.constexpr, KNOWN: tl.constexpr, RECEIVES: tl.constexpr,
    HAS_BEFORE: tl.constexpr, SENDS: tl.constexpr, KEEPS: tl.constexpr, ENTERS: tl.constexpr, REVERSE: tl.constexpr,
    VARLEN: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, FLAG: tl.constexpr,
    CLOCK: tl.constexpr, TINY: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """The same under dense transitions A [B, NS, H, K, K] (REVERSE: their transposes), UNIT columns of a state a unit.
    A piece has a span at least.

    GONE: all A are 0, and not read. KNOWN: so are those where `zero` [B, NS, H] is not 0. What leaves a piece that has
    one is sent before anything comes; forward, what enters a span behind one need not be stored: who knows that it is
    one begins from zero. So it is sent, and without what comes, where all A together leave less than 2^SMALL of that,
    by the `squares` [B, NS, H, 8] of their elements.
    FORWARDS (not KNOWN): what comes from `source` goes on to `target` by the map of the whole piece (`through`
    [B, N, H, K, K], `added` [B, N, H, K, V]) before it goes through the spans.
    """
    UNITS: tl.constexpr = (V + UNIT - 1) // UNIT
    GETS: tl.constexpr = RECEIVES or HAS_BEFORE
    ENDS: tl.constexpr = (KEEPS or SENDS) and not FORWARDS
    lane = tl.program_id(0)
    give = _flag(own, mailboxes, me, target, lane, skip, LANES, FLAG)
    there = _room(own, mailboxes, me, target, lane, skip, P, LANES, CHUNK, FLAG)
    get = _flag(own, mailboxes, source, me, lane, skip, LANES, FLAG)
    here = _room(own, mailboxes, source, me, lane, skip, P, LANES, CHUNK, FLAG)
    lo, count = spans_of(first, piece, NS, VARLEN)
    k = tl.arange(0, BK)
    j = tl.arange(0, BJ)
    for u in tl.range(lane.to(tl.int64), rows * UNITS, LANES, disable_licm=True):
        row = u // UNITS
        v = tl.cast(u % UNITS, tl.int32) * UNIT + tl.arange(0, UNIT)
        at = k[:, None] * V + v[None, :]
        unit = k[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        live = (k < K)[:, None] & (v < V)[None, :]
        spans = (row // H * NS + lo) * H + row % H
        line = (row // H * N + piece) * H + row % H
        head = spans + (count - 1 if REVERSE else 0) * H  # of the first span on this way
        # from the first span whose transition is 0 on nothing waits for what enters: what leaves goes first
        nil, end, many = count, count - 1, 0
        if GONE:
            nil = count * 0
        elif KNOWN:
            nil, end, many = zeros_of(zero, spans, count, H, REVERSE, FLAGS)
        early = nil < count
        free = u >= 0  # whether the lane is there for what leaves
        if SENDS:
            free = _claim(give, target, broken, report, patience, CLOCK)
        small = u < 0  # whether nothing of what comes goes on, though no transition is 0
        waits = u >= 0  # whether what goes on waits for what comes
        left = tl.zeros([BK, UNIT], tl.float32)
        if early:
            left = tl.load(b_ + (spans + (count - 1 - end if REVERSE else end) * H) * K * V + at, live, other=0.0)
            if KNOWN:
                left = products(
                    left, b_, A, entering, spans, end + 1, count, count, at, live, k, j, v, H, K, V, BK, BJ, UNIT,
                    False, ENTERS, REVERSE,
                )  # fmt: skip
            if SENDS:
                _put(there, unit, left, live, free)
            if KEEPS:
                tl.store(leaving + line * K * V + at, left, live)
            if KNOWN and ENTERS:
                if REVERSE or many <= end - nil:
                    S = tl.load(b_ + (spans + (count - 1 - nil if REVERSE else nil) * H) * K * V + at, live, other=0.0)
                    runs(
                        S, b_, A, zero, entering, spans, nil + 1, end + 1, count, at, live, k, j, v, H, K, V, BK, BJ,
                        UNIT, FLAGS, REVERSE,
                    )  # fmt: skip
        elif FORWARDS:
            left = tl.load(added + line * K * V + at, live, other=0.0)
            waits = _largest(through + line * K * K, k, K, BK) >= TINY
            if not waits:
                _put(there, unit, left, live, free)
        elif KNOWN and RECEIVES and SENDS:
            small = _measured(squares, spans, count, H, FLAGS) < SMALL
            if small:
                left = tl.load(b_ + head * K * V + at, live, other=0.0)
                left = products(
                    left, b_, A, entering, spans, 1, count, count, at, live, k, j, v, H, K, V, BK, BJ, UNIT, False,
                    False, REVERSE,
                )  # fmt: skip
                _put(there, unit, left, live, free)
                if KEEPS:
                    tl.store(leaving + line * K * V + at, left, live)
        x = tl.zeros([BK, UNIT], tl.float32)
        if RECEIVES:
            x = _take(here, unit, live, source, broken, report, patience, CLOCK)
        if HAS_BEFORE:
            x = tl.load(before + ((row // H * N + earlier) * H + row % H) * K * V + at, live, other=0.0)
        if FORWARDS:
            S = products(  # a loop, so that all of the transition is loaded at once
                x, added + (line - head) * K * V, through + (line - head) * K * K, entering, head, 0,
                waits.to(tl.int32), 1, at, live, k, j, v, H, K, V, BK, BJ, UNIT, False, False, REVERSE,
            )  # fmt: skip
            if waits:
                left = S
                _put(there, unit, left, live, free)
            if KEEPS:
                tl.store(leaving + line * K * V + at, left, live)
        # through the spans up to that one
        stop = nil if ENDS else tl.minimum(nil, count - 1)
        if small:
            stop = count - 1
        if GETS:
            S, p = x, 0
        else:
            S = tl.load(b_ + head * K * V + at, live, other=0.0)
            p = 1
            if ENTERS:
                tl.store(entering + head * K * V + at, x, live)
        if stop >= p:
            S = products(
                S, b_, A, entering, spans, p, stop, count, at, live, k, j, v, H, K, V, BK, BJ, UNIT, False, ENTERS,
                REVERSE,
            )  # fmt: skip
            if stop < count:
                if ENTERS:
                    tl.store(entering + (spans + (count - 1 - stop if REVERSE else stop) * H) * K * V + at, S, live)
            elif ENDS:
                if SENDS:
                    _put(there, unit, S, live, free)
                if KEEPS:
                    tl.store(leaving + line * K * V + at, S, live)
        if RECEIVES:
            _give_back(get, here, unit, x, live)
