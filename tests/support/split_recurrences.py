"""Split calls of the recurrences beside the fp64 token loop of the whole sequence: outputs, states and gradients."""

from __future__ import annotations

import functools

import torch

import ring_la
from ring_la import reference
from tests.support.pool import group
from tests.support.recurrence_cases import DOCUMENTS, STATIC, error, make_inputs

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
H, K, V = 4, 6, 5


@functools.lru_cache(maxsize=64)
def truth(name: str, documents: str, dtype: torch.dtype):
    """Whole-sequence inputs in `dtype`, cotangents, and the reference's outputs and gradients in fp64."""
    T, cu = DOCUMENTS[documents]
    B = 2 if cu is None else 1
    inputs = make_inputs(name, B, T, H=H, K=K, V=V, dtype=dtype)
    rng = torch.Generator().manual_seed(1)
    N = B if cu is None else len(cu) - 1
    draw = functools.partial(torch.randn, generator=rng, dtype=torch.float64)
    state = draw(N, H, K, V).to(dtype).requires_grad_()
    do, dfinal = draw(B, T, H, V).to(dtype), draw(N, H, K, V)
    out = getattr(reference, name)(**inputs, initial_state=state, output_final_state=True, cu_seqlens=cu)
    leaves = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)} | {"initial_state": state}
    loss = (out.o * do).sum() + (out.final_state * dfinal).sum()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
    return inputs, state, do, dfinal, out, grads


@functools.lru_cache
def context(P: int, scan: str) -> ring_la.ContextParallel:
    """In a rank: one ContextParallel for each group and strategy."""
    return ring_la.ContextParallel(group(P), scan=scan)


def check_sharded(rank: int, P: int, name: str, documents: str, kind: str, scans: tuple[str, ...], dtype=torch.float64):
    """Run on this rank's tokens with every strategy of `scans`; returns the worst error of each tensor, by scan."""
    inputs, state, do, dfinal, want, grads = truth(name, documents, dtype)
    T, cu = DOCUMENTS[documents]
    static = STATIC.get(name, ())
    tensors = {n: x.detach() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    flags = {n: x for n, x in inputs.items() if n not in tensors}
    worst = {}
    for scan in scans:
        cp = context(P, scan)
        layout = cp.layout(T, kind, cu_seqlens=cu)
        local = {n: x if n in static else layout.shard(x) for n, x in tensors.items()} | {
            "initial_state": state.detach()
        }
        local = {n: x.to(cp.device, copy=True).requires_grad_() for n, x in local.items()}
        out = getattr(ring_la, name)(**local, **flags, output_final_state=True, layout=layout)
        # the loss is the sum over ranks: each takes a P-th of what flows into the replicated final state
        loss = (out.o * layout.shard(do).to(cp.device)).sum()
        loss = loss + (out.final_state * dfinal.to(out.final_state)).sum() / P
        got = dict(zip(local, torch.autograd.grad(loss, list(local.values()))))
        errors = {
            "o": error(out.o, layout.shard(want.o)) if layout.local_length else 0.0,
            "final_state": error(out.final_state, want.final_state),
        }
        for n, d in got.items():
            assert d.dtype == local[n].dtype
            if n in static:
                d = cp.comm.all_reduce(d).wait()
            expected = grads[n] if n in static or n == "initial_state" else layout.shard(grads[n])
            errors[f"d{n}"] = error(d, expected) if expected.numel() else 0.0
        worst[scan] = errors
    return worst


def assert_close(results: list, tolerance: float) -> None:
    bad = [
        f"rank {rank} {scan} {tensor}: {e:.1e}"
        for rank, by_scan in enumerate(results)
        for scan, errors in by_scan.items()
        for tensor, e in errors.items()
        if not e <= tolerance
    ]
    assert not bad, f"errors above {tolerance:g}: " + ", ".join(bad[:12])
