"""Which split calls go by the kernels of one GPU (`wy/one_launch`), and what of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.interpreter import interpreted

interpreted()

from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels.protocol import Backward, Inputs, OutputUse  # noqa: E402
from ring_la.kernels.spans import dense  # noqa: E402
from ring_la.kernels.wy import across, gdn_launches, kda_launches, one_launch  # noqa: E402
from ring_la.kernels.wy.scanned_spans import ScannedSpans  # noqa: E402

SPLIT = OutputUse(saved=True)


def call(tokens: int) -> Inputs:
    x = torch.empty(1, tokens, 2, 128, device="meta")
    return Inputs(x, x, x, x[..., 0], x[..., 0])


RULES = [(Rule("delta", "scalar"), 2**16), (Rule("delta", "none"), None), (Rule("erase", "scalar"), None)]


@pytest.mark.parametrize(("rule", "least"), RULES)
def test_split_calls_that_train_go_so_from_a_size_on(rule, least):
    for tokens in (2**16 - 1, 2**16):
        found = one_launch.choice(rule, call(tokens), SPLIT)
        assert (found is one_launch.DELTA) == (least is not None and tokens >= least)


def test_a_call_that_kda_takes(monkeypatch):
    kda, x = Rule("delta", "diagonal", lower_bound=-5.0), call(64)
    assert not one_launch.ACROSS.takes(kda, x)
    monkeypatch.setattr(one_launch, "ACROSS", one_launch.Least(delta_diagonal=128))
    assert one_launch.ACROSS.takes(kda, x)


@pytest.mark.parametrize(
    ("tokens", "heads", "length", "finer"), [(4096, 32, 1024, 1), (16384, 32, 4096, 2), (32768, 32, 4096, 1)]
)
def test_spans_are_as_long_as_an_h200_likes_them(tokens, heads, length, finer):
    """Of the lengths that were measured the fastest; maps' spans are halves only where all spans are whole."""
    assert gdn_launches.across(tokens, heads, 1, 132, True) == (length, finer)
    assert gdn_launches.across(tokens, heads, 1, 132, False)[1] == 1
    assert gdn_launches.across(tokens - 1, heads, 1, 132, True)[1] == 1


class Operations(TorchDispatchMode):
    """What torch is asked to do but for memory and views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = all(r.alias_info is not None for r in function._schema.returns)
        if not views and "empty" not in function.name():
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


class Silent:
    """The border of a rank in the middle, or at an end, at which nothing is exchanged (see `protocol.Border`)."""

    whole, sends = (True, True), (True, True)

    def __init__(self, launches: list[str], middle: bool) -> None:
        self._launches, self.carries = launches, (middle, middle)

    def spans(self, *args) -> None:
        self._launches.append("link")


@pytest.mark.parametrize(
    ("rule", "kernels", "forward", "back"),
    [(Rule("delta", "scalar"), across.DELTA, ["output"], ["output"]),
     (Rule("delta", "diagonal"), across.KDA, ["output"], ["output"] * 2)],
    ids=["delta", "kda"],
)  # fmt: skip
@pytest.mark.parametrize("middle", [True, False])
def test_launches_of_a_split_call(monkeypatch, rule, kernels, forward, back, middle):
    """The link goes through the spans, behind a scan only where what comes goes on, and nothing is filled."""
    launches: list[str] = []
    before = ["maps", "scan", "link"] if middle else ["maps", "link"]

    def kernel(*how, maps=False, early=False):
        assert not early, "no flags are zeroed before it"
        return lambda *args: launches.append("maps" if maps else "output")

    for module, name in (
        (gdn_launches, "forward_kernel"), (gdn_launches, "backward_kernel"), (kda_launches, "kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, kernel)
    for module in (gdn_launches, kda_launches):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(dense, "launch", lambda *args, **constants: launches.append("scan"))
    q = torch.zeros(1, 4096, 2, 128, dtype=torch.bfloat16)
    g = torch.zeros(1, 4096, 2, *((128,) if rule.decay == "diagonal" else ()))
    inputs = Inputs(q, q, q, g, torch.zeros(1, 4096, 2))
    with torch.no_grad(), Operations() as done:
        call = ScannedSpans.of(kernels, rule, inputs, None, 1.0, SPLIT)
        out = call.output(None, border=Silent(launches, middle))
        assert launches == before + forward
        launches.clear()
        call.gradients(Backward(None, q, out.saved), None, border=Silent(launches, middle))
        assert launches == before + back
    assert done.names == []
