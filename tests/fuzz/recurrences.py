"""Every recurrence of the registry, linear attention without a direction, and the scan of one's own maps."""

from __future__ import annotations

import torch
from torch import Tensor

import ring_la
from ring_la.recurrences import RECURRENCES
from ring_la.recurrences.composed import parts_of
from ring_la.testing.examples import make_arguments, make_states
from ring_la.testing.recurrences import one_or_all

from .case import Case
from .problem import Here, Numbers, Options, Problem, Tensors, state_dtype

BY_NAME = {r.name: r for r in RECURRENCES}
STATIC = ("retention", "lightning_attention", "simple_gla")
"""Those that have decays of their own where none are given."""


def recurrence(case: Case) -> Problem:
    definition, how = BY_NAME[case.op], case.how
    tensors, flags = arguments(case, case.op)
    if case.op in STATIC and not how.get("own"):
        del tensors["g"]
    states = make_states(definition, case.documents, case.H, case.K, case.V, seed=case.seed)
    options: Options = {"scale": how.get("scale"), "use_qk_l2norm": how.get("l2norm", False)}
    options["output_final_state"] = how.get("final", False)
    initial = {f"initial_state{i}": s for i, s in enumerate(states)} if how.get("initial") else {}

    def truth(x: Tensors) -> Tensors:
        own, start = _apart(x)
        assert definition.reference is not None
        return _named(definition.reference(**own, **flags, **options, initial_state=start, cu_seqlens=case.cu))

    def ours(x: Tensors, here: Here) -> Tensors:
        own, start = _apart(x)
        more = {"mode": how["mode"]} if "mode" in how else {}
        return _named(
            getattr(ring_la, case.op)(**own, **flags, **options, **more, initial_state=start, layout=here.layout)
        )

    shared, gates, wide = definition.shared, _gates(case, tensors), state_dtype(case)
    final = torch.float64 if torch.float64 in gates.values() else wide
    return Problem(
        truth, ours, {"o": 1} | ({f"final_state{i}": None for i in range(len(states))} if how.get("final") else {}),
        tokens={n: x for n, x in tensors.items() if n not in shared},
        shared={n: x for n, x in tensors.items() if n in shared}, replicated=initial,
        dtypes=dict.fromkeys(shared, wide) | dict.fromkeys(initial, case.dtype_of("states", wide)) | gates,
        results=dict.fromkeys((f"final_state{i}" for i in range(len(states))), final),
    )  # fmt: skip


def _gates(case: Case, tensors: Tensors) -> dict[str, torch.dtype]:
    """Decays and rates of a dtype of their own."""
    of = BY_NAME[case.op].arguments
    named = [n for n in tensors if of[n].kind in ("log decay", "rate") and not of[n].shared]
    return dict.fromkeys(named, case.dtype_of("gates", case.torch_dtype)) if "gates" in case.how else {}


def arguments(case: Case, op: str) -> tuple[Tensors, Options]:
    """A recurrence's tensors in fp64, and its flags; "hard" gates forget everything or nothing here and there."""
    definition, numbers = BY_NAME[op], Numbers(case)
    given = make_arguments(definition, case.B, case.T, case.Hk, case.H, case.K, case.V, seed=case.seed)
    flags = {n: x for n, x in given.items() if not isinstance(x, Tensor)}
    tensors = {n: x.detach() for n, x in given.items() if n not in flags}
    if case.how.get("hard"):
        for n, argument in definition.arguments.items():
            if argument.kind == "log decay" and not argument.shared:
                chosen = numbers.normal(*tensors[n].shape)
                tensors[n] = torch.where(chosen > 1.2, -40.0, torch.where(chosen < -1.2, 0.0, tensors[n]))
    return tensors, flags


def _apart(x: Tensors) -> tuple[Tensors, object]:
    """The initial state apart from the other arguments."""
    start = tuple(t for n, t in x.items() if n.startswith("initial_state"))
    return {n: t for n, t in x.items() if not n.startswith("initial_state")}, one_or_all(start) if start else None


def _named(out: ring_la.LinearAttentionOutput) -> Tensors:
    final = {} if out.final_state is None else {f"final_state{i}": s for i, s in enumerate(parts_of(out.final_state))}
    return {"o": out.o} | final


def bidirectional(case: Case) -> Problem:
    numbers, how = Numbers(case), case.how
    shape = (case.B, case.T)
    tokens = {n: numbers.normal(*shape, case.Hk, case.K) for n in ("q", "k")}
    tokens["v"] = numbers.normal(*shape, case.H, case.V)
    if how.get("normalize"):  # as after a feature map
        tokens |= {n: tokens[n].abs() + 0.1 for n in ("q", "k")}
    width = case.V + bool(how.get("normalize"))
    options: Options = {n: how.get(n) for n in ("scale",)} | {"normalize": how.get("normalize", False), "causal": False}
    options["output_final_state"] = how.get("final", False)
    initial = {}
    if how.get("initial"):
        initial["initial_state0"] = numbers.normal(case.documents, case.H, case.K, width).abs()
    wide = state_dtype(case)

    def truth(x: Tensors) -> Tensors:
        own, start = _apart(x)
        return _named(ring_la.reference.linear_attention(**own, **options, initial_state=start, cu_seqlens=case.cu))

    def ours(x: Tensors, here: Here) -> Tensors:
        own, start = _apart(x)
        return _named(ring_la.linear_attention(**own, **options, initial_state=start, layout=here.layout))

    return Problem(
        truth, ours, {"o": 1} | ({"final_state0": None} if how.get("final") else {}), tokens, replicated=initial,
        dtypes=dict.fromkeys(initial, case.dtype_of("states", wide)), results={"final_state0": wide},
    )  # fmt: skip


def scan(case: Case) -> Problem:
    numbers, how = Numbers(case), case.how
    shape = (case.B, case.T, case.H)
    tokens = {"b": numbers.normal(*shape, case.K, case.V)}
    if how.get("A") == "scalar":
        tokens["A"] = numbers.uniform(*shape)
    elif how.get("A") == "diagonal":
        tokens["A"] = numbers.uniform(*shape, case.K)
    elif how.get("A") == "dense":
        tokens["A"] = numbers.normal(*shape, case.K, case.K) * 0.4
    options = {"reverse": how.get("reverse", False), "exclusive": how.get("exclusive", False)}

    def truth(x: Tensors) -> Tensors:
        A, b = x.get("A"), x["b"]
        outputs: list[Tensor] = [b] * case.T
        cu = case.cu or (0, case.T)
        for first, last in zip(cu, cu[1:]):
            S = torch.zeros_like(b[:, 0])
            for t in reversed(range(first, last)) if options["reverse"] else range(first, last):
                before, S = S, _apply(None if A is None else A[:, t], S) + b[:, t]
                outputs[t] = before if options["exclusive"] else S
        return {"states": torch.stack(outputs, 1)}

    def ours(x: Tensors, here: Here) -> Tensors:
        return {"states": here.cp.scan(x.get("A"), x["b"], here.layout, **options)}

    return Problem(truth, ours, {"states": 1}, tokens, results={"states": state_dtype(case)})


def _apply(A: Tensor | None, S: Tensor) -> Tensor:
    """A map ``[B, H]``, ``[B, H, K]`` or ``[B, H, K, K]`` of a state ``[B, H, K, V]``."""
    if A is None:
        return S
    if A.dim() == 4:
        return (A[..., None] * S[:, :, None]).sum(-2)
    return (A[..., None, None] if A.dim() == 2 else A[..., None]) * S
