"""What chooses the tokens of a batch: each row's as if it were alone, by as many operators for many rows as for one,
while host and device are left alone with theirs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ring_la import ArgumentError
from ring_la.inference import Prefilled, Sampler
from ring_la.serving import Request
from ring_la.serving.batch import Batch, Row
from ring_la.serving.dice import minus_exponential, places, stream
from ring_la.serving.sampling import Chooser, Choosers, Ways, _left_out
from tests.serving import drawn
from tests.support.step_graphs import Apart

PENALTIES = dict(presence_penalty=0.4, frequency_penalty=0.9)
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(temperature=0.8, seed=3),
    dict(temperature=0.8, seed=4),
    dict(temperature=1.0, top_k=5, seed=-3),
    dict(temperature=1.3, top_p=0.7, seed=2**63 - 1),
    dict(temperature=1.3, top_k=9, top_p=0.9, seed=3),
    dict(logit_bias={3: 1.5, 5: -100.0}, **PENALTIES),
    dict(temperature=0.5, top_k=90, top_p=0.99, seed=7, logit_bias={3: 5.0}, **PENALTIES),
    dict(temperature=100.0, top_k=200, seed=8),
]
V = 97


def seated(options: list[dict[str, Any]], room: int = 0) -> tuple[Choosers, Ways]:
    choosers, ways = Choosers(torch.device("cpu"), room), Ways(0)
    for row, each in enumerate(options):
        chooser = Request([1], **each).chooser()
        choosers.seat(row, chooser, V)
        ways |= chooser.ways
    return choosers, ways


def steps(n: int, rows: int) -> torch.Tensor:
    return 3 * torch.randn(n, rows, V, generator=torch.Generator().manual_seed(1))


def test_each_row_s_tokens_are_those_of_the_definition():
    """And the host waits for nothing."""
    choosers, ways = seated(OPTIONS)
    found: list[list[int]] = [[] for _ in OPTIONS]
    for logits in steps(40, len(OPTIONS)):
        with Apart():
            tokens = choosers.choose(logits, ways)
        for row, options in enumerate(OPTIONS):
            assert int(tokens[row]) == drawn.token(logits[row], found[row], **options), options
            found[row].append(int(tokens[row]))
    assert len({tuple(tokens) for tokens in found}) == len(OPTIONS)


def test_a_row_s_tokens_do_not_depend_on_who_is_beside_it():
    """Alone, in another seat, beside others that need more, and behind rows that left."""
    logits = steps(12, len(OPTIONS))
    choosers, ways = seated(OPTIONS, room=len(OPTIONS))
    want = torch.stack([choosers.choose(z, ways) for z in logits])
    for row, options in enumerate(OPTIONS):
        alone, own = seated([options])
        assert [int(alone.choose(z[row : row + 1], own)) for z in logits] == want[:, row].tolist()
    choosers, ways = seated(OPTIONS, room=len(OPTIONS))
    apart = [torch.cat([choosers.choose(z[i : i + 3], ways, first=i) for i in (0, 3, 6)]) for z in logits]
    assert torch.equal(torch.stack(apart), want)
    choosers, ways = seated(OPTIONS)
    rows = torch.arange(len(OPTIONS))
    for n, z in enumerate(logits):
        if n in (3, 7):
            stay = [i for i in range(len(rows)) if i != n - 2]
            choosers.keep(stay)
            rows = rows[stay]
        assert torch.equal(choosers.choose(z[rows], ways), want[n, rows])


def test_a_rank_that_follows_has_the_graph_of_the_rank_that_leads():
    ways = [Request([1], **options).chooser().ways for options in OPTIONS]
    assert [Chooser.of(each).ways for each in ways] == ways
    assert len({*ways}) == 5


def test_who_comes_to_a_seat_has_nothing_of_who_left_it():
    """Of bias and counts that would decide, and of what is drawn."""
    first = [each | dict(logit_bias={3: 50.0}, frequency_penalty=0.1) for each in OPTIONS]
    then = [each | dict(presence_penalty=2.0) for each in OPTIONS[::-1]]
    choosers, ways = seated(first, room=len(OPTIONS))
    logits = steps(1, len(OPTIONS))[0]
    for _ in range(3):
        choosers.choose(logits, ways)
    for row, options in enumerate(then):
        choosers.seat(row, Request([1], **options).chooser(), V)
    again, ways = seated(then)
    for _ in range(6):
        assert torch.equal(choosers.choose(logits, ways), again.choose(logits, ways))


@pytest.mark.parametrize("top_k", [None, 1, 4, 7, 50])
@pytest.mark.parametrize("top_p", [1.0, 1e-30, 0.25, 0.5, 0.7, 0.999999])
def test_what_is_left_to_draw_from_is_exact(top_k, top_p):
    """Tokens as likely as others among them, also where a share ends at `top_p` itself."""
    rows = [[0.0] * 8, [3, 1, 1, 1, 0, 0, 1, -50], [math.log(x) for x in (4, 2, 1, 1, 4, 2, 1, 1)], [5, *[-120.0] * 7]]
    y = torch.tensor(rows)
    choosers = Choosers(torch.device("cpu"))
    for row in range(len(rows)):
        choosers.seat(row, Chooser(Sampler(1.0, top_k, top_p=top_p)), 8)
    out = _left_out(y, y.amax(-1, keepdim=True), choosers._rows)
    for row, z in zip(out.tolist(), y.double().tolist()):
        assert {i for i, gone in enumerate(row) if not gone} == {*drawn.left(z, top_k, top_p)}


def test_numbers_are_exponential_and_never_nothing():
    seeds = (0, 1, 2**63, -1, 12345)
    streams = torch.tensor([[stream(seed)] for seed in seeds])
    got = -minus_exponential(streams, places(300, torch.device("cpu")))
    want = torch.tensor([[drawn.exponential(seed, 0, i) for i in range(300)] for seed in seeds], dtype=torch.float64)
    torch.testing.assert_close(torch.expm1(-got.double()), torch.expm1(-want), rtol=3e-7, atol=0)
    many = -minus_exponential(torch.tensor([[stream(7)]]), places(400_000, torch.device("cpu")))
    assert float(many.min()) > 0
    assert float(many.mean()) == pytest.approx(1, abs=0.008)  # five deviations
    assert float((many < 1e-3).double().mean()) == pytest.approx(1e-3, abs=2.5e-4)


def chi_square(counts: Counter, shares: dict[Any, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= set(shares)
    return sum((counts[x] - total * share) ** 2 / (total * share) for x, share in shares.items())


def test_tokens_come_as_often_as_their_probabilities_say():
    """By seeds one after the other and by places of a sequence; one choice says nothing of the next, or of the next
    seed's. Bounds are passed by one in a hundred thousand."""
    z = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -3.0])
    for options, left in ((dict(), 7), (dict(top_k=4), 4), (dict(top_p=0.7), 3)):
        rows = [dict(temperature=1.5, seed=seed, **options) for seed in range(1500)]
        choosers = Choosers(torch.device("cpu"), len(rows))
        for row, each in enumerate(rows):
            choosers.seat(row, Request([1], **each).chooser(), len(z))
        ways = Request([1], **rows[0]).chooser().ways
        tokens = torch.stack([choosers.choose(z.expand(len(rows), -1), ways) for _ in range(12)])
        weights = Sampler(1.5, **options).weights(z[None])[0].double().tolist()
        shares = {i: w / sum(weights) for i, w in enumerate(weights) if w}
        assert len(shares) == left
        bound = {3: 23.1, 4: 26.0, 7: 33.2}
        assert chi_square(Counter(tokens.flatten().tolist()), shares) < bound[left]
        pairs = {(i, j): a * b for i, a in shares.items() for j, b in shares.items()}
        for one, other in ((tokens[::2], tokens[1::2]), (tokens[:, ::2], tokens[:, 1::2])):
            found = Counter(zip(one.flatten().tolist(), other.flatten().tolist()))
            assert chi_square(found, pairs) < {3: 37.4, 4: 49.8, 7: 101.4}[left]


def test_where_nothing_can_be_drawn_there_is_no_token():
    options: list[dict[str, Any]] = [
        dict(temperature=1.0),
        dict(temperature=1.0, logit_bias={1: math.inf}),
        dict(temperature=1.0, top_p=0.5, logit_bias=dict.fromkeys(range(V), -math.inf)),
        dict(logit_bias={1: math.inf}),
        dict(temperature=1e-300),
        {},
        dict(temperature=1.0, logit_bias={1: 300.0}, top_k=3),
    ]
    choosers, ways = seated(options)
    logits = torch.zeros(len(options), V)
    logits[4, 2] = 1.0
    assert choosers.choose(logits, ways)[1:].tolist() == [-1, -1, 1, -1, 0, 1]
    for bad in (math.nan, math.inf, -math.inf):
        logits[:, 5] = bad
        assert choosers.choose(logits, ways).tolist() == [-1] * len(options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(presence="a"), "presence_penalty: expected a finite number"),
        (dict(frequency=math.nan), "frequency_penalty: expected a finite number"),
        (dict(frequency=10**400), "frequency_penalty: expected a number of at most 9223372036854775808, got an int of"),
        (dict(bias={1: 10**400}), "logit_bias: expected"),
        (dict(sampler=Sampler(10**400)), "temperature: expected"),
        (dict(logprobs=-1), "logprobs: expected"),
    ],
)
def test_values_that_make_no_sense(given, message):
    with pytest.raises(ArgumentError, match=message):
        Chooser(**given)


class Launches(TorchDispatchMode):
    """The operators that run within, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class Still:
    """A model of which nothing is asked but where it is."""

    device, flexible, vocab_size = torch.device("cpu"), True, V


EVERYTHING = OPTIONS[7]
COUNTED = [
    ({}, 6),
    (dict(temperature=1.0), 34),
    (dict(temperature=1.0, top_k=50, top_p=0.9), 52),
    (dict(logit_bias={3: 1.0}, **PENALTIES), 14),
    (EVERYTHING, 60),
    (EVERYTHING | dict(logprobs=5), 69),
]
"""Rows' options, and how many operators there are at most, a copy of tokens for the host among them, and one of what is
said of them."""


@pytest.mark.parametrize(("options", "most"), COUNTED)
def test_a_step_s_choice_takes_as_many_operators_for_many_rows_as_for_one(options, most):
    counts = []
    for n in (1, 8, 64):
        batch = Batch(Still())
        for row in range(n):
            batch.add(Row(row, Request([1], **options).chooser()), Prefilled(torch.randn(1, V), []))
        with Launches() as launched:
            batch.choose()
        assert all(chosen is not None for chosen in batch.told())
        counts.append(len(launched.names))
    assert counts[0] == counts[1] == counts[2] <= most, launched.names


def test_what_is_said_of_a_token_is_on_its_way_with_it():
    """Asked for it later the device, which has the next step to do, does nothing. Who asks for less is told less."""
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    batch = Batch(Still())
    for row, n in enumerate((3, None, 1)):
        batch.add(Row(row, Chooser(logprobs=n)), Prefilled(logits[row : row + 1], []))
    own = logits.log_softmax(-1)
    batch.choose()
    batch._after.logits.zero_()  # the next step's
    with Launches() as launched:
        chosen = batch.told()
    assert launched.names == []
    assert chosen[1].said is None
    for row, n in ((0, 3), (2, 1)):
        best, said = own[row].topk(n), chosen[row].said
        assert said.logprob == float(own[row, chosen[row].token])
        assert said.top == list(zip(best.indices.tolist(), best.values.tolist()))
