"""The ring by mailboxes: one kernel a link (`link_kernel`), where GPUs reach each other's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algebra import Affine, Transition
from ..comm import Group
from ..kernels.protocol import Mail
from ..kernels.sizes import power_of_2
from .chain import Chain
from .strategy import Link

KINDS: dict[Transition, int] = {"identity": 0, "scalar": 1, "diagonal": 2, "dense": 3}
BESIDE = 256, 32
"""Programs of a launch beside other kernels, and registers of a thread: two programs a multiprocessor, which is what
the widest pass over tokens beside them leaves (`attend_kernel` for dq under a constant decay: 217 registers of 256
threads). Measured beside 64, 128 and 512 programs, with and without the bound."""
LEAST, WIDEST = 16, 256
"""Columns of such a unit: as narrow as a product may be; and the widest maps the kernel takes."""
COLUMNS = 32
"""Columns of a unit that `mail.cuh` sends and takes."""


def carries(group: Group, like: Affine) -> bool:
    """Whether this group's links go by mailboxes; the same on every rank."""
    return group.mailboxes is not None and fits(like)


def fits(like: Affine) -> bool:
    """Whether the kernel takes such maps."""
    return like.b.dtype == torch.float32 and (like.kind != "dense" or like.b.shape[-2] <= WIDEST)


class Hop(NamedTuple):
    """One launch: where what enters comes from, and where what leaves goes.

    Attributes:
        source, target: ranks; None: no message.
        passes: whether what enters may leave.
        piece: whose spans these are, of this rank's pieces.
        earlier: the piece whose leaving state enters, where it is this rank's own.
        keeps: whether what leaves enters another piece of this rank.
    """

    source: int | None
    target: int | None
    passes: bool
    piece: int = 0
    earlier: int | None = None
    keeps: bool = False


class LinkStates(NamedTuple):
    """States of a link: `before` is what enters where it is this rank's own; `entering` takes what enters, `leaving`
    what leaves. None: there is none, or nobody wants it."""

    before: Tensor | None
    entering: Tensor | None
    leaving: Tensor | None


class ElementwiseMaps(NamedTuple):
    """Elementwise maps of a link's spans.

    Attributes:
        kind: of the transitions. A: their log2, or (not `log`) themselves; None: the identity.
        b: what the spans add ``[B, NS, H, K, V]``.
        first: ``[N, 2]``: each piece's first span and how many it has; None: one piece.
    """

    kind: Transition
    A: Tensor | None
    b: Tensor
    first: Tensor | None = None
    log: bool = True


class DenseMaps(NamedTuple):
    """Dense maps of a link's spans.

    Attributes:
        A: the transitions ``[B, NS, H, K, K]``; None: that of the only span is 0.
        b: what the spans add ``[B, NS, H, K, V]``.
        zero: int32 ``[B, NS, H]``, which transitions are 0 and not written; None: nobody has looked.
        squares: ``[B, NS, H, 8]``, where `zero` is: sums of squares of the other transitions' elements. Where little
            enough is left of what comes to a piece by a message, what leaves it goes on first.
        first: as of elementwise maps.
        through: where `zero` is not, transitions ``[B, N, H, K, K]`` and what is added ``[B, N, H, K, V]`` of whole
            pieces, by which what comes by a message goes on by one; None: it goes through the spans first.
    """

    A: Tensor | None
    b: Tensor
    zero: Tensor | None = None
    squares: Tensor | None = None
    first: Tensor | None = None
    through: tuple[Tensor, Tensor] | None = None


def steps(chain: Chain, links: Sequence[Link], group: Group, result: list[Tensor | None]) -> Iterator[None]:
    """Walk the owned links in chain order: `Ring._steps` without a message of its own for each hop."""
    left: Tensor | None = None
    for slot, (i, link) in enumerate(zip(chain.local(group.rank), links)):
        before = left if chain.needs[i] and chain.owners[i - 1] == group.rank else None
        source = chain.owners[i - 1] if chain.needs[i] and before is None else None
        target = chain.owners[i + 1] if chain.feeds(i) else None
        keeps = target == group.rank
        result[slot], b = before, link.map.b
        sends = target is not None and not keeps
        if source is None and not sends and (before is None or not keeps or not chain.passes[i]):
            left = b  # nothing to do
            continue
        left = torch.empty_like(b, memory_format=torch.contiguous_format) if keeps else None
        if source is not None:
            result[slot] = torch.empty_like(b, memory_format=torch.contiguous_format)
        hop = Hop(source, target if sends else None, chain.passes[i])
        states = LinkStates(before, result[slot] if source is not None else None, left)
        launch_link(group, link.map, states, hop)
    yield from ()  # no message is waited for here


def launch_link(group: Group, m: Affine, states: LinkStates, hop: Hop) -> None:
    """A link whose map is `m` [B, H, …]: what enters is `states.before` or comes from `hop.source`, what leaves goes to
    `hop.target` and `states.leaving`."""
    from ..kernels.runtime.launch import aligned

    b = aligned(m.b)
    if m.A is None:
        hop = hop._replace(passes=hop.passes and m.kind == "identity")
    if hop.target is None:
        group.refuse_late("receiving")
    else:
        group.put_by_kernel(b.nbytes)
    group.mailboxes.order()
    by_span = LinkStates(*(None if x is None else x[:, None] for x in states))
    if m.kind != "dense":
        maps = ElementwiseMaps(m.kind, None if m.A is None else aligned(m.A), b[:, None], log=False)
        launch_spans(group, maps, by_span, hop)
        return
    A, transposed = m.A if hop.passes else None, False
    if A is not None:
        A, transposed = (A, False) if A.is_contiguous() else (A.mT, True)
        A = aligned(A)[:, None]
    through = None if A is None else (A, b[:, None])
    launch_dense(group, DenseMaps(A, b[:, None], through=through), by_span, hop, reverse=transposed)


def launch_spans(
    group: Group, maps: ElementwiseMaps, states: LinkStates, hop: Hop, *, reverse: bool = False, beside: bool = False
) -> None:
    """`link_kernel` over the spans of piece `hop.piece`: `states.entering` is [B, NS, H, K, V], the other two are
    [B, N, H, K, V]. `beside`: other kernels run on the device meanwhile, which it leaves room for."""
    from ..kernels.runtime.launch import launch
    from .link_kernel import TINY, link_kernel

    b, first, lanes, (B, spans, H, K, V) = maps.b, maps.first, group.mailboxes.lanes[0], maps.b.shape
    unit = min(lanes.room, power_of_2(K * V))
    pieces = next((x.shape[1] for x in (states.leaving, states.before) if x is not None), 1)
    A = b if maps.A is None else maps.A
    units, programs, leave = B * H * -(-K * V // unit), lanes.count, {}
    if beside:
        programs, leave = math.gcd(programs, BESIDE[0]), {"maxnreg": BESIDE[1]}
    launch(
        link_kernel, (min(programs, units),), A, b, *(b if x is None else x for x in states),
        A if first is None else first, *_mailboxes(group, hop), B * H, H, pieces, spans, hop.piece,
        hop.earlier or 0, lanes.skip, _patience(group), KIND=KINDS[maps.kind], LOG=maps.log, K=K, V=V, UNIT=unit,
        REVERSE=reverse, VARLEN=first is not None, LANES=lanes.count, CHUNK=lanes.room, **_flags(states),
        **_constants(group, hop), PASSES=hop.passes, TINY=TINY, num_warps=4, **leave, carveout=beside,  # type: ignore[arg-type]
    )  # fmt: skip


def launch_dense(group: Group, maps: DenseMaps, states: LinkStates, hop: Hop, *, reverse: bool = False) -> None:
    """`dense_link_kernel` over the spans of piece `hop.piece`, of states as for `launch_spans`; `reverse`: from the
    last to the first, by the transposed transitions."""
    from ..kernels.runtime.launch import launch
    from ..kernels.spans.dense import FLAGS, part
    from .link_kernel import SMALL, TINY, dense_link_kernel

    b, first, lanes, (B, spans, H, K, V) = maps.b, maps.first, group.mailboxes.lanes[1], maps.b.shape
    wide = max(LEAST, power_of_2(K))
    unit = max(LEAST, min(power_of_2(V), lanes.room // wide))
    through = maps.through if hop.source is not None and hop.target is not None else None
    of_pieces = states.leaving, states.before, None if through is None else through[1]
    pieces = next((x.shape[1] for x in of_pieces if x is not None), 1)
    flags = _flags(states)
    if states.entering is None and part(K) < wide:  # where products meet states in parts
        states = states._replace(entering=torch.empty_like(b))
    launch(
        dense_link_kernel, (min(lanes.count, B * H * -(-V // unit)),), b if maps.A is None else maps.A, b,
        *(b if x is None else x for x in (maps.zero, maps.squares)), *(through or (b, b)),
        *(b if x is None else x for x in states),
        b if first is None else first, *_mailboxes(group, hop), B * H, pieces, spans, hop.piece, hop.earlier or 0,
        lanes.skip, _patience(group), H=H, K=K, V=V, BK=wide, BJ=part(K), UNIT=unit, FLAGS=FLAGS, GONE=maps.A is None,
        FORWARDS=through is not None, KNOWN=maps.zero is not None, REVERSE=reverse,
        VARLEN=first is not None, LANES=lanes.count, CHUNK=lanes.room, **flags, **_constants(group, hop), TINY=TINY,
        SMALL=SMALL, num_warps=8, num_stages=2,
    )  # fmt: skip


def mail(group: Group, hops: Sequence[Hop], states: tuple[int, int, int]) -> Mail | None:
    """What `mail.cuh` takes of the only hop, for so many states [K, V], each in lanes of its own; None: none fits."""
    lanes, (rows, K, V) = group.mailboxes.lanes[1], states
    fits = K * COLUMNS == lanes.room and V % COLUMNS == 0 and rows * V // COLUMNS <= lanes.count
    if not fits or not hops:
        return None
    (hop,), boxes, (P, FLAG) = hops, group.mailboxes, (group.mailboxes.constants[name] for name in ("P", "FLAG"))
    memory = boxes.own, boxes.mailboxes, boxes.broken, boxes.report, lanes.skip, boxes.patience
    ranks = (-1 if rank is None else rank for rank in (group.rank, hop.source, hop.target))
    return memory, (*ranks, P, lanes.count, lanes.room, FLAG)


def _flags(states: LinkStates) -> dict[str, Any]:
    return dict(zip(("HAS_BEFORE", "ENTERS", "KEEPS"), (x is not None for x in states)))


def _mailboxes(group: Group, hop: Hop) -> tuple[object, ...]:
    """What the kernels know of the group's memory, and the ranks of a hop."""
    boxes, me = group.mailboxes, group.rank
    peers = (me if r is None else r for r in (hop.source, hop.target))
    return boxes.own, boxes.mailboxes, boxes.broken, boxes.report, me, *peers


def _constants(group: Group, hop: Hop) -> dict[str, Any]:
    c = group.mailboxes.constants
    ends = dict(RECEIVES=hop.source is not None, SENDS=hop.target is not None)
    return ends | dict(P=c["P"], FLAG=c["FLAG"], CLOCK=c["CLOCK"])


def _patience(group: Group) -> int:
    return min(group.mailboxes.patience // 1000, 2**31 - 1)
