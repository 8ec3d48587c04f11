"""Deterministic steps on GPUs: the same bits for every number of ranks, layout, packing and way to run a step.

pytest -m gpu tests/gpu/test_same_bits.py                   # as many ranks as there are GPUs
pytest -m gpu tests/gpu/test_same_bits.py --gpu-ranks 4     # four, also on one GPU

A fault of a kernel is told at a later launch, and other ranks then wait for the rank that has it. So that the report
names the layer and the launch:

CUDA_LAUNCH_BLOCKING=1 pytest -m gpu tests/gpu/test_same_bits.py -k other_layers --gpu-ranks 3 -n 6 --gpu-report FILE
"""

from __future__ import annotations

import math

import pytest
import torch

from ring_la.kernels.fixed import library
from tests.support.pool import Ranks
from tests.support.same_bits import LAYERS, OTHERS, Run, decoded, differing, step_of

pytestmark = pytest.mark.gpu(needs=2)

LENGTHS, ALIKE = (70, 1, 99), (70, 70, 70)
READ = ["retention", "comba", "hgrn2", "mlstm"]
SOME = ["gdn", "mamba2", "attention"]
FIRST_SECONDS = 400.0
"""A call may take: kernels are compiled in it."""
ALONE, TOGETHER = [[name] for name in OTHERS], [OTHERS[i : i + 4] for i in range(0, len(OTHERS), 4)]
"""Models of other layers."""


ONE = Run()
SPLIT = (ONE, Run(2, "zigzag"), Run(3), Run(4, "zigzag", order=(2, 0, 1)))


def compare(ranks: Ranks, runs: tuple[Run, ...], layers: list[str], dtype: torch.dtype, **more) -> str:
    """What was compared with one rank's step; fails where a bit differs."""
    lengths, at_once = more.get("lengths", LENGTHS), more.get("at_once", True)
    arguments = (layers, dtype, at_once, lengths)
    one = ranks.run(1, step_of, ONE, *arguments, timeout=FIRST_SECONDS)[0]
    assert math.isfinite(one["loss"])
    assert all(torch.isfinite(x).all() for x in one.values())
    assert torch.equal(one["loss"], one["loss without gradients"])
    wrong, done = [], []
    for run in runs:
        if run.P <= ranks.size:
            found = [differing(one, some) for some in ranks.run(run.P, step_of, run, *arguments, timeout=FIRST_SECONDS)]
            wrong += [f"{run}: {len(f)} of {len(one)}: {f[:6]}" for f in found if f][:1]
            done.append(f"P {run.P} {run.kind} {run.way} {run.order}{' rows' if run.rows else ''} {run.transport}")
    assert not wrong, "\n".join(wrong)
    return "; ".join(done)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_split_and_packing(dtype, gpu_ranks, record_property):
    runs, layers = (SPLIT, LAYERS) if dtype == torch.bfloat16 else (SPLIT[-1:], SOME)
    record_property("compared", compare(gpu_ranks, runs, layers, dtype))


def test_rows_of_a_batch(gpu_ranks, record_property):
    runs = (Run(2, "zigzag", order=(2, 0, 1)), Run(2, order=(1, 2, 0), rows=True), Run(4, "zigzag", rows=True))
    record_property("compared", compare(gpu_ranks, runs, LAYERS, torch.bfloat16, lengths=ALIKE))


@pytest.mark.parametrize("way", ["captured", "compiled"])
def test_compiled_and_captured(way, gpu_ranks, record_property):
    runs = (Run(2, "zigzag", way=way), Run(4, "zigzag", way=way))
    record_property("compared", compare(gpu_ranks, runs, SOME, torch.bfloat16))


def test_mailboxes(gpu_ranks, record_property):
    runs = (Run(2, "zigzag", transport="symmetric"), Run(4, "zigzag", transport="symmetric"))
    record_property("compared", compare(gpu_ranks, runs, SOME, torch.bfloat16))


@pytest.mark.parametrize(
    ("P", "T", "read", "layers"), [(1, 66, 62, LAYERS), (2, 131, 126, LAYERS), (2, 131, 126, READ)]
)
def test_prefill_and_decoding_are_the_forward_pass(P, T, read, layers, gpu_ranks):
    for whole, steps in gpu_ranks.run(P, decoded, P, T, read, layers, torch.bfloat16, timeout=FIRST_SECONDS):
        assert whole.isfinite().all()
        assert torch.equal(whole, steps)


@pytest.mark.gpu(needs=1)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("N", "K"), [(7680, 2560), (13696, 2560), (2560, 6848), (32768, 2560), (256, 1024), (128, 128)]
)
def test_products_of_rows(N, K, transposed, record_property):
    """cuBLAS, as far as it is asked, gives each row the same bits beside any others."""
    from ring_la.kernels.fixed.product import row_product  # needs Triton

    torch.manual_seed(0)
    x, w = torch.randn(5000, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16()
    w = w if transposed else w.mT.contiguous()
    whole = row_product(x, w, transposed=transposed)
    for start, stop in ((0, 64), (100, 101), (0, 512), (700, 1740), (904, 5000)):
        assert torch.equal(row_product(x[start:stop], w, transposed=transposed), whole[start:stop]), (start, stop)
    order = torch.randperm(len(x), device="cuda")
    assert torch.equal(row_product(x[order], w, transposed=transposed), whole[order])
    kinds = {kind: found for kind, found in library._found.items() if (kind.N, kind.K) == (N, K)}
    record_property("cuBLAS", [(kind.transposed, found.alike, found.rows) for kind, found in kinds.items()])


@pytest.mark.parametrize("layers", [*ALONE, *TOGETHER], ids=" ".join)
def test_other_layers(layers, gpu_ranks, record_property):
    runs = (Run(3, "zigzag", order=(2, 0, 1)),)
    record_property("compared", compare(gpu_ranks, runs, layers, torch.bfloat16))


def test_a_launch_a_block(gpu_ranks, record_property):
    """The way of devices and dtypes that the kernels for all blocks are not for."""
    record_property("compared", compare(gpu_ranks, (Run(3, "zigzag"),), ["gdn"], torch.bfloat16, at_once=False))
