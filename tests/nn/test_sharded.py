"""Every layer on a split sequence is the layer on the whole one: outputs, states, and gradients summed over ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ring_la import ContextParallel, RingLAError, UnsupportedError
from tests.nn.cases import DIM, NAMES, make, parts
from tests.support.gpu import on_gpus
from tests.support.pool import group
from tests.support.sums import summed_gradients

TOKENS = 37
WHOLE = ("nsa", "dsa", "moba")
"""They read a prompt at once."""
CU = [0, 3, 3, 20, 37]
CASES = {
    "two ranks": (2, "zigzag", None),
    "three ranks, packed": (3, "zigzag", CU),
    "contiguous": (3, "contiguous", None),
}


def check(rank: int, name: str, kind: str, cu: list[int] | None, replay: bool = False) -> None:
    cp = ContextParallel(group(), scan="ring")
    layout = cp.layout(TOKENS, kind=kind, cu_seqlens=cu)
    torch.manual_seed(1)
    x = torch.randn(1 if cu else 2, TOKENS, DIM, dtype=torch.float64)
    weights = torch.randn_like(x)
    whole, split = make(name), make(name)
    x_whole, x_split = x.clone().requires_grad_(), layout.shard(x).requires_grad_()
    offsets = None if cu is None else torch.tensor(cu)

    out = whole(x_whole, output_state=True, output_loss=True, cu_seqlens=offsets)
    (objective(out.o, weights) + on_state(out.state) + own(out.loss)).backward()
    if replay:
        o, loss, *state = checkpoint(_tensors, split, x_split, layout, use_reentrant=False)
    else:
        o, loss, *state = _tensors(split, x_split, layout)
    part = objective(o, layout.shard(weights)) + own(loss)
    (part + on_state(state) / cp.size).backward()

    close(o, layout.shard(out.o))
    assert (loss is not None) == (name == "dsa")
    if loss is not None:
        close(cp.comm.all_reduce(loss.detach()).wait(), out.loss)
    for a, b in zip(state, parts(out.state), strict=True):
        close(a, b)
    close(x_split.grad, layout.shard(x_whole.grad))
    assert all(p.grad is not None for p in split.parameters())
    for (label, grad), q in zip(summed_gradients(split, cp).items(), whole.parameters(), strict=True):
        close(grad, q.grad, label)


def _tensors(layer, x, layout) -> tuple[torch.Tensor | None, ...]:
    out = layer(x, output_state=True, output_loss=True, layout=layout)
    return (out.o, out.loss, *parts(out.state))


def own(loss: torch.Tensor | None) -> torch.Tensor | float:
    """What the layer adds to a training loss, large enough for a wrong gradient to show."""
    return 0.0 if loss is None else 100 * loss


def objective(o: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (o * weights).sum() + o.square().sum()


def on_state(state) -> torch.Tensor:
    tensors = parts(state) if not isinstance(state, list) else state
    return sum((t * torch.linspace(0, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in tensors)


def close(a: torch.Tensor, b: torch.Tensor, label: str = "") -> None:
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    error = float((a - b).abs().max()) if b.numel() else 0.0
    assert a.shape == b.shape, label
    assert error <= 1e-9 * scale, f"{label}: {error:.1e} of {scale:.1e}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_split_is_whole(ranks, name, case):
    size, kind, cu = CASES[case]
    ranks.run(size, check, name, kind, cu)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_split_is_whole_on_gpus(gpu_ranks, name, case):
    size, kind, cu = CASES[case]
    on_gpus(gpu_ranks, size, check, name, kind, cu)


@pytest.mark.parametrize("name", ["attention", "gdn", "rwkv7"])
def test_checkpointed_layers_exchange_again_in_backward(ranks, name):
    ranks.run(2, check, name, "zigzag", None, True)


def check_striped(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring")
    layout = cp.layout(TOKENS, kind="striped")
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = make("attention")
    close(layer(layout.shard(x), layout=layout).o, layout.shard(layer(x).o))
    with pytest.raises(ValueError, match="Convert first"):
        make("gdn")(layout.shard(x), layout=layout)


def test_striped_layouts_are_for_attention(ranks):
    ranks.run(2, check_striped)


def check_more(rank: int, name: str) -> None:
    """A long continuation, split over the ranks, of what was read before."""
    cp = ContextParallel(group(), scan="ring")
    x = torch.randn(2, TOKENS + 14, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = make(name)
    whole = layer(x, output_state=True)
    first, second = cp.layout(14), cp.layout(TOKENS)
    state = layer(first.shard(x[:, :14]), output_state=True, layout=first).state
    out = layer(second.shard(x[:, 14:]), state=state, output_state=True, layout=second)
    close(out.o, second.shard(whole.o[:, 14:]))
    for a, b in zip(parts(out.state), parts(whole.state), strict=True):
        close(a, b)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WHOLE])
def test_a_prompt_in_two_split_parts(ranks, name):
    ranks.run(2, check_more, name)


def check_no_more(rank: int, name: str) -> None:
    layout, layer = ContextParallel(group(), scan="ring").layout(TOKENS), make(name)
    x = layout.shard(torch.zeros(1, TOKENS, DIM, dtype=torch.float64))
    state = layer(x, layout=layout, output_state=True).state
    with pytest.raises(UnsupportedError, match=r"^state: "):
        layer(x, state=state, layout=layout)


@pytest.mark.parametrize("name", WHOLE)
def test_chosen_keys_do_not_go_on_from_a_cache_on_split_tokens(ranks, name):
    ranks.run(2, check_no_more, name)


def check_refusals(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring", timeout=60)
    layout, other = cp.layout(TOKENS), cp.layout(TOKENS + 2)
    layer = make("gdn")
    x = torch.randn(2, layout.local_length, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"x: expected {DIM} channels last"):
        layer(x[..., 1:], layout=layout)
    with pytest.raises(RingLAError, match="layout: expected one with"):
        layer(x, layout=other)
    with pytest.raises(RuntimeError, match="rank 0: refused: layout: expected one with"):  # every rank hears of it
        layer(x[:, 1:] if rank == 0 else x, layout=cp.layout(TOKENS))


def test_wrong_shapes_are_refused_on_every_rank(ranks):
    ranks.run(2, check_refusals)
