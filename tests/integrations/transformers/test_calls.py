"""The ways to call a parallelized model, on two ranks, against the unmodified one on one process."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from tests.support.transformers_models import CASES, VOCABULARY

from .calls import LENGTH, close, gradients, ids, parallel


class Asked(TorchDispatchMode):
    """Where a number of a tensor came to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.places.append(traceback.format_stack()[-2])
        return function(*args, **(kwargs or {}))


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

    with Asked() as asked:  # a second call of a layout
        model(input_ids=local["input_ids"], layout=layout)
    assert not asked.places, "what waits for a device: " + "".join(asked.places)

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
    kinds = transformers.BloomForCausalLM, transformers.LlamaForCausalLM
    bloom = kinds[0].config_class(vocab_size=VOCABULARY, hidden_size=16, n_head=4, num_hidden_layers=2)
    with torch.device("meta"):
        late = [parallelize(kind(config), cp) for kind, config in zip(kinds, (bloom, model.config))]
    for m in late:
        m.to_empty(device="cpu")
        m.apply(m._init_weights)
    with torch.device("meta" if rank else "cpu"):  # as FSDP loads weights
        late.append(parallelize(kinds[0](bloom), cp))
    for m in (late[0], late[2].to_empty(device="cpu")):
        m.apply(m._init_weights)
        with pytest.raises(UnsupportedError, match=r"h\.0\.self_attention"):
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


def in_fp8(rank: int) -> dict[str, tuple[float, float]]:
    """By model, how far logits are from those of exact keys, and how many bytes keys are over those."""
    from ring_la.errors import ArgumentError, UnsupportedError

    x, out = ids(), {}
    for name in ("llama", "gptj", "deepseek_v3"):
        logits, sent = [], []
        for options in ({}, {"kv_comm_dtype": torch.float8_e4m3fn, "backend": "torch"}):
            model, cp = parallel(name, check=False, **options)
            with torch.no_grad():
                model(input_ids=x)
                before = cp.comm.bytes_sent
                logits.append(model(input_ids=x).logits)
                sent.append(cp.comm.bytes_sent - before)
        far = (logits[1] - logits[0]).abs().max() / logits[0].abs().max()
        out[name] = float(far), sent[1] / sent[0]
    with pytest.raises(UnsupportedError, match="kv_comm_dtype: expected None where gradients are wanted"):
        parallel("llama", check=False, kv_comm_dtype=torch.float8_e4m3fn)[0](input_ids=x)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="expected None where queries choose their keys"):
        parallel("deepseek_v32", check=False, kv_comm_dtype=torch.float8_e4m3fn)[0](input_ids=x)
    for name, wrong in (("kv_comm_dtype", torch.float16), ("backend", "flash_attn")):
        with pytest.raises(ArgumentError, match=f"{name}: expected None or one of"):
            parallel("llama", check=False, **{name: wrong})
    return out


def test_keys_travel_in_fp8(ranks):
    for found in ranks.run(2, in_fp8):
        assert all(1e-5 < far and bytes_of < 0.9 for far, bytes_of in found.values()), found
        assert max(found["llama"][0], found["gptj"][0]) < 0.2, found  # a router's choice is another one at once


def under_another_default_device(rank: int) -> None:
    """New tensors go to "meta", which has no values, where none of ours may depend on that."""
    from ring_la import ContextParallel
    from ring_la.integrations.transformers import parallelize
    from tests.support.pool import group

    alone, x = CASES["qwen3_next"].make(), ids()
    want = alone(input_ids=x, labels=x, use_cache=False).loss.detach()
    cp = ContextParallel(group(), scan="ring", attention="ring")
    with torch.device("meta"):
        got = parallelize(alone, cp)(input_ids=x, labels=x, use_cache=False).loss
    close(got.detach(), want)


def test_the_default_device_does_not_matter(ranks):
    ranks.run(2, under_another_default_device)
