"""A prompt read by several ranks and decoded by one continues as the whole text would."""

from __future__ import annotations

import resource
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ring_la import ArgumentError, ContextParallel
from ring_la.inference import (
    BlockReader,
    KeySize,
    KeyStore,
    Sampler,
    decode,
    generate,
    key_store,
    load_prompt,
    prefill,
    save_prompt,
    step,
)
from ring_la.models import HybridConfig, HybridLM
from tests.support.generation import greedy, make, tokens
from tests.support.pool import group

NEW = 5


def check_handover(rank: int, length: int, cu: list[int] | None) -> list[list[int]]:
    cp = ContextParallel(group(), scan="ring")
    model, ids = make(), tokens(1 if cu else 2, length)
    layout = cp.layout(length, cu_seqlens=cu)
    prompt = prefill(model, layout.shard(ids), layout=layout)
    alone = prefill(model, ids, cu_seqlens=None if cu is None else torch.tensor(cu))
    torch.testing.assert_close(prompt.logits, alone.logits, rtol=1e-9, atol=1e-9)
    if rank != cp.size - 1:
        return []
    return torch.stack(list(decode(model, prompt, NEW)), 1).tolist()  # one rank, without the others


@pytest.mark.parametrize(("size", "length"), [(2, 29), (3, 29), (3, 2)])
def test_prefill_on_ranks_then_decoding_on_one(ranks, size, length):
    got = ranks.run(size, check_handover, length, None)[-1]
    assert got == greedy(make(), tokens(2, length), NEW).tolist()


def test_packed_prompts_are_decoded_as_a_batch(ranks):
    cu = [0, 5, 6, 29]
    got = ranks.run(3, check_handover, 29, cu)[-1]
    model, ids = make(), tokens(1, 29)
    assert got == [greedy(model, ids[:, a:b], NEW)[0].tolist() for a, b in zip(cu, cu[1:])]


def check_shared(rank: int, cu: list[int] | None) -> list[list[int]]:
    """Keys stay on the rank that reads them, and all ranks decode."""
    cp = ContextParallel(group(), scan="ring")
    model, ids = make(()), tokens(1 if cu else 2, 29)
    keys, layout = key_store(model, cp), cp.layout(29, cu_seqlens=cu)
    if cu:
        return generate(model, layout.shard(ids), NEW, layout=layout, keys=keys).tolist()
    first, second = cp.layout(17, "contiguous"), cp.layout(12)
    prompt = prefill(model, first.shard(ids[:, :17]), layout=first, keys=keys)
    prompt = prefill(model, second.shard(ids[:, 17:]), states=prompt.states, layout=second)
    sampler = Sampler(9.0, generator=torch.Generator().manual_seed(rank))
    one, two = (list(decode(model, prompt, NEW, sampler)) for _ in range(2))
    drawn = torch.stack(one + two)
    assert torch.equal(*cp.comm.all_gather(drawn).wait()[[0, -1]])  # though each rank would have drawn others
    return torch.stack(list(decode(model, prompt, NEW)), 1).tolist()


@pytest.mark.parametrize(("size", "cu"), [(1, None), (2, None), (3, None), (4, None), (3, [0, 5, 6, 29])])
def test_keys_stay_on_their_ranks_and_all_decode(ranks, size, cu):
    got, model, ids = ranks.run(size, check_shared, cu), make(()), tokens(1 if cu else 2, 29)
    documents = [ids] if cu is None else [ids[:, a:b] for a, b in zip(cu, cu[1:])]
    assert got == [[row for x in documents for row in greedy(model, x, NEW).tolist()]] * size


def check_other_stores(rank: int) -> list[str]:
    """What is said of keys that would be another model's or another process's, as `key_store(model)`'s are."""
    config = dict(vocab_size=19, dim=16, num_heads=2)
    model, other = (HybridLM(HybridConfig(layers=layers, **config)) for layers in (["gdn", "attention"], ["gdn"]))
    layout = ContextParallel(group(), scan="ring").layout(9)
    said = []
    for keys in (key_store(model), key_store(other, layout.cp), "keys"):
        with pytest.raises(ArgumentError) as error:
            prefill(model, layout.shard(tokens(1, 9)), layout=layout, keys=keys)
        said.append(str(error.value))
    return said


def test_keys_of_other_ranks_or_another_model_are_refused(ranks):
    one, other = ranks.run(2, check_other_stores)
    assert one == other
    assert one[0] == "layout: expected one over the 1 rank(s) of the store's cp, got 2 others"
    assert one[1].startswith("keys: expected a store of this model's layers, [KeySize(")
    assert one[2] == "keys: expected a KeyStore or None, got str"


def check_saved(rank: int, folder: str) -> None:
    cp = ContextParallel(group(), scan="ring")
    model, ids = make(()), tokens(2, 29)
    layout, keys = cp.layout(23), key_store(model, cp)
    prompt = prefill(model, layout.shard(ids[:, :23]), layout=layout, keys=keys)
    for i in range(23, 26):
        prompt = step(model, ids[:, i], prompt.states, in_place=i > 23)
    save_prompt(prompt, folder)


def check_full(rank: int, folder: str) -> None:
    """Rank 1 alone has no room, and a prompt of before is there."""
    cp, most = ContextParallel(group(), scan="ring"), resource.getrlimit(resource.RLIMIT_FSIZE)
    model, layout = make(()), cp.layout(200)
    prompt = prefill(model, layout.shard(tokens(2, 200)), layout=layout, keys=key_store(model, cp))
    save_prompt(prompt, folder)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, most[1]))
    try:
        with pytest.raises(ArgumentError, match="folder: expected one that every rank can write to, with room"):
            save_prompt(prompt, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    with pytest.raises(ArgumentError, match="folder: expected a folder with states"):
        load_prompt(folder, key_store(model, cp))


def test_a_prompt_that_one_rank_cannot_write_is_an_error_on_all(ranks, tmp_path):
    """The others waited for it until the timeout."""
    pytest.importorskip("safetensors")
    ranks.run(2, check_full, str(tmp_path), timeout=40)


def check_loaded(rank: int, folder: str) -> list[list[int]]:
    cp = ContextParallel(group(), scan="ring")
    model, ids = make(()), tokens(2, 29)
    prompt, rest = load_prompt(folder, key_store(model, cp)), cp.layout(3)
    torch.testing.assert_close(prompt.logits, model(ids[:, :26]).logits[:, -1], rtol=1e-9, atol=1e-9)
    prompt = prefill(model, rest.shard(ids[:, 26:]), states=prompt.states, layout=rest)
    return torch.stack(list(decode(model, prompt, NEW)), 1).tolist()


def test_a_prompt_read_by_three_ranks_is_kept_on_disk_and_goes_on_with_fewer(ranks, tmp_path):
    pytest.importorskip("safetensors")
    ranks.run(3, check_saved, str(tmp_path))
    for size in (2, 1):
        assert ranks.run(size, check_loaded, str(tmp_path))[0] == greedy(make(()), tokens(2, 29), NEW).tolist()
    with pytest.raises(ArgumentError, match="folder: expected keys of"):
        load_prompt(tmp_path, KeyStore([KeySize(1, 2, 2)]))
    with pytest.raises(ArgumentError, match="folder: expected a folder with states"):
        load_prompt(tmp_path / "none", KeyStore([KeySize(1, 2, 2)]))
    with pytest.raises(ArgumentError, match="prompt: expected one read with `keys`, a KeyStore, got KVCache"):
        save_prompt(prefill(make(()), tokens(1, 3)), tmp_path)
    for name in ("keys-2.safetensors", "states.safetensors"):
        file = tmp_path / name
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(ArgumentError, match=f"folder: expected a prompt that is whole, got {tmp_path}"):
            load_prompt(tmp_path, key_store(make(())))
    (tmp_path / "keys-2.safetensors").unlink()


def check_two_turns(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring")
    model, ids = make(), tokens(2, 40)
    first, second = cp.layout(15), cp.layout(25)
    prompt = prefill(model, first.shard(ids[:, :15]), layout=first)
    prompt = prefill(model, second.shard(ids[:, 15:]), states=prompt.states, layout=second)
    torch.testing.assert_close(prompt.logits, model(ids).logits[:, -1], rtol=1e-9, atol=1e-9)


def test_a_second_prompt_goes_on_from_the_first(ranks):
    ranks.run(2, check_two_turns)


def test_states_may_be_continued_twice():
    model, ids = make(), tokens(2, 9)
    prompt = prefill(model, ids)
    one = torch.stack(list(decode(model, prompt, NEW)), 1)
    two = torch.stack(list(decode(model, prompt, NEW)), 1)
    assert torch.equal(one, two)
    assert torch.equal(one, generate(model, ids, NEW))
    assert generate(model, ids, 0).shape == (2, 0)


def test_one_step_is_one_token():
    model, ids = make(), tokens(2, 9)
    after = step(model, ids[:, -1], prefill(model, ids[:, :-1]).states)
    torch.testing.assert_close(after.logits, model(ids).logits[:, -1], rtol=1e-9, atol=1e-9)


def test_samples_follow_temperature_top_k_and_top_p():
    logits = torch.tensor([[0.0, 1.0, 5.0, 4.9]]).expand(400, -1)
    assert Sampler()(logits).eq(2).all()

    def draw(**options) -> torch.Tensor:
        return Sampler(generator=torch.Generator().manual_seed(0), **options)(logits)

    assert set(draw(temperature=1.0, top_k=2).tolist()) == {2, 3}
    assert set(draw(temperature=5.0).tolist()) == {0, 1, 2, 3}
    assert torch.equal(draw(temperature=1.0), draw(temperature=1.0))
    share = logits[0].softmax(-1)
    assert set(draw(temperature=1.0, top_p=float(share[2]) - 1e-3).tolist()) == {2}
    assert set(draw(temperature=1.0, top_p=float(share[2]) + 1e-3).tolist()) == {2, 3}
    assert set(draw(temperature=5.0, top_p=0.999, top_k=2).tolist()) == {2, 3}
    assert torch.equal(draw(temperature=5.0, top_p=1), draw(temperature=5.0))
    assert set(draw(temperature=1.0, top_p=1e-300).tolist()) == {2}  # nothing, in fp32
    with pytest.raises(ArgumentError, match="top_p: expected a number above 0"):
        Sampler(top_p=0.0)
    wrong = [("temperature", -1), ("temperature", float("inf")), ("temperature", True), ("generator", 3)]
    for name, value in (*wrong, ("top_k", 0), ("top_k", 1.5), ("top_k", True), ("top_p", "x"), ("top_p", True)):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            Sampler(**{name: value})


def test_what_is_no_model_prompt_or_sampler_is_refused(tmp_path):
    model, ids = make(), tokens(1, 5)
    prompt = prefill(model, ids)
    cp = SimpleNamespace(deterministic=True, size=1)
    calls = {
        "model": [
            lambda: prefill(nn.Linear(2, 2), ids),
            lambda: generate(None, ids, 2),
            lambda: decode("model", prompt, 2),
            lambda: step(None, ids[:, 0], prompt.states),
            lambda: key_store(None),
            lambda: BlockReader(None, cp),
        ],
        "prompt": [lambda: decode(model, prompt.states, 2), lambda: save_prompt(None, tmp_path)],
        "sampler": [lambda: decode(model, prompt, 2, 0.7), lambda: generate(model, ids, 2, "greedy")],
        "tokens": [partial(step, model, x, prompt.states) for x in (ids, 3, [3], None)],
        "cp": [lambda: key_store(model, 2), lambda: BlockReader(model, None)],
        "keys": [lambda: load_prompt(tmp_path, None)],
        "folder": [lambda: load_prompt(None, key_store(model))],
    }
    for name, wrong in calls.items():
        for call in wrong:
            with pytest.raises(ArgumentError, match=f"^{name}: expected"):
                call()


@pytest.mark.parametrize("count", [-1, 2.5, "all", True])
def test_a_number_of_tokens_that_is_none_is_refused(count):
    with pytest.raises(ArgumentError, match="max_new_tokens: expected an int ≥ 0"):
        decode(make(), None, count)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ArgumentError, match="cu_seqlens: expected prompts of at least one token"):
        prefill(make(), tokens(1, 4), cu_seqlens=torch.tensor([0, 0, 4]))
    with pytest.raises(ArgumentError, match="ids: expected a prompt of at least one token"):
        prefill(make(), tokens(1, 0))
    with pytest.raises(ArgumentError, match="cu_seqlens: expected an int32 or int64 tensor"):
        prefill(make(), tokens(1, 4), cu_seqlens=[0, 4])
