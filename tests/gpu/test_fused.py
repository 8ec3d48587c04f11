"""The fused kernels on the GPU against fp64: `pytest -m gpu tests/gpu/test_fused.py -n 12`.

Convolution, unit length and decays: forward and every gradient, several dtypes and shapes, packed and not; the error
beside that of PyTorch's own operations in the same dtype, which it may exceed by half, or up to that of two roundings.
Their times: benchmarks/fused.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.support import bag_cases, conv_cases, gate_cases, loss_cases, read_cases
from tests.support.triton_cases import error

pytestmark = pytest.mark.gpu


def apart(got: list[Tensor], true: list[Tensor]) -> list[float]:
    pairs = zip(got, true, strict=True)
    return [error(x, t) for x, t in pairs if t.numel()]


def conv_case(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return conv_cases.conv_case(CONV[name] | {"dtype": dtype})


CONV = {
    **conv_cases.CASES,
    "long": dict(B=2, T=3000, D=520, W=4, bias=True),
    "long packed": dict(T=5000, D=264, W=4, cu=(0, 1, 1, 700, 4999, 5000), lead=True, ends=True),
    "eight taps": dict(T=2049, D=128, W=8, cu=(0, 1000, 2049), lead=True, ends=True, bias=True),
}
CHECKS: dict[str, Callable[[torch.dtype], tuple[list[Tensor], list[Tensor], list[Tensor]]]] = {
    **{f"conv {name}": partial(conv_case, name) for name in CONV},
    **{f"decay {name}": partial(gate_cases.decay_case, name, times=40) for name in gate_cases.CASES},
    **{
        f"rms {D} {gate}": partial(gate_cases.rms_case, D, gate, rows=3000)
        for D, gate in ((128, "silu"), (128, "sigmoid"), (80, "silu"), (1, None), (2048, None), (5000, "silu"))
    },
    **{f"discretise {V}": partial(gate_cases.step_case, V, V != 64, V != 80, T=900) for V in (5, 64, 80, 128)},
    **{f"steps {H}": partial(gate_cases.steps_case, H, H != 3, H == 80, H != 3, T=900) for H in (3, 80, 160)},
    **{f"ahead {K}": partial(gate_cases.ahead_case, K, T=900) for K in (5, 64, 128)},
    **{f"beside {V}": partial(gate_cases.beside_case, V, T=900) for V in (64, 80)},
    **{f"skip {V} {w}": partial(gate_cases.skip_case, V, w, T=900) for V, w in ((64, False), (80, True), (5, True))},
    **{f"read {name}": partial(read_cases.read_case, name, times=10) for name in read_cases.CASES},
    **{f"turned {D}": partial(read_cases.turned_case, D, T=700) for D in (12, 32, 112, 128)},
    **{f"unit {D}": partial(gate_cases.unit_case, D, T=700) for D in (5, 64, 128, 256)},
    **{f"softmax {D}": partial(gate_cases.softmax_case, D, rows=1001) for D in (5, 64, 256)},
    **{f"swiglu {D}": partial(gate_cases.swiglu_case, D, rows=1001) for D in (5, 96, 2048, 5472)},
    **{f"bags {D}": partial(bag_cases.bag_case, D, rows=999) for D in (5, 2048, 7168)},
    **{f"loss {V}": partial(loss_cases.loss_case, V, rows=300) for V in (257, 4096, 32768, 151936)},
}
"""name: what gives (true, by the kernels, by PyTorch)."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", CHECKS)
def test_beside_fp64(name, dtype, record_property):
    true, got, plain = CHECKS[name](dtype=dtype)
    ours, theirs, rounding = apart(got, true), apart(plain, true), 0.4 * torch.finfo(dtype).eps
    record_property("ours", ours)
    record_property("plain", theirs)
    assert all(a < max(1.5 * b, rounding) + 3e-6 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
