"""Delta rules whose states meet those of other ranks, by the kernels in CUDA C++ on Hopper, against one device in fp64:
`pytest -m gpu tests/gpu/test_across.py [--gpu-ranks 3]`.

Spans are of 64 tokens, so that they begin early, and end within others; segments have 297. What the ranks exchange goes
by mailboxes where GPUs reach each other's memory, or by messages. One GPU has ranks in a line, one after the other.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

import ring_la
from ring_la import reference
from ring_la.algebra import Rule
from ring_la.kernels import gpu
from ring_la.kernels.wy import across, gdn_launches, kda_launches
from tests.support import border_calls, line_of_ranks, pool

pytestmark = pytest.mark.gpu


def forget() -> None:
    """What calls are replayed by: one of the same shapes would be, by the kernels it had then."""
    from ring_la.kernels.replay import root
    from ring_la.kernels.runtime.replayed_function import record_of

    root.cache_clear()
    record_of.cache_clear()


def check(rank: int, name: str, kind: str) -> tuple[dict[str, float], dict[str, float], int]:
    """Errors by these kernels and by chunks of 64 tokens, and how many calls those took."""
    from ring_la.kernels.wy import one_launch
    from ring_la.kernels.wy.scanned_spans import ScannedSpans

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    cp, shape = ring_la.ContextParallel(pool.group(), scan="ring"), dict(H=4, Hk=2, K=128, V=128)
    with ExitStack() as changes:
        bounded = functools.partial(ring_la.kda, lower_bound=-5.0)
        changes.enter_context(mock.patch.object(ring_la, "kda", bounded))
        forget()
        plain = border_calls.errors(cp, name, kind, 9, torch.bfloat16, **shape)
        forget()
        calls = changes.enter_context(mock.patch.object(ScannedSpans, "of", side_effect=ScannedSpans.of))
        changes.enter_context(mock.patch.object(one_launch, "ACROSS", one_launch.Least(0, 0, 0)))
        changes.enter_context(mock.patch.object(gdn_launches, "across", return_value=(64, 64)))
        changes.enter_context(mock.patch.object(gpu, "multiprocessors", return_value=10**6))
        return border_calls.errors(cp, name, kind, 9, torch.bfloat16, **shape), plain, calls.call_count


@pytest.mark.parametrize("name", ["gated_delta_rule", "delta_rule", "kda"])
@pytest.mark.parametrize("kind", [kind for kind in border_calls.LAYOUTS if kind != "folded"])
def test_against_one_device(name, kind, gpu_ranks, record_property):
    results = gpu_ranks.run(gpu_ranks.size, check, name, kind)
    worst = {n: max(found[n] for found, _, _ in results) for n in results[0][0]}
    chunks = {n: max(plain[n] for _, plain, _ in results) for n in worst}
    record_property("errors", worst)
    record_property("in chunks", chunks)
    assert all(e <= max(6e-3, 2 * chunks[n]) for n, e in worst.items()), (worst, chunks)
    assert all(calls > 0 for *_, calls in results), "they went by chunks"


@pytest.mark.parametrize("name", ["gated_delta_rule", "delta_rule", "kda"])
@pytest.mark.parametrize("spans", ["short spans", "spans as they are", "long spans"])
def test_a_line_of_ranks_on_one_gpu(name, spans, monkeypatch, record_property):
    """First, in the middle and last, of documents that start and end in them; heads that forget at once, within some
    hundred tokens, and hardly. Long spans are KDA's: first ones go over their first chunks again."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    if spans == "short spans":
        monkeypatch.setattr(gdn_launches, "across", lambda *sizes: (64, 64))
        monkeypatch.setattr(gpu, "multiprocessors", lambda device: 10**6)
    if spans == "long spans":
        if name != "kda":
            pytest.skip("of KDA alone")
        monkeypatch.setattr(kda_launches, "SPAN", 256)
    kernels, rule = across.DELTA, Rule("delta", "none" if name == "delta_rule" else "scalar")
    if name == "kda":
        kernels, rule = across.KDA, Rule("delta", "diagonal")
    cuts, cu, H, HK = (0, 700, 1500, 1590, 2400), (0, 250, 2100, 2400), 4, 2
    make = torch.Generator("cuda").manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, device="cuda", generator=make)  # noqa: E731
    T, fall = cuts[-1], torch.tensor([3.0, 0.2, 0.02, 0.0], device="cuda")
    q, k = (normalize(draw(1, T, HK, 128), dim=-1).bfloat16() for _ in range(2))
    x = {"q": q, "k": k, "v": draw(1, T, H, 128).bfloat16()}
    if name != "delta_rule":
        g = (logsigmoid(draw(1, T, H, 128)) * fall[:, None]).clamp(min=-5)
        x["g"] = g if name == "kda" else g[..., 0].contiguous()
    x["beta"] = draw(1, T, H).sigmoid()
    (S0, dS), do = draw(2, 1, len(cu) - 1, H, 128, 128), draw(1, T, H, 128).bfloat16()
    got = line_of_ranks.results(kernels, rule, x, cuts, cu, S0, do, dS)
    got["o without gradients"] = line_of_ranks.results(kernels, rule, x, cuts, cu, S0, None, None)["o"]
    leaves = [t.double().requires_grad_() for t in (*x.values(), S0[0])]
    offsets = torch.tensor(cu, dtype=torch.int32, device="cuda")
    want = getattr(reference, name)(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, cu_seqlens=offsets)
    grads = torch.autograd.grad((want.o, want.final_state), leaves, (do.double(), dS[0].double()))
    true = {"o": want.o, "o without gradients": want.o, "S": want.final_state, **dict(zip((*x, "S0"), grads))}
    errors = {n: ((got[n].reshape(y.shape).double() - y).norm() / y.norm()).item() for n, y in true.items()}
    record_property("errors", errors)
    assert all(e <= 6e-3 for e in errors.values()), errors
