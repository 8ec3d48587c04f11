"""A hybrid model split over ranks has the loss and the gradient of one process; its options and its refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ring_la import ArgumentError, ContextParallel, DisagreementError
from ring_la.models import HybridConfig, HybridLM
from tests.support.pool import group
from tests.support.sums import summed_gradients

LAYERS = ("gdn", "attention", "rwkv7", "mamba2")
TOKENS, CU = 41, [0, 6, 6, 29, 41]


def make(**changes) -> HybridLM:
    config = {"vocab_size": 19, "dim": 16, "layers": LAYERS, "num_heads": 2, "options": {"mamba2": {"state_dim": 4}}}
    torch.manual_seed(0)
    return HybridLM(HybridConfig(**{**config, **changes})).double()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 19, (batch, length), generator=torch.Generator().manual_seed(1))


def check_weights(rank: int) -> None:
    model, layout = make(), ContextParallel(group(), scan="ring").layout(TOKENS)
    with torch.no_grad():
        next(model.parameters())[0, 0] += rank
    with pytest.raises(DisagreementError, match=r"the weights, of which every rank must have the same(.|\n)*Seed all"):
        model.loss(layout.shard(tokens(2, TOKENS)), layout=layout)


def test_ranks_with_other_weights_are_told(ranks):
    """Their loss was plausible, and nobody's."""
    ranks.run(2, check_weights)


def check_loss(rank: int, cu: list[int] | None, own_targets: bool) -> None:
    cp = ContextParallel(group())
    layout = cp.layout(TOKENS, cu_seqlens=cu)
    ids = tokens(1 if cu else 2, TOKENS)
    offsets = None if cu is None else torch.tensor(cu)
    targets = ids.roll(3, 1).masked_fill(ids < 4, -100) if own_targets else None
    whole, split = make(tie_embeddings=own_targets), make(tie_embeddings=own_targets)
    expected = whole.loss(ids, targets, cu_seqlens=offsets)
    expected.backward()
    part = split.loss(layout.shard(ids), None if targets is None else layout.shard(targets), layout=layout)
    part.backward()
    torch.testing.assert_close(cp.comm.all_reduce(part.detach()).wait(), expected.detach(), rtol=1e-11, atol=0)
    for (name, grad), q in zip(summed_gradients(split, cp).items(), whole.parameters(), strict=True):
        assert (grad - q.grad).abs().max() <= 1e-9 * max(1e-3, q.grad.abs().max()), name


@pytest.mark.parametrize("cu", [None, CU], ids=["dense", "packed"])
@pytest.mark.parametrize("own_targets", [False, True])
def test_split_loss_and_gradient_are_one_process_s(ranks, cu, own_targets):
    ranks.run(3, check_loss, cu, own_targets)


def test_loss_is_the_mean_over_targets():
    model, ids = make(), tokens(1, TOKENS)
    logits = model(ids, cu_seqlens=torch.tensor(CU)).logits[0]
    targets = [(t, ids[0, t + 1]) for t in range(TOKENS - 1) if t + 1 not in CU]
    at, label = (torch.tensor(x) for x in zip(*targets))
    torch.testing.assert_close(model.loss(ids, cu_seqlens=torch.tensor(CU)), F.cross_entropy(logits[at], label))


def check_own_losses(rank: int) -> None:
    cp, ids, bare = ContextParallel(group()), tokens(2, TOKENS), {}
    for factor in (0.0, 3.0):
        options = {"dsa": {"topk": 5, "index_heads": 12, "index_dim": 4, "index_loss": factor}}
        whole, split = (make(layers=("gdn", "dsa"), options=options) for _ in range(2))
        bare[factor], losses = whole.loss(ids), []
        whole(ids, losses=losses)
        (bare[factor] / 4).backward()
        layout = cp.layout(TOKENS)
        split.loss(layout.shard(ids), layout=layout, total=4 * 2 * (TOKENS - 1)).backward()  # a quarter of a batch
        grads = summed_gradients(split, cp)
        for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
            assert (q.grad is None) == (p.grad is None) == (factor == 0 and "indexer" in name), name
            if q.grad is not None:
                assert (grads[name] - q.grad).abs().max() <= 1e-9 * max(1e-3, q.grad.abs().max()), name
    torch.testing.assert_close(bare[3.0] - bare[0.0], losses[0], rtol=1e-9, atol=0)
    assert losses[0] > 0


def test_a_layer_s_own_loss_is_part_of_the_model_s(ranks):
    ranks.run(2, check_own_losses)


def test_documents_do_not_see_each_other():
    model, ids = make(), tokens(1, TOKENS)
    packed = model(ids, cu_seqlens=torch.tensor(CU)).logits
    for a, b in ((0, 6), (6, 29), (29, 41)):
        torch.testing.assert_close(packed[:, a:b], model(ids[:, a:b]).logits, rtol=1e-11, atol=1e-11)


def test_a_model_comes_back_from_its_config():
    model = make(options={"attention": {"num_kv_heads": 1}})
    again = HybridLM(HybridConfig(**model.config.to_dict())).double()
    again.load_state_dict(model.state_dict())
    ids = tokens(2, 9)
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ["gdn", "rnn"]}, "layers: expected names out of .*, got 'rnn'"),
        ({"layers": []}, "layers: expected a list of at least one"),
        ({"mlp": "relu"}, "mlp: expected one of"),
        ({"num_heads": 3}, "num_heads: expected a divisor of 16, got 3"),
        ({"options": {"rnn": {}}}, "options: expected names out of .*, got 'rnn'"),
        ({"layers": None}, "layers: expected a list"),
        ({"layers": [["gdn"]]}, "layers: expected names out of"),
        ({"mlp": ["swiglu"]}, "mlp: expected one of"),
        ({"mlp_dim": 0}, "mlp_dim: expected an int ≥ 1"),
        ({"vocab_size": "19"}, "vocab_size: expected an int"),
    ],
)
def test_a_wrong_config_is_refused(changes, message):
    with pytest.raises(ArgumentError, match=message):
        make(**changes)


WRONG = [
    ("ids", lambda ids, targets: dict(ids=ids + 1000)),
    ("ids", lambda ids, targets: dict(ids=ids - 100)),
    ("targets", lambda ids, targets: dict(targets=targets - 1000)),
    ("targets", lambda ids, targets: dict(targets=targets.float())),
    *(("total", lambda ids, targets, total=total: dict(total=total)) for total in (0, -3, "9", torch.tensor(0), True)),
    ("total", lambda ids, targets: dict(total=torch.ones(2))),
    *(("chunk", lambda ids, targets, chunk=chunk: dict(chunk=chunk)) for chunk in (0, None)),
]


def check_wrong(rank: int) -> list[str]:
    """What rank 1 alone brings to a loss, and rank 0 hears of at once."""
    missed, whole, model = [], tokens(1, 9).clamp(max=9), make()
    cp = ContextParallel(group(2), scan="ring", timeout=60)
    for name, change in (*WRONG, ("total", lambda ids, targets: dict(total=8))):
        layout = cp.layout(9)  # on which no call was compared
        ids = layout.shard(whole)
        given = dict(ids=ids, targets=layout.targets(ids), layout=layout)
        try:
            model.loss(**given | dict(total=9) | (change(ids, given["targets"]) if rank else {}))
            missed.append(f"{name} is taken")
        except DisagreementError as e:
            missed += [] if name in str(e) else [f"{name}: {e}"]
    return missed


def test_wrong_tokens_and_numbers_are_refused_on_every_rank(ranks):
    assert ranks.run(2, check_wrong) == [[], []]
    model, ids = make(), tokens(1, 9)
    for name, change in WRONG:
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            model.loss(**dict(ids=ids, targets=ids) | change(ids, ids))


def test_wrong_ids_are_refused():
    model, ids = make(), tokens(2, 9)
    with pytest.raises(ArgumentError, match="ids: expected an int tensor"):
        model(ids[0])
    with pytest.raises(ArgumentError, match="ids: expected an int tensor"):
        model(ids.float())
    with pytest.raises(ArgumentError, match="ids: expected an int tensor"):
        model.loss(ids.tolist())
    with pytest.raises(ArgumentError, match="cu_seqlens: expected an int32 or int64 tensor"):
        model.loss(ids[:1], cu_seqlens=[0, 9])
    with pytest.raises(ArgumentError, match="ids: expected a tensor on cpu, where the model is, got one on meta"):
        model(ids.to("meta"))
    for states, got in (([None], 1), (3, 3), (torch.zeros(4), "torch.float32")):
        with pytest.raises(ArgumentError, match=f"states: expected a list of one for each of 4 layers, got {got}"):
            model(ids, states=states)
    for name in ("routings", "losses"):  # lists to write to, no flags
        with pytest.raises(ArgumentError, match=f"^{name}: expected a list or None, got True"):
            model(ids, **{name: True})
    with pytest.raises(ArgumentError, match=r"^routings: expected a list or None, got True"):
        model.loss(ids, routings=True)
    with pytest.raises(ArgumentError, match=r"targets: expected torch\.int64 of the shape of ids"):
        model.loss(ids, ids[:, 1:])


@pytest.mark.parametrize("config", [None, {"vocab_size": 9, "dim": 8, "layers": ["gdn"], "num_heads": 2}])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ArgumentError, match=r"^config: expected a HybridConfig, got"):
        HybridLM(config)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("norm_eps", {"norm_eps": -1}),
        ("norm_eps", {"norm_eps": "x"}),
        ("tie_embeddings", {"tie_embeddings": "no"}),
        ("vocab_size", {"vocab_size": True}),
        ("options", {"options": None}),
        ("options", {"options": {"gdn": 3}}),
        (r"options\['gdn'\]", {"options": {"gdn": {"num_kv_heads": 1}}}),
        ("mlp_options", {"mlp_options": None}),
        ("mlp_options", {"mlp_options": {"experts": 4}}),
    ],
)
def test_wrong_configurations_are_named(name, wrong):
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        HybridLM(HybridConfig(**{"vocab_size": 9, "dim": 8, "layers": ["gdn"], "num_heads": 2, **wrong}))
