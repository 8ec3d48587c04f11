"""The kernels of test_hopper_emulated.py where states come from other shards, against the fp64 token loop: ranks in a
line, all on one device (`tests.support.line_of_ranks`). On a GPU in tests/gpu/test_across.py."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.interpreter import interpreted

interpreted()

from ring_la import reference  # noqa: E402
from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels import gpu  # noqa: E402
from ring_la.kernels.protocol import Backward, Inputs, OutputUse  # noqa: E402
from ring_la.kernels.wy import across, gdn_launches, kda_launches, one_launch  # noqa: E402
from ring_la.kernels.wy.scanned_spans import ScannedSpans  # noqa: E402
from ring_la.scan import Chain, MailboxBorder, border  # noqa: E402
from tests.support import line_of_ranks  # noqa: E402
from tests.support.emulated_kernels import LIMIT, check, draw, emulate  # noqa: E402
from tests.support.hopper import Emulated  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them itself")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulate(monkeypatch)


@pytest.mark.parametrize(("name", "slow"), [("delta", 0.02), ("kda", 0.02), ("kda", 3.0), ("gla", 0.02)])
def test_states_from_other_shards(monkeypatch, name, slow):
    """Of uneven lengths, in a line: each takes what the one before it sends, and backward. One head forgets, or both.
    The first shard ends a document, and begins the other one, which ends in the last, before a third."""
    cuts, cu, H = (0, 90, 210, 300, 390), (0, 30, 340, 390), 2
    function, kernels, rule = RULES[name]
    q, k, v, beta = draw(cuts[-1], H, 1)
    g = F.logsigmoid(torch.randn(1, cuts[-1], H, 128)) * torch.tensor([2.0, slow])[:, None]
    x = tokens_of(name, q, k, v, g, beta)
    (S0, dS), do = torch.randn(2, 1, len(cu) - 1, H, 128, 128), torch.randn_like(v)
    mailed = launches_that_carry(monkeypatch)
    got = line_of_ranks.results(kernels, rule, x, cuts, cu, S0, do, dS)
    got = {n: got[n] for n in ("o", "S", "S0", *x)}
    check(function, [*x.values()], torch.tensor(cu, dtype=torch.int32), got, S0[0], do, dS[0])
    assert mailed == CARRY[name], "those in the middle, of one document"


def test_states_of_gla_by_messages():
    """Two ranks have two runs of tokens each, zigzag, in which documents start and end; another lies over all."""
    cuts, cu, H = (0, 90, 210, 300, 390), (0, 30, 340, 390), 2
    q, k, v, beta = draw(cuts[-1], H, 1)
    g = F.logsigmoid(torch.randn(1, cuts[-1], H, 128)) * torch.tensor([2.0, 0.02])[:, None]
    x, (function, kernels, rule) = tokens_of("gla", q, k, v, g, beta), RULES["gla"]
    (S0, dS), do = torch.randn(2, 1, len(cu) - 1, H, 128, 128), torch.randn_like(v)
    got = line_of_ranks.by_messages(kernels, rule, x, line_of_ranks.zigzag(cuts, cu), S0, do, dS)
    got = {n: got[n] for n in ("o", "S", "S0", *x)}
    check(function, [*x.values()], torch.tensor(cu, dtype=torch.int32), got, S0[0], do, dS[0])


def tokens_of(name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> dict[str, Tensor]:
    """What a rule takes of these; `g` is by channel."""
    x = {"q": q, "k": k, "v": v, "g": g[..., 0] if name == "delta" else g}
    return x if name == "gla" else x | {"beta": beta}


CARRY = {
    "delta": {"gdn_forward", "gdn_backward"},
    "kda": {"kda_forward", "kda_forward states", "kda_backward"},
    "gla": set(),
}
"""Launches that carry states themselves, of a rule that trains."""


class Chunks(NamedTuple):
    """Where a launch of KDA's that makes chunks' states has these among its arguments, and what chunks write."""

    states: int = 16
    writes: int = 17


CHUNKS = Chunks()


def launches_that_carry(monkeypatch) -> set[str]:
    """The kernels launched from now on that do, by name. KDA's states of chunks come as late as they may."""
    found = set()
    start = Emulated.__call__

    def spied(self, *arguments):
        kernel = self._kernel
        if "MAILED=1" in kernel.defines:
            states = kernel.name == "kda_forward" and "KEEP=1" in kernel.defines
            found.add(kernel.name + " states" * states)
        start(self, *arguments)
        if kernel.name == "kda_forward" and {"MAILED=1", "KEEP=1"} <= {*kernel.defines}:
            for i in CHUNKS:  # the next launch is early
                Emulated.late(arguments[i])

    monkeypatch.setattr(Emulated, "__call__", spied)
    return found


@pytest.mark.parametrize("kernels", [across.DELTA, across.KDA], ids=["delta", "kda"])
def test_squares_of_transitions(kernels):
    """Of those that are not 0."""
    q, k, v, beta = draw(160, 2, 1)
    g = F.logsigmoid(torch.randn(1, 160, 2, 128)) * torch.tensor([3.0, 0.02])[:, None]
    call, _ = kernels.cut(Inputs(q, k, v, g if kernels is across.KDA else g[..., 0], beta), None, 1.0, False)
    arrived = torch.ones(2, 1, 3, 2, dtype=torch.int32) if kernels is across.DELTA else None
    maps = kernels.maps(call, False, arrived)
    assert arrived is None or not arrived[0].any(), "which the launch clears"
    whole = maps.zero == 0
    assert whole.tolist() == [[[False, True]] * 3]
    assert torch.allclose(maps.squares[whole].sum(-1), maps.transition[whole].square().sum((-2, -1)), rtol=1e-5)


def test_maps_of_gla():
    """Of two spans of two chunks and one that ends early. Heads forget by a chunk, by two, not, and in the second span
    alone. What a span that forgets leaves is asked for by one that does not, and at the end."""
    T, H = 150, 4
    q, k, v, _ = draw(T, H, 2)
    falls = torch.tensor([3.0, 0.5, 0.02, 0.2]).repeat(T, 1)
    falls[64:128, 3] = 3
    g = (-falls[None, :, :, None] * (0.9 + 0.1 * torch.rand(1, T, H, 128))).bfloat16()
    forgets = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]]).bool()
    call, _ = across.GLA.cut(Inputs(q, k, v, g), None, 1.0, True)
    maps, do = across.GLA.maps(call, True, None), torch.randn_like(v)
    _, saved = across.GLA.output(call, torch.zeros_like(maps.own), maps, True, None)
    back = maps._replace(own=torch.full_like(maps.own, torch.nan))
    across.GLA.add_back(call, back, saved, do, None)
    left = torch.zeros(3, H, 128, dtype=torch.float64)
    for s, part in enumerate((slice(0, 64), slice(64, 128), slice(128, T))):
        wide = [t[:, part].double() for t in (q, k, v, g)]
        S0 = torch.zeros(1, H, 128, 128, dtype=torch.float64, requires_grad=True)
        out = reference.gla(*wide, scale=1.0, initial_state=S0, output_final_state=True)
        (dS0,) = torch.autograd.grad(out.o, S0, do[:, part].double())
        left[s] = wide[3][0].sum(0) / math.log(2)
        for found, true, behind in ((maps.own, out.final_state, s + 1), (back.own, dS0, s - 1)):
            asked = ~forgets[s] | (~forgets[behind] if 0 <= behind < 3 else True)
            assert found.isfinite().all()
            errors = (found[0, s].double() - true[0]).flatten(1).norm(dim=1) / true[0].flatten(1).norm(dim=1)
            assert errors[asked].max() <= LIMIT
    assert torch.allclose(maps.transition[0][~forgets].double(), left[~forgets], rtol=1e-5, atol=1e-4)
    assert (maps.transition[0][forgets] < -1000).all()


@pytest.mark.parametrize(
    ("name", "slow"), [("delta", 3.0), ("delta", 0.02), ("kda", 3.0), ("kda", 0.02), ("gla", 0.02)]
)
def test_batch_rows_from_other_shards(monkeypatch, name, slow):
    """One head of the second row may not forget. No link is launched where launches carry states."""
    cuts, H = (0, 100, 196, 293), 2  # no span is shorter than the chunks that tell
    q, k = (F.normalize(torch.randn(2, cuts[-1], 1, 128), dim=-1).bfloat16() for _ in range(2))
    fall = torch.tensor([[3.0, 3.0], [3.0, slow]])[:, None, :, None]
    g = (fall * F.logsigmoid(torch.randn(2, cuts[-1], H, 128))).clamp(min=-5)
    v = torch.randn(2, cuts[-1], H, 128).bfloat16()
    x = tokens_of(name, q, k, v, g, torch.randn(2, cuts[-1], H).sigmoid())
    (S0, dS), do = torch.randn(2, 2, 1, H, 128, 128), torch.randn_like(x["v"])
    monkeypatch.setattr(border, "launch_dense", lambda *args, **named: pytest.fail("a link was launched"))
    function, kernels, rule = RULES[name]
    mailed = launches_that_carry(monkeypatch)
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, cuts[-1]), S0, do, dS)
    got = {n: got[n] for n in ("o", "S", "S0", *x)}
    check(function, [*x.values()], None, got, S0[:, 0], do, dS[:, 0])
    assert mailed == CARRY[name]


RULES = {
    "delta": (reference.gated_delta_rule, across.DELTA, Rule("delta", "scalar")),
    "kda": (reference.kda, across.KDA, Rule("delta", "diagonal")),
    "gla": (reference.gla, across.GLA, Rule("additive", "diagonal")),
}


def of_five_spans(name: str, shards: int) -> tuple[dict[str, Tensor], list[int]]:
    """Tokens of four heads, five spans a shard: none forgets; the second and fourth of a shard do, for a shard the
    first and last; each leaves little, so that all together leave nothing; that and one that does; and the cuts."""
    T, H = 320 * shards, 4
    q, k, v, beta = draw(T, H, 1)
    span = torch.arange(T) // 64
    every = torch.tensor([[0.002, 0.002, 0.16, 0.16]]).repeat(T, 1)
    every[(span % 5 % 2 == 1) & (span < 5 * shards - 5), 1] = 5
    every[(span % 5 % 4 == 0) & (span >= 5 * shards - 5), 1] = 5
    every[span % 5 == 2, 3] = 5
    g = -every[None, :, :, None] * (0.9 + 0.1 * torch.rand(1, T, H, 128))
    return tokens_of(name, q, k, v, g, beta), [320 * i for i in range(shards + 1)]


@pytest.mark.parametrize(("name", "parts", "beside"), [("delta", 2, 2), ("delta", 1, 2), ("kda", 1, 2), ("kda", 1, 64)])
def test_states_go_from_span_to_span(monkeypatch, name, parts, beside):
    """The delta rule's maps are found in halves, where there is room, by programs that may all run at once. Where two
    do, KDA's first find what others have not begun to look for."""
    monkeypatch.setattr(gdn_launches, "PARTS", 2**28 * (parts > 1))
    monkeypatch.setattr(Emulated, "BESIDE", beside)
    x, cuts = of_five_spans(name, 3)
    (S0, dS), do = torch.randn(2, 1, 1, 4, 128, 128), torch.randn_like(x["v"])
    function, kernels, rule = RULES[name]
    mailed = launches_that_carry(monkeypatch)
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, cuts[-1]), S0, do, dS)
    got = {n: got[n] for n in ("o", "S", "S0", *x)}
    check(function, [*x.values()], None, got, S0[0], do, dS[0])
    assert mailed == CARRY[name]


def test_one_device_trains_in_two_launches(monkeypatch):
    """A row of five spans, given a state, as a call goes that exchanges nothing. What it leaves says how it went."""
    (x, _), do = of_five_spans("delta", 1), torch.randn(1, 320, 4, 128).bfloat16()
    S0, dS = torch.randn(2, 1, 1, 4, 128, 128)
    monkeypatch.setattr(one_launch, "APART", 0)
    monkeypatch.setattr(one_launch, "APART_ROWS", 4)
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 64)
    mailed, (function, _, rule) = launches_that_carry(monkeypatch), RULES["delta"]
    call = (one_launch.DELTA, rule, Inputs(**x), None, 128**-0.5, OutputUse(True, alone=True))
    out = one_launch.OneLaunch(*call).output(S0)
    assert mailed == {"gdn_forward"}
    monkeypatch.setattr(one_launch, "APART", 2**60)
    back = one_launch.OneLaunch(*call).gradients(Backward(S0, do, out.saved), dS)
    assert mailed == {"gdn_forward", "gdn_backward"}
    got = {"o": out.o, "S": out.leaving[0], "S0": back.entering[0]}
    check(function, [*x.values()], None, got | {n: getattr(back.inputs, n) for n in x}, S0[0], do, dS[0])


@pytest.mark.parametrize("name", ["delta", "kda"])
def test_no_states_at_the_ends(name):
    """What leaves the first rank goes first, and nothing enters it; backward the last one's."""
    x, cuts = of_five_spans(name, 3)
    do, none = torch.randn_like(x["v"]), torch.zeros(1, 1, 4, 128, 128)
    function, kernels, rule = RULES[name]
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, cuts[-1]), none, do, none)
    leaves = [t.double().requires_grad_() for t in x.values()]
    o = function(*leaves).o
    true = {"o": o, **dict(zip(x, torch.autograd.grad(o, leaves, do.double())))}
    found = {n: ((got[n].double() - y).norm() / y.norm()).item() for n, y in true.items()}
    assert all(e <= LIMIT for e in found.values()), found


@pytest.mark.parametrize("name", ["delta", "kda", "gla"])
def test_without_gradients_launches_carry_states(monkeypatch, name):
    """GLA's do not, nor is any dense map made of its decays."""
    x, cuts = of_five_spans(name, 3)
    x, cuts = {n: t[:, 40:-20].contiguous() for n, t in x.items()}, [0, 310, 630, 900]
    S0 = torch.randn(1, 1, 4, 128, 128)
    function, kernels, rule = RULES[name]
    mailed = launches_that_carry(monkeypatch)
    monkeypatch.setattr(border, "launch_dense", lambda *args, **named: pytest.fail("a link was launched"))
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, cuts[-1]), S0, None, None)
    want = function(*(t.double() for t in x.values()), initial_state=S0[0].double(), output_final_state=True)
    for found, true in ((got["o"], want.o), (got["S"][0], want.final_state)):
        assert (found.double() - true).norm() <= LIMIT * true.norm()
    assert mailed == {"delta": {"gdn_forward"}, "kda": {"kda_forward"}, "gla": set()}[name]


def of_three_spans(monkeypatch) -> tuple[dict[str, Tensor], list[int]]:
    """KDA's tokens of four heads and three shards, with spans of 160, the first of two chunks less where no gradients
    follow. It begins from zero where it forgets what comes: all do, none does where a shard begins, the second of each
    does not, and but for a shard's first chunk all do; and the cuts."""
    monkeypatch.setattr(kda_launches, "SPAN", 160)
    T, H = 3 * 352, 4
    q, k, v, beta = draw(T, H, 1)
    place, fall = torch.arange(T) % 352, torch.full((T, H), 3.0)
    fall[place < 64, 1] = 0.02
    fall[(place >= 128) & (place < 256), 2] = 0.02
    fall[place < 16, 3] = 0.01
    g = -fall[None, :, :, None] * (0.9 + 0.1 * torch.rand(1, T, H, 128))
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}, [352 * i for i in range(4)]


@pytest.mark.parametrize(("at_a_time", "helping"), [(2, 3), (64, 1), (64, 3)])
def test_first_chunks_of_kda_again(monkeypatch, at_a_time, helping):
    """By programs beside, of which there may be one, and which may be kept out until others are done."""
    monkeypatch.setattr(Emulated, "BESIDE", at_a_time)
    monkeypatch.setattr(kda_launches, "BESIDE", helping)
    x, cuts = of_three_spans(monkeypatch)
    (S0, dS), do = torch.randn(2, 1, 1, 4, 128, 128), torch.randn_like(x["v"])
    function, kernels, rule = RULES["kda"]
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, cuts[-1]), S0, do, dS)
    check(function, [*x.values()], None, {n: got[n] for n in ("o", "S", "S0", *x)}, S0[0], do, dS[0])
    o = function(*(t.double() for t in x.values()), initial_state=S0[0].double()).o
    chunks = [t.unflatten(1, (-1, 16)).transpose(2, 3) for t in (got["o"].double(), o)]
    assert ((chunks[0] - chunks[1]).flatten(3).norm(dim=-1) <= 4 * LIMIT * chunks[1].flatten(3).norm(dim=-1)).all()


def test_a_link_carries_states_where_no_multiprocessor_is_left(monkeypatch):
    x, cuts = of_three_spans(monkeypatch)
    monkeypatch.setattr(gpu, "multiprocessors", lambda device: 4)
    S0, (function, kernels, rule) = torch.randn(1, 1, 4, 128, 128), RULES["kda"]
    mailed = launches_that_carry(monkeypatch)
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, cuts[-1]), S0, None, None)
    want = function(*(t.double() for t in x.values()), initial_state=S0[0].double(), output_final_state=True)
    for found, true in ((got["o"], want.o), (got["S"][0], want.final_state)):
        assert (found.double() - true).norm() <= LIMIT * true.norm()
    assert not mailed


def test_one_program_sees_to_many_heads(monkeypatch):
    """Of more than eight, whose last chunk forgets alone, or the last two do, or hardly anything; one that is gone over
    again goes token by token."""
    monkeypatch.setattr(Emulated, "BESIDE", 64)
    monkeypatch.setattr(kda_launches, "BESIDE", 1)
    monkeypatch.setattr(kda_launches, "SPAN", 160)
    T, H = 3 * 288, 9
    q, k, v, beta = draw(T, H, 1)
    fall = torch.tensor([3.0, 1.5, 1.5, 1.5, 1.5, 1.5, 3.0, 0.02, 1.5])
    g = -fall[:, None] * (0.9 + 0.1 * torch.rand(1, T, H, 128))
    g[:, 288:304, 0] = -6  # factors do not fit
    x, cuts = {"q": q, "k": k, "v": v, "g": g, "beta": beta}, [288 * i for i in range(4)]
    S0, (function, kernels, rule) = torch.randn(1, 1, H, 128, 128), RULES["kda"]
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, T), S0, None, None)
    want = function(*(t.double() for t in x.values()), initial_state=S0[0].double(), output_final_state=True)
    for found, true in ((got["o"], want.o), (got["S"][0], want.final_state)):
        error = (found.double() - true).flatten(-2).norm(dim=-1) / true.flatten(-2).norm(dim=-1)
        assert error.max() <= 4 * LIMIT, error


def test_a_backward_in_groups_of_heads_takes_what_one_launch_found(monkeypatch):
    """It goes by a link, since the gradients of a group would be sent behind those of another."""
    x, cuts = of_three_spans(monkeypatch)
    (S0, dS), do = torch.randn(2, 1, 1, 4, 128, 128), torch.randn_like(x["v"])
    function, kernels, rule = RULES["kda"]
    monkeypatch.setattr(kda_launches, "group", lambda chunks, heads: 2)
    mailed = launches_that_carry(monkeypatch)
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, cuts[-1]), S0, do, dS)
    check(function, [*x.values()], None, {n: got[n] for n in ("o", "S", "S0", *x)}, S0[0], do, dS[0])
    assert mailed == {"kda_forward"}


def test_only_chunks_that_do_not_forget_it_wait_for_what_comes(monkeypatch):
    """Where all of a head's spans forget; else the first begins with what comes."""
    x, cuts = of_three_spans(monkeypatch)
    x = {n: t[:, : cuts[1]].contiguous() for n, t in x.items()}
    ranks, chain = line_of_ranks.groups(2, x["q"].device), Chain.line(2)
    ranks[1].mailboxes.patience = 10**7
    _, kernels, rule = RULES["kda"]
    call = ScannedSpans.of(kernels, rule, Inputs(**x), None, 1.0, OutputUse(final=False))
    o = call.output(None, border=MailboxBorder(ranks[1], chain, [(0, 0)], 1)).o
    assert ranks[1].mailboxes.late() == [0]
    late = o.isnan().any(-1)[0].sum(0)
    assert late.tolist() == [16, 128, 128, 32]


@pytest.mark.parametrize("name", ["delta", "kda"])
def test_what_waits_for_nothing_goes_first(name):
    """The first of two ranks sends nothing: of the second's heads only the one that forgets nothing sends NaN."""
    x, _ = of_five_spans(name, 1)
    ranks, chain = line_of_ranks.groups(3, x["q"].device), Chain.line(3)
    ranks[1].mailboxes.patience = 0
    _, kernels, rule = RULES[name]
    call = ScannedSpans.of(kernels, rule, Inputs(**x), None, 1.0, OutputUse(final=False))
    call.output(None, border=MailboxBorder(ranks[1], chain, [(0, 0)], 1))
    assert ranks[1].mailboxes.late() == [0]
    sent = lanes_of(ranks[1].mailboxes, 2, 1, ranks[1].mailboxes.lanes[1])[:16].view(torch.float32).reshape(4, -1)
    assert sent.isnan().any(1).tolist() == [True, False, False, False]


def lanes_of(boxes, receiver: int, sender: int, lanes) -> torch.Tensor:
    """The rooms of these lanes, a row each."""
    words, P = boxes._memory.keep[receiver][lanes.skip :], boxes.members.size
    flags = P * lanes.count * boxes.constants["FLAG"]
    return words[flags : flags + P * lanes.count * lanes.room].view(P, lanes.count, lanes.room)[sender]


def test_a_state_that_does_not_come_in_time():
    """Who waits for it is told, and what it enters is NaN; who cannot send another is told, too."""
    q, k, v, beta = draw(128, 2, 2)
    x, chain = Inputs(q, k, v, 4 * F.logsigmoid(torch.randn(1, 128, 2, 128)), beta), Chain.line(2)
    ranks = line_of_ranks.groups(2, q.device)
    outs = []
    for group in ranks:
        group.mailboxes.patience = 10**7
        border = MailboxBorder(group, chain, [(0, 0)], 1)
        call = ScannedSpans.of(across.KDA, Rule("delta", "diagonal"), x, None, 1.0, OutputUse(final=False))
        if group is ranks[0]:
            outs += [call.output(None, border=border).o for _ in range(2)]
            assert group.mailboxes.late() == [1], "the second of two, where nobody has taken the first"
        else:
            outs += [call.output(None, border=border).o for _ in range(2)]
            assert group.mailboxes.late() == [0]
    assert all(o.isfinite().all() for o in outs[:3])
    assert outs[3][:, :64].isnan().all()
    assert outs[3][:, 64:].isfinite().all(), "a span that forgets"
