"""What a call makes on the host is on the host, whatever device new tensors go to by default.

The default device is "meta" here, whose tensors have no values; on a GPU machine it is "cuda", where a host that reads
them would wait for the GPU. Autograd's engine takes no default device with it, so that a backward pass has it set anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.function import BackwardCFunction

from ring_la import ContextParallel
from ring_la.inference import generate
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import BalancedSequences, Corpus, PackedSequences, Work
from tests.support.pool import group

from .cases import DIM, make

CU = (0, 3, 20, 37)
LAYERS = ("attention", "mla", "nsa", "dsa", "moba", "retention", "gdn", "mamba2", "rwkv7", "log_linear_mamba2")
SAME_BITS = ("attention", "mla", "retention", "gdn", "mamba2", "rwkv7", "comba", "gated_delta_product", "mesa_net",
             "preconditioned_gdn", "momentum_deltanet", "mlstm", "mamba3", "fox", "ttt", "rwkv6", "gsa", "hgrn", "abc",
             "lightnet")  # fmt: skip


@contextmanager
def elsewhere() -> Iterator[None]:
    """With another default device, also within the backward passes of Functions."""
    back = BackwardCFunction.apply

    def apply(ctx: Any, *grads: Any) -> Any:
        with torch.device("meta"):
            return back(ctx, *grads)

    with torch.device("meta"), patch.object(BackwardCFunction, "apply", apply):
        yield


def check(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring", attention="ring")
    layers, x = [make(name) for name in LAYERS], torch.randn(1, 37, DIM, dtype=torch.float64)
    model = HybridLM(HybridConfig(19, 16, ["gdn", "attention", "mla"], 2))
    ids, other = torch.arange(37)[None] % 19, cp.layout(37, "contiguous", cu_seqlens=CU)
    with elsewhere():
        for kind in ("contiguous", "zigzag", "striped", "balanced"):
            layout = cp.layout(37, kind, cu_seqlens=CU)
            local = layout.shard(x)
            assert torch.equal(layout.gather(local), x)
            assert torch.equal(layout.convert(local, other), other.shard(x))
            assert {
                layout.tokens().device.type,
                layout.positions.device.type,
                layout.targets(layout.shard(ids)).device.type,
            } == {"cpu"}
        layout = cp.layout(37, "zigzag", cu_seqlens=CU)
        for layer in layers:
            layer(layout.shard(x).requires_grad_(), layout=layout).o.sum().backward()
        model.loss(layout.shard(ids), layout=layout).backward()
        assert generate(model, cp.layout(9).shard(ids[:, :9]), 3, layout=cp.layout(9)).shape == (1, 3)


def test_calls_of_ranks(ranks):
    ranks.run(2, check)


def check_same_bits(rank: int) -> None:
    """Also of a rank without tokens, whose gradients are zeros that it makes."""
    cp, layers = ContextParallel(group(), deterministic=True), [make(name) for name in SAME_BITS]
    x, ids = torch.randn(1, 37, DIM, dtype=torch.float64), torch.arange(37)[None] % 19
    model = HybridLM(HybridConfig(19, 16, ["gdn", "attention"], 2))
    with elsewhere():
        layout = cp.layout(37, "zigzag", cu_seqlens=CU)
        assert 0 in layout.lengths
        for layer in layers:
            layer(layout.shard(x).requires_grad_(), layout=layout).o.sum().backward()
        model.loss(layout.shard(ids), layout=layout).backward()


def test_deterministic_calls_of_ranks(ranks):
    ranks.run(3, check_same_bits)


def test_packed_sequences(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    (tmp_path / "b.txt").write_text("another one, longer")

    def read(cache: str) -> list[torch.Tensor]:
        corpus = Corpus(Corpus.prepare(str(tmp_path / "a.txt"), str(tmp_path / cache)))
        kinds = PackedSequences(corpus, 16), BalancedSequences(corpus, 16, 1, Work())
        return [sequences[i][0] for sequences in kinds for i in range(2)]

    want = read("one")
    with torch.device("meta"):
        got = read("two")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
