"""What `ring_la.capture` is given by mistake: `pytest -m gpu tests/gpu/test_capture_misuse.py --gpu-ranks 2`.

Each is named, nothing hangs, and the device is as it was: its stream, its random numbers; the next step is captured.
Around stand-ins of graphs, on the CPU: tests/test_captured_steps.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch

import ring_la
from tests.support import pool

pytestmark = pytest.mark.gpu
PATIENCE = 8


def misuses() -> dict[str, tuple[Callable, str]]:
    """Steps that cannot be captured, and what is said of them."""
    kept, other = [], torch.ones(4, device="cuda", requires_grad=True)
    model = torch.nn.Linear(4, 4, device="cuda")
    eager_only = torch.optim.AdamW(model.parameters(), lr=0.1)

    def optimizes(x):
        eager_only.zero_grad()
        model(x).sum().backward()
        eager_only.step()

    def raises_in_the_capture(x):
        kept.append(1)
        if len(kept) == 2:
            raise KeyError("odd")
        return x + 1

    return {
        "reads": (lambda x: x * x.sum().item(), "synchronizing"),
        "copies": (lambda x: x.cpu(), "synchronizing"),
        "waits": (lambda x: (torch.cuda.synchronize(), x + 1)[1], "test_capture_misuse.py"),
        "raises": (raises_in_the_capture, "odd"),
        "draws": (lambda x: x * float(torch.rand(())), "CPU generator"),
        "changes": (lambda x: x.add_(1), "arguments that it leaves as they are"),
        "differentiates": (lambda x: x * other, "returns tensors without a gradient"),
        "computes elsewhere": (lambda x: torch.ones(3) + 1, "CUDA Graph is empty"),
        "optimizes": (optimizes, "capturable"),
    }


@pytest.mark.parametrize("name", sorted(misuses()) if torch.cuda.is_available() else ["none"])
def test_misuse_is_named_and_leaves_nothing_behind(name):
    step, says = misuses()[name]
    captured, x = ring_la.capture(step, warmup=1), torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(ring_la.UnsupportedError, match=says):
        [captured(x) for _ in range(2)]
    assert captured.graphs == 0
    assert torch.cuda.current_stream() == stream
    torch.manual_seed(0)
    drawn = torch.rand(4, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(4, device="cuda"))
    good = ring_la.capture(lambda x: torch.nn.functional.dropout(x * 2, 0.5), warmup=1)
    outs = [good(torch.ones(512, device="cuda")).clone() for _ in range(4)]
    assert good.graphs == 1
    assert not torch.equal(outs[2], outs[3])  # each replay draws anew
    assert all(set(out.tolist()) == {0.0, 4.0} for out in outs)


def test_what_a_graph_took_for_granted():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, device="cuda")
    rate = torch.tensor(0.1, device="cuda")
    for lr, change, says in (
        (0.1, lambda group: group.update(lr=0.05), "^lr of AdamW: expected the number that was captured, 0.1"),
        (rate, lambda group: group["lr"].fill_(0.05), None),
        (0.1, lambda group: setattr(model, "bias", torch.nn.Parameter(model.bias.detach() + 1)), "^Linear.bias: "),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, capturable=True)

        def step(x):
            optimizer.zero_grad()  # noqa: B023
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()  # noqa: B023

        captured, x = ring_la.capture(step, warmup=1), torch.randn(8, 4, device="cuda")
        for _ in range(3):
            captured(x)
        before = model.weight.detach().clone()
        change(optimizer.param_groups[0])
        if says is None:
            captured(x)
            assert 0 < float((model.weight - before).abs().max()) < 0.08
        else:
            with pytest.raises(ring_la.UnsupportedError, match=says):
                captured(x)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_and_optimizers_are_those_of_eager_steps(foreach):
    def losses(capture: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True, foreach=foreach)

        def step(x):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
            optimizer.step()
            return loss.detach()

        run = ring_la.capture(step) if capture else step
        out = [run(torch.randn(8, 16, device="cuda", generator=drawing)).clone() for _ in range(8)]
        return torch.stack(out).tolist()

    drawing = torch.Generator("cuda").manual_seed(1)
    want = losses(False)
    drawing.manual_seed(1)
    assert losses(True) == pytest.approx(want, rel=1e-4)
    assert want[-1] < want[0]


def test_gradients_of_a_captured_backward():
    """Forward and backward captured, the optimizer outside, gradients set to None between calls."""
    found = []
    for capture in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 1, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, model=model):
            model(x).square().mean().backward()

        run = ring_la.capture(step) if capture else step
        for n in range(8):
            run(torch.full((4, 16), n / 8, device="cuda"))
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.detach().clone())
    torch.testing.assert_close(*found)


def test_a_step_within_a_step():
    inner = ring_la.capture(lambda x: x * 2, warmup=1)
    outer = ring_la.capture(lambda x: inner(x) + 1, warmup=3)
    for n in range(6):
        out = outer(torch.full((4,), float(n), device="cuda"))
        assert out.tolist() == [2 * n + 1.0] * 4
    assert outer.graphs == 1


def test_tensors_of_the_host_are_named():
    with pytest.raises(
        ring_la.ArgumentError, match=r"argument \[0\]\[1\]: expected a tensor on cuda:0, got one on cpu"
    ):
        ring_la.capture(lambda x, t: x * t)(torch.ones(2, device="cuda"), torch.ones(()))


def check_one_rank(rank: int, what: str) -> tuple[str, float]:
    """The last rank's step is another: what every rank hears, and after how long."""
    cp = ring_la.ContextParallel(pool.group(), transport="torch", timeout=PATIENCE)
    odd, seen = rank == cp.size - 1, []

    def step(x):
        seen.append(1)
        if odd and what == "reads":
            x = x * x.sum().item()
        if odd and what == "raises" and len(seen) == 2:
            raise ValueError("odd")
        if odd and what == "raises in the capture" and len(seen) == 3:
            raise KeyError("odd")
        return cp.comm.all_reduce(x).wait()

    run = step if odd and what == "does not capture" else ring_la.capture(step, cp, warmup=2)
    began = time.monotonic()
    try:
        for _ in range(4):
            run(torch.ones(8, device="cuda"))
        if run is not step:
            run.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.gpu(needs=2)
@pytest.mark.parametrize(
    ("what", "says"),
    {
        "reads": "UnsupportedError: .*rank {last}: .*synchronizing",
        "raises": "UnsupportedError: .*rank {last}: .*odd",
        "raises in the capture": "UnsupportedError: .*rank {last}: .*odd",
        "does not capture": "(DisagreementError|PeerError): .*",
    }.items(),
)
def test_one_rank_alone(what, says, gpu_ranks, record_property):
    found = gpu_ranks.run(gpu_ranks.size, check_one_rank, what, timeout=60)
    gpu_ranks.stop()  # messages that nobody answers
    record_property("seconds", max(seconds for _, seconds in found))
    record_property("said", found[0][0][:600])
    for said, seconds in found[:-1]:
        assert seconds < 2 * PATIENCE
        assert re.match(says.format(last=gpu_ranks.size - 1), said, re.DOTALL), said
