"""The same bits: a deterministic call over the ranks, documents in another order, and one on a rank by itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import ring_la

from .case import Case
from .problem import Here, Problem, Tensors, make
from .strides import lain, level


@functools.cache
def alone() -> ring_la.ContextParallel:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return ring_la.ContextParallel(group, deterministic=True)


def bits(case: Case, cp: ring_la.ContextParallel) -> str:
    """What differs, in words; nothing: empty."""
    how = {n: x for n, x in case.how.items() if n not in ("of", "order")}
    plain = Case(**{**vars(case), "op": case.how["of"], "how": how})
    order = case.how["order"]
    if plain.how.get("initial") or plain.how.get("final"):  # states have the order of the documents
        order = sorted(order)
    one = run(plain, alone(), "contiguous", sorted(order))
    some = run(plain, cp, case.kind, order)
    return "; ".join(f"{n} has other bits" for n, x in one.items() if not torch.equal(x, some[n]))


def run(case: Case, cp: ring_la.ContextParallel, kind: str, order: Sequence[int]) -> Tensors:
    """All results and gradients, whole, tokens in the case's own order."""
    problem, dtype = make(case), case.torch_dtype
    cu = case.cu or (0, case.T)
    places = torch.cat([torch.arange(cu[i], cu[i + 1]) for i in order])
    ends = torch.tensor([0] + [cu[i + 1] - cu[i] for i in order]).cumsum(0).tolist()
    layout = cp.layout(case.T, kind, None if case.cu is None else ends)
    whole = {n: level(case, x) if n in problem.tokens else x for n, x in problem.inputs.items()}
    given = {n: x.to(problem.dtypes.get(n, dtype)) for n, x in whole.items()}
    leaves = {n: _own(case, x, n, problem, layout, places) for n, x in given.items()}
    outputs = problem.ours(leaves, Here(cp, layout, {}))
    rng, loss, back = torch.Generator().manual_seed(case.seed + 1), torch.zeros(()), torch.argsort(places)
    found: Tensors = {}
    for n, dim in problem.where.items():
        y = outputs[n]
        whole = layout.gather(y.detach(), dim).index_select(dim, back) if isinstance(dim, int) else y.detach()
        found[n] = whole
        d = torch.randn(whole.shape, generator=rng).to(y.dtype)
        d = layout.shard(d.index_select(dim, places), dim) if isinstance(dim, int) else d * (layout.rank == 0)
        if y.requires_grad:
            loss = loss + (y * d).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (n, x), g in zip(leaves.items(), grads):
        g = torch.zeros_like(x) if g is None else g
        if n in problem.tokens:
            found[f"d{n}"] = layout.gather(g).index_select(1, back)
        else:
            found[f"d{n}"] = cp.comm.all_reduce(g).wait() if n in problem.shared else g
    return found


def _own(case: Case, x: Tensor, name: str, problem: Problem, layout: ring_la.ShardedLayout, places: Tensor) -> Tensor:
    x = layout.shard(x.index_select(1, places)) if name in problem.tokens else x
    return lain(case, name, x).requires_grad_()
