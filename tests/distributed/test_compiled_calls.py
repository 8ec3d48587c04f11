"""Split calls within a compiled graph: one graph without a break, with the numbers and gradients of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import ring_la
from ring_la import indexers
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
    for name in ("mamba3", "gated_delta_product", "hgrn", "ttt_linear", "mesa_net"):
        given = {n: t.detach() for n, t in make_inputs(name, 1, T).items() if isinstance(t, Tensor)}
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
    out["own normalizer"] = lambda *x: normalized(layout, *x), five(layout)
    out["keys in FP8"] = lambda *x: ring_la.attention(*x, layout=layout, kv_comm_dtype=torch.float8_e4m3fn)[:1], qkv
    out["indexed latents"] = partial(indexed, layout), index_tensors(layout)
    rows = [
        layout.shard(normal(30 + n, 1, T, *shape)) for n, shape in enumerate([(2, 4), (4,), (2, 4), (2, 4), (2, 4)])
    ]
    out["blocks"] = partial(blocks, layout), rows
    out["nsa"] = lambda *x: sparse(layout, *x), nsa_tensors(layout)
    return out


def index_tensors(layout) -> list[Tensor]:
    """Index queries, keys and weights, queries, latents, rotary parts; then the up-projections."""
    shapes = [(3, 4), (4,), (3,), (2, 6), (8,), (2,)]
    local = [layout.shard(normal(40 + n, 1, layout.seq_len, *shape)) for n, shape in enumerate(shapes)]
    return [*local, normal(46, 2, 4, 8), normal(47, 2, 5, 8)]


def indexed(layout, iq: Tensor, ik: Tensor, iw: Tensor, *x: Tensor) -> tuple:
    """Latents that a lightning indexer picks, and what trains it."""
    picked = indexers.lightning_index(iq, ik, iw, 5, layout=layout).places
    q, latent, rotary, up_k, _ = x
    lowered = torch.cat([torch.einsum("bthn,hnl->bthl", q[..., :4], up_k), q[..., 4:]], -1)
    keys = torch.cat([latent, rotary], -1)[:, :, None]
    out = ring_la.mla(*x, chosen=picked, layout=layout)
    how = dict(attention_lse=out.lse, scale=q.shape[3] ** -0.5, layout=layout)
    return out.o, indexers.lightning_loss(iq, ik, iw, picked, lowered, keys, **how)[None]


def blocks(layout, iq: Tensor, ik: Tensor, *qkv: Tensor) -> tuple:
    """Blocks by each of the three indexers, one of whose keys a function of the caller's makes."""

    def pool(means: Tensor, first: Tensor) -> Tensor:
        return means * torch.cos(first.double())[:, None]

    how = dict(layout=layout)
    picked = [
        indexers.block_index(*qkv[:2], 3, 2, **how),
        indexers.full_block_index(iq, ik, 3, 2, pool=pool, **how),
        indexers.best_key_index(iq, ik, 3, 2, **how),
    ]
    return tuple(ring_la.sparse_attention(*qkv, p.places, block=3, **how).o for p in picked)


FORWARD_ONLY = ("keys in FP8",)


def normalized(layout, q: Tensor, k: Tensor, v: Tensor, nq: Tensor, nk: Tensor) -> tuple:
    how = dict(causal=False, normalize=True, normalizer_q=nq.abs(), normalizer_k=nk.abs(), output_final_state=True)
    return ring_la.linear_attention(q.abs(), k.abs(), v, layout=layout, **how)[:2]


def five(layout) -> list[Tensor]:
    return [layout.shard(normal(n, 1, layout.seq_len, 2, 4)) for n in range(8, 13)]


def nsa_tensors(layout) -> list[Tensor]:
    """Tokens, then the weights of the maps."""
    shapes = [(4, 4), *[(2, 4)] * 6, (4, 3)]
    local = [layout.shard(normal(20 + n, 1, layout.seq_len, *shape)) for n, shape in enumerate(shapes)]
    return [*local, normal(28, 4, 4, 4) / 3, normal(29, 4, 4, 4) / 3]


def sparse(layout, q: Tensor, *x: Tensor) -> tuple:
    """`nsa` with maps of the caller's, which know where a block stands."""

    def of(weight: Tensor) -> Callable:
        def compress(blocks: Tensor, positions: Tensor) -> Tensor:
            mixed = torch.einsum("bnlhd,lde->bnhe", blocks, weight)
            return torch.tanh(mixed) * torch.cos(positions.double() / 9)[:, None, None]

        return compress

    sizes = dict(length=4, stride=2, block=4, topk=4, window=5)
    out = ring_la.nsa(q, x[:3], x[3:6], x[6].sigmoid(), of(x[7]), of(x[8]), layout=layout, **sizes)
    return out.o, out.chosen.double()


def halo(grid, x: Tensor) -> tuple[Tensor, Tensor]:
    coming = grid.halo(x, 1, (2, 1))
    y = x * 2
    before, after = coming.wait()
    return before * y[:, :1], after


def results(f: Callable, tensors: list[Tensor], gradients: bool = True) -> list[Tensor]:
    """What a call gives, and the gradients of all tensors."""
    if not gradients:
        with torch.no_grad():
            return [*f(*tensors)]
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
        gradients, graphs = name not in FORWARD_ONLY, []
        want = results(f, tensors, gradients)

        def counted(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        got = results(torch.compile(f, backend=counted), tensors, gradients)
        found.append((name, len(graphs), max(error(a, b) for a, b in zip(got, want, strict=True))))
    return found


def test_split_calls_are_one_graph_and_the_same(ranks):
    for found in ranks.run(2, check):
        assert {name: graphs for name, graphs, _ in found} == dict.fromkeys([name for name, *_ in found], 1)
        assert all(apart < 1e-9 for *_, apart in found), found


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check_lengths(rank: int) -> list[tuple[int, float]]:
    """Graphs of functions whose layout is an argument, over lengths, and how far they are from eager calls."""
    cp, out = ring_la.ContextParallel(group(), scan="ring", attention="ring"), []
    for f, make in ((sparse, nsa_tensors), (normalized, five)):
        torch._dynamo.reset()
        before, worst = graphs(), 0.0
        compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (26, 33):
            layout = cp.layout(rows)
            pairs = [results(partial(g, layout), make(layout)) for g in (compiled, f)]
            worst = max(worst, *(error(a, b) for a, b in zip(*pairs, strict=True)))
        out.append((graphs() - before, worst))
    return out


def test_one_graph_serves_all_lengths(ranks):
    for found in ranks.run(2, check_lengths):
        assert all(count == 1 and apart < 1e-9 for count, apart in found), found


def everything(layout, other, layouts, x: Tensor, weight: Tensor, experts: Tensor) -> tuple[Tensor, ...]:
    """Tokens moved to the ranks and back, and what stands around recurrences: one after the other."""
    local = layout.shard(x)
    local = ring_la.short_conv(local, weight, layout=layout).o
    local = ring_la.token_shift(local, layout=layout).o + local
    local = ring_la.grouped_gemm(local[0], experts, torch.tensor([3, local.shape[1] - 3]))[None]
    q = local.unflatten(2, (2, 4))
    o = ring_la.linear_attention(q, q.sin(), q.cos(), causal=False, layout=layout).o
    for way in layouts:  # a strategy each
        o = o + ring_la.attention(o, q, q.cos(), layout=way).o
    turned = layout.convert(o, other)
    ids = torch.arange(T)[None]
    return layout.gather(o), turned, layout.targets(layout.shard(ids)).double()


def check_everything(rank: int) -> tuple[int, int, float]:
    """Graphs and breaks that the compiler counts, and how far results and gradients are from eager ones."""
    cps = [ring_la.ContextParallel(group(), scan="ring", attention=s) for s in ("ring", "all_gather", "ulysses")]
    layouts = [cp.layout(T) for cp in cps]
    f = partial(everything, layouts[0], cps[0].layout(T, "contiguous"), layouts)
    tensors = [normal(50, 1, T, 8), normal(51, 8, 3), normal(52, 2, 8, 8)]
    torch._dynamo.reset()
    told = torch._dynamo.explain(f)(*[t.clone().requires_grad_() for t in tensors])
    torch._dynamo.reset()
    got = results(torch.compile(f, fullgraph=True, backend="aot_eager"), tensors)
    apart = max(error(a, b) for a, b in zip(got, results(f, tensors), strict=True))
    return told.graph_count, told.graph_break_count, apart


def test_the_compiler_counts_no_break(ranks):
    """In whatever is cut, gathered, moved between layouts and labelled, and in attention by each strategy."""
    for graphs, breaks, apart in ranks.run(2, check_everything):
        assert (graphs, breaks) == (1, 0)
        assert apart < 1e-9
