"""What runs without the host, on the GPU: `pytest -m gpu tests/gpu/test_capture.py -n 14 --dist loadgroup`.

For every recurrence, short_conv, token_shift and the bidirectional form, forward and backward:

    sync      no host synchronisation, dense and packed (`torch.cuda.set_sync_debug_mode("error")`)
    graph     captured in a CUDA graph, replayed on other data, against the eager call
    stable    no kernel is compiled again when the length or the packing changes
    compile   torch.compile(fullgraph=True, dynamic=True) in chunk and recurrent mode over changing lengths, one graph
    decode    one-token steps from a state: no synchronisation, captured, compiled; in place where the step can

With `--dist loadgroup` the cases of an op go to one process, which compiles its kernels once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ring_la
from tests.support.recurrence_cases import RECURRENCES, error, make_inputs

pytestmark = pytest.mark.gpu
H, D, T = 4, 64, 1024
LIMIT = 1e-2
"""Between two runs of the same kernels in bf16; runs in different modes are farther apart."""
APART = 4e-2
OTHERS = ("short_conv", "token_shift", "bidirectional")
Inputs = dict[str, Tensor]


def op_of(name: str, **keywords) -> Callable[..., tuple]:
    """The public function as one from tensors to its results."""
    flags = {"dt_softplus": True} if name == "mamba2" else {}
    if name == "bidirectional":
        return lambda **x: ring_la.linear_attention(**x, causal=False, **keywords)
    if name == "short_conv":
        flags = {"activation": "silu"}
    return lambda **x: getattr(ring_la, name)(**x, **flags, **keywords)


def inputs(name: str, B: int = 1, length: int = T, seed: int = 0) -> Inputs:
    """bf16 on the GPU; gates and static decays fp32."""
    if name in ("short_conv", "token_shift"):
        generator = torch.Generator().manual_seed(seed)
        x = dict(x=torch.randn(B, length, H * D, generator=generator))
        if name == "short_conv":
            x |= dict(weight=torch.randn(H * D, 4, generator=generator), bias=torch.randn(H * D, generator=generator))
        return {n: t.to("cuda", torch.bfloat16).requires_grad_() for n, t in x.items()}
    drawn = make_inputs("linear_attention" if name == "bidirectional" else name, B, length, 2, H, D, D, seed=seed)
    wide = {"g", "w", "A", "D", "dt_bias"}
    return {
        n: t.detach().to("cuda", torch.float32 if n in wide else torch.bfloat16).requires_grad_()
        for n, t in drawn.items()
        if isinstance(t, Tensor)
    }


def both(op: Callable, x: Inputs, do: Tensor) -> list[Tensor]:
    """The output and the gradients."""
    o = op(**x).o
    return [o.detach(), *torch.autograd.grad(o, list(x.values()), do)]


def like_output(op: Callable, x: Inputs) -> Tensor:
    with torch.no_grad():
        return torch.randn_like(op(**x).o)


def apart(got: list[Tensor], want: list[Tensor]) -> float:
    return max(error(g, w) for g, w in zip(got, want, strict=True))


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def packed() -> Tensor:
    """T tokens in four documents, one of them empty."""
    return offsets(100, 0, 300, 624)


def without_sync(function: Callable[[], object]) -> object:
    """`function()`, where a synchronisation raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(function: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of `function`, and where its results come out."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


# -- the cases -----------------------------------------------------------------------------------------------


def check_sync(name: str, cu: Tensor | None = None) -> float:
    op, x = op_of(name, cu_seqlens=cu), inputs(name)
    do = like_output(op, x)
    want = both(op, x, do)
    return apart(without_sync(lambda: both(op, x, do)), want)


def check_graph(name: str, cu: Tensor | None = None) -> float:
    op, x, other = op_of(name, cu_seqlens=cu), inputs(name), inputs(name, seed=1)
    do = like_output(op, x)
    graph, out = captured(lambda: both(op, x, do))
    with torch.no_grad():
        for n, t in x.items():
            t.copy_(other[n])
    graph.replay()
    torch.cuda.synchronize()
    return apart(out, both(op, other, do))


def compiled_kernels() -> dict[str, int]:
    """How many variants of each Triton kernel this process holds."""
    from triton.runtime.jit import JITFunction

    found: dict[str, int] = {}
    for fn in gc.get_objects():
        if issubclass(type(fn), JITFunction):  # not isinstance, which asks weak proxies whose object is gone
            count = sum(len(entry[0]) for entry in fn.device_caches.values())
            if count:
                found[fn.__name__] = found.get(fn.__name__, 0) + count
    return found


def compiled_again(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """How many more variants of each kernel other lengths need, and other packings."""
    packings = (packed(), offsets(1, 2, 997), offsets(*[97] * 11), offsets(777))
    lengths = (T, 1000, 777, 3001)

    def run(length: int, cu: Tensor | None) -> None:
        op, x = op_of(name, cu_seqlens=cu), inputs(name, length=length)
        both(op, x, like_output(op, x))

    def grown(before: dict[str, int]) -> dict[str, int]:
        return {n: c - before.get(n, 0) for n, c in compiled_kernels().items() if c != before.get(n, 0)}

    run(lengths[0], None)
    before = compiled_kernels()
    for length in lengths[1:]:
        run(length, None)
    dense = grown(before)
    run(int(packings[0][-1]), packings[0])
    before = compiled_kernels()
    for cu in packings[1:]:
        run(int(cu[-1]), cu)
    return dense, grown(before)


def check_compile(name: str, mode: str | None) -> tuple[float, int]:
    """The worst error over three lengths, and the graphs they took."""
    torch._dynamo.reset()
    keywords = {} if mode is None else {"mode": mode}
    op = op_of(name, **keywords)
    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    stats, worst = torch._dynamo.utils.counters["stats"], 0.0
    graphs = stats["unique_graphs"]
    for length in (9, 33, 70) if mode == "recurrent" else (150, 333, 1000):
        x = inputs(name, length=length)
        do = like_output(op, x)
        worst = max(worst, apart(both(compiled, x, do), both(op, x, do)))
    return worst, stats["unique_graphs"] - graphs


@torch.no_grad()
def check_decode(name: str) -> float:
    """Ten one-token steps from a state of five tokens, eager, captured and compiled, against one call over all
    fifteen; and one step in place, captured once and replayed for each."""
    x = {n: t.detach() for n, t in inputs(name, B=3, length=15).items()}
    names = [n for n, t in x.items() if t.dim() > 2]

    def cut(a: int, b: int) -> Inputs:
        return {n: t[:, a:b].contiguous() if n in names else t for n, t in x.items()}

    mode = {} if name in OTHERS else {"mode": "recurrent"}
    op = op_of(name, output_final_state=True, **mode)
    whole = op_of(name)(**x).o

    def steps(function: Callable) -> list[Tensor]:
        state, outs = op(**cut(0, 5)).final_state, []
        for t in range(5, 15):
            out = function(**tokens[t - 5], initial_state=state)
            outs.append(out.o)
            state = out.final_state
        return outs

    tokens = [cut(t, t + 1) for t in range(5, 15)]

    def call(initial_state: Tensor, **y):
        return op_of(name, output_final_state=True, initial_state=initial_state, **mode)(**y)

    steps(call)
    worst = apart([torch.cat(without_sync(lambda: steps(call)), 1)], [whole[:, 5:]])
    graph, out = captured(lambda: steps(call))
    for o in out:
        o.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    worst = max(worst, apart([torch.cat(out, 1)], [whole[:, 5:]]))
    state = op(**cut(0, 5)).final_state
    kept, places = state.clone(), {n: t.clone() for n, t in tokens[0].items()}
    graph, o = captured(lambda: [op_of(name, initial_state=kept, in_place=True, **mode)(**places).o])
    kept.copy_(state)
    for t, token in enumerate(tokens, 5):
        for n, x_t in token.items():
            places[n].copy_(x_t)
        graph.replay()
        worst = max(worst, apart(o, [whole[:, t : t + 1]]))
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    return max(worst, apart([torch.cat(steps(compiled), 1)], [whole[:, 5:]]))


OPS = (*RECURRENCES, *OTHERS)


def over(ops: tuple[str, ...]) -> list:
    """Parameters, an op's in one process."""
    return [pytest.param(name, id=name, marks=pytest.mark.xdist_group(name)) for name in ops]


@pytest.mark.parametrize("documents", ["dense", "packed"])
@pytest.mark.parametrize("name", over(OPS))
def test_sync(name, documents, record_property):
    worst = check_sync(name, packed() if documents == "packed" else None)
    record_property("worst", worst)
    assert worst <= LIMIT


@pytest.mark.parametrize("documents", ["dense", "packed"])
@pytest.mark.parametrize("name", over(OPS))
def test_graph(name, documents, record_property):
    worst = check_graph(name, packed() if documents == "packed" else None)
    record_property("worst", worst)
    assert worst <= LIMIT


@pytest.mark.parametrize("name", over(OPS))
def test_stable(name):
    dense, packings = compiled_again(name)
    assert not dense, "over lengths"
    assert not packings, "over packings"


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
@pytest.mark.parametrize("name", over(RECURRENCES))
def test_compile(name, mode, record_property):
    compiles(name, mode, record_property)


@pytest.mark.parametrize("name", over(OTHERS))
def test_compile_without_modes(name, record_property):
    compiles(name, None, record_property)


def compiles(name: str, mode: str | None, record_property) -> None:
    worst, graphs = check_compile(name, mode)
    record_property("worst", worst)
    assert worst <= APART
    assert graphs <= 1, "over three lengths"


@pytest.mark.parametrize("name", over(tuple(n for n in OPS if n != "bidirectional")))
def test_decode(name, record_property):
    worst = check_decode(name)
    record_property("worst", worst)
    assert worst <= APART
