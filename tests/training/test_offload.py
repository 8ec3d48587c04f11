"""Activations in host memory: the same gradients, and what is kept of recomputed blocks travels, no more."""

from __future__ import annotations

import pytest
import torch

from ring_la import ArgumentError
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import recompute
from ring_la.training.offload import Offload, _Taken

IDS = torch.randint(0, 19, (1, 64), generator=torch.Generator().manual_seed(0))


def gradients(kinds: list[str], offload: Offload | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = recompute(HybridLM(HybridConfig(19, 16, ["gdn", "attention", "mamba2"], 2)).double(), kinds)
    if offload is None:
        loss = model.loss(IDS)
    else:
        with offload:
            loss = model.loss(IDS)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("kinds", [[], ["block", "norm"]])
def test_gradients_are_the_same(kinds):
    offload = Offload(in_flight=0, least=1)
    expected = gradients(kinds, None)
    for name, grad in gradients(kinds, offload).items():
        assert torch.equal(grad, expected[name]), name
    residual = 64 * 16 * 8
    if kinds:  # one tensor a block, and the head's
        assert 3 * residual <= offload.moved <= 9 * residual
    else:
        assert offload.moved > 30 * residual


def test_small_tensors_and_parameters_stay():
    offload = Offload(least=1 << 20)
    gradients([], offload)
    assert offload.moved == 0
    weight = torch.nn.Parameter(torch.randn(8, 8))
    offload = Offload(least=1)
    with offload:
        x = torch.randn(8, 8, requires_grad=True)
        (x @ weight.T).sum().backward()
    assert offload.moved == x.nbytes
    with pytest.raises(ArgumentError, match="in_flight: expected a number ≥ 0"):
        Offload(in_flight=-1)


def test_the_host_waits_where_too_much_came_back():
    """The device is waited for where `in_flight` bytes are waiting to be used, and never for what was taken last."""
    reached = []

    class Event:
        def __init__(self, name: int) -> None:
            self.name = name

        def synchronize(self) -> None:
            reached.append(self.name)

    taken = _Taken(limit=25)
    for name, waited in enumerate([[], [], [1], [1, 2], [1, 2, 3]]):
        taken.make_room(10)
        assert reached == waited
        assert taken.bytes + 10 <= 25
        taken.add(10, Event(name))
    taken.make_room(100)
    assert (reached, len(taken.begun)) == ([1, 2, 3, 4], 1)


def test_what_was_changed_before_it_was_copied_is_refused():
    """PyTorch says so of what it keeps itself; here the gradients were of other numbers."""

    class Copying:
        def query(self) -> bool:
            return False

    offload = Offload(least=1)
    x = torch.ones(4)
    kept = offload.pack(x)
    kept.source, kept.event = x.detach(), Copying()  # as on a GPU while the copy is under way
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place before Offload had copied it"):
        offload.unpack(kept)
    for name, wrong in (
        ("in_flight", "2"),
        ("in_flight", float("nan")),
        ("least", None),
        ("ahead", 1.5),
        ("ahead", True),
    ):
        with pytest.raises(ArgumentError, match=f"{name}: expected"):
            Offload(**{name: wrong})
