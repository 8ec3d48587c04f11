"""A sequence read in parts: split by one layout or another, whole, or token by token; states are handed on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ring_la
from ring_la import reference
from ring_la.models import HybridConfig, HybridLM
from ring_la.recurrences import RECURRENCES

from . import local, recurrences
from .case import Case
from .problem import Here, Numbers, Problem, Tensors, state_dtype
from .strides import lain

SHARED = {r.name: r.shared for r in RECURRENCES} | {"short_conv": ("weight", "bias"), "token_shift": ()}


def parts(case: Case) -> list[tuple[int, int, str]]:
    """First and last token of each part, and how it is read: a layout's kind, "whole" or in "steps"."""
    borders = [0, *case.how["cuts"], case.T]
    out: list[tuple[int, int, str]] = []
    for a, b, way in zip(borders, borders[1:], case.how["parts"]):
        out += [(t, t + 1, "steps") for t in range(a, b)] if way == "steps" else [(a, b, way)]
    return out


def recurrent(case: Case) -> Problem:
    """Without gradients: those into a state that is handed on are summed over ranks."""
    op, how = case.how["of"], case.how
    if op in ("short_conv", "token_shift"):
        tensors, flags = getattr(local, op)(case).inputs, {}
    else:
        tensors, flags = recurrences.arguments(case, op)
    shared = SHARED[op]

    def truth(x: Tensors) -> Tensors:
        out = getattr(reference, op)(**x, **flags, output_final_state=True)
        return {"o": out.o, "final": _flat(out.final_state)}

    def ours(x: Tensors, here: Here) -> Tensors:
        whole = {n: t if n in shared else here.layout.gather(t) for n, t in x.items()}
        outputs, state = [], None
        for a, b, way in parts(case):
            own = {n: t if n in shared else t[:, a:b] for n, t in whole.items()}
            layout = None if way in ("whole", "steps") else here.cp.layout(b - a, way)
            if layout is not None:
                own = {n: t if n in shared else layout.shard(t) for n, t in own.items()}
            own = {n: lain(case, n, t) for n, t in own.items()}
            over = {"in_place": True} if how.get("in_place") and way == "steps" and state is not None else {}
            out = getattr(ring_la, op)(
                **own, **flags, initial_state=state, output_final_state=True, layout=layout, **over
            )
            outputs.append(out.o if layout is None else layout.gather(out.o))
            state = out.final_state
        return {"o": torch.cat(outputs, 1), "final": _flat(state)}

    wide = {} if op in ("short_conv", "token_shift") else {"final": state_dtype(case)}
    return Problem(
        truth, ours, {"o": None, "final": None}, {n: x for n, x in tensors.items() if n not in shared},
        {n: x for n, x in tensors.items() if n in shared}, gradients=False, results=wide,
        dtypes={n: state_dtype(case) for n in shared if op not in ("short_conv", "token_shift")},
    )  # fmt: skip


def _flat(state: Any) -> Tensor:
    parts = state if isinstance(state, tuple) else (state,)
    return torch.cat([p.flatten() for p in parts])


def model(case: Case) -> Problem:
    """A model's logits after each part are those of one pass over the whole sequence."""
    from ring_la.inference.generate import prefill, step

    numbers = Numbers(case)
    ids = numbers.below(19, case.B, case.T)
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        lm = HybridLM(HybridConfig(19, 16, case.how["layers"], 2)).double().requires_grad_(False)
    ends = [b - 1 for _, b, _ in parts(case)]

    def truth(x: Tensors) -> Tensors:
        return {"logits": lm(ids)[0][:, ends]}

    def ours(x: Tensors, here: Here) -> Tensors:
        logits, states = [], None
        for a, b, way in parts(case):
            own = ids[:, a:b]
            if way == "steps" and states is not None:
                read = step(lm, own[:, 0], states)
            else:
                layout = None if way in ("whole", "steps") else here.cp.layout(b - a, way)
                own = own if layout is None else layout.shard(own)
                read = prefill(lm, own, states=states, layout=layout)
            logits.append(read.logits)
            states = read.states
        return {"logits": torch.stack(logits, 1)}

    return Problem(truth, ours, {"logits": None}, gradients=False, bound=1e-8)
