"""Which calls go by one launch each way (`wy/one_launch`): split ones, and those of layers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.interpreter import interpreted

interpreted()

import ring_la  # noqa: E402
from ring_la import nn  # noqa: E402
from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels import gpu  # noqa: E402
from ring_la.kernels.protocol import Backward, Inputs, Mail, OutputUse  # noqa: E402
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


def seen(layer: torch.nn.Module, name: str) -> tuple[Rule, Inputs]:
    """The rule and inputs of a layer's call in bf16."""
    made, module = [], f"{type(layer).__module__}.{name}"
    with mock.patch(module, side_effect=lambda *x, **how: made.append((x, how)) or getattr(ring_la, name)(*x, **how)):
        layer.bfloat16()(torch.randn(1, 40, layer.dim).bfloat16())
    [(x, how)] = made
    if name == "rwkv7":
        r, w, k, v, a, b = x
        return Rule("dplr", "diagonal", how["lower_bound"]), Inputs(r, k, v, w, None, a, b)
    return Rule("delta", "diagonal", how.get("lower_bound")), Inputs(*x)


def test_layers_whose_calls_launches_take():
    train = OutputUse(saved=True, alone=True)
    rwkv7 = seen(nn.RWKV7(256, num_heads=2), "rwkv7")
    assert one_launch.choice(*rwkv7, train) is one_launch.DPLR
    assert {x.dtype for x in rwkv7[1] if x is not None} == {torch.bfloat16}
    bounded = seen(nn.KimiDeltaAttention(256, 2, lower_bound=-5.0), "kda")
    assert one_launch.choice(*bounded, train) is one_launch.KDA
    assert one_launch.choice(*seen(nn.KimiDeltaAttention(256, 2), "kda"), train) is None


@pytest.mark.parametrize(
    ("tokens", "heads", "length"), [(4096, 32, 1024), (8192, 32, 2048), (16384, 32, 4096), (32768, 32, 4096)]
)
def test_spans_are_as_long_as_an_h200_likes_them(tokens, heads, length):
    """Of the lengths that were measured the fastest."""
    assert gdn_launches.across(tokens, heads, 1, 132, True) == (length, length)


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
    """The border of a rank in the middle, or of the first, at which nothing is exchanged (see `protocol.Border`)."""

    whole = True, True

    def __init__(self, launches: list[str], middle: bool, mail: Mail | None) -> None:
        self._launches, self._mail = launches, mail
        self.carries, self.sends = (middle, middle), (True, middle)

    def mail(self, states: tuple[int, int, int], reverse: bool) -> Mail | None:
        assert states == (4, 128, 128)
        return self._mail

    def spans(self, *args, **named) -> None:
        self._launches.append("link")


@pytest.mark.parametrize(
    ("rule", "kernels", "prepared"),
    [(Rule("delta", "scalar"), across.DELTA, []), (Rule("delta", "diagonal"), across.KDA, ["states"])],
    ids=["delta", "kda"],
)
@pytest.mark.parametrize("middle", [True, False])
@pytest.mark.parametrize("mail", [None, ((1,), (2,))], ids=["", "mailed"])
def test_launches_of_a_split_call(monkeypatch, rule, kernels, prepared, middle, mail):
    """The link goes through the spans, behind their maps, unless launches carry states themselves. Nothing is filled.
    What needs no gradient of a state comes first where nothing is sent by then, or by a launch beside it."""
    launches: list[str] = []

    def kernel(name, *how, leaves=False, maps=False, early=False, mailed=False):
        delta = kernels is across.DELTA
        # parts of maps, or spans, wait for each other; or a launch finds maps beside that of chunks' states
        beside = maps if delta else mailed and (maps or name == "forward")
        assert (leaves, early) == (False, beside)
        assert mailed == (mail is not None and not (maps and delta))
        return lambda *args: launches.append("maps" if maps else "states" if name == "states" else "output")

    for module, name in (
        (gdn_launches, "forward_kernel"), (gdn_launches, "backward_kernel"), (kda_launches, "kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(gdn_launches, "zeros", lambda count, device: q)
    monkeypatch.setattr(across, "clear", lambda x: launches.append("clear"))
    monkeypatch.setattr(dense, "launch", lambda *args, **constants: launches.append("scan"))
    q = torch.zeros(1, 4096, 4, 128, dtype=torch.bfloat16)
    g = torch.zeros(1, 4096, 4, *((128,) if rule.decay == "diagonal" else ()))
    inputs = Inputs(q, q, q, g, torch.zeros(1, 4096, 4))
    with torch.no_grad(), Operations() as done:
        call = ScannedSpans.of(kernels, rule, inputs, None, 1.0, SPLIT)
        out = call.output(None, border=Silent(launches, middle, mail))
        link = ["link"] * (mail is None)
        finds = mail is not None and kernels is across.KDA  # one launch does all, given numbers that are zero
        assert launches == ["clear" if finds else "maps", *link, "output"]
        launches.clear()
        call.gradients(Backward(None, q, out.saved), None, border=Silent(launches, middle, mail))
        first = mail is not None or not middle
        before = [*prepared, "maps", *link] if first else ["maps", *link, *prepared]
        assert launches == [*before, "output"]
    assert done.names == []
