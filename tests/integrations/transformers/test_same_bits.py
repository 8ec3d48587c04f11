"""Models of Transformers under ``deterministic=True``: the same bits on any number of ranks, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tests.support.pool import group  # noqa: E402
from tests.support.same_bits import differing  # noqa: E402
from tests.support.transformers_models import CASES, VOCABULARY  # noqa: E402

SAME = ["llama", "qwen3_next", "mamba2", "minimax", "deepseek_v3", "gpt_oss"]
LENGTHS = (70, 66, 3)


def steps(rank: int, P: int, kind: str, order: tuple[int, ...], same: bool = True) -> dict[str, Tensor]:
    """Of each model, of documents packed in some order: the loss, all gradients, and each document's logits."""
    import ring_la
    from ring_la.integrations.transformers import parallelize
    from ring_la.training import sum_gradients

    cp = ring_la.ContextParallel(group(P), deterministic=same)
    rng, found = torch.Generator().manual_seed(5), {}
    documents = [torch.randint(3, VOCABULARY, (n,), generator=rng) for n in LENGTHS]
    ids, lengths = torch.cat([documents[i] for i in order])[None], [LENGTHS[i] for i in order]
    for name in SAME:
        model = parallelize(CASES[name].make(), cp, kind=kind)
        out = model(input_ids=ids, labels=ids, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0), use_cache=False)
        out.loss.backward()
        sum_gradients(model.parameters(), cp)
        logits = out.layout.gather(out.logits.detach()).split(lengths, 1)
        found |= {f"{name} logits {n}": logits[i] for i, n in enumerate(order)} | {f"{name} loss": out.loss.detach()}
        found |= {f"{name} {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found


def test_bits_do_not_depend_on_ranks_or_packing(ranks):
    one = ranks.run(1, steps, 1, "contiguous", (0, 1, 2))[0]
    for some in ranks.run(3, steps, 3, "zigzag", (2, 1, 0)):
        assert not differing(one, some)
    for n, want in ranks.run(1, steps, 1, "contiguous", (0, 1, 2), False)[0].items():
        assert float((one[n] - want).abs().max()) <= 1e-4 * max(float(want.abs().max()), 1e-2), n


REFUSED = [
    (
        "xlstm",
        {},
        {},
        "cp: expected deterministic=False for this layer, got a deterministic one with backbone.blocks.0",
    ),
    ("llama4", {}, {}, "layout: expected one without deterministic=True for a layer whose operators take no blocks"),
    ("llama", dict(average=True), {}, "average: expected not given with deterministic=True"),
    ("llama", dict(loss_chunk=8), {}, "loss_chunk: expected not given with deterministic=True"),
    ("llama", {}, dict(checkpointing=True), "layout: expected one without deterministic=True for gradient checkpoint"),
    ("llama", {}, dict(dropout=True), "dropout: expected 0 with deterministic=True"),
    ("mixtral", {}, dict(output_router_logits=True), "layout: expected one without deterministic=True for output_r"),
]


def call(name: str, how: dict, checkpointing: bool = False, dropout: bool = False, **keywords: bool) -> None:
    import ring_la
    from ring_la.integrations.transformers import parallelize

    model = parallelize(CASES[name].make(), ring_la.ContextParallel(group(), deterministic=True), **how)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if dropout:
        model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, torch.nn.Dropout(0.5))
    ids = torch.arange(3, 43)[None]
    model(input_ids=ids, labels=ids, **keywords)


def refused(rank: int) -> list[str]:
    """What a call, or `parallelize` itself, says of each."""
    import ring_la

    said = []
    for name, how, keywords, _ in REFUSED:
        with pytest.raises(ring_la.UnsupportedError) as caught:
            call(name, how, **keywords)
        said.append(str(caught.value))
    return said


def test_what_has_not_the_same_bits_is_refused(ranks):
    for said in ranks.run(2, refused):
        for got, (*_, words) in zip(said, REFUSED, strict=True):
            assert got.startswith(words)
