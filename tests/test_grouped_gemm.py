"""Grouped GEMM: against a matrix at a time, its derivatives, its operators' registration, and what it refuses."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from ring_la.errors import ArgumentError, UnsupportedError
from ring_la.grouped_gemm import grouped_gemm
from ring_la.kernels.grouped import BACKENDS, GroupedProduct, choose, load
from ring_la.kernels.grouped.preference import ON_CUDA
from ring_la.kernels.grouped.tuning import CANDIDATES, HOPPER, tiles_for

SIZES = [(3, 4, 2), (0, 5, 0, 4), (9,), (0, 0, 0), (1, 0, 7, 0)]
OPS = {"rows": torch.ops.ring_la.grouped_rows, "outer": torch.ops.ring_la.grouped_outer}


def operands(sizes, k=4, n=3, dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(len(sizes))
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    a, b = make(sum(sizes), k), make(len(sizes), k, n)
    return a.requires_grad_(grad), b.requires_grad_(grad), torch.tensor(sizes)


def one_by_one(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    parts = a.split(sizes.tolist())
    return torch.cat([x @ y for x, y in zip(parts, b, strict=True)])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(sizes):
    a, b, group_sizes = operands(sizes, grad=True)
    out, expected = grouped_gemm(a, b, group_sizes), one_by_one(a, b, group_sizes)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((out * weight).sum(), (a, b)),
        torch.autograd.grad((expected * weight).sum(), (a, b)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sizes", [(2, 0, 3), (0, 0), (1, 4)], ids=str)
def test_gradcheck_to_second_order(sizes):
    a, b, group_sizes = operands(sizes, k=3, n=2, grad=True)
    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, group_sizes), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: grouped_gemm(a, b, group_sizes), (a, b))
    d = torch.randn(sum(sizes), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, d: OPS["outer"](a, d, group_sizes, "auto", True), (a, d))


@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_one_gradient_alone(wants):
    a, b, sizes = operands((2, 3))
    a, b = a.requires_grad_(wants[0]), b.requires_grad_(wants[1])
    grouped_gemm(a, b, sizes).square().sum().backward()
    assert (a.grad is not None, b.grad is not None) == wants


def test_the_graph_is_not_lost():
    """Every backend's result is part of the graph, whatever computed it."""
    a, b, sizes = operands((2, 3), k=8, n=8, dtype=torch.float32, grad=True)
    for backend in ("auto", "loop", "torch"):
        out = grouped_gemm(a, b, sizes, backend=backend)
        assert out.requires_grad
        assert "ring_la_grouped_rows" in type(out.grad_fn).__name__
        out.sum().backward()
    assert a.grad.abs().sum() > 0
    assert b.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["loop", "torch"])
@pytest.mark.parametrize("by_columns", [False, True])
def test_backends_agree(backend, dtype, by_columns):
    a, b, sizes = operands((3, 0, 6), k=16, n=8)
    expected = one_by_one(a, b, sizes)
    b = b.mT.contiguous().mT if by_columns else b
    leaves = [x.to(dtype).detach().requires_grad_() for x in (a, b)]
    out = grouped_gemm(*leaves, sizes, backend=backend)
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    grads = torch.autograd.grad((out * out.detach()).sum(), leaves)
    reference = [x.detach().double().requires_grad_() for x in (a, b)]
    truth = one_by_one(*reference, sizes)
    for ours, theirs in zip(grads, torch.autograd.grad((truth * truth.detach()).sum(), reference), strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("product", ["rows", "outer"])
@pytest.mark.parametrize("backend", ["loop", "torch"])
def test_rows_past_the_sizes(product, backend):
    """They belong to no group: zero in C, absent from dB, even when they hold NaN."""
    a, b, sizes = operands((3, 2, 0), k=8, n=8, dtype=torch.float32)
    d = torch.randn(9, 8)
    a = torch.cat([a, torch.full((4, 8), float("nan"))])
    d[5:] = float("nan")
    y = b if product == "rows" else d
    out = load(backend).compute(GroupedProduct(product, a, y, sizes))
    whole = load("loop").compute(GroupedProduct(product, a[:5], b if product == "rows" else d[:5], sizes))
    torch.testing.assert_close(out[:5] if product == "rows" else out, whole)
    if product == "rows":
        assert (out[5:] == 0).all()
    else:
        assert (out[2] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (5, 1, 0, 2), (5, 1, 4, 0), (0, 0, 4, 2)], ids=str)
def test_nothing_to_multiply(shape):
    m, g, k, n = shape
    a, b = torch.randn(m, k, requires_grad=True), torch.randn(g, k, n, requires_grad=True)
    sizes = torch.zeros(g, dtype=torch.int64)
    if g:
        sizes[0] = m
    out = grouped_gemm(a, b, sizes)
    assert out.shape == (m, n)
    assert not out.any()
    out.sum().backward()
    assert a.grad.shape == a.shape
    assert b.grad.shape == b.shape


def test_strided_operands_give_the_same_numbers():
    """Transposed, sliced, expanded: the same numbers, and gradients in the operands' shapes."""
    a, b, sizes = operands((3, 4), k=4, n=4)
    expected = one_by_one(a, b, sizes)
    wide = torch.stack([a, a], -1)[..., 0]
    cases = [(a.T.contiguous().T, b), (wide, b), (a, b.mT.contiguous().mT), (a, torch.stack([b, b], -1)[..., 1])]
    for x, y in cases:
        torch.testing.assert_close(grouped_gemm(x, y, sizes), expected)
    shared = b[:1].expand(2, 4, 4)
    torch.testing.assert_close(grouped_gemm(a, shared, sizes), a @ b[0])
    torch.testing.assert_close(grouped_gemm(a.float(), shared.float(), sizes, backend="torch"), (a @ b[0]).float())
    x = a.clone().requires_grad_()
    grouped_gemm(x, b, sizes).sum().backward()  # an expanded gradient
    torch.testing.assert_close(x.grad, torch.cat([b[0].sum(1).expand(3, 4), b[1].sum(1).expand(4, 4)]))


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_gradient_lies_as_its_matrices_do(by_columns):
    """Or autograd would copy it, as large as all weights, to where they are."""
    a, b, sizes = operands((2, 0, 3))
    stored = (b.mT.contiguous() if by_columns else b).requires_grad_()
    grouped_gemm(a, stored.mT if by_columns else stored, sizes).sum().backward()
    assert stored.grad.is_contiguous()
    (grad,) = torch.autograd.grad(grouped_gemm(a, y := (stored.mT if by_columns else stored), sizes).sum(), y)
    assert grad.stride() == y.stride()


def test_sizes_as_int32():
    a, b, sizes = operands((2, 3))
    torch.testing.assert_close(grouped_gemm(a, b, sizes.int()), grouped_gemm(a, b, sizes))


def test_autocast_multiplies_in_its_dtype():
    a, b, sizes = operands((2, 3), dtype=torch.float32, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_gemm(a, b, sizes)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("product", ["rows", "outer"])
def test_operators_have_right_schemas_and_fakes(product, grad):
    a, b, sizes = operands((2, 0, 3), grad=grad)
    y = b if product == "rows" else torch.randn(5, 3, dtype=torch.float64, requires_grad=grad)
    torch.library.opcheck(OPS[product].default, (a, y, sizes, "auto", True))


def test_compile_whole_with_dynamic_sizes():
    def loss(a, b, sizes):
        return (grouped_gemm(a * 2, b.mT, sizes).relu() ** 2).sum()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for m, g in ((7, 2), (12, 3), (5, 2)):
        a, b, _ = operands([m] + [0] * (g - 1), k=4, n=4, dtype=torch.float32)
        b = b.detach()
        sizes = torch.tensor([m - 2] + [2] + [0] * (g - 2))
        grads = {}
        for function in (loss, compiled):
            x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
            grads[function] = torch.autograd.grad(function(x, y, sizes), (x, y))
        for ours, theirs in zip(grads[compiled], grads[loss], strict=True):
            torch.testing.assert_close(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_lists_are_multiplied_one_by_one():
    a, b, sizes = operands((2, 0, 3), k=8, n=8, dtype=torch.float32, grad=True)
    rows, matrices = list(a.split(sizes.tolist())), list(b)
    expected = one_by_one(a, b, sizes).split(sizes.tolist())
    for backend in ("auto", "loop", "torch"):
        out = grouped_gemm(rows, matrices, backend=backend)
        assert isinstance(out, list)
        for ours, theirs in zip(out, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert torch.cat(out).requires_grad
    assert grouped_gemm([], []) == []
    uneven = grouped_gemm([torch.ones(2, 3), torch.ones(4, 5)], [torch.ones(3, 6), torch.ones(5, 7)])
    assert [tuple(x.shape) for x in uneven] == [(2, 6), (4, 7)]
    with pytest.raises(UnsupportedError, match="several shapes"):
        grouped_gemm([torch.ones(2, 3), torch.ones(4, 5)], [torch.ones(3, 6), torch.ones(5, 7)], backend="torch")


A, B, S = torch.ones(5, 4), torch.ones(2, 4, 3), torch.tensor([2, 3])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("a", (torch.ones(5), B, S)),
        ("a", (A.int(), B.int(), S)),
        ("a", (A.to_sparse(), B, S)),
        ("b", (A, B.to_sparse(), S)),
        ("a[0]", ([A.to_sparse()], [B[0]])),
        ("b", (A, torch.ones(4, 3), S)),
        ("b", (A, B.mT, S)),
        ("b", (A, B.double(), S)),
        ("b", (A, B.to("meta"), S)),
        ("group_sizes", (A, B, [2, 3])),
        ("group_sizes", (A, B, None)),
        ("group_sizes", (A, B, S.float())),
        ("group_sizes", (A, B, torch.tensor([5]))),
        ("group_sizes", (A, B, torch.tensor([2, 2]))),
        ("group_sizes", (A, B, torch.tensor([6, -1]))),
        ("group_sizes", ([A], [B[0]], S)),
        ("b", ([A], B)),
        ("b", ([A], [B[0], B[1]])),
        ("b[0]", ([A], [B])),
        ("b[0]", ([A], [B[0].T])),
        ("b[0]", ([A], [B[0].double()])),
        ("b[0]", ([A], [B[0].to("meta")])),
        ("a[0]", ([A.int()], [B[0].int()])),
    ],
)
def test_wrong_arguments_are_named(name, arguments):
    with pytest.raises(ArgumentError) as raised:
        grouped_gemm(*arguments)
    assert raised.value.name == name


def test_wrong_backends_are_named():
    with pytest.raises(ArgumentError, match="backend: expected 'auto' or one of"):
        grouped_gemm(A, B, S, backend="cublas")
    with pytest.raises(ArgumentError, match="backend: expected 'auto' or one of"):
        grouped_gemm(A, B, S, backend=["torch"])
    with pytest.raises(UnsupportedError, match=r"16 bytes.*These can: \['loop'"):
        grouped_gemm(A, B, S, backend="torch")
    with pytest.raises(UnsupportedError, match=r"These can: .*'loop'"):
        grouped_gemm(A, B, S, backend="cutlass")
    with pytest.raises(UnsupportedError, match="float64"):
        grouped_gemm(A.double(), B.double(), S, backend="torch")


def test_meta_tensors_have_the_right_shape():
    assert grouped_gemm(A.to("meta"), B.to("meta"), S.to("meta")).shape == (5, 3)


def test_vmap_is_refused():
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.vmap(lambda a: grouped_gemm(a, B, S))(torch.ones(3, 5, 4))


def test_a_gradient_falls_back_where_a_named_backend_cannot():
    """The forward product is strict; a gradient the named backend refuses goes to "auto"."""
    a, b, sizes = operands((2, 3), k=8, n=8, dtype=torch.float32, grad=True)
    calls = []
    backend = load("torch")
    unsupported = type(backend).unsupported
    try:
        type(backend).unsupported = lambda self, call: (
            calls.append(call.product) or ("no outer products" if call.product == "outer" else "")
        )
        grouped_gemm(a, b, sizes, backend="torch").sum().backward()
    finally:
        type(backend).unsupported = unsupported
    assert "outer" in calls
    assert b.grad is not None


def test_every_backend_answers_whether_it_takes_a_call():
    call = GroupedProduct("rows", A, B, S)
    for name in BACKENDS:
        backend = load(name)
        assert isinstance(backend.unsupported(call), str)
        assert next(iter(inspect.signature(backend.compute).parameters)) == "call"
    assert choose("auto", call) == "loop"
    for lines in ON_CUDA.values():
        assert all(set(order) <= set(BACKENDS) and order[-1] == "loop" for _, order in lines)
    for kind, candidates in CANDIDATES.items():
        assert tiles_for(kind, 10**9) == HOPPER[kind][-1][1]
        assert {tiles for _, tiles in HOPPER[kind]} <= set(candidates), "the table holds what was measured"


# CUTLASS cannot run here. The stand-in has the names and parameters of cutlass.operators 0.3.0, read in its source.


class StandInArguments:
    def __init__(self, A, B, out, accumulator_type, offsets, offsets_along, epilogue=None):
        assert offsets_along == "m"
        assert offsets.dtype == torch.int32
        assert accumulator_type == torch.float32
        assert A.dim() == 2
        assert B.dim() == 3
        assert out.dim() == 2
        assert B.stride(-2) == 1, "B by columns"
        self.A, self.B, self.out, self.offsets = A, B, out, offsets


class StandInOperator:
    def __init__(self, tile, two):
        self.metadata = SimpleNamespace(design=SimpleNamespace(tile_shape=tile, use_2cta_mma=two))
        self.compiled = 0

    def compile(self, args, target_sm=None):
        self.compiled += 1
        return f"artifact {self.metadata.design.tile_shape}"

    def run(self, args, compiled_artifact=None, stream=None, workspace=None, assume_supported_args=False):
        assert compiled_artifact == f"artifact {self.metadata.design.tile_shape}"
        start = 0
        args.out.fill_(float("nan"))
        for g, end in enumerate(args.offsets.tolist()):
            args.out[start:end] = args.A[start:end] @ args.B[g]
            start = end


@pytest.fixture
def cutlass(monkeypatch):
    """The CUTLASS backend on a stand-in for its package, allowed to run on the CPU."""
    from ring_la.kernels.grouped import cutlass_backend

    found = [StandInOperator((128, 128, 64), False), StandInOperator((256, 128, 64), True)]
    module = ModuleType("cutlass.operators")
    module.IndexPtrGroupedGemmArguments = StandInArguments
    module.get_operators = lambda args=None, metadata_filter=None, target_sm=None, **others: found
    monkeypatch.setitem(sys.modules, "cutlass", ModuleType("cutlass"))
    monkeypatch.setitem(sys.modules, "cutlass.operators", module)
    backend = load("cutlass")
    monkeypatch.setattr(backend, "ready", {})
    monkeypatch.setattr(cutlass_backend.Cutlass, "unsupported", lambda self, call: self.unsupported_layout(call))
    return SimpleNamespace(backend=backend, found=found)


def test_cutlass_trains_through_its_wrapper(cutlass):
    a, w, sizes = operands((3, 0, 4), k=8, n=8, dtype=torch.bfloat16, grad=True)
    for _ in range(2):
        out = grouped_gemm(a, w.mT, sizes, backend="cutlass")  # w [G, N, K], as linear layers store it
        torch.testing.assert_close(out, grouped_gemm(a, w.mT, sizes, backend="loop"))
    assert [operator.compiled for operator in cutlass.found] == [0, 1], "the larger tile, compiled once"
    grads = torch.autograd.grad(out.sum(), (a, w))
    for ours, theirs in zip(grads, torch.autograd.grad(grouped_gemm(a, w.mT, sizes).sum(), (a, w)), strict=True):
        torch.testing.assert_close(ours, theirs)
    padded = cutlass.backend.compute(GroupedProduct("rows", torch.cat([a, a]).detach(), w.mT.detach(), sizes))
    assert not padded[7:].any()


def test_cutlass_refuses_by_name(cutlass):
    a, b, sizes = operands((3, 4), k=8, n=8, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="stored by columns"):
        grouped_gemm(a, b, sizes, backend="cutlass")
    with pytest.raises(UnsupportedError, match="bfloat16 and float16"):
        grouped_gemm(a.float(), b.float().mT.contiguous().mT, sizes, backend="cutlass")
    a, b, sizes = operands((3, 4), k=8, n=4, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="16 bytes"):
        grouped_gemm(a, b.mT.contiguous().mT, sizes, backend="cutlass")


def test_cutlass_signatures():
    """Against the package itself, where it is installed."""
    operators = pytest.importorskip("cutlass.operators")
    ours = list(inspect.signature(StandInArguments.__init__).parameters)
    assert list(inspect.signature(operators.IndexPtrGroupedGemmArguments.__init__).parameters) == ours
    for name in ("compile", "run"):
        theirs = inspect.signature(getattr(operators.Operator, name)).parameters
        assert set(inspect.signature(getattr(StandInOperator, name)).parameters) <= set(theirs)
