"""Split calls within a compiled graph: one graph without a break, with the numbers and gradients of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import ring_la
from tests.support.attention_cases import error
from tests.support.chosen_cases import SPLIT, draw, function_of
from tests.support.chosen_cases import T as ROWS
from tests.support.pool import group
from tests.support.recurrence_cases import make_inputs

T = 26


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cases(cp: ring_la.ContextParallel) -> dict[str, tuple[Callable, list[Tensor]]]:
    """Functions of this rank's tensors, and these."""
    out: dict[str, tuple[Callable, list[Tensor]]] = {}
    layout = cp.layout(ROWS)
    for feature in ("latents", "blocks of each head"):
        case = draw(feature, False)
        names, function = [*case.tensors], function_of(case)
        local = [layout.shard(t) if n in SPLIT else t for n, t in case.tensors.items()]
        how = case.keywords | dict(chosen=layout.shard(case.keywords["chosen"]), layout=layout)

        def attend(*x: Tensor, f=function, names=names, how=how) -> tuple:
            return f(**dict(zip(names, x)), **how)[:2]

        out[feature] = attend, local
    layout = cp.layout(T)
    for name in ("mamba3", "gated_delta_product", "hgrn", "gated_oja_rule"):
        given = {n: t.detach() for n, t in make_inputs(name, 1, T).items()}
        function = getattr(ring_la, name)
        shared = function.definition.shared
        local = [t if n in shared else layout.shard(t) for n, t in given.items()]

        def recur(*x: Tensor, f=function, names=tuple(given)) -> tuple:
            o, final = f(**dict(zip(names, x)), layout=layout, output_final_state=True)
            return (o, *(final if isinstance(final, tuple) else (final,)))

        out[name] = recur, local
    qkv = [layout.shard(normal(n, 1, T, 2, 4)) for n in range(3)]
    g, lam = -layout.shard(normal(3, 1, T, 2)).abs(), layout.shard(normal(4, 1, T, 2, 6))
    out["log-linear"] = lambda *x: ring_la.log_linear_attention(*x, layout=layout)[:1], [*qkv, g, lam]
    out["forgetting"] = lambda *x: ring_la.forgetting_attention(*x, layout=layout)[:2], [*qkv, g]
    rows = [layout.shard(normal(5, 1, T, 2, 3, 3)), layout.shard(normal(6, 1, T, 2, 3, 4))]
    out["scan"] = lambda A, b: (cp.scan(A, b, layout, reverse=True, exclusive=True),), rows
    grid = cp.grid((6, 5))
    x = normal(7, 2, *grid.local_shape)
    out["halo"] = partial(halo, grid), [x]
    return out


def halo(grid, x: Tensor) -> tuple[Tensor, Tensor]:
    coming = grid.halo(x, 1, (2, 1))
    y = x * 2
    before, after = coming.wait()
    return before * y[:, :1], after


def results(f: Callable, tensors: list[Tensor]) -> list[Tensor]:
    """What a call gives, and the gradients of all tensors."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = f(*leaves)
    used = [o for o in out if o.requires_grad]
    back = [normal(9 + i, *o.shape).to(o.dtype) for i, o in enumerate(used)]
    grads = torch.autograd.grad(used, leaves, back, allow_unused=True, materialize_grads=True)
    return [o.detach().nan_to_num(neginf=0.0) for o in out] + list(grads)


def check(rank: int) -> list[tuple[str, int, float]]:
    cp, found = ring_la.ContextParallel(group(), scan="ring", attention="ring"), []
    for name, (f, tensors) in cases(cp).items():
        torch._dynamo.reset()
        want, graphs = results(f, tensors), []

        def counted(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        got = results(torch.compile(f, backend=counted), tensors)
        found.append((name, len(graphs), max(error(a, b) for a, b in zip(got, want, strict=True))))
    return found


def test_split_calls_are_one_graph_and_the_same(ranks):
    for found in ranks.run(2, check):
        assert {name: graphs for name, graphs, _ in found} == dict.fromkeys([name for name, *_ in found], 1)
        assert all(apart < 1e-9 for *_, apart in found), found
