"""Inputs and the fp64 token loop the Triton kernels are held against (shared by the interpreter's tests and the
GPU's)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_la.algebra import Rule, act
from ring_la.kernels.protocol import Backward, Inputs, OutputUse

RULES = ("additive_none", "additive_scalar", "additive_diagonal", "delta_none", "delta_scalar", "delta_diagonal",
         "erase_scalar", "erase_diagonal", "dplr_diagonal")  # fmt: skip


@dataclass(frozen=True)
class Case:
    rule: str
    B: int = 1
    T: int = 100
    H: int = 2
    Hk: int = 1
    K: int = 16
    V: int = 16
    dtype: torch.dtype = torch.float32
    cu: tuple[int, ...] | None = None
    states: bool = True
    decay: float = 0.1  # scale of −g; 30 forgets within a token
    gate: bool = True  # the decay's gradient is wanted
    static: bool = False  # a scalar decay is the same at every token
    strong: bool = False  # what additive writes write is multiplied by β
    skips: bool = False  # and some of v passes by
    bulk: bool = False  # tensors go by descriptor, however small
    gluon: bool = True  # kernels in Gluon are used where there are any
    waves: int = 0  # programs wanted in a pass over segments; 0: as for large inputs, so segments of one chunk

    def inputs(self, device: str = "cpu") -> Inputs:
        """Random inputs; decays differ by head, token and channel."""
        write, decay = self.rule.split("_")

        def unit(*shape: int) -> Tensor:
            return torch.nn.functional.normalize(torch.randn(*shape, device=device), dim=-1)

        head = torch.linspace(0.1, 2, self.H, device=device)
        bt = (self.B, self.T)
        g = {
            "none": None,
            "scalar": -self.decay * torch.rand(*((1, 1) if self.static else bt), self.H, device=device) * head,
            "diagonal": -self.decay * torch.rand(*bt, self.H, self.K, device=device) * head[:, None],
        }[decay]
        g = g.expand(*bt, self.H) if self.static else g
        beta = torch.rand(*bt, self.H, device=device) if write in ("delta", "erase") or self.strong else None
        if beta is not None:
            beta[:, 3::7] = 0  # its gradient is not
        a = b = None
        if self.skips:
            a = torch.rand(self.H, device=device).expand(*bt, self.H)
        if write == "dplr":
            a = unit(*bt, self.H, self.K)
            b = -a * torch.rand(*bt, self.H, 1, device=device)
        if write == "erase":
            a = unit(*bt, self.H, self.K)
        q, k = unit(*bt, self.Hk, self.K), unit(*bt, self.Hk, self.K)
        v = torch.randn(*bt, self.H, self.V, device=device)
        raw = Inputs(q, k, v, g, beta, a, b)
        wide = ("g", "beta", "a") if self.strong else ("g",)
        return Inputs(
            *(None if x is None else x.to(torch.float32 if n in wide else self.dtype) for n, x in raw._asdict().items())
        )


def token_loop(rule: Rule, x: Inputs, S0: Tensor | None, scale: float, cu: tuple[int, ...] | None):
    """(o, the state leaving each piece), one token after another."""
    B, T, H, V = x.v.shape
    K, repeat = x.q.shape[-1], H // x.q.shape[2]
    q, k = (y.repeat_interleave(repeat, 2) for y in (x.q, x.k))
    cu = cu or (0, T)
    outs, ends = [], []
    for n in range(len(cu) - 1):
        S = x.v.new_zeros(B, H, K, V) if S0 is None else S0[:, n]
        for t in range(cu[n], cu[n + 1]):
            decayed = S
            if x.g is not None:
                g = x.g[:, t].exp()
                decayed = S * (g[..., None, None] if rule.decay == "scalar" else g[..., None])
            write = x.v[:, t]
            if rule.write == "additive" and x.beta is not None:
                write = write * x.beta[:, t, :, None]
            if rule.write in ("delta", "erase"):
                reads = k if rule.write == "delta" else x.a
                write = (write - (decayed * reads[:, t, :, :, None]).sum(-2)) * x.beta[:, t, :, None]
            if rule.write == "dplr":
                decayed = decayed + x.b[:, t, :, :, None] * (S * x.a[:, t, :, :, None]).sum(-2)[..., None, :]
            S = decayed + k[:, t, :, :, None] * write[..., None, :]
            o = (S * q[:, t, :, :, None]).sum(-2) * scale
            skips = rule.write == "additive" and x.a is not None
            outs.append(o + x.a[:, t, :, None] * x.v[:, t] if skips else o)
        ends.append(S)
    return torch.stack(outs, 1), torch.stack(ends, 1)


def error(x: Tensor, y: Tensor) -> float:
    """‖x − y‖ / ‖y‖; NaN where x is not finite."""
    return ((x.double() - y).norm() / (y.norm() + 1e-30)).item()


def errors(case: Case, backend, device: str = "cpu") -> dict[str, float]:
    """The relative error of everything a backend computes, by name, against fp64."""
    rule, x, scale = Rule.parse(case.rule), case.inputs(device), case.K**-0.5
    N = 1 if case.cu is None else len(case.cu) - 1
    shape = (case.B, N, case.H, case.K, case.V)
    S0 = torch.randn(shape, device=device) if case.states else None
    dS = torch.randn(shape, device=device) if case.states else None
    do = torch.randn_like(x.v)
    leaves = Inputs(*(None if y is None else y.double().requires_grad_() for y in x))
    start = None if S0 is None else S0.double().requires_grad_()
    o, end = token_loop(rule, leaves, start, scale, case.cu)
    loss = (o * do.double()).sum()
    if dS is not None:
        loss = loss + (end * dS.double()).sum()
    names = [n for n, y in leaves._asdict().items() if y is not None and (n != "g" or case.gate)]
    wanted = [getattr(leaves, n) for n in names] + ([start] if start is not None else [])
    true = dict(zip([f"d{n}" for n in names] + ["dS0"], torch.autograd.grad(loss, wanted)))
    cu = None if case.cu is None else torch.tensor(case.cu, device=device)
    local = backend(rule, x, cu, scale, OutputUse(saved=True))
    got = local.output(S0)
    out = {"o": error(got.o, o), "S": error(got.leaving, end)}
    less = () if case.states else without_states(got.saved)
    for saved in (got.saved, less):  # what callers pass on of what the output left: all, less (long calls), nothing
        grads, dS0 = backend(rule, x, cu, scale).gradients(Backward(S0, do, saved, case.gate), dS)
        found = {f"d{n}": error(getattr(grads, n), true[f"d{n}"]) for n in names}
        found |= {"dS0": error(dS0, true["dS0"])} if case.states else {}
        out |= {n: max(e, out.get(n, 0.0), key=lambda e: math.inf if math.isnan(e) else e) for n, e in found.items()}
    if case.states:
        out["adjoint"] = error(local.adjoint(Backward(S0, do), dS).entering, true["dS0"])
        summary = local.summary(None, True)
        out["summary"] = error(act(rule.transition, summary.transition, S0) + summary.leaving, end)
    return out


def without_states(saved: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What a long call's output leaves, which keeps no states before the chunks."""
    from ring_la.kernels.scalar_decay.recurrence import ScalarDecaySaved
    from ring_la.kernels.wy.saved import WYSaved

    if isinstance(saved, ScalarDecaySaved):
        return saved._replace(states=None)
    return WYSaved.of(saved)._replace(u=None, states=None).flat
