"""A step over states of fixed addresses: nothing in it asks the device, and what it costs in operators."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_la.inference import KeySize
from ring_la.integrations.transformers.sequences import Sequences
from ring_la.keystore.static import StaticKeys, StaticRows
from ring_la.nn import KVCache, LayerState
from tests.support.transformers_models import CASES, VOCABULARY

VIEWS = set("view transpose unsqueeze slice select expand t split permute as_strided _unsafe_view detach alias".split())
VIEWS |= set("squeeze unbind split_with_sizes _reshape_alias empty unfold new_empty empty_like".split())
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "bincount", "_unique2", "masked_select"}
ROWS, COLUMNS = 2, 8


class Counted(TorchDispatchMode):
    """Operators that are more than a view."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.found[name] += name not in VIEWS
        return function(*args, **(kwargs or {}))


def fixed(states: list[Any], rows: StaticRows) -> list[Any]:
    """States at fixed addresses, with what those given have."""
    out: list[Any] = []
    for state in states:
        if isinstance(state, KVCache):
            out.append(StaticKeys(rows, KeySize(*state.k.shape[2:], state.v.shape[3]), state.k.dtype))
            for row in range(ROWS):
                out[-1].fill(row, state.k[row], state.v[row])
        else:
            out.append(LayerState(*(None if x is None else x.clone() for x in state)))
    return out


def step(sequences: Sequences, rows: StaticRows, states: list[Any], tokens: Tensor) -> Tensor:
    rows.begin(ROWS, COLUMNS)
    logits = sequences.step(tokens, states, True).logits
    rows.advance()
    return logits


@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_linear"])
def test_a_step_asks_the_device_for_nothing(name):
    """On "meta", where no value can be read, a step runs as on a GPU; its tokens are right first, on the CPU."""
    model = CASES[name].make().eval()
    sequences = Sequences(model)
    ids = torch.arange(2 * 3).view(2, 3) * 5 % VOCABULARY
    read, tokens = sequences.read(ids, None), torch.tensor([3, 9])
    rows = StaticRows(ROWS, COLUMNS, None, torch.device("cpu"))
    for row in range(ROWS):
        rows.seat(row, torch.arange(3), 3)
    got = step(sequences, rows, fixed(read.states, rows), tokens)
    want = sequences.step(tokens, read.states, False).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    model.to("meta").bfloat16()
    there = StaticRows(ROWS, COLUMNS, None, torch.device("meta"))
    states = [type(s)(*(None if x is None else x.to("meta") for x in s)) for s in read.states]
    states, plain = fixed(states, there), fixed(states, there)
    with Counted() as ours:
        step(sequences, there, states, tokens.to("meta"))
    for module in model.modules():
        module.__dict__.pop("forward", None)  # the library's own norms and recurrences
    with Counted() as theirs:
        step(sequences, there, plain, tokens.to("meta"))
    assert not READS & set(ours.found)
    assert ours.found["grouped_rows"] > 0
    assert ours.found.total() < 0.7 * theirs.found.total()
