"""What training left on disk is what is served."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from ring_la import ArgumentError, ContextParallel, UnsupportedError
from ring_la.cli import serve as serve_command
from ring_la.inference import LayerKeys, sharded_weights
from ring_la.inference.sharded_weights import held_weights
from ring_la.integrations.transformers import sharded
from ring_la.models import HybridConfig, HybridLM
from ring_la.serving import Bytes, Ended, Engine, Event, Failed, NoText, pace
from ring_la.serving.load import load, vocabulary
from ring_la.serving.model import Served, rehearse
from ring_la.serving.pretrained import Pretrained
from ring_la.serving.static import StaticBatch
from tests.serving.engines import LONG, Asked
from tests.support.pool import group
from tests.support.transformers_models import CASES, SMALL, VOCABULARY


def hybrid(vocab_size: int = 257) -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(vocab_size, 32, ["gdn", "attention"], 2, mlp_dim=32))


def same(got: torch.nn.Module, want: torch.nn.Module) -> bool:
    pairs = zip(got.state_dict().items(), want.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_a_checkpoint_of_the_demo(tmp_path):
    model = hybrid()
    torch.save({"config": model.config.to_dict(), "model": model.state_dict(), "x": 1}, tmp_path / "checkpoint.pt")
    for path in (tmp_path, tmp_path / "checkpoint.pt"):
        served, text = load(path)
        assert same(served.model, model)
        assert (served.vocab_size, text.end) == (257, {256})
    assert load(tmp_path, dtype="bfloat16")[0].model.embedding.weight.dtype == torch.bfloat16


def test_the_newest_complete_checkpoint_of_a_run(tmp_path):
    model = hybrid(99)
    about = {"hybrid": model.config.to_dict(), "data": {"tokenizer": None}, "model": {}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ArgumentError, match="model: expected a run with a complete checkpoint"):
        load(tmp_path)
    for step in (2, 10):
        with torch.no_grad():
            model.embedding.weight.fill_(step)
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / f"checkpoints/step-{step:08d}", no_dist=True)
    (tmp_path / "checkpoints/step-00000011").mkdir()
    served, text = load(tmp_path)
    assert same(served.model, model)
    assert isinstance(text, NoText)
    assert isinstance(vocabulary("bytes", 300), Bytes)
    (tmp_path / "config.json").write_text(json.dumps(about | {"hybrid": None}))
    with pytest.raises(UnsupportedError, match="model: expected a run of a HybridLM"):
        load(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="model: expected a checkpoint or a folder with one, got"):
        load(tmp_path / "none")
    with pytest.raises(ArgumentError, match="model: expected a file of torch"):
        load(tmp_path)
    (tmp_path / "checkpoint.pt").write_text("hello")
    with pytest.raises(ArgumentError, match="model: expected a file of torch"):
        load(tmp_path)
    with pytest.raises(ArgumentError, match="dtype: expected one of auto"):
        load(tmp_path, dtype="int8")
    with pytest.raises(ArgumentError, match="tokenizer: expected none for a model of less than 256"):
        vocabulary("bytes", 100)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A folder with a tokenizer of pieces of words, and what AutoTokenizer needs beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|user|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special)
    made.train_from_iterator([TEXT], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    return folder


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no systems here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "one sequence over many ranks → naïve one sequence\n\n  over many ranks"


def test_tokenizers_give_the_text_back(tokenizer):
    for name in (str(tokenizer), str(tokenizer / "tokenizer.json")):
        text = vocabulary(name, 300)
        ids = text.encode(TEXT + "🙂")
        decoder = text.decoder()
        assert len(ids) < len(TEXT)
        assert text.end == set(text.encode("<|endoftext|>"))
        said = [decoder.push(i) for i in ids]
        assert "".join(said) + decoder.rest() == TEXT + "🙂"
        assert "" in said  # the face is four bytes, and they are not one token
        assert "\ufffd" not in "".join(said)
    with pytest.raises(ArgumentError, match="tokenizer: expected a tokenizer"):
        vocabulary(str(tokenizer / "none.json"), 300)
    with pytest.raises(ArgumentError, match="tokenizer: expected a folder AutoTokenizer reads"):
        vocabulary(str(tokenizer / "none"), 300)


def test_conversations_are_written_by_the_tokenizer_s_template(tokenizer):
    text, said = vocabulary(str(tokenizer), 300), {"role": "user", "content": "one sequence"}
    want = text.encode("<user>one sequence<|endoftext|><assistant>")
    assert text.chat([said]) == (want, ())
    with pytest.raises(ArgumentError, match="messages: expected what the model's chat template takes, got no systems"):
        text.chat([said | {"role": "system"}])
    for none in (vocabulary(str(tokenizer / "tokenizer.json"), 300), NoText()):
        with pytest.raises(UnsupportedError, match="messages: expected a model with a chat template, got a"):
            none.chat([said])


def test_where_no_model_is_named_the_demo_is_served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"MODEL: expected one, or the demo's checkpoint in runs/demo.*demo\.sh"):
        serve_command.run(command().parse_args([]))
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/checkpoint.pt").touch()
    assert serve_command.demo() == "runs/demo"


def prompts() -> list[list[int]]:
    """Two that are split, and those that are too short for a token on each of 2 or 4 ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (21, 2, 1, 5)]


def answers(
    folder: str, cp: ContextParallel | None = None, parts: bool = False, fixed: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Tokens of all prompts side by side, read in pieces; and of the kept ones again, what was not read anew. Where
    weights are sharded another prompt fails among them. fixed: states have fixed addresses."""
    model, text = load(folder, cp, sharded=parts)
    bad = Asked([5, 6, 7, 8, 9, 1], TOKENS)
    jobs, again = [Asked(ids, TOKENS) for ids in prompts()], [Asked(ids, TOKENS) for ids in prompts()[:2]]
    engine = Engine(model, text, cp, patience=LONG, piece=13, batch=3, keep=1 << 20, capture=fixed)
    assert isinstance(engine.batch, StaticBatch) == fixed
    sizes, step = [], model.step
    model.step = lambda tokens, states, in_place: sizes.append(len(tokens)) or step(tokens, states, in_place)
    hear = jobs[0].emit

    def then(event: Event) -> None:  # when that is answered, it is asked again
        hear(event)
        if isinstance(event, (Ended, Failed)):
            engine.submit(*again)
            engine.stop()

    jobs[0].emit = then
    if parts:
        break_inside(model, bad.request.ids[-1])
    if engine.ranks.leads:
        engine.submit(*jobs[:1], *[bad] * parts, *jobs[1:])
    engine.run()
    assert not engine.states.open
    assert_spread(engine)
    assert model.resumes
    assert model.goes_on
    assert max(sizes, default=2) > 1  # side by side, where tokens are decoded
    if parts:
        assert sizes  # on every rank
        assert_shared(model.model, cp.size)
        assert bad.events == [Failed("the request has failed (RuntimeError)")] or not engine.ranks.leads
    return [job.tokens for job in (*jobs, *again)], [job.reused for job in again]


UNEVEN = 4
"""Tokens that a rank may have more than its part: two of each piece."""


def assert_spread(engine: Engine) -> None:
    """Keys stay on the rank that read them: of what is kept each has its part, and of all else nothing is left."""
    cp, model = engine.cp, engine.model
    assert model.shares_keys == (cp is not None and cp.size > 1)
    if not model.shares_keys:
        return
    assert engine.states.kept
    for kept in engine.states.kept.values():
        rows = next(state.rows for state in kept.since.states if isinstance(state, LayerKeys))
        everywhere = cp.comm.all_gather(torch.tensor([rows.nbytes])).wait()
        each = model.home(cp).keys.token_bytes
        assert int(everywhere.sum()) == kept.length * each
        assert int(everywhere.max()) <= (kept.length / cp.size + UNEVEN) * each
    store = model.home(cp).keys
    del kept, rows
    engine.states.kept.clear()
    engine.batch.clear()
    assert store.nbytes == 0


def break_inside(model: Served, token: int) -> None:
    """Reading a prompt that ends with `token` fails in the last layer, with weights gathered and more on their way."""
    read, bad = model.read, []

    def marked(ids, states, cp):
        bad[:] = [token] * (int(ids[0, -1]) == token)
        try:
            return read(ids, states, cp)
        finally:
            bad.clear()

    def broken(*_: object) -> None:
        if bad:
            raise RuntimeError("no such prompt")

    model.read = marked
    model.model.base_model.layers[-1].register_forward_pre_hook(broken)


def assert_shared(model: torch.nn.Module, ranks: int) -> None:
    """A rank has its part of what is large, in rows, and all of the rest."""
    parts = [(isinstance(p, DTensor), p.numel() * p.element_size(), p.shape[0]) for p in model.parameters()]
    whole = sum(size for shared, size, _ in parts if not shared) + sum(b.nbytes for b in model.buffers())
    bound = whole + sum(size // rows * -(-rows // ranks) for shared, size, rows in parts if shared)
    assert held_weights(model) <= bound
    assert ranks == 1 or held_weights(model) < 0.8 * sum(size for _, size, _ in parts)


def check_transformers(
    rank: int, folders: list[str], parts: bool = False, fixed: bool = False
) -> list[tuple[list[list[int]], list[int]]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "DECODING", 0.0)  # a slow piece does not let others end before the next joins them
        patch.setattr(sharded_weights, "LEAST", LARGE)
        patch.setattr(sharded, "STRIP", 4)
        return [answers(folder, cp, parts, fixed) for folder in folders]


LARGE = 512
"""Bytes from which a weight is sharded here."""
TOKENS = 3
MODELS = ("qwen3_next", "bamba", "kimi_linear", "jamba", "llama", "minimax")


def test_models_of_transformers(ranks, tmp_path: Path):
    folders, want = [], []
    for name in MODELS:
        model = CASES[name].make().eval()
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.save_pretrained(tmp_path / name)
        said = []
        for ids in prompts():
            made = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0].tolist()
            said.append(made[len(ids) :])
        want.append((said + said[:2], [21, 2]))
        folders.append(str(tmp_path / name))
    assert [answers(folder, fixed=True) for folder in folders] == want
    assert ranks.run(2, check_transformers, folders)[0] == want
    for size, some in ((1, slice(1)), (3, slice(4))):  # whose weights are of all kinds that the others have
        assert ranks.run(size, check_transformers, folders[some], True)[0] == want[some], size
    latents = slice(2, 3)
    assert ranks.run(2, check_transformers, folders[latents], True, True)[0] == want[latents]
    assert ranks.run(2, check_transformers, folders[:1], False, True)[0] == want[:1]
    assert ranks.run(4, check_transformers, folders[latents])[0] == want[latents]


def check_announcement(rank: int, folder: str) -> str:
    args = command().parse_args([folder])
    with pytest.raises(UnsupportedError) as refused:
        serve_command.serve(args, None)
    return str(refused.value)


def command() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    return parser


def test_a_model_that_cannot_go_on_after_a_split_prompt_is_refused_before_it_is_announced(ranks, tmp_path: Path):
    CASES["xlstm"].make().save_pretrained(tmp_path)
    for said in ranks.run(4, check_announcement, str(tmp_path)):
        assert said.startswith("model: expected one that reads a prompt and goes on from there, got"), said
        assert "xLSTMForCausalLM" in said
    with pytest.raises(UnsupportedError, match=r"^model: expected one that reads a prompt"):
        rehearse(load(tmp_path)[0], None)  # whose cache, in the library, is of other sizes than its layers' states


def pretrained(folder: Path, **options: object) -> torch.nn.Module:
    """A causal model of Transformers, saved, with tokens for every byte."""
    config = LlamaConfig(**(SMALL | {"vocab_size": 300, "eos_token_id": 7, "num_hidden_layers": 1} | options))
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def test_a_tokenizer_that_is_named_is_used_for_models_of_transformers(tmp_path: Path, tokenizer: Path):
    pretrained(tmp_path)
    shutil.copytree(tokenizer, tmp_path, dirs_exist_ok=True)
    _, text = load(tmp_path, tokenizer="bytes")
    assert text.encode("a→") == [97, 226, 134, 146]
    assert text.end == {7}  # the model's own, not that of a vocabulary of bytes
    _, own = load(tmp_path)
    assert own.encode("one sequence") != list(b"one sequence")
    other = Tokenizer(WordLevel({"one": 5, "sequence": 6}))
    other.pre_tokenizer = Whitespace()
    other.save(str(tmp_path / "words.json"))
    _, words = load(tmp_path, tokenizer=str(tmp_path / "words.json"))
    assert words.encode("one sequence") == [5, 6]
    assert words.end == {7}


@pytest.mark.parametrize("kind", ["hybrid", "transformers"])
def test_a_file_that_is_overwritten_changes_nothing(tmp_path: Path, kind: str):
    if kind == "hybrid":
        model, name = hybrid(), "checkpoint.pt"
        torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, tmp_path / name)
    else:
        model, name = pretrained(tmp_path), "model.safetensors"
    served, _ = load(tmp_path)
    with open(tmp_path / name, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        file.write(bytes(size))
    assert same(served.model, model)
    os.truncate(tmp_path / name, 0)
    assert served.read(torch.tensor([[3, 4]]), None, None).logits.isfinite().all()


class Coded(torch.Tensor):
    """A weight that is in numbers of its own kind: linear layers know it, and nothing else does."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].whole, *args[2:], **kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole)
        raise NotImplementedError(f"{func} of a coded weight")


def check_coded(rank: int) -> bool:
    model = CASES["llama"].make().eval()
    ids = torch.tensor([prompts()[0]])
    want = model(input_ids=ids).logits[:, -1]
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(Coded(module.weight.detach()), requires_grad=False)
    cp = ContextParallel(group(), scan="ring", validate="never")
    served = Pretrained(model, cp)
    assert served.flexible
    return torch.allclose(served.read(ids, None, cp).logits, want, rtol=1e-4, atol=1e-5)


def test_weights_of_a_kind_of_their_own_are_left_as_they_are(ranks):
    """As quantised ones are."""
    assert all(ranks.run(2, check_coded))


def check_shared(rank: int) -> list[bool]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    return [Pretrained(CASES[name].make(), cp).shares_keys for name in ("gpt_oss", "gemma2", "llama4")]


def test_keys_with_windows_sinks_and_caps_stay_on_their_ranks(ranks):
    """The trial at the start compares them with one process's; of attention in chunks they do not."""
    assert ranks.run(2, check_shared) == [[True, True, False]] * 2
