"""Bytes that a SANA layer sends, counted: ours, and linear attention as xDiT's Sana layer has it over a ring.

    torchrun --nproc_per_node 4 -m benchmarks.peers.sana_bytes --xfuser CHECKOUT --sizes 1024,2048

One layer of SANA 1.6B (70 heads of 32, 2,240 channels), bf16, two rows for guidance, on CPUs over gloo. Ours is what
two layers send beyond one, convolution's rows among it. xDiT's is its own function, read from a checkout of it: it
imports on GPUs alone, so what it imports is put in its place and what it posts is counted. Its convolution sends as
many rows as ours, before they are widened, and is not counted.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor
from yunchang.ring.utils import RingComm

import ring_la
from ring_la.integrations.diffusers import parallelize

from ..options import counts

HEADS, WIDTH, BATCH = 70, 32, 2
RING = Path("xfuser/core/long_ctx_attention/ring/ring_flash_attn.py")


def ours(size: int, cp: ring_la.ContextParallel) -> int:
    """Bytes that this rank sends for a layer of an image of `size` rows and columns."""
    sent = []
    for layers in (1, 2):
        torch.manual_seed(0)
        model = parallelize(diffusers.SanaTransformer2DModel(num_layers=layers).bfloat16(), cp)
        inputs = dict(
            hidden_states=torch.randn(BATCH, 32, size // 32, size // 32), timestep=torch.full((BATCH,), 500.0)
        )
        inputs |= dict(encoder_hidden_states=torch.randn(BATCH, 300, 2304))
        given = {n: x.bfloat16() for n, x in inputs.items()}
        with torch.no_grad():
            model(**given)  # the first call compares more
            before = cp.comm.bytes_sent
            model(**given)
        sent.append(cp.comm.bytes_sent - before)
    return sent[1] - sent[0]


def theirs(size: int, attend: Callable[..., Tensor]) -> int:
    """Bytes that this rank sends for linear attention over xDiT's ring."""
    sent, post = 0, dist.batch_isend_irecv

    def counted(ops: list[dist.P2POp]) -> Any:
        nonlocal sent
        sent += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return post(ops)

    shape = (BATCH, (size // 32) ** 2 // dist.get_world_size(), HEADS, WIDTH)
    q, k, v = (torch.randn(shape).bfloat16() for _ in range(3))
    with mock.patch.object(dist, "batch_isend_irecv", counted), torch.no_grad():
        attend(dist.group.WORLD, q, k, v)
    return sent


def of_xdit(checkout: Path) -> Callable[..., Tensor]:
    """xDiT's forward of linear attention over a ring."""
    names = ("xfuser.core.long_ctx_attention", "xfuser.core.cache_manager.cache_manager", "xfuser.envs")
    stands = {name: types.ModuleType(name) for name in names}
    stands[names[0]].xFuserLongContextAttention = object  # type: ignore[attr-defined]
    stands[names[1]].get_cache_manager = None  # type: ignore[attr-defined]
    stands[names[2]]._is_npu = lambda: False  # type: ignore[attr-defined]
    parents = {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)}
    with mock.patch.dict(sys.modules, {**{p: types.ModuleType(p) for p in parents}, **stands}):
        sys.modules["xfuser"].envs = stands[names[2]]  # type: ignore[attr-defined]
        text = (checkout / RING).read_text().replace("AttnType.FA", "None")  # a default, of what GPUs alone import
        found = types.ModuleType("xdit_ring")
        exec(compile(text, str(checkout / RING), "exec"), found.__dict__)
    found.RingComm = RingComm  # type: ignore[attr-defined]
    return found.xdit_sana_ring_flash_attn_forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xfuser", type=Path, default=None, help="a checkout of xDiT; without, ours alone")
    parser.add_argument("--sizes", type=counts, default=[1024], help="rows of pixels, as many columns")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    cp = ring_la.ContextParallel(scan="ring", attention="ring")
    attend = None if options.xfuser is None else of_xdit(options.xfuser)
    for size in options.sizes:
        row = [ours(size, cp), 0 if attend is None else theirs(size, attend)]
        every = [None] * cp.size
        dist.all_gather_object(every, row)
        if cp.rank == 0:
            for rank, (mine, other) in enumerate(every):  # type: ignore[misc]
                print(f"{size} x {size}, rank {rank}: ring_la {mine:,} bytes, xDiT's ring {other:,}", flush=True)


if __name__ == "__main__":
    main()
