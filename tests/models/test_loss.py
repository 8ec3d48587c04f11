"""Chunked cross-entropy against the whole logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ring_la import ArgumentError, UnsupportedError
from ring_la.models.loss import linear_cross_entropy


def inputs(dtype: torch.dtype, n: int = 37) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 12, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(29, 12, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, 29, (n,), generator=g)
    targets[::5] = -100
    return x, weight, targets


def run(call, dtype: torch.dtype) -> list[torch.Tensor]:
    x, weight, targets = inputs(dtype)
    loss = call(x, weight, targets)
    (0.37 * loss).backward()
    return [loss.detach(), x.grad, weight.grad]


def whole(x, weight, targets):
    logits = F.linear(x, weight)
    logits = logits.to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_loss_and_gradients_are_those_of_the_whole_logits(chunk):
    ours = run(lambda *a: linear_cross_entropy(*a, chunk=chunk), torch.float64)
    for a, b in zip(ours, run(whole, torch.float64)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_bf16_is_as_near_to_fp64_as_the_whole_logits():
    truth = run(whole, torch.float64)
    theirs = run(whole, torch.bfloat16)
    ours = run(lambda *a: linear_cross_entropy(*a, chunk=8), torch.bfloat16)
    for a, b, t in zip(ours, theirs, truth):
        assert (a - t).norm() <= 1.5 * (b - t).norm() + 1e-3 * t.norm()


def test_no_logits_of_all_rows_exist():
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    x, weight, targets = inputs(torch.float32, n=640)
    with Watch():
        linear_cross_entropy(x, weight, targets, chunk=16).backward()
    assert largest == max(x.numel(), 16 * 29)


def test_without_gradients_none_are_formed():
    x, weight, targets = inputs(torch.float64)
    loss = linear_cross_entropy(x.detach(), weight.detach(), targets, chunk=8)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole(x, weight, targets).detach())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "fast"}, "backend: expected one of"),
        ({"chunk": 0}, "chunk: expected an int ≥ 1"),
        ({"targets": torch.zeros(3)}, "targets: expected torch.int64"),
        ({"weight": torch.zeros(29, 11)}, "weight: expected torch.float64"),
        ({"weight": None}, "weight: expected torch.float64"),
        ({"targets": torch.zeros(37, dtype=torch.int64, device="meta")}, "targets: expected a tensor on cpu"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    x, weight, targets = inputs(torch.float64)
    with pytest.raises(ArgumentError, match=message):
        linear_cross_entropy(**{"x": x, "weight": weight, "targets": targets, **changes})


class OnCuda(torch.Tensor):
    is_cuda = True


def test_liger_is_taken_by_its_name_alone(monkeypatch):
    """It was taken on CUDA wherever it was installed."""
    from ring_la.models import loss

    monkeypatch.setattr(loss, "has_liger", lambda: True)
    monkeypatch.setattr(loss, "traced", lambda _: False)  # which it says of a subclass
    monkeypatch.setattr(loss, "_liger", lambda *_: "Liger's")
    monkeypatch.setattr(loss, "_Chunked", SimpleNamespace(apply=lambda *_: "ours"))
    x, weight, targets = inputs(torch.float32)
    given = (x.as_subclass(OnCuda), weight, targets)
    found = [linear_cross_entropy(*given, backend=backend) for backend in loss.BACKENDS]
    assert dict(zip(loss.BACKENDS, found)) == {"auto": "ours", "chunked": "ours", "liger": "Liger's"}


def test_a_missing_library_is_refused():
    from ring_la.models import loss

    if loss.has_liger():
        pytest.skip("liger-kernel is installed")
    with pytest.raises(UnsupportedError, match="liger-kernel"):
        linear_cross_entropy(*inputs(torch.float32), backend="liger")
