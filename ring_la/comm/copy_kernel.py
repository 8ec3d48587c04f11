"""The kernel behind `symmetric`: messages through mailboxes in the memory of the ranks that receive them.

Every rank has for each sender and each of BLOCKS blocks a ring of SLOTS chunks, and one flag a chunk. A sender's block
waits for an empty flag, writes the chunk and raises the flag to the word of its call; the receiver's block waits for a
raised flag, copies the chunk out and lowers it, but takes nothing that was raised to another word. So no message is
overtaken, lost in a slow receiver or taken for another one's, nothing is counted on the host, and a captured graph
replays as it ran. Flags and data cross NVLink as ordinary system-scope loads and stores: no multicast.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 32  # blocks a message is spread over
SLOTS = 2
CHUNK = 16384  # words of 4 bytes
FLAG = 8  # words a flag takes: a memory sector of its own
LANES = (512, 1024), (128, 4096)  # of a ring of states, behind the messages: how many with room for so many words
EMPTY, FULL = tl.constexpr(0), tl.constexpr(1)
LATE, OTHER = tl.constexpr(1), tl.constexpr(2)
POISON = tl.constexpr(0x7FFF7FFF)  # NaN in every float format
UNSENT = tl.constexpr(0x7FFF5A5A)  # what is in a lane's room until a state comes: a NaN no arithmetic makes


def words(ranks: int, chunk: int = CHUNK) -> int:
    """Words of the mailboxes of one rank: flags, then chunks; flags of lanes, then their rooms."""
    return ranks * (SLOTS * BLOCKS * (FLAG + chunk) + sum(n * (FLAG + room) for n, room in LANES))


def prepare(
    own: Tensor, ranks: int, chunk: int = CHUNK, blocks: int = BLOCKS, lanes: Sequence[tuple[int, int]] = LANES
) -> None:
    """Make empty mailboxes of `words` int32 words."""
    own.zero_()
    at = ranks * SLOTS * blocks * (FLAG + chunk)
    for count, room in lanes:
        at += ranks * count * FLAG
        own[at : at + ranks * count * room] = UNSENT.value
        at += ranks * count * room


@triton.jit
def wait_for(flag, value, put, patience, CLOCK: tl.constexpr):
    """What `flag` has when it has `value`, or to take something anything but EMPTY, or what it still has `patience`
    nanoseconds later (without a clock, as in the interpreter, nothing is ever late)."""
    seen = tl.atomic_cas(flag, value, value, sem="acquire", scope="sys")
    late = 0
    if CLOCK:
        start = tl.extra.cuda.globaltimer()
    while (seen != value) & (put | (seen == EMPTY)) & (late == 0):
        seen = tl.atomic_cas(flag, value, value, sem="acquire", scope="sys")
        if CLOCK:
            late = (tl.extra.cuda.globaltimer() - start > patience).to(tl.int32)
    return seen


@triton.jit
def _copy(source, target, n, STEP: tl.constexpr, CHUNK: tl.constexpr):
    """n ≤ CHUNK words, in 16 bytes a load."""
    source = tl.multiple_of(source, 16)
    target = tl.multiple_of(target, 16)
    for at in tl.static_range(0, CHUNK, STEP):
        i = at + tl.arange(0, STEP)
        tl.store(target + i, tl.load(source + i, i < n, cache_modifier=".cg"), i < n)


@triton.jit(do_not_specialize=["me", "units", "send_stride", "receive_stride", "sends", "receives", "word", "patience"])
def exchange_kernel(
    source, target, own, mailboxes, broken, report, me, units, send_stride, receive_stride, sends, receives, word,
    patience,
    P: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, FLAG: tl.constexpr,
    STEP: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Messages of one size to and from the ranks whose bits are set in `sends` and `receives`.

    `units` is that size, and the strides are the distances from one message to the next in `source` and `target`, in 16
    bytes; messages stand in the order of their ranks. `mailboxes` holds how far each rank's mailboxes lie from this
    rank's `own`, in 16 bytes too. A message to oneself is copied. Programs: put or take, peer, block, so that what is
    sent starts first. A flag is raised to `word`, which tells calls apart and is not EMPTY. A peer that is late for
    `patience` nanoseconds, or whose flag has another word, is marked in `broken` and, for the host, in `report`: LATE
    or OTHER.
    """
    program = tl.program_id(0)
    per_peer = tl.num_programs(0) // (2 * P)
    block = program % per_peer
    peer = (me + 1 + program // per_peer) % P
    put = program < per_peer * P
    mask = tl.where(put, sends, receives)
    if (mask >> peer) & 1 == 0:
        return
    nth = 0  # messages before this peer's
    for r in tl.static_range(P):
        nth += ((mask >> r) & 1) * (r < peer).to(tl.int32)
    n = units.to(tl.int64) * 4
    chunks = (n + CHUNK - 1) // CHUNK
    if peer == me:
        if put:
            slot = 0
            for r in tl.static_range(P):
                slot += ((receives >> r) & 1) * (r < me).to(tl.int32)
            for i in range(block, chunks, BLOCKS):
                at = i * CHUNK
                _copy(
                    source + nth * send_stride.to(tl.int64) * 4 + at,
                    target + slot * receive_stride.to(tl.int64) * 4 + at, n - at, STEP, CHUNK,
                )  # fmt: skip
        return
    owner = tl.where(put, peer, me)
    sender = tl.where(put, me, peer)
    base = own + tl.load(mailboxes + owner) * 4
    mine = sender * SLOTS * BLOCKS + block
    data = base + P * SLOTS * BLOCKS * FLAG
    if tl.load(broken + peer) != 0:
        patience = patience * 0
    for i in range(block, chunks, BLOCKS):
        slot = (i // BLOCKS) % SLOTS
        flag = base + (mine + slot * BLOCKS) * FLAG
        chunk = data + (mine + slot * BLOCKS).to(tl.int64) * CHUNK
        at = i * CHUNK
        wanted = tl.where(put, EMPTY, word)
        seen = wait_for(flag, wanted, put, patience, CLOCK)
        ready = seen == wanted
        if not ready:
            tl.store(broken + peer, 1)
            tl.store(report + peer, tl.where(put | (seen == EMPTY), LATE, OTHER))
            patience = patience * 0
        tl.debug_barrier()
        if put:
            if ready:
                _copy(source + nth * send_stride.to(tl.int64) * 4 + at, chunk, n - at, STEP, CHUNK)
                tl.debug_barrier()
                tl.atomic_xchg(flag, word, sem="release", scope="sys")
        else:
            out = target + nth * receive_stride.to(tl.int64) * 4 + at
            if ready:
                _copy(chunk, out, n - at, STEP, CHUNK)
                tl.debug_barrier()
                tl.atomic_xchg(flag, EMPTY, sem="release", scope="sys")
            else:
                for start in tl.static_range(0, CHUNK, STEP):
                    j = start + tl.arange(0, STEP)
                    tl.store(out + j, tl.full([STEP], POISON, tl.int32), j < n - at)
