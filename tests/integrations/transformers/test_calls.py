"""The ways to call a parallelized model, on two ranks, against the unmodified one on one process."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.transformers_models import CASES, VOCABULARY

LENGTH = 21


def ids(rows: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def parallel(name: str, **options):
    import ring_la
    from ring_la.integrations.transformers import parallelize
    from tests.support.pool import group

    cp = ring_la.ContextParallel(group(), scan="ring", attention="ring", timeout=20)
    return parallelize(CASES[name].make(), cp, **options), cp


def gradients(model, cp=None) -> dict[str, torch.Tensor]:
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return grads if cp is None else {n: cp.comm.all_reduce(g).wait() for n, g in grads.items()}


def close(a, b, **keywords):
    torch.testing.assert_close(a, b, **({"rtol": 2e-4, "atol": 2e-5} | keywords))


# -- losses ------------------------------------------------------------------------------------------------


def losses(rank: int) -> None:
    """Ignored labels, a divisor, shifted labels, padding, rows of packed documents, tokens split already."""
    model, cp = parallel("qwen3_next")
    alone = CASES["qwen3_next"].make()

    def same(expected: dict, given: dict | None = None) -> None:
        want = alone(use_cache=False, **expected)
        want.loss.backward()
        got = model(**(given or expected))
        got.loss.mul_(1)  # the Trainer multiplies it where it is
        got.loss.backward()
        close(got.loss, want.loss)
        for (n, a), b in zip(gradients(model, cp).items(), gradients(alone).values()):
            close(a, b, msg=lambda m, n=n: f"{n}: {m}")

    x = ids(2)
    labels = x.masked_fill(torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.4, -100)
    same({"input_ids": x, "labels": labels})
    same({"input_ids": x, "labels": labels, "num_items_in_batch": torch.tensor(17)})
    same({"input_ids": x, "labels": labels, "attention_mask": torch.ones_like(x)})
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    same({"input_ids": x, "labels": labels}, {"input_ids": x, "shift_labels": shifted})
    same({"input_ids": x, "labels": labels}, {"inputs_embeds": model.get_input_embeddings()(x), "labels": labels})
    same({"input_ids": x, "labels": x.where(x != 5, -7), "ignore_index": -7})

    padded = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13]])
    same({"input_ids": x, "labels": x.masked_fill(~padded, -100), "attention_mask": padded.long()})

    layout = cp.layout(LENGTH)
    local = {n: layout.shard(t) for n, t in {"input_ids": x, "labels": labels}.items()}
    same({"input_ids": x, "labels": labels}, {**local, "layout": layout})
    routers = {"output_router_logits": True}  # their loss is that of the whole batch
    same({"input_ids": x, "labels": labels, **routers}, {**local, "layout": layout, **routers})
    same(
        {"input_ids": x, "labels": labels, "num_items_in_batch": 9},
        {**local, "layout": layout, "num_items_in_batch": 9},
    )

    # two rows of two documents each, by positions: as four rows of one document
    positions = torch.cat([torch.arange(8), torch.arange(13)])[None].expand(2, -1)
    packed = model(input_ids=x, labels=x, position_ids=positions)
    parts = [x[:, :8], x[:, 8:]]
    want = sum(alone(input_ids=p, labels=p, use_cache=False).loss * (p.numel() - 2) for p in parts) / (2 * LENGTH - 4)
    close(packed.loss, want)
    offsets = torch.tensor([0, 8, 21, 29, 42], dtype=torch.int32)
    flash = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 13, "max_length_k": 13}
    row = {"input_ids": x.reshape(1, -1), "labels": x.reshape(1, -1)}
    close(model(**row, **flash).loss, want)
    assert torch.isnan(model(input_ids=x, labels=torch.full_like(x, -100)).loss)  # as on one process


def test_losses_are_those_of_one_process(ranks):
    ranks.run(2, losses)


def chunks(rank: int) -> None:
    """Logits that never exist whole: the same loss and gradients, experts' loss and softcapped logits included."""
    for name, options in (("qwen3_next", {"output_router_logits": True}), ("qwen3_next", {}), ("gemma2", {})):
        x = ids(2)
        model, cp = parallel(name, loss_chunk=6)
        alone = CASES[name].make()
        if name == "qwen3_next":
            model.config.output_router_logits = alone.config.output_router_logits = not options
        want = alone(input_ids=x, labels=x, use_cache=False, **options)
        want.loss.backward()
        got = model(input_ids=x, labels=x, **options)
        got.loss.backward()
        assert got.logits is None
        close(got.loss, want.loss)
        for (n, a), b in zip(gradients(model, cp).items(), gradients(alone).values()):
            close(a, b, msg=lambda m, n=n: f"{n}: {m}")
        assert model(input_ids=x).logits is not None


def test_a_loss_in_chunks_is_that_of_whole_logits(ranks):
    ranks.run(3, chunks)


def dropped(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients with dropout in attention; ranks are seeded alike."""
    model, cp = parallel("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.4
    torch.manual_seed(5)
    out = model(input_ids=ids(2), labels=ids(2))
    out.loss.backward()
    return out.loss.detach(), gradients(model, cp)


def test_dropout_does_not_depend_on_the_split(ranks):
    ((loss, grads),) = ranks.run(1, dropped)
    for other, others in ranks.run(3, dropped):
        close(other, loss)
        for n, g in grads.items():
            close(others[n], g, msg=lambda m, n=n: f"{n}: {m}")
    model = CASES["llama"].make()
    assert abs(loss - model(input_ids=ids(2), labels=ids(2)).loss) > 1e-3  # something was dropped


def checked_late(rank: int, folder: str) -> None:
    """A model made on the device "meta" is checked when it has its weights; checkpoints are as ever."""
    import transformers

    from ring_la.errors import UnsupportedError
    from ring_la.integrations.transformers import parallelize

    model, cp = parallel("llama")
    kinds = transformers.RwkvForCausalLM, transformers.LlamaForCausalLM
    rwkv = kinds[0].config_class(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2)
    with torch.device("meta"):
        late = [parallelize(kind(config), cp) for kind, config in zip(kinds, (rwkv, model.config))]
    for m in late:
        m.to_empty(device="cpu")
        m.apply(m._init_weights)
    with torch.device("meta" if rank else "cpu"):  # as FSDP loads weights
        late.append(parallelize(kinds[0](rwkv), cp))
    for m in (late[0], late[2].to_empty(device="cpu")):
        m.apply(m._init_weights)
        with pytest.raises(UnsupportedError, match=r"blocks\.0\.attention"):
            m(input_ids=ids())
    late[1].load_state_dict(model.state_dict())
    late[1].model.rotary_emb.load_state_dict(model.model.rotary_emb.state_dict())
    late[1].model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq)
    close(late[1](input_ids=ids(), labels=ids()).loss, model(input_ids=ids(), labels=ids()).loss)
    if rank == 0:
        model.save_pretrained(folder)
        again = kinds[1].from_pretrained(folder)
        assert again.config._attn_implementation != "ring_la"
        want = CASES["llama"].make().eval()(input_ids=ids()).logits
        close(again.eval()(input_ids=ids()).logits, want)


def test_checked_in_the_first_call_and_saved(ranks, tmp_path):
    ranks.run(2, checked_late, str(tmp_path))


# -- backward ----------------------------------------------------------------------------------------------


def two_calls_in_flight(rank: int, reentrant: bool) -> None:
    """Two calls of different length and packing, then their backward passes, recomputing layers."""
    model, cp = parallel("qwen3_next", kind="contiguous")
    x, y = ids(), ids(seed=4)[:, :15]

    def both() -> dict[str, torch.Tensor]:
        one = model(input_ids=x, labels=x, cu_seqlens=[0, 6, LENGTH])
        two = model(input_ids=y, labels=y)
        (one.loss + 2 * two.loss).backward()
        return gradients(model, cp)

    plain = both()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for (n, a), b in zip(both().items(), plain.values()):
        close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_two_calls_in_flight(ranks, reentrant):
    ranks.run(2, two_calls_in_flight, reentrant)


# -- prefill -----------------------------------------------------------------------------------------------


def prefill(rank: int, name: str) -> None:
    """The cache of a prefill is that of one process, on every rank; decoding goes on from it; generate works."""
    model, _ = parallel(name)
    model.eval()
    alone, x = CASES[name].make().eval(), ids(2)
    with torch.no_grad():
        want, got = alone(input_ids=x, use_cache=True), model(input_ids=x, use_cache=True)
        for a, b in zip(got.past_key_values.layers, want.past_key_values.layers):
            for field in ("keys", "values", "conv_states", "recurrent_states"):
                s, t = getattr(a, field, None), getattr(b, field, None)
                assert (s is None) == (t is None)
                if isinstance(t, dict):
                    s, t = s[0], t[0]
                if t is not None:
                    close(s, t)
        step = {"input_ids": x[:, :1], "use_cache": True, "position_ids": torch.full((2, 1), LENGTH)}
        after = model(**step, past_key_values=got.past_key_values)
        close(after.logits, alone(**step, past_key_values=want.past_key_values).logits)
        out, whole = (m(input_ids=x, output_hidden_states=True) for m in (model, alone))
        for a, b in zip(out.hidden_states, whole.hidden_states, strict=True):
            close(out.layout.gather(a), b)
        last = model(input_ids=x, logits_to_keep=2, use_cache=False).logits
        close(last, want.logits[:, -2:])
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(x, **options), alone.generate(x, **options))


def generated(rank: int) -> None:
    """Generation without a cache, by a model that cannot keep logits itself; a cache of fixed size is refused."""
    from ring_la.errors import UnsupportedError

    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model, _ = parallel("xlstm")
    want = CASES["xlstm"].make().eval().generate(ids(2), use_cache=False, **options)
    assert torch.equal(model.eval().generate(ids(2), use_cache=False, **options), want)
    with pytest.raises(UnsupportedError, match=r"cache_implementation|attention_mask"):
        parallel("llama")[0].generate(ids(2), cache_implementation="static", **options)


def test_generation_without_a_growing_cache(ranks):
    ranks.run(2, generated)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3"])
def test_a_split_prompt_leaves_the_caches_of_one_process(ranks, name):
    ranks.run(2, prefill, name)


# -- refused -----------------------------------------------------------------------------------------------


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
    with pytest.raises(UnsupportedError, match="past_key_values: expected none, or an empty one, with gradients"):
        model(input_ids=x, labels=x, past_key_values=cache)  # a prefix of PEFT's
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
    names += ["position_ids", "cache_position", "seq_idx", "labels", "position_ids", "cu_seqlens"]
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
    model(input_ids=ids(), labels=ids())
    with pytest.raises(DisagreementError, match=slip.format("the batch")):
        model(input_ids=ids(seed=rank), labels=ids(seed=rank))
    with pytest.raises(DisagreementError, match="disagree on the batch"):
        model(input_ids=ids(seed=rank))


def test_ranks_with_different_batches(ranks):
    ranks.run(2, different_batches)


REFUSED = {
    "RwkvForCausalLM": (dict(), r"blocks\.0\.attention\S* \(\w+\), whose result at one token depends"),
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
