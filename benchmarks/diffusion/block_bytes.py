"""Bytes that the operations of one transformer block read and write, and what a step holds at once, Diffusers' way and
ours, without a GPU.

    python -m benchmarks.diffusion.block_bytes --model sana,sana_video --rows 12

A step of a model of published shape, in bf16, runs on meta tensors of its first size: they have shapes, strides and
dtypes and no numbers. One rank; two blocks less one. Every operation that is no view is counted, with what it reads
and what it writes; an operator of ring_la is one operation, and so is softmax attention. `turned` are the bytes of
operations that read one order of dimensions and write another, which take a GPU longer than a copy. "At once" is the
most memory that what a step makes takes together, in tensors of the image's tokens.
"""

from __future__ import annotations

import argparse
import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ring_la
from ring_la.cli.options import count
from ring_la.integrations.diffusers import linear, parallelize
from ring_la.kernels.fused import bidirectional as steps
from ring_la.kernels.fused import turned
from ring_la.recurrences import bidirectional as fused

from ..options import names
from .shapes import SHAPES, Shape

BANDWIDTH = 4.1e12
"""Bytes a second that a copy reads and writes on an H200."""
KERNELS = (
    mock.patch.multiple(fused, outer_sum=steps.outer_sum_op, read_quotient=steps.read_quotient_op),
    mock.patch.object(linear, "relu_and_turn", turned.relu_and_turn_op),
)
"""The operators that CUDA tensors go through."""
FREE = ("empty", "new_empty", "_unsafe_view", "detach", "set_")


def _attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


ATTENTION = mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention)
"""Of meta tensors softmax attention is many operations."""


class Counted(TorchDispatchMode):
    """Bytes by operation.

    Attributes:
        moved: read and written, by the operation's name and dtypes. turned: those of them that change the order.
        at_once: the most that tensors made here have taken together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.turned: Counter[str] = Counter()
        self.at_once = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.convolution.default:  # of meta tensors it forgets the order that cuDNN keeps
            out = out.contiguous(memory_format=suggest_memory_format(args[0]))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._hold([] if op.is_view else made)
        name = op.name().partition("::")[2].partition(".")[0]
        if op.is_view or not made or name.startswith(FREE):
            return out
        if name in ("copy_", "fill_", "zero_"):
            read = read[1:]
        if name.startswith(("new_", "zeros", "ones")):
            read = []
        if name == "index_select":  # of what it reads it takes a part
            read = made
        key = f"{name} {'+'.join(sorted(set(map(_dtype, read))))} > {_dtype(made[0])}"
        moved = sum(map(_bytes, (*read, *made)))
        self.moved[key] += moved
        large = max(map(_bytes, (*read, *made))) // 4
        orders = {_closest(x) for x in (*read, *made) if _bytes(x) >= large}
        if len(orders) > 1 and not name.endswith("mm"):
            self.turned[key] += moved
        return out

    def _hold(self, made: list[Tensor]) -> None:
        for x in made:
            storage = x.untyped_storage()
            if storage._cdata not in self._held:
                self._held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, storage._cdata)
        self.at_once = max(self.at_once, sum(self._held.values()))


def _bytes(x: Tensor) -> int:
    """Of its elements in memory: expanded ones once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride()):
        elements *= size if stride else 1
    return elements * x.element_size()


def _closest(x: Tensor) -> tuple[int, int]:
    """How many dimensions, and which of them has its elements next to each other."""
    strides = [(stride, d) for d, (size, stride) in enumerate(zip(x.shape, x.stride())) if size > 1]
    return x.dim(), min(strides, default=(1, 0))[1]


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def counted(shape: Shape, layers: int, cp: ring_la.ContextParallel | None) -> Counted:
    """A step of so many blocks; by ours with `cp`."""
    before = torch.get_default_dtype()
    with torch.no_grad(), ExitStack() as patched:
        for patch in (*KERNELS, ATTENTION):
            patched.enter_context(patch)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = getattr(diffusers, shape.model)(**shape.config, **shape.of_layers(layers)).eval()
                inputs = shape.inputs(torch.randn, shape.sizes[0], False)
        finally:
            torch.set_default_dtype(before)
        if cp is not None:
            parallelize(model, cp)
        with Counted() as found:
            model(**inputs, return_dict=False)
    return found


def a_block(shape: Shape, cp: ring_la.ContextParallel | None) -> tuple[Counter[str], Counter[str], int]:
    """Bytes of a block, moved and turned, and what a step of four blocks holds at once."""
    one, two, four = (counted(shape, layers, cp) for layers in (1, 2, 4))
    return two.moved - one.moved, two.turned - one.turned, four.at_once


def of_tokens(shape: Shape) -> int:
    """Bytes of a tensor of the image's tokens, of SANA's width, in bf16."""
    model = getattr(diffusers, shape.model)
    with torch.device("meta"):
        blocks = model(**shape.config, **shape.of_layers(1)).transformer_blocks
        latents = shape.inputs(torch.randn, shape.sizes[0], False)["hidden_states"]
    patch = shape.config.get("patch_size", 2 if latents.dim() == 5 else 1)
    return latents[0, 0].numel() // patch**2 * blocks[0].attn1.to_q.in_features * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=names(SHAPES), default=["sana", "sana_video"])
    parser.add_argument("--rows", type=count, default=20, help="operations to print")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cp = ring_la.ContextParallel(scan="ring", attention="ring")
    cp.comm.device = torch.device("meta")
    for model in options.model:
        shape = SHAPES[model]
        depth = next(iter(shape.depth.values()))
        for arm, given in (("diffusers", None), ("ours", cp)):
            moved, turned, held = a_block(shape, given)
            whole, strided = sum(moved.values()), sum(turned.values())
            ms, tensors = 1e3 * depth * whole / BANDWIDTH, held / of_tokens(shape)
            print(
                f"{model} {arm}: {whole / 1e6:,.0f} MB a block, {strided / 1e6:,.0f} turned; {depth} blocks {ms:.1f} ms"
                f"; {tensors:.1f} tensors at once"
            )
            for key, size in moved.most_common(options.rows):
                print(f"    {size / 1e6:9,.1f} MB  {turned[key] / 1e6:9,.1f} turned  {key}")


if __name__ == "__main__":
    main()
