"""The process group that a sequence is split over, and its axes where it is a two-dimensional mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm import Group
from ..errors import ArgumentError


@dataclass(frozen=True)
class Grid:
    """The axes of a two-dimensional mesh, as attention uses them.

    Attributes:
        ulysses: ranks that exchange tokens for heads.
        ring: ranks that hold the same heads.
        holders: for each rank of `ring`, the ranks of the whole group it exchanged tokens with.
    """

    ulysses: Group
    ring: Group
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, whole: Group, transport: str) -> Grid:
        """The axes of `mesh`, whose ranks are those of `whole`."""
        carried = "torch" if transport == "torch" else "auto"
        ulysses, ring = (Group(mesh.get_group(axis), whole.timeout, carried) for axis in ("ulysses", "ring"))
        by_ring = mesh.mesh if mesh.mesh_dim_names == ("ring", "ulysses") else mesh.mesh.T
        rows = [sorted(row) for row in by_ring.tolist()]
        lines = [next(row for row in rows if rank in row) for rank in ring.global_ranks]
        return cls(ulysses, ring, tuple(tuple(whole.global_ranks.index(r) for r in line) for line in lines))


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """What a `ContextParallel` was given, as a group; None: the default group. Collective for a mesh of two axes."""
    if isinstance(group, DeviceMesh):
        if group.ndim == 1:
            return group.get_group()
        if group.ndim != 2 or set(group.mesh_dim_names or ()) != {"ulysses", "ring"}:
            got = f"one of shape {tuple(group.shape)} with axes {group.mesh_dim_names}"
            expected = 'a one-dimensional DeviceMesh, or a two-dimensional one with axes "ulysses" and "ring"'
            raise ArgumentError("group", expected, got, 'Pick an axis: mesh["context"]')
        ranks = sorted(group.mesh.flatten().tolist())
        if len(ranks) == dist.get_world_size():
            return None
        root = getattr(group, "_root_mesh", None)
        if root is not None and root.size() == dist.get_world_size():  # all ranks are here, and make all parts' groups
            return group._flatten().get_group()
        made: Any = dist.new_group(ranks, use_local_synchronization=True)
        return made
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group", "a ProcessGroup, a DeviceMesh or None", type(group).__name__)
    return group
