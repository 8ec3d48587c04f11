"""The ring by mailboxes: one kernel a link (`link_kernel`), where GPUs reach each other's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..algebra import Affine
from ..comm import Group
from .chain import Chain
from .strategy import Link

KINDS = {"identity": 0, "scalar": 1, "diagonal": 2, "dense": 3}
WORDS = 4096
"""Of a unit: small enough that a state is on its way to the next rank while the rest of it still arrives."""
LEAST, WIDEST = 16, 256
"""Columns of a unit under dense maps: as narrow as a product may be; and the widest maps the kernel takes."""


def carries(group: Group, like: Affine) -> bool:
    """Whether this group's links go by mailboxes; the same on every rank."""
    return group.mailboxes is not None and fits(like)


def fits(like: Affine) -> bool:
    """Whether the kernel takes such maps."""
    return like.b.dtype == torch.float32 and (like.kind != "dense" or like.b.shape[-2] <= WIDEST)


def steps(
    chain: Chain, links: Sequence[Link], like: Affine, group: Group, result: list[Tensor | None]
) -> Iterator[None]:
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
        _launch(group, link.map, b, before, result[slot], left, source, target if sends else None, chain.passes[i])
    yield from ()  # no message is waited for here


def _launch(
    group: Group,
    m: Affine,
    b: Tensor,
    before: Tensor | None,
    entering: Tensor | None,
    leaving: Tensor | None,
    source: int | None,
    target: int | None,
    passes: bool,
) -> None:
    from ..kernels.triton.launch import aligned, launch
    from .link_kernel import TINY, link_kernel

    boxes, kind, b = group.mailboxes, KINDS[m.kind], aligned(b)
    K, V = b.shape[-2:]
    A, transposed = m.A, False
    if A is None:
        A, passes = b, passes and not kind
    elif kind == 3 and not A.is_contiguous():
        A, transposed = A.mT, True
    c = boxes.constants
    lanes = c["BLOCKS"] * c["SLOTS"]
    unit = min(WORDS, c["CHUNK"], _width(K * V))
    if kind == 3:
        unit = max(LEAST, min(_width(V), unit // max(LEAST, _width(K))))
    me = group.rank
    if target is not None:
        group.sends(b.nbytes)
    boxes.order()
    launch(
        link_kernel, (lanes,), aligned(A), b, *(b if x is None else x for x in (before, entering, leaving)), boxes.own,
        boxes.mailboxes, boxes.broken, boxes.report, me, me if source is None else source,
        me if target is None else target, b.shape[:-2].numel(), min(boxes.patience // 1000, 2**31 - 1), KIND=kind, K=K,
        V=V, BK=max(LEAST, _width(K)), BJ=min(32, max(LEAST, _width(K))), UNIT=unit, TRANSPOSED=transposed,
        RECEIVES=source is not None, HAS_BEFORE=before is not None, PASSES=passes, SENDS=target is not None,
        KEEPS=leaving is not None, P=c["P"], LANES=lanes, CHUNK=c["CHUNK"], FLAG=c["FLAG"], CLOCK=c["CLOCK"],
        TINY=TINY, num_warps=8,
    )  # fmt: skip


def _width(n: int) -> int:
    return 1 << (n - 1).bit_length()
