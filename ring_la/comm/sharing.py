"""Memory of the GPUs of one host that every rank reaches: who can have it, and how it is mapped."""

from __future__ import annotations

import base64
import inspect
import json
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ..errors import UnsupportedError
from .agreement import Agreement
from .members import Members

UNIT = 16
"""Bytes that what is moved between ranks' memory is a multiple of."""


def allocate(members: Members, size: int) -> tuple[Tensor, Any]:
    """`size` zero bytes of torch's symmetric memory on every rank: this rank's, and the handle. Collective; every rank
    must have taken part in as many rendezvous of torch before, in whatever groups."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=members.device)
    own.zero_()
    torch.cuda.synchronize(members.device)  # before any rank may write into it
    return own, symmetric.rendezvous(own, members.group.group_name)


def share(members: Members, agreement: Agreement, own: Tensor) -> list[Tensor]:
    """Every rank's tensor `own`, its memory mapped here by CUDA's interprocess handles. Collective; one host.

    Not torch's rendezvous: that makes multicast objects where it can, and hangs in groups whose ranks have been in
    different numbers of rendezvous before.
    """
    torch.cuda.synchronize(members.device)  # what is in it now is seen by all
    names, arguments, failure = list(inspect.signature(rebuild_cuda_tensor).parameters), (), ""
    try:
        _, arguments = reduce_tensor(own)
    except RuntimeError as error:  # memory of an allocator that gives no handles
        failure = f"rank {members.rank} cannot share its memory: {str(error).splitlines()[0]}"
    told = agreement.tell(written(arguments))
    mapped = []
    for rank, text in enumerate(told):
        if rank == members.rank:
            mapped.append(own)
            continue
        theirs = dict(zip(names, read(text, arguments)))
        if failure or not theirs:
            break
        theirs |= {"storage_device": members.device.index, "event_sync_required": False}
        try:
            mapped.append(rebuild_cuda_tensor(**theirs))
        except RuntimeError as error:
            failure = f"rank {members.rank} cannot map the memory of rank {rank}: {str(error).splitlines()[0]}"
            break
    failures = [f for f in agreement.tell(failure) if f]
    if failures:
        raise UnsupportedError("transport", "'auto' or 'torch' for this group", f"'symmetric': {failures[0]}")
    return mapped


def written(handle: Sequence[Any]) -> str:
    """The numbers and bytes of a handle as text. Whatever stands in the job's store is data: nothing is unpickled."""
    plain = [x for x in handle if _is_plain(x)]
    return json.dumps([{"bytes": base64.b64encode(x).decode()} if isinstance(x, bytes) else x for x in plain])


def read(text: str, like: Sequence[Any]) -> list[Any]:
    """The handle that `written` gave, with the classes and dtypes of this rank's own one; empty: there is none."""
    values = iter(json.loads(text))
    if not like or text == "[]":
        return []
    return [_value(next(values)) if _is_plain(x) else x for x in like]


def _is_plain(x: object) -> bool:
    return x is None or isinstance(x, (bool, int, bytes, list, tuple))


def _value(x: Any) -> Any:
    if isinstance(x, dict):
        return base64.b64decode(x["bytes"])
    return torch.Size(x) if isinstance(x, list) else x


def unsupported(members: Members, agreement: Agreement) -> str:
    """Why this group cannot use symmetric memory; empty if it can. Collective."""
    if not members.on_cuda:
        return "the group's backend is not NCCL"
    here = socket.gethostname() if find_spec("triton") else "no triton"
    everywhere = agreement.tell(here)
    if "no triton" in everywhere:
        return f"triton is not installed on rank {everywhere.index('no triton')}"
    if len(set(everywhere)) > 1:
        return f"the ranks are on {len(set(everywhere))} hosts"
    return ""


def can_copy(members: Members, agreement: Agreement) -> bool:
    """Whether every rank can copy from every other's memory, as far as the driver says. Collective.

    It says so of GPUs that this process sees; where each process sees its own alone, the answer is no.
    """
    if members.size == 1 or unsupported(members, agreement):
        return False
    devices = [int(d) for d in agreement.tell(str(members.device.index))]
    here, seen = members.device.index, torch.cuda.device_count()
    others = [d for r, d in enumerate(devices) if r != members.rank]
    mine = all(d < seen and d != here and torch.cuda.can_device_access_peer(here, d) for d in others)
    return all(answer == "yes" for answer in agreement.tell("yes" if mine else "no"))
