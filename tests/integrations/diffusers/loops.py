"""Every covered model in a denoising loop of its own: split over 1 to 4 ranks in every way, it ends as on one process.

    python -m tests.integrations.diffusers.loops [--whole] [name ...]

A step asks the model and takes a part of its answer from the latents; between steps the step of time changes. Prints a
line for each model; exits with the number of wrong ones. With --whole models are compiled as a whole besides, in one
graph or not. No test collects it: all of them take minutes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ring_la
from ring_la.errors import RingLAError
from ring_la.integrations.diffusers import parallelize, restore
from ring_la.integrations.diffusers.compare import mapped, tensors_in
from tests.support.attention_cases import error
from tests.support.pool import Ranks, group

from .models import CASES, limits, make

STEPS = 3
WAYS: dict[int, tuple[str, ...]] = {
    1: ("ring",),
    2: ("ring", "ulysses", "keys first"),
    3: ("ring", "ulysses", "keys first"),
    4: ("ring", "ulysses", "usp", "keys first"),
}


def context(way: str, P: int) -> ring_la.ContextParallel:
    if way == "usp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        return ring_la.ContextParallel(mesh["ring", "ulysses"], scan="ring", attention="usp", timeout=60)
    attention = "auto" if way == "keys first" else way
    return ring_la.ContextParallel(group(P), scan="ring", attention=attention, timeout=60)  # type: ignore[arg-type]


def loop(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """What a model's answers come to."""
    given = mapped(inputs, Tensor.detach)
    total: list[Tensor] = []
    for n in range(STEPS):
        step = {name: x * (1 - 0.2 * n) if name == "timestep" else x for name, x in given.items()}
        step = {name: list(x) if isinstance(x, list) else x for name, x in step.items()}  # HunyuanDiT empties one
        out = [x for x in tensors_in(model(**step)) if x.is_floating_point()]
        total = [a + x for a, x in zip(total, out)] if total else out
        latents = step.get("hidden_states")
        if isinstance(latents, Tensor) and latents.shape == out[0].shape:
            given["hidden_states"] = latents - 0.1 * out[0] / out[0].abs().max()
    return total


def check(rank: int, P: int, name: str, ways: tuple[str, ...]) -> dict[str, str]:
    model, inputs = make(name)
    said = {}
    with torch.no_grad():
        want = loop(model, inputs)
        for way in ways:
            try:
                parallelize(model, context(way, P), keys_first=way == "keys first")
                wrong = max(error(got, one) for got, one in zip(loop(model, inputs), want))
                said[way] = "" if wrong < 3 * limits(name)[0] else f"{wrong:.1e}"
                restore(model)
            except RingLAError as refused:
                said[way] = f"refused: {refused}"
    return said


def _unsplit(model: Any, given: dict[str, Any]) -> str:
    """Whether the library's own model is refused by the compiler."""
    torch._dynamo.reset()
    try:
        torch.compile(model, fullgraph=True, backend="eager")(**given)
    except Exception:
        return ", as in the library's own"
    return ""


def check_whole(rank: int, name: str) -> str:
    """Why a model compiled as a whole is not one graph with the eager output."""
    torch._dynamo.reset()
    model, inputs = make(name)
    parallelize(model, context("ring", 2))
    with torch.no_grad():
        given = mapped(inputs, Tensor.detach)
        want = tensors_in(model(**{name: list(x) if isinstance(x, list) else x for name, x in given.items()}))
        try:
            given = {name: list(x) if isinstance(x, list) else x for name, x in given.items()}
            got = tensors_in(torch.compile(model, fullgraph=True, backend="eager")(**given))
        except Exception as broken:
            return f"{type(broken).__name__}{_unsplit(restore(model), given)}"
        wrong = max(error(a, b) for a, b in zip(got, want))
    return "" if wrong < limits(name)[0] else f"{wrong:.1e}"


def main() -> int:
    ranks, wrong, whole = Ranks(), 0, "--whole" in sys.argv
    ranks.start()
    for name in [a for a in sys.argv[1:] if a in CASES] or CASES:
        bad, ran, refused = [], 0, []
        for P, ways in WAYS.items():
            found = ranks.run(P, check, P, name, ways, timeout=400)
            for way in ways:
                words = {one[way] for one in found}
                ran += words == {""}
                refused += [f"{way}" for w in words if w.startswith("refused: keys_first")]
                bad += [f"{P} ranks, {way}: {w}" for w in words if w and not w.startswith("refused: keys_first")]
        if whole:
            said = set(ranks.run(2, check_whole, name, timeout=400))
            bad += [f"whole: {w}" for w in said if w and "library" not in w]
            refused += [f"as one graph: {w}" for w in said if "library" in w]
        note = f" (not {', '.join(sorted(set(refused)))})" if refused else ""
        print(f"{name}: {'WRONG ' + '; '.join(bad) if bad else f'equal, {ran} ways{note}'}", flush=True)
        wrong += bool(bad)
    ranks.stop()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
