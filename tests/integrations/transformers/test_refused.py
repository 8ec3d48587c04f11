"""Calls and models that a split model refuses, by name and on every rank."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from ring_la.integrations.transformers.names import CACHE
from tests.support.transformers_models import CASES

from .calls import LENGTH, ids, parallel


def refused_calls(rank: int) -> list[str]:
    from ring_la.errors import ArgumentError, UnsupportedError

    model, _ = parallel("llama")
    x, said = ids(), []
    left = torch.ones_like(x).index_fill(1, torch.tensor([0]), 0)
    for keywords in (
        {"pixel_values": x},
        {"attention_mask": left},
        {"attention_mask": left.flip(1), "labels": x},
        {"output_attentions": True},
        {"use_cache": True, "labels": x},
        {"logits_to_keep": 1},
        {"position_ids": torch.zeros(3, 1, LENGTH, dtype=torch.long)},
        {"cache_position": torch.arange(LENGTH) + 1},
        {"seq_idx": torch.ones_like(x).cumsum(1)},
        {"labels": x[:, 1:]},
        {"labels": x.float()},
        {"labels": torch.where(torch.arange(LENGTH) == 5, 999, x)},  # on one rank alone it would be no token of its own
        {"input_ids": torch.where(torch.arange(LENGTH) == 5, 999, x)},
        {"labels": x, "num_items_in_batch": 0},
        {"labels": x, "num_items_in_batch": float("nan")},
        {"labels": x, "num_items_in_batch": "x"},
        {"labels": x, "num_items_in_batch": torch.ones(2)},
        {"input_ids": ids(2), "position_ids": torch.arange(LENGTH).expand(3, -1)},
        {"input_ids": ids(2), "cu_seqlens": [0, 30, 2 * LENGTH]},
        {"input_ids": x.float()},
        {"input_ids": x.tolist()},
        {"position_ids": list(range(LENGTH))},
    ):
        with pytest.raises((ArgumentError, UnsupportedError)) as error:
            model(**{"input_ids": x} | keywords)
        assert len(str(error.value)) < 200
        said.append(str(error.value).partition(":")[0])
    model.config._output_attentions = True  # as it was made, with eager attention
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model(input_ids=x)
    model.config._output_attentions = False
    with torch.no_grad():
        cache = model(input_ids=x, use_cache=True).past_key_values
    with pytest.raises(UnsupportedError, match=f"{CACHE}: expected none, or an empty one, with gradients"):
        model(input_ids=x, labels=x, past_key_values=cache)  # a prefix of PEFT's
    with pytest.raises(ArgumentError, match=f"past_key_values: expected one cache, as {CACHE}, got cache, too"):
        model(input_ids=x, cache=cache, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="a call of the parallelized model itself"):
        model.model(input_ids=x)
    with pytest.raises(UnsupportedError, match="copy"):
        copy.deepcopy(model)
    table = model.get_input_embeddings()
    table.neftune_noise_alpha = 5.0
    with pytest.raises(UnsupportedError, match="neftune_noise_alpha: expected None"):
        model(input_ids=x)
    del table.neftune_noise_alpha
    model.set_attn_implementation("sdpa")  # would attend to this rank's tokens alone
    with pytest.raises(UnsupportedError, match="_attn_implementation: expected 'ring_la', got 'sdpa'"):
        model(input_ids=x)
    return said


def test_refused_calls(ranks):
    names = ["pixel_values", "attention_mask", "labels", "output_attentions", "use_cache", "logits_to_keep"]
    names += ["position_ids", "cache_position", "seq_idx", *["labels"] * 3, "input_ids", *["num_items_in_batch"] * 4]
    names += ["position_ids", "cu_seqlens"]
    names += ["input_ids", "input_ids", "position_ids"]
    for said in ranks.run(2, refused_calls):
        assert said == names


def different_batches(rank: int) -> None:
    from ring_la.errors import DisagreementError

    model, _ = parallel("llama")
    slip = r"disagree on {}(.|\n)*DistributedSampler over the data axis alone"  # as under a Trainer of the library
    with pytest.raises(DisagreementError, match=slip.format("the layout")):
        model(input_ids=ids()[:, rank:])
    with pytest.raises(DisagreementError, match=slip.format("the whole batch, which every rank must be given")):
        model(input_ids=ids(seed=rank))
    with pytest.raises(DisagreementError, match=r"rank 0: num_items_in_batch=40\n  rank 1: num_items_in_batch=41"):
        model(input_ids=ids(), labels=ids(), num_items_in_batch=40 + rank)
    model(input_ids=ids(), labels=ids())
    with pytest.raises(DisagreementError, match=slip.format("the batch")):
        model(input_ids=ids(seed=rank), labels=ids(seed=rank))
    with pytest.raises(DisagreementError, match=slip.format("the batch")):
        model(input_ids=ids(seed=rank))


def different_weights(rank: int) -> None:
    from ring_la.errors import DisagreementError

    model, _ = parallel("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 5] += rank
    with pytest.raises(DisagreementError, match=r"disagree on the weights, of which every rank must have the same"):
        model(input_ids=ids(), labels=ids())


def test_ranks_with_different_weights(ranks):
    """Models made by ranks that are seeded apart had a plausible loss, which was nobody's."""
    ranks.run(2, different_weights)


def test_ranks_with_different_batches(ranks):
    ranks.run(2, different_batches)


REFUSED = {
    "BloomForCausalLM": (dict(n_head=4), r"h\.0\.self_attention \(BloomAttention\), which failed"),
    "Llama4ForCausalLM": (
        dict(no_rope_layers=[1, 0], num_local_experts=2, intermediate_size_mlp=48, num_key_value_heads=4, head_dim=8),
        r"layers\.1\.self_attn \(Llama4TextAttention\), which goes by the place",
    ),
    "RobertaForCausalLM": (
        dict(is_decoder=True),
        r"positions that count from 0 .*RobertaForCausalLM, which counts them",
    ),
    "BertModel": ({}, r"masks that are causal.*BertModel: a mask made by 'bidirectional"),
    "DogeForCausalLM": ({}, r"layers\.0\.self_attn \(DogeAttention\), which failed"),
    "LlamaForSequenceClassification": (
        {},
        r"a language model's head .*LlamaForSequenceClassification with ForSequence",
    ),
    "T5ForConditionalGeneration": (dict(d_kv=8), r"a decoder, got .*encoder-decoder"),
    "OPTForCausalLM": (
        dict(layerdrop=0.5, ffn_dim=48, word_embed_proj_dim=32),
        r"the same layers on every rank, got model\.decoder \(OPTDecoder\) with layerdrop=0.5",
    ),
}


class BatchNorm(torch.nn.Module):
    """Token by token in eval, over a rank's tokens in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(0, 1)).view_as(x)


class Faded(torch.nn.Module):
    """Of a user's own: goes by places, from the thousandth on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.shape[1]) / 1000).clamp(min=1)[:, None]


class Averaged(torch.nn.Module):
    """As adapters start: looks at other tokens as soon as its gate is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * x.mean(1, keepdim=True)


def refused_models(rank: int) -> None:
    import transformers

    import ring_la
    from ring_la.errors import UnsupportedError
    from ring_la.integrations.transformers import parallelize
    from tests.support.pool import group
    from tests.support.transformers_models import case

    cp = ring_la.ContextParallel(group(), scan="ring")
    for kind, (options, message) in REFUSED.items():
        if hasattr(transformers, kind):
            model = case(kind, skip=("head_dim", "num_key_value_heads"), **options).make()
            before = {n: set(vars(m)) for n, m in model.named_modules()}, model.config._attn_implementation
            with pytest.raises(UnsupportedError, match=message):
                parallelize(model, cp)
            after = {n: set(vars(m)) for n, m in model.named_modules()}, model.config._attn_implementation
            assert before == after  # it is as it was
            assert not model.base_model._forward_hooks
    for norm, message in (
        (BatchNorm(), r"model\.norm\.inner \(BatchNorm1d\): statistics"),
        (Faded(), r"model\.norm \(Faded\), which goes by"),
        (Averaged(), r"model\.norm \(Averaged\), whose result at one token depends"),
    ):
        model, later = CASES["llama"].make(), parallelize(CASES["llama"].make(), cp)
        model.model.norm = later.model.norm = norm
        with pytest.raises(UnsupportedError, match=message):
            parallelize(model, cp)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=message):  # put in after the check
                later(input_ids=ids())
    assert not any(bool(p.any()) for p in norm.parameters())  # as it was
    bamba = CASES["bamba"]
    with_more = parallelize(replace(bamba, options=bamba.options | {"z_loss_coefficient": 0.1}).make(), cp)
    with pytest.raises(UnsupportedError, match=r"labels: .* BambaForCausalLM, which adds to its loss_function's"):
        with_more(input_ids=ids(), labels=ids())


def test_refused_models(ranks):
    ranks.run(1, refused_models)


class Rounded(torch.nn.Linear):
    """To one number a token, whose rounding goes by the token's place in the tensor, as a product's may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y[..., ::2, :] += torch.finfo(x.dtype).eps * x[..., ::2, :].norm(dim=-1, keepdim=True) * self.weight.norm()
        return y


class Gated(torch.nn.Module):
    """A gate that one token, of 16, nearly closes: what is left of it there is rounding."""

    def __init__(self, token: int, scale: float = 1.0, behind: torch.nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.behind = scale, behind or torch.nn.Identity()
        self.embedding, self.gate = torch.nn.Embedding(16, 8), Rounded(8, 1, bias=False)
        x, w = self.embedding.weight[token].detach(), self.gate.weight.data
        w -= (w @ x)[:, None] / x.square().sum() * x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.behind(x * (1 + self.scale * self.gate(x)))


class Uneven(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :5], 2 * x[:, 5:]], 1)


@pytest.mark.parametrize("token", range(16))
def test_rounding_is_not_taken_for_places(token):
    from ring_la.integrations.transformers import probe

    model = Gated(token)
    probe.check(model, lambda ids, positions, offsets: model(ids), 16, 64, torch.device("cpu"))
    y = model.gate(model.embedding(torch.full((23,), token)))
    assert (y - y[0]).abs().max() > 1e-3 * y[0].abs().max()  # it would be, by that token alone


@pytest.mark.parametrize("token", range(16))
def test_places_behind_a_near_tie_are_seen(token):
    """For that token rounding reaches what goes by places, too: its input is not the same."""
    from ring_la.errors import UnsupportedError
    from ring_la.integrations.transformers import probe

    model = Gated(token, 1e6, Uneven())
    with pytest.raises(UnsupportedError, match=r"(behind \(Uneven\)|Gated), which goes by the place"):
        probe.check(model, lambda ids, positions, offsets: model(ids), 16, 64, torch.device("cpu"))


@pytest.mark.parametrize(("name", "given"), [("average", dict(average=1)), ("check", dict(check="no"))])
def test_flags_are_flags(name, given):
    from ring_la import ArgumentError, ContextParallel
    from ring_la.integrations.transformers.settings import Settings

    cp = object.__new__(ContextParallel)
    with pytest.raises(ArgumentError, match=f"^{name}: expected True or False"):
        Settings(**dict(cp=cp, kind="zigzag", average=False, loss_chunk=None, check=True) | given)
