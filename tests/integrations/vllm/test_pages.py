"""From what a reader's ranks hand over to vLLM's pages, with layers that only look like vLLM's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ring_la.errors import ArgumentError, UnsupportedError
from ring_la.integrations.vllm.memory import Shared, mapped
from ring_la.integrations.vllm.pages import HandedOver, SequenceBlocks, check_layers
from ring_la.integrations.vllm.parcels import LaidTensor, places, planned, runs
from ring_la.integrations.vllm.states import WorkerPart, write_states

CPU = torch.device("cpu")


class Pages:
    """Attention as vLLM's: slots of keys and values."""

    def __init__(self, heads: int, blocks: int, size: int) -> None:
        self.num_kv_heads, self.impl = heads, self
        self.kv_cache = torch.zeros(2, blocks * size, heads, 4)

    def do_kv_cache_update(self, layer, key, value, cache, slots) -> None:
        cache[0, slots], cache[1, slots] = key, value


def recurrent(kind: str, *pages: torch.Size, **others) -> SimpleNamespace:
    cache = tuple(torch.full((4, *shape), torch.nan) for shape in pages)
    return SimpleNamespace(mamba_type=SimpleNamespace(name=kind), kv_cache=cache, **others)


def test_places_are_runs():
    tokens = torch.tensor([0, 1, 2, 7, 9, 10])
    assert runs(tokens) == [[0, 3], [7, 8], [9, 11]]
    assert torch.equal(places(runs(tokens)), tokens)
    assert runs(tokens[:0]) == []
    assert len(places([])) == 0


@pytest.mark.parametrize(
    "change",
    [{"at": 512}, {"at": -256}, {"at": 1}, {"shape": [3, 100]}, {"dtype": "int8"}, {"kind": "x"}, {"layer": ""}],
)
def test_a_piece_lies_within_its_memory(change):
    good = LaidTensor(3, "key", 0, torch.bfloat16, (3, 4), 256)
    assert LaidTensor.from_json(good.to_json(), 280) == good
    with pytest.raises(ArgumentError, match="pieces"):
        LaidTensor.from_json(good.to_json() | change, 280)


def parcel(memory: Shared, tokens: torch.Tensor, tensors: list) -> dict:
    pieces, size = planned(tensors)
    room, handle = memory.room(1, size)
    for piece, (*_, tensor) in zip(pieces, tensors):
        piece.of(room).copy_(tensor)
    return {"tokens": runs(tokens), "memory": handle, "pieces": [piece.to_json() for piece in pieces]}


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (4, 2)])
def test_keys_of_two_ranks_go_into_blocks_by_heads(size, kv_heads, tmp_path):
    """Zigzag: rank 0 has the ends. Tokens before the span, and of blocks a window left behind, stay as they were."""
    k, v = torch.randn(2, 24, kv_heads, 4)
    shared = [Shared(CPU, tmp_path), Shared(CPU, tmp_path)]
    split = [torch.cat([torch.arange(6), torch.arange(18, 24)]), torch.arange(6, 18)]
    parcels = [parcel(m, t, [(5, "key", 0, k[t]), (5, "value", 0, v[t])]) for m, t in zip(shared, split)]
    blocks = SequenceBlocks([3, -1, 0, 2], 8)
    over = HandedOver(parcels, CPU)
    for rank in range(size):
        layer = Pages(max(1, kv_heads // size), 4, 8)
        assert over.numbered({"model.layers.5.self_attn.attn": layer}) == {"model.layers.5.self_attn.attn": 5}
        over.write(5, layer, blocks, (2, 24), WorkerPart(rank, size))
        head = slice(rank * kv_heads // size, max(1, kv_heads // size) + rank * kv_heads // size)
        expected = torch.zeros_like(layer.kv_cache)
        for where, token in [(24 + t, t) for t in range(2, 8)] + [(t, 16 + t) for t in range(8)]:
            expected[0, where], expected[1, where] = k[token, head], v[token, head]
        assert torch.equal(layer.kv_cache, expected)
    for memory in shared:
        memory.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_states_of_gated_delta_nets_by_workers(size, turned):
    """Each worker has the channels of its heads' queries, keys and values, and these heads' states, V first."""
    H, V, K = 4, 3, 5
    q, k, v = torch.randn(2, K, 6), torch.randn(2, K, 6), torch.randn(H, V, 6)
    conv, state = torch.cat([x.flatten(0, 1) for x in (q, k, v)]), torch.randn(H, K, V)
    for rank in range(size):
        keys, values = slice(rank * 2 // size, (rank + 1) * 2 // size), slice(rank * H // size, (rank + 1) * H // size)
        channels = torch.cat([x.flatten(0, 1) for x in (q[keys], k[keys], v[values])])[:, -3:]
        shapes = (tuple(channels.shape) if turned else tuple(channels.T.shape)), (H // size, V, K)
        layer = recurrent("GDN_ATTN", *shapes, key_dim=2 * K, value_dim=H * V)
        write_states(layer, {("convolution", 0): conv, ("recurrent", 0): state}, 2, WorkerPart(rank, size))
        assert torch.equal(layer.kv_cache[0][2], channels if turned else channels.T)
        assert torch.equal(layer.kv_cache[1][2], state[values].mT)
        assert layer.kv_cache[1][:2].isnan().all()


@pytest.mark.parametrize("groups", [1, 2])
def test_states_of_mamba_by_workers(groups):
    """Of one group every worker has all, of two each has one; a prompt shorter than the kernel begins with zeros."""
    H, V, K, size = 4, 3, 5, 2
    x, B, C, state = torch.randn(H * V, 2), *torch.randn(2, groups * K, 2), torch.randn(H, V, K)
    mine = groups // size or 1
    for rank in range(size):
        of = slice(0, K) if groups == 1 else slice(rank * K, (rank + 1) * K)
        channels = torch.cat([x[rank * 6 : rank * 6 + 6], B[of], C[of]])
        sizes = {"intermediate_size": H * V, "groups_ssm_state_size": mine * K * size}
        layer = recurrent("MAMBA2", (3, len(channels)), (2, V, K), **sizes)
        states = {("convolution", 0): torch.cat([x, B, C]), ("recurrent", 0): state}
        write_states(layer, states, 0, WorkerPart(rank, size))
        assert torch.equal(layer.kv_cache[0][0], torch.cat([torch.zeros(1, len(channels)), channels.T]))
        assert torch.equal(layer.kv_cache[1][0], state[2 * rank : 2 * rank + 2])


def test_states_of_mamba_1_by_workers():
    channels, state = torch.randn(6, 4), torch.randn(6, 5)
    for rank in range(2):
        mine = slice(3 * rank, 3 * rank + 3)
        layer = recurrent("MAMBA1", (3, 3), (3, 5))
        write_states(layer, {("convolution", 0): channels, ("recurrent", 0): state}, 1, WorkerPart(rank, 2))
        assert torch.equal(layer.kv_cache[0][1], channels[mine, -3:].T)
        assert torch.equal(layer.kv_cache[1][1], state[mine])


def test_layers_that_nothing_can_be_written_into_are_refused_at_the_start():
    attention = SimpleNamespace(num_kv_heads=2, impl=SimpleNamespace(do_kv_cache_update=None))
    known = {"layers.0.attn": attention, "layers.1.mixer": recurrent("MAMBA1", (3, 3), (3, 5))}
    check_layers(known)
    with pytest.raises(UnsupportedError, match=r"latents.*got layers.0.indexer.k_cache, a SimpleNamespace"):
        check_layers(known | {"layers.0.indexer.k_cache": SimpleNamespace(head_dim=4)})
    with pytest.raises(UnsupportedError, match=r"SHORT_CONV, got LINEAR layers.2.mixer"):
        check_layers(known | {"layers.2.mixer": recurrent("LINEAR", (2, 2))})
    with pytest.raises(UnsupportedError, match=r"attention_backend: .* got SimpleNamespace in layers.3.attn"):
        check_layers(known | {"layers.3.attn": SimpleNamespace(num_kv_heads=2, impl=SimpleNamespace())})


def test_what_does_not_fit_is_refused_by_name():
    state = {("convolution", 0): torch.zeros(8, 3), ("recurrent", 0): torch.zeros(2, 2, 2)}
    with pytest.raises(UnsupportedError, match=r"layers out of GDN_ATTN, MAMBA1, .*SHORT_CONV, got LINEAR"):
        write_states(recurrent("LINEAR", (2, 2)), state, 0, WorkerPart(0, 1))
    with pytest.raises(UnsupportedError, match=r"a convolution of channels \[4, 4, 4\], got 8"):
        write_states(recurrent("GDN_ATTN", (2, 12), (2, 2, 2), key_dim=4, value_dim=4), state, 0, WorkerPart(0, 1))
    with pytest.raises(UnsupportedError, match=r"a convolution for pages \[2, 6\], got 8 channels"):
        write_states(recurrent("SHORT_CONV", (2, 6)), state, 0, WorkerPart(0, 1))
    layer = recurrent("MAMBA2", (2, 8), (2, 2, 3), intermediate_size=4, groups_ssm_state_size=2)
    with pytest.raises(UnsupportedError, match=r"a state \[2, 2, 3\] of SimpleNamespace, got \[2, 2, 2\]"):
        write_states(layer, state, 0, WorkerPart(0, 1))
    with pytest.raises(UnsupportedError, match="3 workers share evenly, got 2 of 4 on each"):
        WorkerPart(0, 3).cut(torch.zeros(4), 0, 2)
    with pytest.raises(UnsupportedError, match="reader: expected memory that this process can map, got /nowhere"):
        mapped({"file": "/nowhere", "size": 3}, CPU)
    with pytest.raises(ArgumentError, match="memory: expected a handle"):
        mapped({"file": "/nowhere"}, CPU)


def test_layers_without_a_number_are_taken_in_order():
    """Falcon-H1's mixers are numbered behind its layers, Zamba2's attention by itself."""
    over = HandedOver([], CPU)
    over.states = {layer: {} for layer in (0, 2, 11)}
    mixer = recurrent("MAMBA2")
    names = {f"model.{n}.mixer": mixer for n in (102, 9, 20)}
    assert over.numbered(names) == {"model.9.mixer": 0, "model.20.mixer": 2, "model.102.mixer": 11}
    with pytest.raises(UnsupportedError, match=r"the model vLLM has, with state of \['model.9.mixer'\], got those of"):
        over.numbered({"model.9.mixer": mixer})
    with pytest.raises(UnsupportedError, match=r"with state of model.layers.1.mixer, got none"):
        over.numbered({"model.layers.1.mixer": mixer})


def test_what_a_killed_reader_leaves_the_next_removes(tmp_path):
    living, dead = Shared(CPU, tmp_path), Shared(CPU, tmp_path)
    room, handle = living.room(7, 100)
    room.fill_(3)
    dead._lock.close()  # as its end does
    Shared(CPU, tmp_path).close()
    assert [folder.name for folder in tmp_path.iterdir()] == [living._folder.name]
    seen = mapped(handle, CPU)
    living.drop(7)
    assert seen.sum() == 300
    assert living.held == 0
    living.close()
