"""What `ring_la.capture` refuses, and how ranks learn of it, with graphs of a stand-in.

The stand-in "captures" by running a step and "replays" nothing, so all that stands around a graph runs on the CPU. The
same misuses by graphs of CUDA: tests/gpu/test_capture_misuse.py.
"""

from __future__ import annotations

import gc
import random
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch

import ring_la
from ring_la.capturing import CapturedStep
from ring_la.capturing.graph import StepStream, changed, drawn
from ring_la.kernels.fenwick.table import table_of
from tests.support.pool import group
from tests.support.step_graphs import Recorded, Repeating, standing

PATIENCE = 5


@pytest.fixture
def stand(monkeypatch):
    standing(monkeypatch.setattr)


def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def calls(step, x, n=5):
    for _ in range(n):
        step(x)


def changed_between(name: str):
    """A step that reads something from around it, and what changes it behind the capture."""
    model, optimizer = model_and_optimizer()
    scale, state, halves = 2.0, torch.ones(4), torch.ones(2, 4)

    def step(x):
        optimizer.step()
        with torch.no_grad():
            return model(x) * scale + state + halves[0]

    def change():
        nonlocal scale, state
        if name == "scale":
            scale = 3.0
        elif name == "state":
            state = torch.zeros(4)
        elif name == "halves":
            halves.data = torch.zeros(2, 4)
        elif name == "Linear.weight":
            model.weight = torch.nn.Parameter(model.weight.detach().clone())
        elif name == "Linear.bias":
            model.bias.data = model.bias.data.clone()
        else:
            optimizer.param_groups[0]["lr"] = 0.05

    return step, change


@pytest.mark.parametrize("name", ["scale", "state", "halves", "Linear.weight", "Linear.bias", "lr of AdamW"])
def test_what_a_graph_took_for_granted(name, stand):
    step, change = changed_between(name)
    captured, x = ring_la.capture(step), torch.ones(1, 4)
    calls(captured, x)
    change()
    with pytest.raises(ring_la.UnsupportedError, match=f"^{name}: expected"):
        captured(x)
    captured.release()
    calls(captured, x)
    assert captured.graphs == 1


def misuse(name: str):
    """Steps that no graph can repeat."""
    leaf = torch.ones(4, requires_grad=True)

    def keeps_a_gradient(x):
        (x.detach().requires_grad_() * leaf).sum().backward()
        return x * leaf

    return dict(
        leaves=lambda x: x.add_(1),
        gradient=keeps_a_gradient,
    )[name]


@pytest.mark.parametrize(
    ("name", "says"),
    {
        "leaves": "arguments that it leaves as they are, got one of shape",
        "gradient": "one that returns tensors without a gradient",
    }.items(),
)
def test_steps_that_no_graph_repeats(name, says, stand):
    step = ring_la.capture(misuse(name), warmup=1)
    step(torch.ones(4))
    with pytest.raises(ring_la.UnsupportedError, match=says):
        step(torch.ones(4))
    assert step.graphs == 0


def test_an_argument_that_gets_a_gradient(stand):
    step = ring_la.capture(lambda x: (x * x).sum().backward(), warmup=1)
    step(torch.ones(4, requires_grad=True))
    with pytest.raises(ring_la.UnsupportedError, match="arguments without a gradient of their own"):
        step(torch.ones(4, requires_grad=True))


def test_gradients_belong_to_the_step_or_stay_where_they_are(stand):
    def trainer(within: bool):
        model, _ = model_and_optimizer()

        def step(x):
            if within:
                model.zero_grad()
            model(x).sum().backward()

        return model, ring_la.capture(step), torch.ones(1, 4)

    model, step, x = trainer(within=True)
    calls(step, x)
    held = model.weight.grad
    model.zero_grad()  # a replay gives the leaf the graph's gradient again
    step(x)
    assert model.weight.grad is held

    model, step, x = trainer(within=False)
    for _ in range(5):
        model.zero_grad()
        step(x)
    assert model.weight.grad is not None
    with pytest.raises(ring_la.UnsupportedError, match="expected None, as at the capture"):
        step(x)  # an eager step would add

    model, step, x = trainer(within=False)
    calls(step, x)  # adds, call by call
    model.zero_grad()
    with pytest.raises(ring_la.UnsupportedError, match="which the graph adds to, got None"):
        step(x)


def test_ways_of_a_call_are_kinds(stand):
    model, _ = model_and_optimizer()
    step, x = ring_la.capture(lambda x: model(x).detach(), warmup=1), torch.ones(1, 4)
    calls(step, x, 2)
    with torch.no_grad():
        calls(step, x, 2)
    model.eval()
    calls(step, x, 2)
    assert step.graphs == 3


def test_tensors_elsewhere_are_named(stand, monkeypatch):
    monkeypatch.setattr(CapturedStep, "_device", lambda self, tensors: torch.device("meta"))
    with pytest.raises(
        ring_la.ArgumentError, match=r"argument \[1\]\['t'\]: expected a tensor on meta, got one on cpu"
    ):
        ring_la.capture(lambda x, t: x)(torch.ones(2, device="meta"), t=torch.ones(()))


def test_captured_steps_are_not_captured_again():
    with pytest.raises(ring_la.ArgumentError, match="step: expected a function, got CapturedStep"):
        ring_la.capture(ring_la.capture(lambda x: x))


def test_numbers_of_the_host():
    for name, draw in {
        "PyTorch's CPU generator": lambda: torch.rand(()),
        "random": random.random,
        "numpy.random": numpy.random.rand,
    }.items():
        before = drawn()
        assert changed(before) is None
        draw()
        assert changed(before) == name


def check_refused(rank: int, where: str) -> str:
    """Rank 1's step raises: as it runs the last time, or as it is captured."""
    with pytest.MonkeyPatch.context() as patch:
        standing(patch.setattr)
        cp = ring_la.ContextParallel(group(), scan="ring", timeout=PATIENCE)
        seen = []

        def step(x):
            seen.append(1)
            if rank == 1 and len(seen) == (2 if where == "run" else 3):
                raise (ValueError if where == "run" else KeyError)("odd")
            return x

        captured = ring_la.capture(step, cp, warmup=2)
        try:
            calls(captured, torch.ones(2), 3)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("where", ["run", "capture"])
def test_a_rank_that_raises_is_named_on_all(where, ranks):
    first, second = ranks.run(2, check_refused, where)
    assert first.startswith("UnsupportedError: step: expected one that a CUDA graph can repeat, got rank 1: ")
    assert "test_captured_steps.py" in first
    assert "odd" in first
    assert second == ("ValueError: odd" if where == "run" else first)


def check_alone(rank: int) -> str:
    """Rank 1 calls the step as it is."""
    cp = ring_la.ContextParallel(group(), scan="ring", timeout=PATIENCE)
    layout = cp.layout(8, "contiguous")
    step = lambda x: layout.gather(layout.shard(x))  # noqa: E731
    step(torch.ones(1, 8))
    try:
        for _ in range(2):
            (step if rank else ring_la.capture(step, cp))(torch.ones(1, 8))
    except ring_la.RingLAError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_does_not_capture(ranks):
    said = ranks.run(2, check_alone)
    ranks.stop()
    assert all(x.startswith(("DisagreementError", "PeerError")) for x in said), said


@pytest.fixture
def repeating(monkeypatch):
    standing(monkeypatch.setattr, Repeating)


def test_the_training_example(repeating, monkeypatch):
    from examples.train_demo import STEPS, train_step
    from ring_la.models import HybridConfig, HybridLM

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    losses = []
    for how in STEPS:
        torch.manual_seed(0)
        model = HybridLM(HybridConfig(32, 16, ["gdn", "attention"], 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        step = train_step(model, optimizer, None, None, how)
        losses.append([])
        for n in range(8):
            losses[-1].append(step(torch.randint(32, (1, 12), generator=torch.Generator().manual_seed(n))))
            schedule.step()
    assert len(losses) == 3
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=1e-6)


def test_what_a_step_binds_is_not_held(stand):
    """Nor what it never reads, nor optimizers that others step, nor buffers, nor what its owner has beside it."""
    model, optimizer = model_and_optimizer()
    model.register_buffer("table", torch.ones(2))
    last, unread = None, 0

    class Owner:
        def __init__(self):
            self.kept, self.count = torch.ones(1), 0

        def step(self, x):
            nonlocal last
            optimizer.zero_grad()
            out = model(x).sum() + model.table.sum()
            out.backward()
            last = out.detach()
            return last

    owner = Owner()
    step, x = ring_la.capture(owner.step), torch.ones(1, 4)
    for n in range(6):
        step(x)
        owner.kept, owner.count, unread = torch.ones(1), n, unread + 1
        optimizer.param_groups[0]["lr"] = 0.1 / (n + 1)
        model.table = torch.ones(2)
    assert step.graphs == 1


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_in_a_capture(fails, monkeypatch):
    """A graph among the garbage would be given back there, which ends the capture ("operation not permitted")."""
    stands = dict(Stream=lambda device: None, current_stream=lambda device: None, set_stream=lambda stream: None)
    stands |= dict(CUDAGraph=SimpleNamespace, graph=lambda graph, **how: nullcontext())
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    stream, on = StepStream(torch.device("cpu")), []

    def step():
        on.append(gc.isenabled())
        if fails:
            raise ZeroDivisionError
        return 3

    if fails:
        with pytest.raises(ZeroDivisionError):
            stream.write(step)
    else:
        assert stream.write(step)[1] == 3
    assert on == [False]
    assert gc.isenabled()


def check_told_at_once(rank: int) -> tuple[str, float]:
    """Rank 1's capture breaks, and the others are on their way to an exchange with it."""
    with pytest.MonkeyPatch.context() as patch:
        standing(patch.setattr)
        cp = ring_la.ContextParallel(group(), scan="ring", timeout=4 * PATIENCE)
        x, seen, layout = torch.ones(1, 8, 2, 4), [], cp.layout(8 * cp.size)

        def step(q):
            seen.append(1)
            if rank == 1 and len(seen) == 2:
                raise KeyError("odd")
            return ring_la.linear_attention(q, q, q, layout=layout).o

        captured = ring_la.capture(step, cp, warmup=1)
        captured(x)
        began = time.monotonic()
        try:
            captured(x)
        except (ring_la.UnsupportedError, ring_la.PeerError) as error:
            return str(error), time.monotonic() - began
    return "", 0.0


TOLD = "as far as the end of its capture", "disagree", "this group is of no more use"
"""What ranks say that are ahead of the one whose capture broke, beside it, and so late that another has sent."""


def test_ranks_elsewhere_are_told_at_once(ranks):
    """Not after the timeout: the one whose capture broke has left."""
    for r, (said, seconds) in enumerate(ranks.run(3, check_told_at_once)):
        assert "odd" in said if r == 1 else any(words in said for words in TOLD)
        assert seconds < 2 * PATIENCE  # others may hold the cores


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: x * x.sum().item(), "item: the host would wait"),
        (lambda x: x + torch.tensor([1.0, 2.0], device=x.device), "tensor: the host would wait"),
        (lambda x: x[[1, 0]], "__getitem__: the host would wait"),
        (lambda x: x[x > 0], "index within a graph: the host would wait"),
    ],
)
def test_the_stand_in_refuses_what_a_graph_cannot(monkeypatch, wrong, said):
    standing(monkeypatch.setattr, Recorded)
    with pytest.raises(ring_la.UnsupportedError, match=said):
        calls(ring_la.capture(wrong), torch.ones(2))


def test_the_stand_in_repeats_operators_and_no_python(monkeypatch):
    """Its memory is one for all replays; what the host decided stays decided, and memory that is gone is refused."""
    standing(monkeypatch.setattr, Recorded)
    total, numbers, held = torch.zeros(2), iter(range(99)), [torch.full((2,), float(n)) for n in range(5)]

    def taken(x):
        total.add_(x)
        return total + next(numbers)

    step, outs = ring_la.capture(taken), []
    for n in range(6):
        outs.append(step(torch.full((2,), float(n))))
    assert [x[0].item() for x in outs[:3]] == [0, 2, 5]  # by Python: 0, 1, 3 and a number
    assert all(x is outs[3] for x in outs[3:])
    assert outs[3].tolist() == [15 + 3, 15 + 3]
    with pytest.raises(ring_la.UnsupportedError, match="numbers that nobody keeps"):
        calls(ring_la.capture(lambda x: x + held.pop()), torch.ones(2))


def test_a_graph_keeps_the_tables_that_a_cache_forgets(monkeypatch):
    """Calls of other lengths between two replays, as prompts of a server are, are more than the cache has room for."""
    standing(monkeypatch.setattr, Recorded)
    step = ring_la.capture(lambda x: x + table_of((0, 7, 0), 4, x.device)[0].sum())
    calls(step, x := torch.zeros(2))
    want = x + table_of((0, 7, 0), 4, x.device)[0].sum()
    for n in range(300):
        table_of((0, 100 + n, 0), 4, x.device)
    assert step(x).equal(want)
    step.release()
    assert not any(kind.tables for kind in step.kinds.values())
