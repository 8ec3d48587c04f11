"""States written over the ones that entered are the states a call without that would return."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la.inference import decode, prefill, step
from ring_la.nn import KVCache
from tests.support.generation import make, tokens
from tests.support.recurrence_cases import RECURRENCES, make_inputs


def both_ways(call, state: Tensor) -> None:
    """`call(initial_state=…)` with and without overwriting the state."""
    with torch.no_grad():
        o, final = call(initial_state=state.clone(), output_final_state=True)
        kept = state.clone()
        out = call(initial_state=kept, in_place=True)
    assert out.final_state is kept
    torch.testing.assert_close(out.o, o, rtol=0, atol=0)
    torch.testing.assert_close(kept, final, rtol=0, atol=0)
    assert not torch.equal(kept, state)


@pytest.mark.parametrize("name", RECURRENCES)
def test_every_recurrence_writes_its_state_in_place(name):
    x = make_inputs(name, 2, 3)
    H, V = next(t for n, t in x.items() if n in ("v", "x")).shape[2:]
    state = torch.randn(2, H, 6, V, dtype=torch.float64)
    both_ways(lambda **keywords: getattr(ring_la, name)(**x, **keywords), state)


def test_packed_compiled_and_convolutions():
    x = {n: t.detach() for n, t in make_inputs("kda", 1, 9).items()}
    cu = torch.tensor([0, 4, 4, 9])

    def call(**keywords):
        return ring_la.kda(**x, cu_seqlens=cu, **keywords)

    state = torch.randn(3, 4, 6, 5, dtype=torch.float64)
    state[1] = 0
    both_ways(call, state)
    both_ways(lambda **keywords: call(**keywords, mode="chunk"), state)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    kept, want = state.clone(), call(initial_state=state, output_final_state=True)
    torch.testing.assert_close(compiled(initial_state=kept, in_place=True).o, want.o)
    torch.testing.assert_close(kept, want.final_state)
    y, weight = torch.randn(2, 5, 8), torch.randn(8, 4)
    both_ways(lambda **keywords: ring_la.short_conv(y, weight, **keywords), torch.randn(2, 8, 3))
    both_ways(lambda **keywords: ring_la.token_shift(y, **keywords), torch.randn(2, 8))


def test_generation_overwrites_its_own_states_only():
    model = make()
    prompt = prefill(model, tokens(2, 6))
    before = [[t.clone() for t in state if t is not None] for state in prompt.states]
    assert torch.equal(torch.stack(list(decode(model, prompt, 4))), torch.stack(list(decode(model, prompt, 4))))
    for old, state in zip(before, prompt.states, strict=True):
        assert all(map(torch.equal, old, [t for t in state if t is not None]))
    out = step(model, tokens(2, 1)[:, 0], prompt.states, in_place=True)
    same = [a.recurrent is b.recurrent for a, b in zip(out.states, prompt.states) if hasattr(a, "recurrent")]
    assert len(same) == sum(block.layer.state_type is not KVCache for block in model.blocks)
    assert all(same)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(initial_state=None), "initial_state"),
        (dict(initial_state=torch.zeros(1, 4, 6, 5)), "initial_state"),
        (dict(backend="reference"), "in_place"),
        (dict(q=torch.zeros(1, 8, 2, 6, dtype=torch.float64, requires_grad=True)), "in_place"),
    ],
)
def test_what_cannot_be_overwritten_is_refused(change, name):
    x = {n: t.detach() for n, t in make_inputs("delta_rule", 1, 8).items()}
    x["initial_state"] = torch.zeros(1, 4, 6, 5, dtype=torch.float64)
    with pytest.raises(ring_la.ArgumentError, match=f"^{name}: expected"):
        ring_la.delta_rule(**(x | change), in_place=True)
