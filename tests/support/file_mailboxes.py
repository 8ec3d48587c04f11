"""Groups whose mailboxes are files the ranks share, in place of symmetric memory, and the copy kernel interpreted."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ring_la.comm import Group
from tests.support.interpreter import interpreted
from tests.support.pool import group

interpreted()

BLOCKS, CHUNK = 2, 64  # few and small, so that messages of several chunks and rounds stay quick


def over_files(
    rank: int,
    size: int,
    folder: str,
    timeout: float = 60.0,
    chunk: int = CHUNK,
    dense: tuple[int, int] = (3, 1024),
    step: int = 32,
) -> Group:
    """A gloo group whose messages go by mailboxes in files. `dense`: lanes of dense maps' states, and words of one.
    `step`: words that a program copies at a time."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreted()
    from ring_la.comm import copy_kernel
    from ring_la.comm.symmetric import MailboxMemory, SymmetricTransport

    own = Group(group(size), timedelta(seconds=timeout))
    n, lanes = copy_kernel.words(size, chunk), ((3, 128), dense)
    if rank == 0:
        for r in range(size):
            boxes = torch.from_file(f"{folder}/{r}", shared=True, size=n, dtype=torch.int32)
            copy_kernel.prepare(boxes, size, chunk, BLOCKS, lanes)
    dist.barrier(group(size))
    boxes = [torch.from_file(f"{folder}/{r}", shared=True, size=n, dtype=torch.int32) for r in range(size)]
    addresses = [b.data_ptr() for b in boxes]
    memory = MailboxMemory(boxes[rank], addresses, boxes)
    own.transport = own.mailboxes = SymmetricTransport(
        own, own.streams, own.transport, memory, BLOCKS=BLOCKS, CHUNK=chunk, STEP=step
    )
    own.mailboxes.lanes, own.mailboxes.word = own.mailboxes._lanes(lanes), own.agreement.word
    return own
