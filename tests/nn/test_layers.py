"""Layers on one device: documents kept apart, token by token, low precision, bad input."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from ring_la import ArgumentError, UnsupportedError
from ring_la.nn.decoding import KVRows
from ring_la.nn.seats import Seats
from tests.nn.cases import DIM, NAMES, RECURRENT, make, parts


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_is_the_whole(name):
    layer, x = make(name), random(2, 11, DIM)
    whole = layer(x, output_state=True)
    out, outputs = layer(x[:, :4], output_state=True), []
    for t in range(4, 11):
        out = layer(x[:, t : t + 1], state=out.state, output_state=True)
        outputs.append(out.o)
    close(torch.cat(outputs, 1), whole.o[:, 4:])
    for a, b in zip(parts(out.state), parts(whole.state), strict=True):
        close(a, b)
    assert layer(x).state is None


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_kept_apart_and_decoded_as_rows(name):
    layer, x, more = make(name), random(1, 13, DIM), random(3, 2, DIM)
    cu = torch.tensor([0, 4, 5, 13])
    packed = layer(x, cu_seqlens=cu, output_state=True)
    after = layer(more, state=packed.state)
    for n in range(3):
        alone = torch.cat([x[:, cu[n] : cu[n + 1]], more[n : n + 1]], 1)
        o = layer(alone).o
        close(packed.o[:, cu[n] : cu[n + 1]], o[:, :-2])
        close(after.o[n : n + 1], o[:, -2:])


def test_rows_at_several_places_of_a_mini_batch_go_on():
    """Documents of several lengths, packed, then rows of a batch: each at its own place of a mini-batch of 3."""
    layer, x, more = make("ttt"), random(1, 12, DIM), random(3, 5, DIM)
    cu = torch.tensor([0, 4, 5, 12])
    state, steps = layer(x, cu_seqlens=cu, output_state=True).state, []
    for t in range(5):
        out = layer(more[:, t : t + 1], state=state, output_state=True)
        state, steps = out.state, [*steps, out.o]
    for n in range(3):
        alone = torch.cat([x[:, cu[n] : cu[n + 1]], more[n : n + 1]], 1)
        close(torch.cat(steps, 1)[n : n + 1], layer(alone).o[:, -5:])


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_mode_is_chunk_mode(name):
    x = random(2, 9, DIM)
    close(make(name, mode="recurrent")(x).o, make(name, mode="chunk")(x).o)


def test_a_window_holds_while_decoding():
    layer, x = make("attention", window=3), random(2, 12, DIM)
    whole, out = layer(x).o, layer(x[:, :5], output_state=True)
    for t in range(5, 12):
        out = layer(x[:, t : t + 1], state=out.state, output_state=True)
        close(out.o[:, 0], whole[:, t])


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_runs(name):
    every = {"nsa": {"topk": 18}, "dsa": {"topk": 70}, "moba": {"topk": 24}}.get(name, {})  # another choice is no error
    layer, x = make(name, torch.float32, **every), random(1, 70, DIM).float()
    exact = layer(x).o
    with torch.autocast("cpu", torch.bfloat16):
        o = layer(x).o
    assert (o - exact).norm() < 0.05 * exact.norm()
    o = layer.to(torch.bfloat16)(x.bfloat16()).o
    assert o.dtype == torch.bfloat16
    assert (o - exact).norm() < 0.08 * exact.norm()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_found_without_memory(name):
    layer, x = make(name).to("meta"), torch.empty(2, 9, DIM, dtype=torch.float64, device="meta", requires_grad=True)
    if name == "nsa":
        with pytest.raises(UnsupportedError, match=r"^q: expected a tensor with values"):
            layer(x)
        return
    out = layer(x, output_state=True)
    (dx,) = torch.autograd.grad(out.o.sum(), x)
    assert out.o.shape == dx.shape == x.shape
    if name != "log_linear_mamba2":  # the host reads how many tokens there were
        assert layer(x[:, :1], state=out.state).o.shape == (2, 1, DIM)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_named_at_the_layer(name):
    layer, x = make(name), random(2, 5, DIM)
    for bad in (x[..., :-1], x[0], x.long(), None):
        with pytest.raises(ArgumentError, match="x: expected"):
            layer(bad)
    with pytest.raises(ArgumentError, match="cu_seqlens: expected to end at"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ArgumentError, match="cu_seqlens: expected None for a batch"):
        layer(x, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ArgumentError, match="state: expected a"):
        layer(x, state=x)
    for flag in ("output_state", "in_place"):
        with pytest.raises(ArgumentError, match=f"^{flag}: expected True or False"):
            layer(x, **{flag: "yes"})
    with pytest.raises(ArgumentError, match="layout: expected a layout made by"):
        layer(x, layout="zigzag")
    with pytest.raises(TypeError):
        layer(x, lay_out=None)


def test_a_cache_of_other_documents_or_heads_is_refused():
    layer, x = make("attention"), random(2, 6, DIM)
    state = layer(x, output_state=True).state
    with pytest.raises(ArgumentError, match="state: expected keys of 1 documents and 2 heads, got"):
        layer(x[:1], state=state)
    with pytest.raises(ArgumentError, match="state: expected keys of 2 documents and 1 heads, got"):
        make("attention", num_kv_heads=1)(x, state=state)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_what_another_layer_remembers_is_refused(name):
    """Where its shapes are others; else nobody can tell."""
    layer, x = make(name), random(2, 3, DIM)
    mine = layer(x, output_state=True).state
    shapes = [None if t is None else t.shape for t in mine]
    for other in (make(n) for n in NAMES):
        theirs = other(x, output_state=True).state
        if type(theirs) is not type(mine) or [None if t is None else t.shape for t in theirs] == shapes:
            continue
        with suppress(ArgumentError):  # some states have the shapes that matter
            layer(x[:, :1], state=theirs)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_what_is_remembered_of_other_documents_is_refused(name):
    layer, x = make(name), random(3, 3, DIM)
    states = [layer(x[:n], output_state=True).state for n in (1, 2)]
    for n, state in ((1, states[1]), (2, states[0]), (3, states[1])):
        for T in (1, 2):
            with pytest.raises(ArgumentError, match="expected"):
                layer(x[:n, :T], state=state)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "nsa"])
def test_a_batch_without_rows_is_one(name):
    layer, x = make(name), random(2, 5, DIM)
    assert layer(x[:0]).o.shape == (0, 5, DIM)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mla", "nsa", "dsa", "moba"])
def test_rows_of_several_lengths_share_memory(name):
    """As a server decodes: each sequence goes on by a token as it does alone."""
    layer, x = make(name), random(3, 12, DIM)
    before = [layer(x[n : n + 1, :length], output_state=True) for n, length in enumerate((9, 5, 11))]
    seats = Seats.of([9, 5, 11], torch.device("cpu"))
    rows = KVRows(Seats.of([], torch.device("cpu"))).moved((), [out.state for out in before], seats)
    out = layer(x[:, -1:], state=rows, output_state=True)
    for n, alone in enumerate(before):
        close(out.o[n : n + 1], layer(x[n : n + 1, -1:], state=alone.state).o)


def test_a_packed_continuation_of_a_cache_is_refused():
    layer, x = make("attention"), random(1, 6, DIM)
    state = layer(x, output_state=True).state
    with pytest.raises(UnsupportedError, match="as a batch row"):
        layer(x, state=state, cu_seqlens=torch.tensor([0, 6]))
