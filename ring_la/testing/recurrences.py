"""A recurrence held to its reference: outputs, final states and every gradient, on one device and on a split sequence.

    check_recurrence(function)              one device: every mode, packed or not, handed over, normalised
    check_recurrence(function, group)       on every rank of a group, each with its tokens: every scan and layout

The truth is the definition's token loop in fp64 on the whole sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..context import ContextParallel
from ..errors import ArgumentError, describe_tensor
from ..layout import KINDS
from ..outputs import LinearAttentionOutput
from ..recurrences.composed import parts_of
from ..recurrences.definition import Definition
from ..scan import STRATEGIES
from .examples import DOCUMENTS, error, make_arguments, make_states

Function = Callable[..., LinearAttentionOutput]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


class Truth:
    """A case of a recurrence: its arguments and states in a dtype, what flows back, and the reference's results. It can
    be sent to other processes."""

    def __init__(self, definition: Definition, documents: str, dtype: torch.dtype = torch.float64) -> None:
        self.T, self.cu = DOCUMENTS[documents]
        B = 2 if self.cu is None else 1
        N = B if self.cu is None else len(self.cu) - 1
        self.shared = definition.shared
        self.arguments = make_arguments(definition, B, self.T, dtype=dtype)
        self.tensors = {n: x for n, x in self.arguments.items() if isinstance(x, Tensor)}
        self.flags = {n: x for n, x in self.arguments.items() if n not in self.tensors}
        self.state = tuple(s.to(dtype).requires_grad_() for s in make_states(definition, N))
        if definition.reference is None:
            raise ValueError(f"{definition.name} is defined without a reference")
        out = definition.reference(
            **self.arguments, initial_state=one_or_all(self.state), output_final_state=True, cu_seqlens=self.cu
        )
        o, final = out.o, parts_of(out.final_state)
        rng = torch.Generator().manual_seed(2)
        draw = functools.partial(torch.randn, generator=rng, dtype=torch.float64)
        self.do, self.dfinal = draw(*o.shape).to(dtype), [draw(*s.shape) for s in final]
        leaves = {**self.tensors, **{f"initial_state[{i}]": s for i, s in enumerate(self.state)}}
        loss = (o * self.do).sum() + sum((s * d).sum() for s, d in zip(final, self.dfinal))
        self.o, self.final = o.detach(), [s.detach() for s in final]
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        self.gradients = {n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(leaves.items(), found)}


def one_or_all(state: tuple[Tensor, ...]) -> Any:
    """A state as functions take it, the reverse of `parts_of`: a tensor, or a tuple where it has several parts."""
    return state[0] if len(state) == 1 else state


def errors(
    function: Function, truth: Truth, cp: ContextParallel | None = None, kind: str = "zigzag", **keywords: Any
) -> dict[str, float]:
    """The relative error of everything a call gives, by name: on one device, or of this rank's part under `cp`."""
    shared = truth.shared
    layout = None if cp is None else cp.layout(truth.T, kind, cu_seqlens=truth.cu)  # type: ignore[arg-type]
    shard = (lambda x: x) if layout is None else layout.shard
    local = {n: (x.detach() if n in shared else shard(x.detach())) for n, x in truth.tensors.items()}
    local |= {f"initial_state[{i}]": s.detach() for i, s in enumerate(truth.state)}
    device = torch.device("cpu") if cp is None else cp.device
    local = {n: x.to(device, copy=True).requires_grad_() for n, x in local.items()}
    state = one_or_all(tuple(x for n, x in local.items() if n.startswith("initial_state")))
    if layout is None:
        keywords["cu_seqlens"] = None if truth.cu is None else torch.tensor(truth.cu)
    else:
        keywords["layout"] = layout
    tokens = {n: x for n, x in local.items() if n in truth.tensors}
    o, final = function(**tokens, **truth.flags, initial_state=state, output_final_state=True, **keywords)
    # the loss is the sum over ranks: each takes a P-th of what flows into the replicated final state
    share = 1 if cp is None else cp.size
    loss = (o * shard(truth.do).to(o)).sum()
    loss = loss + sum((s * d.to(s)).sum() for s, d in zip(parts_of(final), truth.dfinal)) / share
    got = torch.autograd.grad(loss, list(local.values()), allow_unused=True)
    worst = {"o": error(o, shard(truth.o)) if o.numel() else 0.0}
    worst |= {f"final_state[{i}]": error(s, w) for i, (s, w) in enumerate(zip(parts_of(final), truth.final))}
    for (n, x), d in zip(local.items(), got):
        d = torch.zeros_like(x) if d is None else d
        whole = n in shared or n.startswith("initial_state")
        if n in shared and cp is not None:
            d = cp.comm.all_reduce(d).wait()
        want = truth.gradients[n] if whole else shard(truth.gradients[n])
        worst[f"d{n}"] = error(d, want) if want.numel() else 0.0
    return worst


def check_recurrence(
    function: Function,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    documents: Iterable[str] = ("uneven", "packed", "short packed"),
    kinds: Iterable[str] = ("contiguous", "zigzag"),
    scans: Iterable[str] = tuple(STRATEGIES),
    dtype: torch.dtype = torch.float64,
) -> None:
    """Hold a recurrence to its definition's reference.

    Args:
        function: made by `ring_la.define.recurrence`, with `arguments` and a reference.
        group: None: one device, this process alone. A process group: every rank calls, and holds its part of every
            split; give the group of all ranks' results.
        documents: cases, names in `examples.DOCUMENTS`. kinds: of layouts. scans: strategies that carry states.
        dtype: of the arguments. Errors of fp64 may reach 1e-9, those of fp32 2e-5, relative to each tensor's norm.

    Raises:
        AssertionError: an error is larger, by case and tensor. ValueError: the recurrence has no reference.
        ArgumentError: what is no recurrence, or no case.
    """
    if not isinstance(definition := getattr(function, "definition", None), Definition):
        raise ArgumentError("function", "one that ring_la.define.recurrence made", describe_tensor(function))
    documents, bad = _names("documents", documents, DOCUMENTS), []
    kinds, scans = _names("kinds", kinds, KINDS), _names("scans", scans, STRATEGIES)
    if dtype not in [*TOLERANCE]:
        raise ArgumentError("dtype", f"one of {', '.join(map(str, TOLERANCE))}", repr(dtype))
    for name in documents:
        truth = Truth(definition, name, dtype)
        for case, found in _cases(function, truth, group, kinds, scans):
            bad += [f"{name}, {case}: {n} {e:.1e}" for n, e in found.items() if not e <= TOLERANCE[dtype]]
    if group is None:
        bad += _handed_over(function, definition)
    assert not bad, f"{definition.name}, errors above {TOLERANCE[dtype]:g}: " + "; ".join(bad[:12])


def _names(argument: str, given: object, known: Iterable[str]) -> tuple[str, ...]:
    """The names, after refusing what are none of those known."""
    out = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
    if out is None or not all(name in [*known] for name in out):
        raise ArgumentError(argument, f"a list of names out of {', '.join(known)}", repr(given))
    return out


def _cases(
    function: Function,
    truth: Truth,
    group: torch.distributed.ProcessGroup | None,
    kinds: Iterable[str],
    scans: Iterable[Any],
) -> Iterator[tuple[str, dict[str, float]]]:
    if group is None:
        for mode in ("chunk", "recurrent"):
            yield mode, errors(function, truth, mode=mode)
        return
    for scan in scans:
        cp = ContextParallel(group, scan=scan)
        for kind in kinds:
            yield f"{kind}, {scan}", errors(function, truth, cp, kind)


def _handed_over(function: Function, definition: Definition) -> list[str]:
    """A sequence cut in two with the state passed on, another scale, and q and k of unit length."""
    assert definition.reference is not None, "Truth refuses this"
    x = make_arguments(definition, 2, 33)
    whole = function(**x, scale=0.3, use_qk_l2norm=True, output_final_state=True)
    want = definition.reference(**x, scale=0.3, use_qk_l2norm=True, output_final_state=True)
    along = {n for n, a in definition.arguments.items() if not a.shared}
    first, second = ({n: t[:, s] if n in along else t for n, t in x.items()} for s in (slice(0, 20), slice(20, None)))
    before = function(**first, scale=0.3, use_qk_l2norm=True, output_final_state=True)
    after = function(**second, scale=0.3, use_qk_l2norm=True, output_final_state=True, initial_state=before.final_state)
    pairs = [("o", torch.cat([before.o, after.o], 1), whole.o), ("o", whole.o, want.o)]
    for out in (after, whole):
        pairs += [("final_state", *p) for p in zip(parts_of(out.final_state), parts_of(want.final_state))]
    return [f"handed over: {n} {e:.1e}" for n, got, true in pairs if not (e := error(got, true)) <= 1e-9]
