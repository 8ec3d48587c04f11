"""The kernels in CUDA C++ for Hopper, run on a CPU (`tests.support.hopper`), against the fp64 token loop.

Spans are of 64 tokens, so that they start early, wait for each other, and end within others. The same kernels run on a
GPU in tests/gpu/test_bounded_kda.py and test_fused_delta.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.interpreter import interpreted

interpreted()

from ring_la import reference  # noqa: E402
from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels.protocol import Inputs, OutputUse  # noqa: E402
from ring_la.kernels.runtime.cuda_kernel import CudaKernel  # noqa: E402
from ring_la.kernels.runtime.zeros import ZEROS  # noqa: E402
from ring_la.kernels.wy import across, dplr_launches, gdn_launches, gla_launches, kda_launches  # noqa: E402
from ring_la.kernels.wy.scanned_spans import ScannedSpans  # noqa: E402
from ring_la.scan import Chain, MailboxBorder, border  # noqa: E402
from tests.support import line_of_ranks  # noqa: E402
from tests.support.hopper import Emulated, KernelError  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them itself")

LIMIT = 6e-3
"""Relative error of bf16, as on the GPU; the kernels that take chunks of 64 are not off by more than half of it."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """The kernels run here, their threads in an order that is drawn; spans are short, and combine in long rows."""
    both = (
        (module, name)
        for module in (gdn_launches, gla_launches, dplr_launches)
        for name in ("forward_kernel", "backward_kernel")
    )
    for module, name in (*both, (kda_launches, "kernel")):
        made = getattr(module, name)
        made = functools.cache(lambda *how, made=made, **more: Emulated(made(*how, **more), seed=1))
        monkeypatch.setattr(module, name, made)
    for module in (gdn_launches, kda_launches):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 10**6)
        monkeypatch.setattr(module, "zeros", Emulated.zeros)
    monkeypatch.setattr(across, "clear", Emulated.clear)
    for module in (gdn_launches, kda_launches):
        monkeypatch.setattr(module, "side_by_side", lambda programs, device: programs <= Emulated.BESIDE)
    monkeypatch.setattr(gdn_launches, "span", lambda *sizes: 64)
    monkeypatch.setattr(gdn_launches, "across", lambda *sizes: (64, 64))
    monkeypatch.setattr(gdn_launches, "TOGETHER", 3)
    monkeypatch.setattr(gdn_launches, "GROUPED", 6)
    monkeypatch.setattr(gdn_launches, "picks", lambda programs, device: True)
    monkeypatch.setattr(kda_launches, "TOKENS", 0)


def draw(T: int, H: int, HK: int) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(1, T, HK, 128), dim=-1).bfloat16() for _ in range(2))
    return [q, k, torch.randn(1, T, H, 128).bfloat16(), torch.randn(1, T, H).sigmoid()]


HALVES = 2.2e-3
"""The same of kernels whose products are all of fp16: outputs' own rounding to bf16 is 1.66e-3 of it."""


def check(
    function, x: list[Tensor], cu, got: dict[str, Tensor], S0: Tensor, do: Tensor, dS: Tensor, limit: float = LIMIT
) -> dict[str, float]:
    """Outputs, states and all gradients; their errors."""
    leaves = [t.double().requires_grad_() for t in (*x, S0)]
    want = function(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, cu_seqlens=cu)
    grads = torch.autograd.grad((want.o, want.final_state), leaves, (do.double(), dS.double()))
    names = [n for n in got if n not in ("o", "S", "S0")] + ["S0"]
    wanted = {"o": want.o, "S": want.final_state, **dict(zip(names, grads, strict=True))}
    found = {n: ((got[n].reshape(y.shape).double() - y).norm() / y.norm()).item() for n, y in wanted.items()}
    assert all(e <= limit for e in found.values()), found
    return found


class FarCall(gdn_launches.GDNCall):
    """Its chunks' numbers begin where what they leave lies behind 2^31 bytes."""

    FROM = 2**16

    @classmethod
    def of(cls, *args, **named):
        call = super().of(*args, **named)
        if call.runs is not None:
            call.runs.table[:, 3] += cls.FROM
        return dataclasses.replace(call, chunks=call.chunks + cls.FROM)


@pytest.mark.parametrize(
    ("T", "H", "HK", "cu", "fall"),
    [(150, 2, 1, (0, 0, 30, 131, 150), 1.0), (720, 1, 1, None, 0.02), (140, 1, 1, None, None)],
    ids=["packed and forgetting", "waiting", "no gates"],
)
def test_delta_rules(monkeypatch, T, H, HK, cu, fall):
    q, k, v, beta = draw(T, H, HK)
    g = None if fall is None else fall * F.logsigmoid(torch.randn(1, T, H))
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    N = 1 if cu is None else len(cu) - 1
    S0, dS, do = torch.randn(N, H, 128, 128), torch.randn(N, H, 128, 128), torch.randn_like(v)
    inputs = Inputs(q, k, v, g, beta)
    monkeypatch.setattr(gdn_launches, "UNEVEN", 8 if T == 140 else 0)
    monkeypatch.setattr(gdn_launches, "picks", lambda programs, device: T != 140)
    if cu is not None:
        monkeypatch.setattr(gdn_launches, "GDNCall", FarCall)
    o, S, kept = gdn_launches.forward(inputs, offsets, 128**-0.5, S0[None], True, keep=True)
    for alone, beside in zip(gdn_launches.forward(inputs, offsets, 128**-0.5, S0[None], True, keep=False), (o, S)):
        assert (alone.float() - beside.float()).norm() <= LIMIT * beside.float().norm()  # beta lies elsewhere then
    grads, dS0 = gdn_launches.gradients(inputs, offsets, 128**-0.5, S0[None], do, dS[None], kept)
    got = {"o": o, "S": S, "S0": dS0, **{n: x for n, x in grads._asdict().items() if x is not None}}
    x = [q, k, v, beta] if g is None else [q, k, v, g, beta]
    check(reference.delta_rule if g is None else reference.gated_delta_rule, x, offsets, got, S0, do, dS)
    if H > 1:  # made again, a head at a time
        monkeypatch.setattr(gdn_launches, "group", lambda chunks, heads: 1)
        again, _ = gdn_launches.gradients(inputs, offsets, 128**-0.5, S0[None], do, dS[None], None)
        assert all(torch.equal(a, b) for a, b in zip(grads[:5], again[:5], strict=True))


@pytest.mark.parametrize(("name", "slow"), [("delta", 0.02), ("kda", 0.02), ("kda", 3.0)])
def test_states_from_other_shards(monkeypatch, name, slow):
    """Of uneven lengths, in a line: each takes what the one before it sends, and backward. One head forgets, or both.
    The first shard ends a document, and begins the other one, which ends in the last, before a third."""
    cuts, cu, H = (0, 90, 210, 300, 390), (0, 30, 340, 390), 2
    function, kernels, rule = RULES[name]
    q, k, v, beta = draw(cuts[-1], H, 1)
    g = F.logsigmoid(torch.randn(1, cuts[-1], H, 128)) * torch.tensor([2.0, slow])[:, None]
    x = {"q": q, "k": k, "v": v, "g": g if name == "kda" else g[..., 0], "beta": beta}
    (S0, dS), do = torch.randn(2, 1, len(cu) - 1, H, 128, 128), torch.randn_like(v)
    mailed = launches_that_carry(monkeypatch)
    got = line_of_ranks.results(kernels, rule, x, cuts, cu, S0, do, dS)
    got = {n: got[n] for n in ("o", "S", "S0", *x)}
    check(function, [*x.values()], torch.tensor(cu, dtype=torch.int32), got, S0[0], do, dS[0])
    assert mailed == CARRY[name], "those in the middle, of one document"


CARRY = {"delta": {"gdn_forward", "gdn_backward"}, "kda": {"kda_forward", "kda_forward states", "kda_backward"}}
"""Launches that carry states themselves, of a rule that trains."""


class Maps(NamedTuple):
    """Where a launch of KDA's that finds maps of gradients has them among its arguments."""

    states: int = 12
    arrived: int = 16


MAPS = Maps()


def launches_that_carry(monkeypatch) -> set[str]:
    """The kernels launched from now on that do, by name. What KDA's maps are comes as late as it may."""
    found = set()
    start = Emulated.__call__

    def spied(self, *arguments):
        kernel = self._kernel
        if "MAILED=1" in kernel.defines:
            states = kernel.name == "kda_forward" and "KEEP=1" in kernel.defines
            found.add(kernel.name + " states" * states)
        start(self, *arguments)
        if "MAPS=1" in kernel.defines and kernel.name.startswith("kda") and arguments[MAPS.arrived] is not None:
            for x in {arguments[i] for i in MAPS} - {None}:  # the next launch is early
                Emulated.late(x)

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


@pytest.mark.parametrize("slow", [3.0, 0.02], ids=["all forget", "one waits"])
@pytest.mark.parametrize("name", ["delta", "kda"])
def test_batch_rows_from_other_shards(monkeypatch, name, slow):
    """One head of the second row may not forget. No link is launched where launches carry states."""
    cuts, H = (0, 100, 196, 293), 2  # no span is shorter than the chunks that tell
    q, k = (F.normalize(torch.randn(2, cuts[-1], 1, 128), dim=-1).bfloat16() for _ in range(2))
    fall = torch.tensor([[3.0, 3.0], [3.0, slow]])[:, None, :, None]
    g = (fall * F.logsigmoid(torch.randn(2, cuts[-1], H, 128))).clamp(min=-5)
    x = {"q": q, "k": k, "v": torch.randn(2, cuts[-1], H, 128).bfloat16(), "g": g if name == "kda" else g[..., 0]}
    x["beta"] = torch.randn(2, cuts[-1], H).sigmoid()
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
    return {"q": q, "k": k, "v": v, "g": g if name == "kda" else g[..., 0], "beta": beta}, [
        320 * i for i in range(shards + 1)
    ]


@pytest.mark.parametrize(
    ("name", "parts", "beside"), [("delta", 2, 2), ("delta", 2, 64), ("delta", 1, 2), ("kda", 1, 2), ("kda", 1, 64)]
)
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


@pytest.mark.parametrize("name", ["delta", "kda"])
def test_without_gradients_launches_carry_states(monkeypatch, name):
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
    assert mailed == {"delta": {"gdn_forward"}, "kda": {"kda_forward"}}[name]


def of_three_spans(monkeypatch) -> tuple[dict[str, Tensor], list[int]]:
    """KDA's tokens of three heads and shards, with spans of 128 tokens, of which a shard's first begins from zero where
    it forgets what comes: all do, none does where a shard begins, and the second of each does not; and the cuts."""
    monkeypatch.setattr(kda_launches, "SPAN", 128)
    T, H = 3 * 320, 3
    q, k, v, beta = draw(T, H, 1)
    place, fall = torch.arange(T) % 320, torch.full((T, H), 3.0)
    fall[place < 64, 1] = 0.02
    fall[(place >= 128) & (place < 256), 2] = 0.02
    g = -fall[None, :, :, None] * (0.9 + 0.1 * torch.rand(1, T, H, 128))
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}, [320 * i for i in range(4)]


@pytest.mark.parametrize(("at_a_time", "helping"), [(2, 3), (64, 0), (64, 3)])
def test_first_chunks_of_kda_again(monkeypatch, at_a_time, helping):
    """States are sent and taken by programs of their own, or by those of first spans: where there are none, or those are
    kept out."""
    monkeypatch.setattr(Emulated, "BESIDE", at_a_time)
    monkeypatch.setattr(kda_launches, "BESIDE", helping)
    x, cuts = of_three_spans(monkeypatch)
    (S0, dS), do = torch.randn(2, 1, 1, 3, 128, 128), torch.randn_like(x["v"])
    function, kernels, rule = RULES["kda"]
    got = line_of_ranks.results(kernels, rule, x, cuts, (0, cuts[-1]), S0, do, dS)
    check(function, [*x.values()], None, {n: got[n] for n in ("o", "S", "S0", *x)}, S0[0], do, dS[0])


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
    assert late.tolist() == [16, 128, 128]


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


@pytest.mark.parametrize(
    ("T", "H", "cu", "fall", "dtype"),
    [(150, 2, (0, 0, 30, 131, 150), 1.0, torch.float32), (330, 1, None, 0.02, torch.bfloat16),
     (140, 2, None, 20.0, torch.bfloat16)],
    ids=["packed and forgetting", "waiting", "factors that do not fit"],
)  # fmt: skip
def test_gla(monkeypatch, T, H, cu, fall, dtype):
    q, k, v, _ = draw(T, H, H if cu is None else 1)
    g = (fall * F.logsigmoid(torch.randn(1, T, H, 128))).to(dtype)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    N = 1 if cu is None else len(cu) - 1
    S0, dS, do = torch.randn(N, H, 128, 128), torch.randn(N, H, 128, 128), torch.randn_like(v)
    if cu is not None:
        monkeypatch.setattr(gla_launches, "GDNCall", FarCall)
    inputs, scale = Inputs(q, k, v, g), 128**-0.5
    o, S, kept = gla_launches.forward(inputs, offsets, scale, S0[None], True, keep=True)
    grads, dS0 = gla_launches.gradients(inputs, offsets, scale, S0[None], do, dS[None], kept)
    got = {"o": o, "S": S, **{n: x for n, x in grads._asdict().items() if x is not None}, "S0": dS0}
    check(reference.gla, [q, k, v, g], offsets, got, S0, do, dS)
    if H > 1:  # made again, a head at a time
        monkeypatch.setattr(gla_launches, "group", lambda chunks, heads: 1)
        again, _ = gla_launches.gradients(inputs, offsets, scale, S0[None], do, dS[None], None)
        assert all(torch.equal(a, b) for a, b in zip(grads[:4], again[:4], strict=True))


@pytest.mark.parametrize(
    ("T", "cu", "sizes", "silent"),
    [(150, (0, 0, 30, 131, 150), (1.0, 1.0, 1.0), False), (200, None, (1.0, 1.0, 1.0), False),
     (200, None, (20.0, 1e6, 1e-7), True)],
    ids=["packed", "waiting", "of far sizes, and chunks that say nothing"],
)  # fmt: skip
def test_dplr(monkeypatch, T, cu, sizes, silent):
    H = 2 if cu else 1
    q, k, v, _ = draw(T, H, 1)
    q, v = q * sizes[0], v * sizes[1]
    a = -F.normalize(torch.randn(1, T, H, 128), dim=-1)
    b, g = (
        (-a * torch.randn(1, T, H, 128).sigmoid()).bfloat16(),
        (-0.6 * torch.randn(1, T, H, 128).sigmoid()).bfloat16(),
    )
    a, offsets = a.bfloat16(), None if cu is None else torch.tensor(cu, dtype=torch.int32)
    N = 1 if cu is None else len(cu) - 1
    S0, dS, do = torch.randn(N, H, 128, 128), torch.randn(N, H, 128, 128), torch.randn_like(v) * sizes[2]
    S0, dS = S0 * sizes[1], dS * sizes[2]
    if silent:
        k[:, 64:96], v[:, 64:128], a[:, 96:128], do[:, 32:64] = 0, 0, 0, 0
    inputs, scale = Inputs(q, k, v, g, None, a, b), 128**-0.5
    if cu is not None:
        monkeypatch.setattr(dplr_launches, "GDNCall", FarCall)
    o, S, kept = dplr_launches.forward(inputs, offsets, scale, S0[None], True, keep=True)
    grads, dS0 = dplr_launches.gradients(inputs, offsets, scale, S0[None], do, dS[None], kept)
    got = {"o": o, "S": S, **{n: getattr(grads, n) for n in ("q", "k", "v", "a", "b", "g")}, "S0": dS0}
    x, limit = [q, k, v, a, b, g], HALVES * H  # heads of q are added in bf16
    check(reference.dplr_delta_rule, x, offsets, got, S0, do, dS, limit)
    if H > 1:  # made again, a head at a time
        monkeypatch.setattr(dplr_launches, "group", lambda chunks, heads: 1)
        again, _ = dplr_launches.gradients(inputs, offsets, scale, S0[None], do, dS[None], None)
        assert all(x is y or torch.equal(x, y) for x, y in zip(grads, again, strict=True))


@pytest.mark.parametrize("fall", [0.6, 0.01], ids=["forgets", "waits"])
def test_dplr_begins_early(monkeypatch, fall):
    """Spans of six chunks look at four before (backward: behind) them, and hear nothing from where those forget."""
    q, k, v, _ = draw(600, 1, 1)
    a = -F.normalize(torch.randn(1, 600, 1, 128), dim=-1)
    b, g = -a * torch.randn(1, 600, 1, 128).sigmoid(), -fall * torch.randn(1, 600, 1, 128).sigmoid()
    inputs = Inputs(q, k, v, g.bfloat16(), None, a.bfloat16(), b.bfloat16())
    monkeypatch.setattr(dplr_launches, "cut", lambda *sizes: (192, 192))
    S0, dS, do = torch.randn(1, 1, 128, 128), torch.randn(1, 1, 128, 128), torch.randn_like(v)
    o, S, kept = dplr_launches.forward(inputs, None, 128**-0.5, S0[None], True, keep=True)
    grads, dS0 = dplr_launches.gradients(inputs, None, 128**-0.5, S0[None], do, dS[None], kept)
    got = {"o": o, "S": S, **{n: getattr(grads, n) for n in ("q", "k", "v", "a", "b", "g")}, "S0": dS0}
    x = [q, k, v, inputs.a, inputs.b, inputs.g]
    check(reference.dplr_delta_rule, x, None, got, S0, do, dS, HALVES)
    v[:, :32], do[:, -32:] = torch.nan, torch.nan
    o, _, _ = dplr_launches.forward(inputs, None, 128**-0.5, S0[None], True)
    grads, _ = dplr_launches.gradients(inputs, None, 128**-0.5, S0[None], do, dS[None], kept)
    heard = o[:, 192:].isnan().any(), grads.v[:, :384].isnan().any()
    assert all(x == (fall < 0.1) for x in heard)


@pytest.mark.parametrize("own", [False, True], ids=["tickets, two launches", "own numbers, one launch"])
@pytest.mark.parametrize("waits", [False, True])
def test_kda(monkeypatch, waits, own):
    monkeypatch.setattr(kda_launches, "side_by_side", lambda programs, device: own)
    monkeypatch.setattr(kda_launches, "TOKENS", 10**6 if own else 0)
    q, k, v, beta = draw(300, 1, 1)
    g = -0.002 * torch.rand(1, 300, 1, 128) if waits else -5 * torch.sigmoid(torch.randn(1, 300, 1, 128))
    S0, dS, do = torch.randn(1, 1, 128, 128), torch.randn(1, 1, 128, 128), torch.randn_like(v)
    inputs = Inputs(q, k, v, g, beta)
    o, S = kda_launches.forward(inputs, None, 128**-0.5, S0[None], True)
    grads, dS0 = kda_launches.gradients(inputs, None, 128**-0.5, S0[None], do, dS[None])
    got = {"o": o, "S": S, "S0": dS0, **{n: x for n, x in grads._asdict().items() if x is not None}}
    found = check(reference.kda, [q, k, v, g, beta], None, got, S0, do, dS)
    # where gates forget, what a token reads of its own write is most of it, and no factor's rounding is in that
    assert waits or max(found[n] for n in ("o", "q", "beta")) < 2.4e-3, found


def test_what_kda_forgets_is_what_its_bound_says():
    """Spans whose last chunk forgets, whose two last do (by the product of their bounds, or not: two channels are slow
    in a chunk each), and that do not forget; keys hand the state from channel to channel."""
    T, H = 64, 5
    q, k, v, beta = draw(T, H, H)
    k[..., :2] = 0  # what these channels hold stays there
    g = torch.full((1, T, H, 128), -4.0)
    g[:, :, 1] = -1.1
    g[:, 32:48, 2, 0] = g[:, 48:, 2, 1] = 0
    g[:, 32:, 3, 0] = 0
    g[:, :, 4] = -0.002
    maps = across.KDA.maps(kda_launches.KDACall.of(Inputs(q, k, v, g, beta), None, 1.0, H), False, None)

    def forgets(tokens: int, h: int) -> bool:
        u = torch.ones(128, dtype=torch.float64)
        for t in range(T - tokens, T):
            u = u * g[0, t, h].double().exp()
            size = k[0, t, h].double().abs()
            u = u + beta[0, t, h].double() * size * (size @ u)
        return u.max().item() < 2.0**-30

    by = [forgets(16, h) + forgets(32, h) for h in range(H)]
    assert by == [2, 1, 1, 0, 0]
    assert maps.zero.flatten().tolist() == [min(n, 1) for n in by]


FAULTY = """
#include "hopper.cuh"
struct Args { int* out; int which; };
extern "C" __global__ void faulty(const __grid_constant__ Args a) {
  if (a.which == 0) lds32(1 << 20);
  if (a.which == 1 && threadIdx.x < 5) __syncwarp();
  if (a.which == 2) bar_wait(1024, 0);
  if (a.which == 3) uniform(threadIdx.x);
}
"""


def test_a_faulty_kernel_is_told(tmp_path):
    file = tmp_path / "faulty.cu"
    file.write_text(FAULTY)
    kernel = Emulated(CudaKernel(file, "faulty", "Qi", 32, 1024))
    for which, said in enumerate(("shared memory", "nothing goes on", "no barrier", "differ")):
        with pytest.raises(KernelError, match=said):
            kernel(1, torch.zeros(1, dtype=torch.int32), which)
    kernel(1, torch.zeros(1, dtype=torch.int32), 4)


def test_zeros():
    x = torch.ones(2000, dtype=torch.int32)
    Emulated(ZEROS)(2, x, 1999)
    assert x[:-1].any().item() is False
    assert x[-1] == 1


def test_the_smallest_call_that_trains_by_one_launch_is_a_knob(monkeypatch):
    """It is read at each call: tests on GPUs and benchmarks set it."""
    from ring_la.algebra import Rule
    from ring_la.kernels.protocol import OutputUse
    from ring_la.kernels.wy import one_launch

    x = torch.empty(1, 64, 2, 128, device="meta")
    rule, call = Rule("delta", "none"), Inputs(x, x, x, beta=x[..., 0])
    assert one_launch.choice(rule, call, OutputUse(saved=False)) is one_launch.DELTA
    for least, found in ((0, one_launch.DELTA), (129, None), (128, one_launch.DELTA)):
        monkeypatch.setattr(one_launch, "LEAST", least)
        assert one_launch.choice(rule, call, OutputUse(saved=True, alone=True)) is found
