"""`transport="symmetric"` on CPUs: mailboxes, and the memory that rings of attention copy from, are files that all
ranks of a group map, and the kernel of a message is interpreted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

import ring_la
from ring_la.comm import Group
from ring_la.comm.memory import Memory
from ring_la.comm.symmetric import Message
from tests.support.file_mailboxes import over_files
from tests.support.file_memory import Files

CHUNK = 8192
"""Words of a mailbox's room. The interpreter runs a launch's programs one after the other, those that send first, so a
message has to find room for all of it, where on a GPU others take of it meanwhile."""


def carry(cp: ring_la.ContextParallel) -> None:
    """From here on messages of a context go so; rings of states by messages, too, for the interpreter does not end some
    of the kernels that carry them, with more units than lanes. Collective."""
    with _folder(cp.comm) as folder:
        own = over_files(cp.rank, cp.size, folder, chunk=CHUNK, step=CHUNK)
    boxes: Any = own.mailboxes
    room = 4 * CHUNK * boxes.constants["BLOCKS"] * boxes.constants["SLOTS"]
    launch = boxes._launch

    def launched(message: Message, stream: Any) -> None:
        assert message.size <= room, f"a message of {message.size} bytes, of which the interpreter takes {room}"
        launch(message, stream)

    boxes._launch, own.mailboxes = launched, None
    own.agreement.backwards, own.copies = cp.comm.agreement.backwards, True
    cp.comm = own


@contextmanager
def memory() -> Iterator[None]:
    """Around calls of such a context: memory that is opened is files."""
    with mock.patch.object(Memory, "open", _Mapped.open):
        yield


class _Mapped(Files):
    @classmethod
    def open(cls, own: Any, size: int) -> Files:
        Files.opened = 0  # of this group, not of all that the process is in: files are named by it
        with _folder(own) as cls.folder:
            return super().open(own, size)


@contextmanager
def _folder(group: Group) -> Iterator[str]:
    """A folder for files that live on as memory alone. Collective."""
    name = [tempfile.mkdtemp() if group.rank == 0 else None]
    dist.broadcast_object_list(name, 0, group.group)
    yield str(name[0])
    dist.barrier(group.group)
    if group.rank == 0:
        shutil.rmtree(str(name[0]))
