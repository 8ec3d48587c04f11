"""Every Triton kernel on the GPU against the fp64 token loop: `pytest -m gpu tests/gpu/test_triton.py -n 12`.

The interpreter cannot show what the compiler gets wrong (Triton 3.4–3.7 on Hopper miscompiles a transposed product of
accumulators at 64 channels), so every gradient is proven here at K = 64, 128 and 256. Tensors of more than 2^31
elements need 130 GB free, so a process alone: `pytest -m gpu tests/gpu/test_triton.py -k beyond`, best after the
others, which have compiled.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ring_la.algebra import Rule
from ring_la.kernels.families import recurrence
from ring_la.kernels.protocol import Backward, Inputs
from ring_la.kernels.spans import plan, table
from tests.support.triton_cases import RULES, Case, error, errors

pytestmark = pytest.mark.gpu
PACKED = (0, 1, 1, 130, 257, 300)
LIMIT = {torch.bfloat16: 1.2e-2, torch.float16: 3e-3, torch.float32: 1e-4}


def cases(rules: list[str]) -> list[Case]:
    out = []
    for rule in rules:
        for K, V in ((64, 64), (128, 128), (256, 256), (128, 64), (64, 128), (32, 32), (16, 16), (80, 48)):
            out.append(Case(rule, 2, 300, 4, 2, K, V, torch.bfloat16))
        for K, V in ((64, 64), (128, 128), (256, 256)):
            out.append(Case(rule, 1, 300, 4, 4, K, V, torch.bfloat16, PACKED))
            out.append(Case(rule, 1, 200, 2, 2, K, V, torch.float32))
        out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.float16, states=False))
        out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.bfloat16, decay=30.0))
        out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.bfloat16, decay=1e-4))
        out.append(Case(rule, 1, 1, 2, 1, 64, 64, torch.bfloat16))
        out.append(Case(rule, 1, 2000, 2, 2, 128, 128, torch.bfloat16, states=False))
        if rule in ("additive_none", "additive_scalar"):
            out += by_descriptor(rule)
        if rule == "additive_scalar":
            out += constant(rule)
        if rule in ("additive_scalar", "delta_scalar"):
            out += forgetful(rule)
        if rule in ("additive_scalar", "delta_none", "delta_scalar"):
            out += portable(rule)
        if rule.endswith("_diagonal") or rule == "delta_none":
            out += narrow(rule)
    return out


def narrow(rule: str) -> list[Case]:
    """Few key channels beside many values, in chunks that need levels and in those that do not."""
    out = [Case(rule, 1, 63, 1, 1, 32, 64, d, decay=g) for d in (torch.float16, torch.bfloat16) for g in (2.0, 0.02)]
    more = [(32, 128), (16, 64), (16, 128)]
    return [*out, *(Case(rule, 2, 150, 2, 2, K, V, torch.bfloat16, decay=g) for K, V in more for g in (2.0, 0.02))]


def by_descriptor(rule: str) -> list[Case]:
    """What only large inputs do, on small ones."""
    half = dict(dtype=torch.bfloat16, bulk=True)
    out = [Case(rule, 1, 300, 4, 2, K, V, **half) for K, V in ((64, 64), (128, 128), (128, 64), (64, 128))]
    out += [Case(rule, 2, 320, 4, 4, D, D, states=False, gate=False, **half) for D in (64, 128)]
    out += [Case(rule, 1, 300, 4, 4, 128, 128, decay=d, **half) for d in (30.0, 1e-4)]
    return [*out, Case(rule, 1, 300, 4, 4, 128, 128, torch.float16, bulk=True)]


def forgetful(rule: str) -> list[Case]:
    """Spans of many chunks, of which only the last matter to what leaves them, or all."""
    more = [dict(decay=d, waves=w) for d in (2.0, 0.4, 0.03) for w in (16, 32)]
    out = [Case(rule, 1, 1200, 4, 2, 128, 128, torch.bfloat16, **m) for m in more]
    out.append(Case(rule, 1, 1200, 4, 2, 128, 128, torch.bfloat16, (0, 1, 1, 500, 1200), decay=2.0, waves=16))
    return [*out, Case(rule, 1, 1200, 2, 2, 64, 64, decay=2.0, waves=4)]


def portable(rule: str) -> list[Case]:
    """What devices and versions of Triton compute that have no kernel in Gluon."""
    more = dict(dtype=torch.bfloat16, gluon=False)
    out = [Case(rule, 2, 300, 4, 2, K, V, **more) for K, V in ((64, 64), (128, 128), (128, 64), (64, 128))]
    out.append(Case(rule, 1, 300, 4, 4, 128, 128, cu=PACKED, **more))
    return [*out, Case(rule, 1, 2000, 2, 2, 128, 128, states=False, decay=30.0, **more)]


def constant(rule: str) -> list[Case]:
    """A decay whose gradient nobody wants, by token and the same at every token."""
    out = []
    for static, bulk in ((False, False), (True, False), (True, True)):
        more = dict(gate=False, static=static, bulk=bulk)
        out += [Case(rule, 1, 300, 4, 2, K, V, torch.bfloat16, **more) for K, V in ((64, 64), (128, 128), (128, 64))]
        out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.bfloat16, decay=30.0, **more))
    out.append(Case(rule, 1, 300, 4, 4, 128, 128, torch.bfloat16, PACKED, gate=False, static=True))
    out.append(Case(rule, 2, 300, 4, 4, 80, 48, torch.bfloat16, gate=False, static=True))
    return [*out, Case(rule, 1, 200, 2, 2, 64, 64, gate=False, static=True)]


def title(case: Case) -> str:
    name = f"{case.rule}-B{case.B}T{case.T}H{case.H}/{case.Hk}-{case.K}x{case.V}-{str(case.dtype)[6:]}-g{case.decay}"
    flags = dict(packed=case.cu, stateless=not case.states, gateless=not case.gate, static=case.static, bulk=case.bulk)
    flags |= {"portable": not case.gluon, f"waves{case.waves}": case.waves}
    return "-".join([name, *(flag for flag, on in flags.items() if on)])


@pytest.mark.parametrize(("seed", "case"), [pytest.param(*c, id=title(c[1])) for c in enumerate(cases(list(RULES)))])
def test_against_the_token_loop(seed, case, monkeypatch, record_property):
    monkeypatch.setattr(table, "LEAST_CHUNKS", 1)
    if case.states:  # else keys stay weighed for the backward, as in small calls
        monkeypatch.setattr(table, "SAVED_WEIGHED", 0)
    if case.bulk:
        monkeypatch.setattr(table, "DESCRIBED", 0)
    if case.waves:
        monkeypatch.setattr(table, "WAVES", dict.fromkeys(table.WAVES, case.waves))
        monkeypatch.setattr(table, "SLOTS", dict.fromkeys(table.SLOTS, case.waves))
    if not case.gluon:
        monkeypatch.setattr(plan, "hopper", lambda device: False)
    torch.manual_seed(seed)
    found = errors(case, recurrence, "cuda")
    record_property("errors", found)
    assert all(e < LIMIT[case.dtype] for e in found.values()), found


@pytest.mark.parametrize("rule", RULES)
def test_the_last_head_of_many(rule, monkeypatch, record_property):
    """What more than 2^31 elements launch, on few: their tensors go by descriptor."""
    monkeypatch.setattr(table, "DESCRIBED", 0)
    last_head(rule, 512, record_property)


@pytest.mark.parametrize("rule", RULES)
def test_beyond_2_31_elements(rule, alone, record_property):
    torch.cuda.empty_cache()
    needed = 130e9
    if (free := torch.cuda.mem_get_info()[0]) < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free")
    last_head(rule, 530_000, record_property)


def last_head(rule: str, T: int, record_property, H: int = 32, D: int = 128) -> None:
    """The last head's last tokens, of every result, are those of the head alone."""
    torch.manual_seed(0)
    write, decay = rule.split("_")

    def unit() -> torch.Tensor:
        return torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16).mul_(D**-0.5)

    def gates(*shape: int) -> torch.Tensor:
        return torch.rand(1, T, H, *shape, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = unit(), unit(), unit(), unit()
    g = None if decay == "none" else gates(*(D,) * (decay == "diagonal")).mul_(-0.1)
    a = unit() if write in ("erase", "dplr") else None
    beta = gates() if write in ("delta", "erase") else None
    x = Inputs(q, k, v, g, beta, a, a.mul(-0.5) if write == "dplr" else None)

    def results(x: Inputs, do: torch.Tensor) -> list[torch.Tensor]:
        run = recurrence(Rule.parse(rule), x, None, 1.0)
        out = run.output(None)
        grads, _ = run.gradients(Backward(None, do), None)
        return [t[:, -300:, -1].clone() for t in (out.o, *grads) if t is not None] + [out.leaving[:, :, -1]]

    whole = results(x, do)
    last = Inputs(*(None if t is None else t[:, :, -1:].contiguous() for t in x))
    alone = results(last, do[:, :, -1:].contiguous())
    names = ["o", *(f"d{n}" for n, t in x._asdict().items() if t is not None), "S"]
    found = {n: error(a, b.double()) for n, a, b in zip(names, whole, alone, strict=True)}
    record_property("errors", found)
    assert all(e < 1.2e-2 for e in found.values()), found
