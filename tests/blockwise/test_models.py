"""A hybrid model under ``deterministic=True``: logits, losses, every gradient and training steps are the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la.inference import BlockReader
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import LAYERS as KINDS
from ring_la.training import sum_gradients
from tests.support.pool import group
from tests.support.same_bits import EXPERTS, LAYERS, OTHERS, PACKED, decoded, differing, model, projected, tokens


def trained(rank: int, P: int, kind: str, cu: tuple[int, ...], layers: list[str], steps: int = 2) -> dict[str, Tensor]:
    """Of some steps of training: losses, and the last one's gradients, parameters and logits."""
    m, (ids,) = model(layers), tokens(cu[-1])
    cp = ring_la.ContextParallel(group(P), deterministic=True, attention="ulysses" if P == 3 else "auto")
    layout, out = cp.layout(cu[-1], kind, cu_seqlens=cu if len(cu) > 2 else None), {}
    optimizer, mine = torch.optim.AdamW(m.parameters(), lr=0.01), layout.shard(ids[None])
    for step in range(steps):
        optimizer.zero_grad()
        loss = m.loss(mine, layout=layout)
        loss.backward()
        sum_gradients(m.parameters(), cp)
        optimizer.step()
        out[f"loss {step}"] = cp.comm.all_reduce(loss.detach()).wait()
    out |= {f"gradient of {n}": p.grad for n, p in m.named_parameters()}
    out |= {n: p.detach() for n, p in m.named_parameters()}
    with torch.no_grad():
        return out | {"logits": layout.gather(m(mine, layout=layout).logits)}


def test_training_does_not_depend_on_ranks_or_layouts(ranks):
    one = ranks.run(1, trained, 1, "contiguous", PACKED, LAYERS)[0]
    assert all(torch.isfinite(x).all() and x.any() for n, x in one.items() if "gradient" in n)
    for P, kind in ((2, "zigzag"), (3, "contiguous"), (4, "zigzag")):
        for some in ranks.run(P, trained, P, kind, PACKED, LAYERS):
            assert not differing(one, some), (P, kind)


def test_experts_do_not_depend_on_ranks_or_layouts(ranks):
    """Chosen, shared and gated ones, and both losses of their routers; nor on packing."""
    layers = ["gdn", EXPERTS]
    one = ranks.run(1, trained, 1, "contiguous", PACKED, layers)[0]
    routers = [x for n, x in one.items() if n.startswith("gradient") and "router" in n]
    assert len(routers) == 1
    assert routers[0].any()
    for P, kind in ((2, "zigzag"), (3, "contiguous")):
        for some in ranks.run(P, trained, P, kind, PACKED, layers):
            assert not differing(one, some), (P, kind)
    one = ranks.run(1, packed, 1, "contiguous", (0, 1, 2), False, layers)[0]
    for P, kind, order, rows in ((3, "zigzag", (1, 2, 0), False), (2, "contiguous", (2, 1, 0), True)):
        for some in ranks.run(P, packed, P, kind, order, rows, layers):
            assert not differing(one, some), (P, kind, order, rows)


REFUSED = {"nsa", "dsa", "moba", "log_linear_mamba2"}
CUT = ("rwkv6", "mamba3", "lightnet", "abc")
"""Layers that go on from no state with the same bits."""
READ_ON = [name for name in OTHERS if name not in CUT]


def read_on(rank: int, name: str) -> tuple[str, str]:
    """What a reader says of such a layer, and what the layer does behind the first block."""
    m, cp = model([name]), ring_la.ContextParallel(group(1), deterministic=True)
    with pytest.raises(ring_la.UnsupportedError) as of_reader:
        BlockReader(m, cp)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    _, states = m.hidden(ids, output_states=True, layout=cp.layout(64))
    with pytest.raises(ring_la.UnsupportedError) as caught:
        m.hidden(ids, states=states, layout=cp.layout(64))
    return str(of_reader.value), str(caught.value)


def unread(rank: int, layer: str) -> str:
    """What a reader says of a model of such layers."""
    m = HybridLM(HybridConfig(50, 48, [layer], 3))
    with pytest.raises(ring_la.UnsupportedError) as caught:
        BlockReader(m, ring_la.ContextParallel(group(1), deterministic=True))
    return str(caught.value)


def refused(rank: int, name: str) -> str:
    layout = ring_la.ContextParallel(group(), deterministic=True).layout(64)
    with pytest.raises(ring_la.UnsupportedError) as caught:
        KINDS[name](48, 3)(torch.zeros(1, layout.local_length, 48), layout=layout)
    return str(caught.value)


def test_every_layer_has_the_same_bits_or_is_refused_by_name(ranks):
    assert set(LAYERS) | set(OTHERS) | REFUSED == set(KINDS)
    for name in REFUSED:
        expected = f"one without deterministic=True for {KINDS[name].__name__}"
        assert ranks.run(2, refused, name) == [f"layout: expected {expected}, got a deterministic one"] * 2
    for name in CUT:
        of_reader, of_layer = ranks.run(1, read_on, name)[0]
        kind = KINDS[name].__name__
        expected = "model: expected layers that go on from a state under a deterministic layout"
        assert of_reader.startswith(f"{expected}, got {kind}")
        assert of_layer.startswith(f"state: expected None under a deterministic layout for {kind}, got a state")


def test_a_reader_refuses_what_has_not_the_same_bits_when_it_is_made(ranks):
    for layer in sorted(REFUSED):
        expected = "model: expected layers that go on from a state under a deterministic layout"
        assert ranks.run(1, unread, layer) == [f"{expected}, got {KINDS[layer].__name__}"]


def plain(rank: int, layers: list[str]) -> dict[str, Tensor]:
    """The first loss and its gradients, in fp64 and without blocks."""
    m, (ids,) = model(layers).double(), tokens(PACKED[-1])
    loss = m.loss(ids[None], cu_seqlens=torch.tensor(PACKED))
    loss.backward()
    return {"loss 0": loss.detach()} | {f"gradient of {n}": p.grad for n, p in m.named_parameters()}


@pytest.mark.parametrize("layers", [LAYERS, ["gdn", EXPERTS]])
def test_values_are_those_of_other_layouts(ranks, layers):
    want = ranks.run(1, plain, layers)[0]
    got = ranks.run(1, trained, 1, "contiguous", PACKED, layers, 1)[0]
    for name, x in want.items():
        assert float((got[name] - x).norm() / x.norm()) < 2e-5, name


def packed(
    rank: int, P: int, kind: str, order: tuple[int, ...], rows: bool = False, layers: list[str] = LAYERS
) -> dict[str, Tensor]:
    """Loss and gradients of three documents packed in some order, or as rows of a batch, and the logits of each."""
    m, documents = model(layers), tokens(70, 70, 70)
    cp = ring_la.ContextParallel(group(P), deterministic=True)
    if rows:
        layout, ids = cp.layout(70, kind), torch.stack([documents[i] for i in order])
    else:
        layout, ids = (
            cp.layout(210, kind, cu_seqlens=(0, 70, 140, 210)),
            torch.cat([documents[i] for i in order])[None],
        )
    with projected(m) as found:
        loss = m.loss(layout.shard(ids), layout=layout)
    loss.backward()
    sum_gradients(m.parameters(), cp)
    logits = layout.gather(found[0].detach()).view(3, 70, -1)
    out = {f"logits {n}": logits[i] for i, n in enumerate(order)} | {n: p.grad for n, p in m.named_parameters()}
    return out | {"loss": cp.comm.all_reduce(loss.detach()).wait()}


def test_packing_changes_no_bit(ranks):
    one = ranks.run(1, packed, 1, "contiguous", (0, 1, 2))[0]
    for P, kind, order, rows in (
        (3, "zigzag", (1, 2, 0), False),
        (2, "contiguous", (2, 1, 0), True),
        (2, "balanced", (2, 0, 1), False),
    ):
        for some in ranks.run(P, packed, P, kind, order, rows):
            assert not differing(one, some), (P, kind, order, rows)


def test_other_layers_do_not_depend_on_ranks_or_packing(ranks):
    one = ranks.run(1, packed, 1, "contiguous", (0, 1, 2), False, OTHERS)[0]
    for P, kind, order, rows in ((4, "zigzag", (1, 2, 0), False), (3, "contiguous", (2, 1, 0), True)):
        for some in ranks.run(P, packed, P, kind, order, rows, OTHERS):
            assert not differing(one, some), (P, kind, order, rows)


def compiled(rank: int, P: int, kind: str, backend: str | None) -> dict[str, Tensor]:
    """The loss and the gradients of a step, compiled for a backend."""
    m, (ids,) = model(["gdn"]), tokens(PACKED[-1])
    cp = ring_la.ContextParallel(group(P), deterministic=True)
    layout = cp.layout(PACKED[-1], kind, cu_seqlens=PACKED)
    loss_of = m.loss if backend is None else torch.compile(m.loss, backend=backend)
    loss = loss_of(layout.shard(ids[None]), layout=layout)
    loss.backward()
    sum_gradients(m.parameters(), cp)
    return {"loss": cp.comm.all_reduce(loss.detach()).wait()} | {n: p.grad for n, p in m.named_parameters()}


def test_compiled_steps_have_the_same_bits(ranks):
    one = ranks.run(1, compiled, 1, "contiguous", None)[0]
    for some in ranks.run(2, compiled, 2, "zigzag", "inductor"):
        assert not differing(one, some)


@pytest.mark.parametrize(
    ("P", "T", "read", "layers"),
    [(1, 66, 62, LAYERS), (2, 131, 126, LAYERS), (2, 131, 126, READ_ON), (2, 131, 126, ["gdn", EXPERTS])],
)
def test_prefill_and_decoding_are_the_forward_pass(ranks, P, T, read, layers):
    for whole, steps in ranks.run(P, decoded, P, T, read, layers):
        assert torch.equal(whole, steps)


def test_a_solver_goes_on_from_the_matrix_it_had(ranks):
    """In bf16: what MesaNet writes is not rounded where its solver reads it."""
    whole, steps = ranks.run(1, decoded, 1, 66, 64, ["mesa_net"], torch.bfloat16)[0]
    assert torch.equal(whole, steps)
