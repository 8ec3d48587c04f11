"""yunchang's, ring-flash-attn's and xfuser's own code with ours, on flash-attn's kernels, over all GPUs:
`pytest -m gpu tests/gpu/test_upstream.py`.

Forward of one and backward of the other, both ways, over one ctx; ring-flash-attn's functions beside ours of the same
name; xfuser's `USP` with what `xdit.install` and `xdit.register` put in its place. What is not installed is skipped.
flash_attn's functions, which these libraries import, run on the kernel that is named (`benchmarks.peers.flash_attn`).
"""

from __future__ import annotations

import importlib
import types
from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks.peers.flash_attn import flash_attn, use
from ring_la.errors import RingLAError
from ring_la.integrations import ring_flash_attn, xdit
from ring_la.softmax.backends import Ask, choose
from tests.support.attention_cases import error
from tests.support.pool import group
from tests.support.yunchang_cases import DENSE, places

pytestmark = pytest.mark.gpu(needs=2)

KERNELS = ("flash", "flash_attn_2", "flash_attn_4")
LENGTH, HEADS, D, LIMIT = 512, (8, 2), 128, 1.5e-2
DOCUMENTS = (0, 128, 136, 384, 512)
"""Offsets of packed documents on a rank."""


def installed(name: str) -> types.ModuleType | str:
    """A library that imports flash_attn, or why it cannot be had."""
    with flash_attn():
        try:
            if name.startswith("xfuser"):  # 0.7.0 imports a function for NPUs that no release of yunchang has
                vars(importlib.import_module("yunchang.ring.utils")).setdefault("update_npu_out", None)
            return importlib.import_module(name)
        except ImportError as e:
            return f"{type(e).__name__}: {e}"


def absent(kernel: str) -> str:
    """Why a kernel cannot be had; "" where it can."""
    try:
        choose(Ask(torch.device("cuda"), torch.bfloat16, *HEADS, D, D), kernel)
    except RingLAError as e:
        return str(e)
    return ""


@cache
def whole(P: int, causal: bool = True, heads: tuple[int, int] = HEADS, cu: tuple = ()) -> tuple[list, list]:
    """q, k, v, do in bf16; o and the gradients in fp64, dense, of documents at offsets `cu`."""
    rng = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, P * LENGTH, h, D) for h in (heads[0], heads[1], heads[1], heads[0])]
    tensors = [torch.randn(*s, generator=rng, device="cuda").bfloat16() for s in shapes]
    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    repeated = [q.transpose(1, 2), *(x.repeat_interleave(heads[0] // heads[1], 2).transpose(1, 2) for x in (k, v))]
    sizes = [b - a for a, b in zip(cu, cu[1:])] or [P * LENGTH]
    documents = zip(*(x.split(sizes, 2) for x in repeated))
    o = torch.cat([F.scaled_dot_product_attention(*x, is_causal=causal) for x in documents], 2).transpose(1, 2)
    return tensors, [o.detach(), *torch.autograd.grad(o, (q, k, v), tensors[3].double())]


def apart(function, tensors: list, want: list, at: torch.Tensor) -> list[float]:
    """Errors of o, dq, dk and dv of this rank's tokens."""
    *leaves, do = (t[:, at].clone().requires_grad_() for t in tensors)
    o = function(*leaves)
    got = [o, *torch.autograd.grad(o, leaves, do.detach())]
    return [error(g, w[:, at]) for g, w in zip(got, want)]


def mixed(rank: int, P: int, kernel: str, kind: str) -> list[float] | str:
    """Their forward with our backward, and ours with theirs."""
    names = {"contiguous": "ring_flash_attn", "zigzag": "zigzag_ring_flash_attn", "stripe": "stripe_flash_attn"}
    module = installed(f"yunchang.ring.{names[kind]}")
    if isinstance(module, str) or absent(kernel):
        return module if isinstance(module, str) else absent(kernel)
    from yunchang.kernels import AttnType

    use(kernel)
    ours, at, found = DENSE[kind][0], places(kind, rank, P, P * LENGTH), []
    theirs, extra = getattr(module, ours.__name__), (None,) if kind == "contiguous" else ()
    for forward, backward in ((ours, theirs), (theirs, ours)):
        function = type("Mixed", (torch.autograd.Function,), dict(
            forward=staticmethod(forward.forward), backward=staticmethod(backward.backward)
        ))  # fmt: skip
        how = (0.0, None, True, (-1, -1), 0.0, None, False, False, group(P), AttnType.FA, *extra)
        found += apart(lambda *x, f=function, how=how: f.apply(*x, *how), *whole(P), at)
    return found


def beside(rank: int, P: int, kernel: str, kind: str) -> list[float] | str:
    """ring-flash-attn's function of a kind and ours of the same name and arguments."""
    module = installed("ring_flash_attn")
    if isinstance(module, str) or absent(kernel):
        return module if isinstance(module, str) else absent(kernel)
    use(kernel)
    found, packed = [], kind.endswith("packed")
    kind, cu = kind.removesuffix(" packed"), [P * n for n in DOCUMENTS] if packed else []
    spans = zip(cu, cu[1:]) if packed else [(0, P * LENGTH)]
    at = torch.cat([places(kind, rank, P, b - a, a) for a, b in spans])
    name = {"contiguous": "ring", "zigzag": "zigzag_ring", "stripe": "stripe"}[kind]
    name += "_flash_attn_varlen_func" if packed else "_flash_attn_func"
    own = torch.tensor(DOCUMENTS, dtype=torch.int32, device="cuda")
    offsets = (own, int(own.diff().max())) if packed else ()
    for library in (module, ring_flash_attn):
        function = getattr(library, name)

        def call(*qkv, f=function):
            inside = [x[0] for x in qkv] if packed else qkv
            o = f(*inside, *offsets, causal=True, group=group(P))
            return o[None] if packed else o

        found += apart(call, *whole(P, cu=tuple(cu)), at)
    return found


def xfuser(rank: int, P: int, ring: int) -> list[float] | str:
    """`USP` of xfuser 0.7, its own and with ours installed, as a ring or as Ulysses over all ranks."""
    usp = installed("xfuser.model_executor.layers.usp")
    if isinstance(usp, str):
        return usp
    backend = usp.AttentionBackendType.SDPA_FLASH
    plain = types.SimpleNamespace(use_spargeattn_head_balance=False)
    state = types.SimpleNamespace(attention_backend=backend, fp8_comms=None, runtime_config=plain)
    sizes = dict(sequence=P, ring=ring, ulysses=P // ring)
    patches = {f"get_{name}_parallel_world_size": lambda n=n: n for name, n in sizes.items()}
    patches |= dict(get_runtime_state=lambda: state, PROCESS_GROUP=types.SimpleNamespace(
        RING_PG=group(ring), ULYSSES_PG=group(P // ring)
    ))  # fmt: skip
    tensors, want = whole(P, False, (8, 8))
    at, found = places("contiguous", rank, P, P * LENGTH), []

    def call(q, k, v):
        return usp.USP(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def forward(q, k, v) -> float:
        with torch.no_grad():
            return error(call(*(x[:, at] for x in (q, k, v))), want[0][:, at])

    with mock.patch.multiple(usp, **patches):
        found.append(forward(*tensors[:3]))  # theirs: their ring has no gradient of the global sum
        taken, back = xdit.register(usp.ATTENTION_FUNCTION_REGISTRY), xdit.install()
        try:
            found += apart(call, tensors, want, at) if ring > 1 else [forward(*tensors[:3])]
        finally:
            back()
            usp.ATTENTION_FUNCTION_REGISTRY[backend] = taken
    return found


def held(found: list) -> None:
    """Every rank's errors are small; a reason on any rank skips."""
    if isinstance(found[0], str):
        pytest.skip(found[0])
    assert max(e for errors in found for e in errors) < LIMIT, found


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_forward_and_backward_mix_with_yunchang(gpu_ranks, kernel, kind):
    held(gpu_ranks.run(gpu_ranks.size, mixed, gpu_ranks.size, kernel, kind))


@pytest.mark.parametrize("kind", [*DENSE, "contiguous packed", "zigzag packed"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_beside_ring_flash_attn(gpu_ranks, kernel, kind):
    held(gpu_ranks.run(gpu_ranks.size, beside, gpu_ranks.size, kernel, kind))


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "ulysses"])
def test_models_attention_of_xfuser(gpu_ranks, ring):
    size = gpu_ranks.size
    held(gpu_ranks.run(size, xfuser, size, size if ring else 1))
