"""Models of Transformers whose memory the library has in a place of its own: in the layers (RecurrentGemma), beside
keys (Zaya), in a list of tensors (RWKV-4). Their tokens are those of the library alone."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("transformers")

from torch.nn.functional import one_hot
from transformers.utils import ModelOutput

from ring_la import ContextParallel, UnsupportedError
from ring_la.integrations.transformers import mixers, rotary
from ring_la.serving import Ended, Engine, Event, Failed, NoText
from ring_la.serving.model import rehearse
from ring_la.serving.pretrained import Pretrained, _OneByOne
from ring_la.serving.static import StaticBatch
from tests.serving.engines import LONG, Asked
from tests.support import served_models
from tests.support.pool import group
from tests.support.transformers_models import CASES

NEW = 4
PROMPTS = (tuple(range(3, 31)), (7, 8, 9), (5,), tuple(range(4, 21)))
"""Long enough for three ranks and several pieces; too short to split; one token; long again."""


class Served(NamedTuple):
    """Tokens of all prompts side by side, then of the first again; what of that was not read anew; and how."""

    tokens: list[list[int]]
    reused: int
    side_by_side: bool
    goes_on: bool
    shares_keys: bool


@cache
def truth(name: str) -> list[list[int]]:
    """Tokens of `generate`, of a new model each: RecurrentGemma's layers do not forget the prompt before."""
    found = []
    for ids in (*PROMPTS, PROMPTS[0]):
        model = CASES[name].make().eval()
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        found.append(out[0, len(ids) :].tolist())
    return found


def served(name: str, cp: ContextParallel | None = None, fixed: bool = False) -> Served:
    model = Pretrained(CASES[name].make(), cp)
    rehearse(model, cp)
    engine = Engine(model, NoText(), cp, piece=6, batch=3, keep=1 << 20, patience=LONG, capture=fixed)
    assert isinstance(engine.batch, StaticBatch) == fixed
    jobs, again = [Asked(ids, NEW) for ids in PROMPTS], Asked(PROMPTS[0], NEW)
    hear = jobs[0].emit

    def then(event: Event) -> None:  # when that is answered, it is asked again
        hear(event)
        if isinstance(event, (Ended, Failed)):
            engine.submit(again)
            engine.stop()

    jobs[0].emit = then
    if engine.ranks.leads:
        engine.submit(*jobs)
    engine.run()
    tokens = [job.tokens for job in (*jobs, again)]
    return Served(tokens, again.reused, model.flexible, model.goes_on, model.shares_keys)


def split(rank: int, names: tuple[str, ...]) -> list[Served]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    return [served(name, cp) for name in names]


NAMES = ("zaya", "rwkv") if mixers.OF_ONE_SEQUENCE else ("recurrent_gemma", "zaya", "rwkv")


@pytest.mark.parametrize("name", NAMES)
def test_states_of_every_place_are_rows(name):
    """At fixed addresses, as a graph of a step wants them."""
    assert served(name, fixed=True) == Served(truth(name), len(PROMPTS[0]), True, True, False)


def test_so_they_are_on_several_ranks(ranks):
    for name, got in zip(NAMES, ranks.run(3, split, NAMES)[0], strict=True):
        assert got == Served(truth(name), len(PROMPTS[0]), True, True, name != "rwkv"), name


@pytest.mark.parametrize("name", NAMES)
def test_they_are_decoded_alone_where_they_are_no_rows(monkeypatch, name):
    """Sequences take turns, and each finds its own."""
    monkeypatch.setattr(rotary, "goes_by_length", lambda module: True)
    assert served(name) == Served(truth(name), 0, False, False, False)


class Summing(torch.nn.Module):
    """The next token is the sum of all, which it calls by a name of its own and returns anew."""

    config = None

    def forward(self, input_ids: torch.Tensor, total: torch.Tensor | None = None, use_cache: bool = False):
        sums = input_ids.cumsum(1) + (0 if total is None else total)
        return ModelOutput(logits=one_hot(sums % 7, 7).float(), total=sums[:, -1:])


def test_the_name_of_a_cache_is_learnt():
    model = _OneByOne(Summing(), split=False)
    read = model.read(torch.tensor([[1, 4, 4]]), None)
    assert int(read.logits.argmax()) == 2
    for token, said in ((3, 5), (6, 4)):
        read = model.step(torch.tensor([token]), read.states, False)
        assert int(read.logits.argmax()) == said
    assert read.states == [torch.tensor([[18]]), 5]


def test_the_guides_say_what_is_served_and_how():
    """Of each reason for being decoded alone one model is tried; which are refused is a matter of their classes."""
    (_, said, _), (_, classes, _) = served_models.parts("served"), served_models.parts("uncached")
    rows = {cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in said.splitlines())}
    assert rows[served_models.REFUSED] == served_models.words(served_models.refused())
    assert classes == served_models.classes()
    alone = set(re.findall(r"`(\w+)`", rows[served_models.ALONE]))
    for name in ("deepseek_v32", "minimax_m3", "llama4", "llama_dynamic", "falcon"):
        assert name in alone
        assert served_models.way(name) == served_models.ALONE, name
    assert rows[served_models.NOWHERE] == "`xlstm`"
    assert served_models.way("xlstm") == served_models.NOWHERE
    assert alone.isdisjoint({*NAMES, "xlstm"})
    assert alone < set(CASES)


def test_a_library_whose_layers_keep_one_sequence_is_refused_by_name(monkeypatch):
    """RecurrentGemma before Transformers 5.23: the cache has no place for what it remembers."""
    monkeypatch.setattr(mixers, "OF_ONE_SEQUENCE", {"RecurrentGemmaRecurrentBlock"})
    with pytest.raises(
        UnsupportedError, match="model: expected one that has all it remembers in its cache, got Recurr"
    ):
        served("recurrent_gemma")
