"""The ranks of a process group as one of them sees it, and what they share beside messages: the job's store."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # here, before there is a group, which defaults of its functions would keep for good

from ..errors import ArgumentError, PeerError, UnsupportedError


class Members:
    """The ranks of a process group, addressed by group rank.

    Args:
        group: a ProcessGroup; None for the default group.
        timeout: how long a peer may take before a wait becomes a `PeerError`.

    Attributes:
        group: the ProcessGroup. size, rank: how many ranks it has, and this one's.
        global_ranks: of each rank, its rank in the job.
        on_cuda: whether messages are on the GPU (NCCL). device: where they are.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError("group", "an initialised torch.distributed (dist.init_process_group)", "none")
        self.group = dist.group.WORLD if group is None else group
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ArgumentError("group", "a group this rank belongs to", f"one without global rank {dist.get_rank()}")
        self.global_ranks = dist.get_process_group_ranks(self.group)
        self.on_cuda = "nccl" in dist.get_backend_config(self.group)  # which an unnamed backend has a name in, too
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else torch.device("cpu")
        self.timeout, self._process = timeout, os.getpid()
        if not self.on_cuda:
            atexit.register(_let_go, weakref.ref(self))

    def names(self, ranks: Sequence[int]) -> str:
        """These ranks as errors name them."""
        return ", ".join(f"rank {r} (global rank {self.global_ranks[r]})" for r in ranks)

    def refuse_forked(self) -> None:
        """Raise an `UnsupportedError` in a fork of the process that the group is of: it has its memory and connections,
        and none of the threads behind them."""
        if os.getpid() != self._process:
            expected, hint = "a group of this process", "Split calls belong into the process that made the group"
            raise UnsupportedError("group", expected, f"one of process {self._process}, which was forked", hint)

    @property
    def spoiled(self) -> str:
        """Who has left messages in the process group that nobody expects; an empty string: nobody is known to have."""
        store, name = _job_store("spoiled"), self.group.group_name
        return self.names([int(store.get(name))]) if store.check([name]) else ""

    def spoil(self) -> None:
        """Tell whoever comes to this process group later that messages of this rank are left in it."""
        with suppress(RuntimeError):  # the store's host may be gone, and the job with it
            _job_store("spoiled").set(self.group.group_name, str(self.rank))

    def refuse_spoiled(self) -> None:
        """Raise a `PeerError` if the process group is of no more use."""
        if self.size > 1 and (name := self.spoiled):
            raise PeerError(
                f"the process group is of no more use: {name} had sent messages when its ranks disagreed. Make another"
            )


def _job_store(part: str) -> dist.Store:
    """A part of the job's store."""
    return dist.PrefixStore(f"ring_la/{part}", dist.distributed_c10d._get_default_store())


def _let_go(members: weakref.ref[Members]) -> None:
    """Let a group end that the program has destroyed, while the interpreter still runs.

    gloo's threads end with the group. One that gives a message's tensors back later needs an interpreter that is no
    more: the process would abort ("terminate called without an active exception") with all its work done.
    """
    ending = members()
    if ending is not None:
        vars(ending).pop("group", None)


class JobStore:
    """What the ranks of one group keep in the job's store, apart from all other groups.

    Attributes:
        name: a number that no other group has, the same on all its ranks.
    """

    def __init__(self, name: int) -> None:
        self.name = name

    @property
    def host(self) -> str:
        """The address of the job's store; an empty string: it has none."""
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return getattr(store, "host", "")

    def of(self, purpose: str) -> dist.Store:
        """The part of the store for one purpose."""
        return _job_store(f"{self.name}/{purpose}")
