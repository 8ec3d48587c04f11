"""`ring_la.capture` on the CPU, where the step runs as it is: its buckets, its kinds, and its errors.

What a graph does is tested on GPUs (tests/gpu/test_capture_step.py).
"""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la import Buckets, ContextParallel, capture
from tests.support.pool import group

BUCKETS = Buckets((8, 16), {"ids": 0, "targets": -100})


def seen(ids, targets=None, scale=1):
    return ids.shape, None if targets is None else targets[0].tolist(), scale


def test_steps_run_as_they_are():
    step = capture(seen)
    assert step(torch.zeros(1, 5), scale=3) == ((1, 5), None, 3)
    step(torch.ones(1, 5), scale=3)
    step(torch.ones(1, 6), scale=3)
    step.wait()
    assert [kind.calls for kind in step.kinds.values()] == [2, 1]
    assert step.graphs == 0


def test_a_tensor_given_twice_is_a_kind_of_its_own():
    step, x = capture(seen), torch.ones(1, 5)
    step(x, x)
    step(x, x.clone())
    step(x.clone(), x)
    assert [kind.calls for kind in step.kinds.values()] == [1, 2]


def test_lengths_are_padded_to_buckets():
    step = capture(seen, buckets=BUCKETS)
    for T, length in ((5, 8), (8, 8), (9, 16)):
        shape, targets, _ = step(torch.ones(1, T), targets=torch.ones(1, T, dtype=torch.int64))
        assert shape == (1, length)
        assert targets == [1] * T + [-100] * (length - T)
    assert len(step.kinds) == 2


def test_wrong_arguments_are_named():
    ids, targets = torch.ones(1, 17), torch.ones(1, 17)
    step = capture(seen, buckets=BUCKETS)
    for match, call in {
        "ids: expected at most 16 tokens": lambda: step(ids, targets),
        "pad: expected arguments of one length": lambda: step(ids[:, :3], targets[:, :4]),
        "targets: expected a tensor": lambda: step(ids[:, :3]),
        "step: expected arguments that are tensors or can be hashed, got set": lambda: capture(seen)(ids, scale={1}),
        "step: expected a function": lambda: capture(3),
        "cp: expected a ContextParallel": lambda: capture(seen, group),
        "warmup: expected an int": lambda: capture(seen, warmup=0),
        "timeout: expected a positive timedelta or number": lambda: capture(seen, timeout=-1.0),
        "timeout: .* got 'soon'": lambda: capture(seen, timeout="soon"),
        "buckets: expected ring_la.Buckets": lambda: capture(seen, buckets=(8, 16)),
        "lengths: expected ints > 0 that increase": lambda: Buckets((16, 8), {"ids": 0}),
        "lengths: expected ints > 0 .* got 8": lambda: Buckets(8, {"ids": 0}),
        "pad: expected names of arguments": lambda: Buckets((8, 16), {}),
        "pad: .* the number": lambda: Buckets((8, 16), {"ids": "0"}),
        "pad: expected an integer for ids": lambda: capture(seen, buckets=Buckets((8,), {"ids": 0.5}))(ids.long()),
        "dim: expected an int": lambda: Buckets((8, 16), {"ids": 0}, dim="1"),
        "ids: expected a tensor with dimension 2": lambda: capture(seen, buckets=Buckets((8,), {"ids": 0}, 2))(ids),
    }.items():
        with pytest.raises(ring_la.ArgumentError, match=match):
            call()


def check_ranks(rank: int) -> str:
    """A step that exchanges, of tokens padded to a bucket; then one whose arguments differ."""
    cp = ContextParallel(group(), scan="ring")
    layouts = {n: cp.layout(n, "contiguous") for n in BUCKETS.lengths}

    def whole(ids, targets):
        layout = layouts[ids.shape[1]]
        return layout.gather(layout.shard(ids)).sum() + (targets != -100).sum()

    step = capture(whole, cp, buckets=BUCKETS)
    for T in (5, 11):
        assert float(step(torch.ones(1, T), torch.ones(1, T))) == 2 * T
    step.wait()
    with pytest.raises(ring_la.DisagreementError) as error:
        step(torch.ones(1, 5, dtype=(torch.float64, torch.bfloat16)[rank]), torch.ones(1, 5))
    return str(error.value)


def test_ranks_run_one_step(ranks):
    for said in ranks.run(2, check_ranks):
        assert "disagree on the captured step" in said
        assert "torch.bfloat16" in said
