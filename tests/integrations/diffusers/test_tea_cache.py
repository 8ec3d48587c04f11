"""TeaCache on one process: which steps are computed, by the rule of the paper, and what the others give.

On split tokens, beside other step caches: test_pipelines.py.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

import ring_la
from ring_la.integrations.diffusers.tea_cache import COEFFICIENTS, disable_tea_cache, enable_tea_cache

from .models import make

POLYNOMIAL = (3.0, 1.0, 0.01)


def steps_of(name: str, threshold: float, steps: int = 6) -> tuple[list[bool], list[bool], list[float], torch.Tensor]:
    """Which of two runs' steps were computed, by what the last block did and by the rule, the second's changes, and
    how far steps left out are from what the blocks added before."""
    model, inputs = make(name)
    inputs = {n: x.detach() for n, x in inputs.items()}
    first = (model.blocks if name == "wan" else model.transformer_blocks)[0]
    last = (model.blocks if name == "wan" else model.single_transformer_blocks)[-1]
    told, ran = [], []

    def tell(block, args, keywords):
        given = dict(zip(("hidden_states", "encoder_hidden_states", "temb"), args)) | keywords
        told.append(given["temb"] if name == "wan" else first.norm1(given["hidden_states"], emb=given["temb"])[0])

    first.register_forward_pre_hook(tell, with_kwargs=True)
    part = last.attn1 if name == "wan" else last.attn
    part.to_q.register_forward_hook(lambda *x: ran.append(1))
    enable_tea_cache(model, steps, threshold, POLYNOMIAL)
    computed, expected, changes, total = [], [], [], 0.0
    for n in range(2 * steps):
        ran.clear()
        now = inputs | dict(timestep=inputs["timestep"] * (1 - 0.1 * (n % steps)))
        with torch.no_grad(), model.cache_context("cond"):
            out = model(**now).sample
        assert out.isfinite().all()
        computed.append(bool(ran))
        at = n % steps
        if at:
            d = float((told[-1] - told[-2]).abs().mean() / told[-2].abs().mean())
            changes.append(d)
            total += POLYNOMIAL[0] * d * d + POLYNOMIAL[1] * d + POLYNOMIAL[2]
        expected.append(at in (0, steps - 1) or total >= threshold)
        total = 0.0 if expected[-1] else total
    disable_tea_cache(model)
    ran.clear()
    with torch.no_grad():
        model(**inputs)
    assert ran  # as before
    return computed, expected, changes, out


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_steps_are_computed_by_the_rule(name):
    _, _, changes, _ = steps_of(name, 0.0)
    one = sum(c * changes[0] ** p for p, c in enumerate(reversed(POLYNOMIAL)))
    computed, expected, _, _ = steps_of(name, 1.5 * one)
    assert computed == expected
    assert 2 < sum(computed) < len(computed)
    always, _, _, _ = steps_of(name, 0.0)
    assert all(always)
    rarely, _, _, _ = steps_of(name, 1e9)
    assert rarely == [True, False, False, False, False, True] * 2


def test_a_step_left_out_adds_what_was_added_before():
    model, inputs = make("flux")
    inputs = {n: x.detach() for n, x in inputs.items()}
    enable_tea_cache(model, 9, 1e9)
    with torch.no_grad(), model.cache_context("cond"):
        want = model(**inputs).sample
        assert torch.equal(model(**inputs).sample, want)  # of the same input the same
        moved = model(**inputs | dict(hidden_states=inputs["hidden_states"] * 1.1)).sample
    assert 0 < float((moved - want).norm() / want.norm()) < 0.5
    with torch.no_grad(), model.cache_context("uncond"):  # guidance's other call has a run of its own
        model._reset_stateful_cache()


def test_wrong_arguments_are_named():
    model, _ = make("flux")
    for match, call in {
        "model: expected one of FluxTransformer2DModel": lambda: enable_tea_cache(make("sana")[0], 5),
        "steps: expected an int ≥ 1, got 0": lambda: enable_tea_cache(model, 0),
        "threshold: expected a number ≥ 0": lambda: enable_tea_cache(model, 5, -1.0),
        "coefficients: expected those of this checkpoint": lambda: enable_tea_cache(make("wan")[0], 5),
        "model: expected one with TeaCache": lambda: disable_tea_cache(model),
    }.items():
        with pytest.raises(ring_la.errors.ArgumentError, match=match):
            call()
    enable_tea_cache(model, 5)
    assert model._cache_config.coefficients == COEFFICIENTS["FluxTransformer2DModel"]
    with pytest.raises(ring_la.errors.ArgumentError, match="model: expected one without a step cache"):
        enable_tea_cache(model, 5)
