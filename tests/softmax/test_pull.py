"""Keys pulled from their owner's memory and gradients pushed into it: order of copies, barriers and places in the
mailbox, on files shared by the ranks in place of symmetric memory. The GPU's own check is
``tests.gpu.check_attention --transport symmetric``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ring_la
from ring_la.comm.memory import Memory, cut
from tests.distributed.pool import group
from tests.softmax.cases import DOCUMENTS, draw, truth
from tests.softmax.test_sharded import KINDS, compare


class Shared:
    """Memory of all ranks, as files; copies are done at once."""

    def __init__(self, folder: str, own, size: int) -> None:
        self.group, self.size = own.group, size
        self.seen = [
            torch.from_file(f"{folder}/{own.size}-{size}-{r}", shared=True, size=size, dtype=torch.uint8)
            for r in range(own.size)
        ]
        self.barrier()

    def rooms(self, rank: int, first: int, shapes: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
        return cut(self.seen[rank], first, shapes, dtype)

    def barrier(self) -> None:
        dist.barrier(self.group)

    def now(self) -> None: ...

    def wait(self, point: None) -> None: ...

    def beside(self, after: None, *read: torch.Tensor):
        return nullcontext()

    def join(self) -> None: ...


def check_pull(rank: int, P: int, folder: str, documents: str, features: tuple[str, ...]) -> list[str]:
    cp = ring_la.ContextParallel(group(P), scan="ring")
    cp.comm.copies = True  # as on the GPUs of one host
    memory = cache(lambda own, size: Shared(folder, own, size))
    T, cu = DOCUMENTS[documents]
    bad = []
    with mock.patch.object(Memory, "kept", memory):
        for kind in KINDS:
            layout = cp.layout(T, kind, cu_seqlens=cu)
            for feature in features:
                errors = compare(layout, draw(documents, feature), truth(documents, feature), "ring")
                bad += [f"{kind} {feature} {n} {e:.1e}" for n, e in errors.items() if e > 1e-9]
    return bad


@pytest.mark.parametrize(
    ("P", "documents", "features"),
    [
        (2, "short", ("causal", "two for one")),
        (3, "uneven", ("causal", "all", "values narrower", "window")),
        (4, "packed", ("two for one", "all rear", "window both sides")),
        (4, "many", ("causal", "full")),
    ],
)
def test_pulled_is_whole(ranks, tmp_path, P, documents, features):
    bad = ranks.run(P, check_pull, P, str(tmp_path), documents, features)
    assert not any(bad), bad
