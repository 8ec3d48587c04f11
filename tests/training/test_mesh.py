"""FSDP2 over data, fsdp and context axes: the gradient, its norm and an update are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ring_la import ArgumentError, ContextParallel
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import LAYERS
from ring_la.training import TrainingMesh, draw_hybrid, recompute, shard_parameters
from tests.support.peak import peak

TOKENS = 37
CU = [[0, 5, 5, 30, 37], [0, 37], [0, 18, 37], [0, 1, 37]]
TARGETS = sum(TOKENS - sum(a < b for a, b in zip(cu, cu[1:])) for cu in CU)


def make() -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(19, 16, ["gdn", "attention", "mamba2"], 2)).double()


def tokens(i: int) -> torch.Tensor:
    return torch.randint(0, 19, (1, TOKENS), generator=torch.Generator().manual_seed(i))


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def check_step(rank: int, axes: dict[str, int], kinds: list[str], mlp_chunk: int | None) -> None:
    whole = make()
    for i, cu in enumerate(CU):
        whole.loss(tokens(i), cu_seqlens=torch.tensor(cu), total=TARGETS).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer(whole).step()

    mesh = TrainingMesh.make("cpu", **axes)
    keep = "block" in kinds or "attention" in kinds  # with either exchange; heads travel once more
    cp = ContextParallel(
        mesh.context, scan="ring", attention="ulysses" if keep and mesh.context.size() == 2 else "ring"
    )
    split = shard_parameters(recompute(make(), kinds, mlp_chunk=mlp_chunk, keep_attention=keep), mesh)
    mine = len(CU) // mesh.replicas
    for i in range(mesh.replica * mine, mesh.replica * mine + mine):
        layout = cp.layout(TOKENS, cu_seqlens=CU[i])
        split.loss(layout.shard(tokens(i)), layout=layout, total=TARGETS).backward()
    found = torch.nn.utils.clip_grad_norm_(split.parameters(), 0.5).full_tensor()
    torch.testing.assert_close(found, norm, rtol=1e-10, atol=0)
    for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-8, atol=1e-11, msg=lambda m: f"{name}: {m}")  # noqa: B023
    optimizer(split).step()
    for p, q in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-6, atol=1e-7)
    assert all(p.numel() > p.to_local().numel() for p in split.parameters() if p.numel() > 3)  # sharded indeed


@pytest.mark.parametrize(
    ("axes", "kinds", "mlp_chunk"),
    [
        ({"context": 4}, ["gdn", "mlp", "norm"], None),
        ({"data": 2, "context": 2}, ["block", "norm"], 7),
        ({"data": 1, "fsdp": 2, "context": -1}, ["attention"], 100),
        ({"data": -1, "fsdp": 2, "context": 1}, [], None),
    ],
)
def test_a_step_is_that_of_one_process(ranks, axes, kinds, mlp_chunk):
    ranks.run(4, check_step, axes, kinds, mlp_chunk)


def drawn(rank: int, layers: list[str]) -> tuple[int, int]:
    """A model whose ranks draw a block at a time is the model made whole; bytes held at most, and of its weights."""
    config = HybridConfig(300, 32, layers, 2, tie_embeddings=False)
    mesh = TrainingMesh.make("cpu", context=4)
    with torch.device("meta"):
        model = HybridLM(config).bfloat16()
    shard_parameters(recompute(model, ["block"]), mesh, dtype=torch.float32)
    torch.manual_seed(5)
    _, most, _ = peak(lambda: draw_hybrid(model, "cpu"))
    torch.manual_seed(5)
    whole = HybridLM(config).bfloat16()
    expected = dict(whole.named_buffers())
    assert all(torch.equal(b, expected[n]) for n, b in model.named_buffers())
    for (n, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), n
        assert p.to_local().untyped_storage().nbytes() == p.to_local().nbytes, n
    layout = ContextParallel(mesh.context, scan="ring").layout(20)
    ids = torch.arange(20)[None]
    loss = model.loss(layout.shard(ids), layout=layout)
    loss.backward()
    assert torch.isfinite(loss)
    with pytest.raises(ArgumentError, match="model: expected a HybridLM, got Linear"):
        draw_hybrid(nn.Linear(2, 2, device="meta"), "cpu")
    with pytest.raises(ArgumentError, match="model: expected one made under"):
        draw_hybrid(whole, "cpu")
    return most, sum(2 * p.numel() for p in whole.parameters())


def test_a_model_is_drawn_a_block_at_a_time(ranks):
    for most, weights in ranks.run(4, drawn, list(LAYERS)):
        assert most < 0.6 * weights, "a quarter of all, and a block in fp32"


def check_refusals(rank: int) -> None:
    with pytest.raises(ArgumentError, match=r"^device_type: expected a str"):
        TrainingMesh.make(torch.device("cpu"))
    for axes in (
        {"data": True},
        {"data": 3},
        {"data": -1, "context": -1},
        {"data": 1, "fsdp": 1, "context": 2},
        {"fsdp": 0},
    ):
        with pytest.raises(ArgumentError, match="data, fsdp, context"):
            TrainingMesh.make("cpu", **axes)
    model, mesh = nn.Sequential(nn.Linear(2, 2)), TrainingMesh.make("cpu")
    for match, wrong in {
        "blocks: expected modules of Sequential, got Linear": dict(blocks=[nn.Linear(2, 2)]),
        "blocks: expected modules of Sequential, which has no": {},
        "experts: expected modules of Sequential": dict(blocks=[*model], experts=[nn.Linear(2, 2)]),
        "dtype: expected a floating torch.dtype": dict(blocks=[*model], dtype="bfloat16"),
        "mesh: expected a TrainingMesh": dict(blocks=[*model], mesh=mesh.axes),
        "blocks: expected a list of modules": dict(blocks=model[0]),
        "experts: expected a list of modules": dict(blocks=[*model], experts=None),
        "methods: expected a list of names of methods, got 'loss'": dict(blocks=[*model], methods="loss"),
        "average: expected True or False": dict(blocks=[*model], average="no"),
        "model: expected a Module": dict(model=[*model], blocks=[*model]),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            shard_parameters(**{"model": model, "mesh": mesh} | wrong)
    assert type(model[0]) is nn.Linear  # nothing was sharded


def test_axes_and_modules_that_do_not_fit_are_refused(ranks):
    ranks.run(4, check_refusals)
