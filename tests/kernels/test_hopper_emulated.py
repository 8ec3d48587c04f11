"""The kernels in CUDA C++ for Hopper, run on a CPU (`tests.support.hopper`), against the fp64 token loop.

Spans are of 64 tokens, so that they start early, wait for each other, and end within others. The same kernels run on a
GPU in tests/gpu/test_bounded_kda.py and test_fused_delta.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.support.interpreter import interpreted

interpreted()

from ring_la import reference  # noqa: E402
from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels import families, gpu  # noqa: E402
from ring_la.kernels.protocol import Inputs  # noqa: E402
from ring_la.kernels.runtime.cuda_kernel import CudaKernel  # noqa: E402
from ring_la.kernels.runtime.zeros import ZEROS  # noqa: E402
from ring_la.kernels.wy import across, dplr_launches, gdn_launches, gla_launches, kda_launches, one_launch  # noqa: E402
from ring_la.kernels.wy.span_call import SpanCall  # noqa: E402
from tests.support.emulated_kernels import LIMIT, check, draw, emulate  # noqa: E402
from tests.support.hopper import Emulated, KernelError  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them itself")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulate(monkeypatch)


HALVES = 2.2e-3
"""The same of kernels whose products are all of fp16: outputs' own rounding to bf16 is 1.66e-3 of it."""


class FarCall(SpanCall):
    """Its chunks' numbers begin where what they leave lies behind 2^31 bytes."""

    FROM = 2**16

    @classmethod
    def of(cls, *args, **named):
        call = super().of(*args, **named)
        if call.runs is not None:
            call.runs.table[:, 3] += cls.FROM
        return dataclasses.replace(call, chunks=call.chunks + cls.FROM)


class FarDelta(FarCall, gdn_launches.GDNCall):
    pass


@pytest.mark.parametrize(
    ("T", "H", "HK", "cu", "fall"),
    [(150, 2, 1, (0, 0, 30, 131, 150), 1.0), (720, 1, 1, None, 0.02), (140, 1, 1, None, None)],
    ids=["packed and forgetting", "waiting", "no gates"],
)
def test_delta_rules(monkeypatch, T, H, HK, cu, fall):
    q, k, v, beta = draw(T, H, HK)
    g = None if fall is None else fall * F.logsigmoid(torch.randn(1, T, H))
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    N = 1 if cu is None else len(cu) - 1
    S0, dS, do = torch.randn(N, H, 128, 128), torch.randn(N, H, 128, 128), torch.randn_like(v)
    inputs = Inputs(q, k, v, g, beta)
    monkeypatch.setattr(gdn_launches, "UNEVEN", 8 if T == 140 else 0)
    monkeypatch.setattr(gdn_launches, "picks", lambda programs, device: T != 140)
    if cu is not None:
        monkeypatch.setattr(gdn_launches, "GDNCall", FarDelta)
    o, S, kept = gdn_launches.forward(inputs, offsets, 128**-0.5, S0[None], True, keep=True)
    for alone, beside in zip(gdn_launches.forward(inputs, offsets, 128**-0.5, S0[None], True, keep=False), (o, S)):
        assert (alone.float() - beside.float()).norm() <= LIMIT * beside.float().norm()  # beta lies elsewhere then
    grads, dS0 = gdn_launches.gradients(inputs, offsets, 128**-0.5, S0[None], do, dS[None], kept)
    got = {"o": o, "S": S, "S0": dS0, **{n: x for n, x in grads._asdict().items() if x is not None}}
    x = [q, k, v, beta] if g is None else [q, k, v, g, beta]
    check(reference.delta_rule if g is None else reference.gated_delta_rule, x, offsets, got, S0, do, dS)
    if H > 1:  # made again, a head at a time
        monkeypatch.setattr(gdn_launches, "group", lambda chunks, heads: 1)
        again, _ = gdn_launches.gradients(inputs, offsets, 128**-0.5, S0[None], do, dS[None], None)
        assert all(torch.equal(a, b) for a, b in zip(grads[:5], again[:5], strict=True))


@pytest.mark.parametrize("rule", ["delta/scalar", "delta/diagonal", "additive/diagonal"])
def test_a_gate_that_all_tokens_share_goes_by_chunks(monkeypatch, rule):
    """It comes as one of each head, which these kernels would read beyond."""
    monkeypatch.setattr(gpu, "is_hopper", lambda device: True)
    monkeypatch.setattr(one_launch.cuda_kernel, "unsupported", lambda: "")
    write, decay = rule.split("/")
    rule, channels = Rule(write, decay, lower_bound=-1.0), (128,) * (decay == "diagonal")
    q, k, v, beta = draw(64, 2, 2)
    for shape, taken in (((1, 64, 2, *channels), True), ((1, 1, 2, *channels), False)):
        x = Inputs(q, k, v, torch.full(shape, -0.1), beta if write == "delta" else None)
        assert isinstance(families.recurrence(rule, x, None, 1.0), one_launch.OneLaunch) == taken


@pytest.mark.parametrize(
    ("T", "H", "cu", "fall", "dtype"),
    [(150, 2, (0, 0, 30, 131, 150), 1.0, torch.float32), (330, 1, None, 0.02, torch.bfloat16),
     (140, 2, None, 20.0, torch.bfloat16)],
    ids=["packed and forgetting", "waiting", "factors that do not fit"],
)  # fmt: skip
def test_gla(monkeypatch, T, H, cu, fall, dtype):
    q, k, v, _ = draw(T, H, H if cu is None else 1)
    g = (fall * F.logsigmoid(torch.randn(1, T, H, 128))).to(dtype)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    N = 1 if cu is None else len(cu) - 1
    S0, dS, do = torch.randn(N, H, 128, 128), torch.randn(N, H, 128, 128), torch.randn_like(v)
    if cu is not None:
        monkeypatch.setattr(gla_launches, "SpanCall", FarCall)
    inputs, scale = Inputs(q, k, v, g), 128**-0.5
    o, S, kept = gla_launches.forward(inputs, offsets, scale, S0[None], True, keep=True)
    grads, dS0 = gla_launches.gradients(inputs, offsets, scale, S0[None], do, dS[None], kept)
    got = {"o": o, "S": S, **{n: x for n, x in grads._asdict().items() if x is not None}, "S0": dS0}
    check(reference.gla, [q, k, v, g], offsets, got, S0, do, dS)
    if H > 1:  # made again, a head at a time
        monkeypatch.setattr(gla_launches, "group", lambda chunks, heads: 1)
        again, _ = gla_launches.gradients(inputs, offsets, scale, S0[None], do, dS[None], None)
        assert all(torch.equal(a, b) for a, b in zip(grads[:4], again[:4], strict=True))


@pytest.mark.parametrize(
    ("T", "cu", "sizes", "silent"),
    [(150, (0, 0, 30, 131, 150), (1.0, 1.0, 1.0), False), (200, None, (1.0, 1.0, 1.0), False),
     (200, None, (20.0, 1e6, 1e-7), True)],
    ids=["packed", "waiting", "of far sizes, and chunks that say nothing"],
)  # fmt: skip
def test_dplr(monkeypatch, T, cu, sizes, silent):
    H = 2 if cu else 1
    q, k, v, _ = draw(T, H, 1)
    q, v = q * sizes[0], v * sizes[1]
    a = -F.normalize(torch.randn(1, T, H, 128), dim=-1)
    b, g = (
        (-a * torch.randn(1, T, H, 128).sigmoid()).bfloat16(),
        (-0.6 * torch.randn(1, T, H, 128).sigmoid()).bfloat16(),
    )
    a, offsets = a.bfloat16(), None if cu is None else torch.tensor(cu, dtype=torch.int32)
    N = 1 if cu is None else len(cu) - 1
    S0, dS, do = torch.randn(N, H, 128, 128), torch.randn(N, H, 128, 128), torch.randn_like(v) * sizes[2]
    S0, dS = S0 * sizes[1], dS * sizes[2]
    if silent:
        k[:, 64:96], v[:, 64:128], a[:, 96:128], do[:, 32:64] = 0, 0, 0, 0
    inputs, scale = Inputs(q, k, v, g, None, a, b), 128**-0.5
    if cu is not None:
        monkeypatch.setattr(dplr_launches, "SpanCall", FarCall)
    o, S, kept = dplr_launches.forward(inputs, offsets, scale, S0[None], True, keep=True)
    grads, dS0 = dplr_launches.gradients(inputs, offsets, scale, S0[None], do, dS[None], kept)
    got = {"o": o, "S": S, **{n: getattr(grads, n) for n in ("q", "k", "v", "a", "b", "g")}, "S0": dS0}
    x, limit = [q, k, v, a, b, g], HALVES * H  # heads of q are added in bf16
    check(reference.dplr_delta_rule, x, offsets, got, S0, do, dS, limit)
    if H > 1:  # made again, a head at a time
        monkeypatch.setattr(dplr_launches, "group", lambda chunks, heads: 1)
        again, _ = dplr_launches.gradients(inputs, offsets, scale, S0[None], do, dS[None], None)
        assert all(x is y or torch.equal(x, y) for x, y in zip(grads, again, strict=True))


@pytest.mark.parametrize("fall", [0.6, 0.01], ids=["forgets", "waits"])
def test_dplr_begins_early(monkeypatch, fall):
    """Spans of six chunks look at four before (backward: behind) them, and hear nothing from where those forget."""
    q, k, v, _ = draw(600, 1, 1)
    a = -F.normalize(torch.randn(1, 600, 1, 128), dim=-1)
    b, g = -a * torch.randn(1, 600, 1, 128).sigmoid(), -fall * torch.randn(1, 600, 1, 128).sigmoid()
    inputs = Inputs(q, k, v, g.bfloat16(), None, a.bfloat16(), b.bfloat16())
    monkeypatch.setattr(dplr_launches, "cut", lambda *sizes: (192, 192))
    S0, dS, do = torch.randn(1, 1, 128, 128), torch.randn(1, 1, 128, 128), torch.randn_like(v)
    o, S, kept = dplr_launches.forward(inputs, None, 128**-0.5, S0[None], True, keep=True)
    grads, dS0 = dplr_launches.gradients(inputs, None, 128**-0.5, S0[None], do, dS[None], kept)
    got = {"o": o, "S": S, **{n: getattr(grads, n) for n in ("q", "k", "v", "a", "b", "g")}, "S0": dS0}
    x = [q, k, v, inputs.a, inputs.b, inputs.g]
    check(reference.dplr_delta_rule, x, None, got, S0, do, dS, HALVES)
    v[:, :32], do[:, -32:] = torch.nan, torch.nan
    o, _, _ = dplr_launches.forward(inputs, None, 128**-0.5, S0[None], True)
    grads, _ = dplr_launches.gradients(inputs, None, 128**-0.5, S0[None], do, dS[None], kept)
    heard = o[:, 192:].isnan().any(), grads.v[:, :384].isnan().any()
    assert all(x == (fall < 0.1) for x in heard)


def test_dplr_knows_what_a_chunk_adds(monkeypatch):
    """Spans of two chunks that wait go over them with values and without. The warp that makes the second half of a
    chunk, whose values are all there are, says what the next one has before the other is done."""
    q, k, v, beta = draw(320, 1, 1)
    v.unflatten(1, (-1, 32))[:, :, :16] = 0
    unit, g = F.normalize(torch.randn(1, 320, 1, 128), dim=-1), -0.01 * torch.rand(1, 320, 1, 128)
    x = [q, k, v, (-unit).bfloat16(), (unit * beta[..., None]).bfloat16(), g.bfloat16()]
    monkeypatch.setattr(dplr_launches, "cut", lambda *sizes: (64, 64))
    o, S, _ = dplr_launches.forward(Inputs(*x[:3], x[5], None, *x[3:5]), None, 128**-0.5, None, True)
    want = reference.dplr_delta_rule(*(t.double() for t in x), output_final_state=True)
    for found, true in ((o, want.o), (S[0], want.final_state)):
        assert (found.double() - true).norm() <= HALVES * true.norm()


@pytest.mark.parametrize("own", [False, True], ids=["tickets, two launches", "own numbers, one launch"])
@pytest.mark.parametrize("waits", [False, True])
def test_kda(monkeypatch, waits, own):
    monkeypatch.setattr(kda_launches, "side_by_side", lambda programs, device: own)
    monkeypatch.setattr(kda_launches, "TOKENS", 10**6 if own else 0)
    q, k, v, beta = draw(300, 1, 1)
    g = -0.002 * torch.rand(1, 300, 1, 128) if waits else -5 * torch.sigmoid(torch.randn(1, 300, 1, 128))
    S0, dS, do = torch.randn(1, 1, 128, 128), torch.randn(1, 1, 128, 128), torch.randn_like(v)
    inputs = Inputs(q, k, v, g, beta)
    o, S = kda_launches.forward(inputs, None, 128**-0.5, S0[None], True)
    grads, dS0 = kda_launches.gradients(inputs, None, 128**-0.5, S0[None], do, dS[None])
    got = {"o": o, "S": S, "S0": dS0, **{n: x for n, x in grads._asdict().items() if x is not None}}
    found = check(reference.kda, [q, k, v, g, beta], None, got, S0, do, dS)
    # where gates forget, what a token reads of its own write is most of it, and no factor's rounding is in that
    assert waits or max(found[n] for n in ("o", "q", "beta")) < 2.4e-3, found


def test_what_kda_forgets_is_what_its_bound_says():
    """Spans whose last chunk forgets, whose two last do (by the product of their bounds, or not: two channels are slow
    in a chunk each), and that do not forget; keys hand the state from channel to channel."""
    T, H = 64, 5
    q, k, v, beta = draw(T, H, H)
    k[..., :2] = 0  # what these channels hold stays there
    g = torch.full((1, T, H, 128), -4.0)
    g[:, :, 1] = -1.1
    g[:, 32:48, 2, 0] = g[:, 48:, 2, 1] = 0
    g[:, 32:, 3, 0] = 0
    g[:, :, 4] = -0.002
    call = kda_launches.KDACall.of(Inputs(q, k, v, g, beta), None, 1.0, kda_launches.cut(H))
    maps = across.KDA.maps(call, False, None)

    def forgets(tokens: int, h: int) -> bool:
        u = torch.ones(128, dtype=torch.float64)
        for t in range(T - tokens, T):
            u = u * g[0, t, h].double().exp()
            size = k[0, t, h].double().abs()
            u = u + beta[0, t, h].double() * size * (size @ u)
        return u.max().item() < 2.0**-30

    by = [forgets(16, h) + forgets(32, h) for h in range(H)]
    assert by == [2, 1, 1, 0, 0]
    assert maps.zero.flatten().tolist() == [min(n, 1) for n in by]


FAULTY = """
#include "hopper.cuh"
struct Args { int* out; int which; };
extern "C" __global__ void faulty(const __grid_constant__ Args a) {
  if (a.which == 0) lds32(1 << 20);
  if (a.which == 1 && threadIdx.x < 5) __syncwarp();
  if (a.which == 2) bar_wait(1024, 0);
  if (a.which == 3) uniform(threadIdx.x);
  if (a.which == 5) {
    if (threadIdx.x) between_two(1);
    else between_all();
  }
}
"""


def test_a_faulty_kernel_is_told(tmp_path):
    file = tmp_path / "faulty.cu"
    file.write_text(FAULTY)
    kernel = Emulated(CudaKernel(file, "faulty", "Qi", 32, 1024))
    for which, said in enumerate(("shared memory", "nothing goes on", "no barrier", "differ")):
        with pytest.raises(KernelError, match=said):
            kernel(1, torch.zeros(1, dtype=torch.int32), which)
    with pytest.raises(KernelError, match="barrier 3"):
        kernel(1, torch.zeros(1, dtype=torch.int32), 5)
    kernel(1, torch.zeros(1, dtype=torch.int32), 4)


def test_zeros():
    x = torch.ones(2000, dtype=torch.int32)
    Emulated(ZEROS)(2, x, 1999)
    assert x[:-1].any().item() is False
    assert x[-1] == 1


def test_the_smallest_call_that_trains_by_one_launch_is_a_knob(monkeypatch):
    """It is read at each call: tests on GPUs and benchmarks set it."""
    from ring_la.algebra import Rule
    from ring_la.kernels.protocol import OutputUse
    from ring_la.kernels.wy import one_launch

    x = torch.empty(1, 64, 2, 128, device="meta")
    rule, call = Rule("delta", "none"), Inputs(x, x, x, beta=x[..., 0])
    assert one_launch.choice(rule, call, OutputUse(saved=False)) is one_launch.DELTA
    for least, found in ((0, one_launch.DELTA), (129, None), (128, one_launch.DELTA)):
        monkeypatch.setattr(one_launch, "LEAST", least)
        assert one_launch.choice(rule, call, OutputUse(saved=True, alone=True)) is found
