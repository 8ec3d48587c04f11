"""The arms of ``ring-la bench scan``: one recurrence on this rank's tokens, under one exchange or another.

    local                      this rank's tokens alone: the bound
    alone                      a split call on a group of one, where nothing crosses a border: the local call
    ring, pipelined, …, auto   ring_la's strategies
    LASP pattern               ring, waited for as soon as it is posted (Sun et al. 2024, arXiv 2404.02882)
    LASP-2 pattern             all_gather, likewise (Sun et al. 2025, arXiv 2502.07563; also FLA's exchange)
    Ulysses pattern            heads for sequence by an all-to-all, the local kernel on whole sequences, and back
    FLA local, FLA CP          fla-core's kernels alone and under its context parallelism, as shipped
    FlashQLA local, FlashQLA CP     the same of Qwen's (gated delta rule)

Every arm but these runs the same kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

import ring_la
from ring_la.algebra import Affine, transition_shape
from ring_la.comm import Group, Pending
from ring_la.context import ContextParallel
from ring_la.recurrences.retention import retention_decay
from ring_la.scan import STRATEGIES, Chain, Cost, Exchange, Link, Scan

from ..ops import production
from ..peers.scan import FLA, fla, flash_qla

HALF_LIVES = (16, 65536)
"""Tokens: half-lives of trained gates, log-uniform over the heads."""

UNSPLIT = ("local", "alone", "FLA local", "FlashQLA local")
"""Arms that know nothing of other ranks: their result is not the whole sequence's."""

Gates = Literal["trained", "none", "production", "mixed"]
SLOW = 8
"""Of so many heads one whose gate forgets nothing, in "mixed"."""
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Op:
    """What a recurrence's tokens bring beyond q, k, v.

    Attributes:
        production: whose gates "production" are, of `benchmarks.ops.production`; empty: none.
    """

    gate: Literal["", "scalar", "diagonal"] = ""
    beta: bool = False
    production: Literal["", "qwen", "kimi"] = ""


OPS: dict[str, Op] = {
    "linear_attention": Op(),
    "retention": Op(),
    "simple_gla": Op("scalar"),
    "gla": Op("diagonal"),
    "delta_rule": Op(beta=True),
    "gated_delta_rule": Op("scalar", True, "qwen"),
    "kda": Op("diagonal", True, "kimi"),
}
"""Those of `ring_la.cli.transitions`."""


def tokens(
    name: str,
    gates: Gates,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    keys: int | None = None,
) -> list[Tensor]:
    """q, k, v ``[1, T, H, D]`` and what else the recurrence takes, for a shape (T, H, D), as leaves.

    q and k have unit length, and `keys` heads if that is given. Gates are fp32 per head, or of `dtype` per channel:
    −ln 2 / half-life times a random factor of mean 1 a token, and per channel a factor of ½ to 2; zero for
    gates="none"; for "production" those of the production rows of `bench ops`, in fp32, as β then is, and "mixed" the
    same of Kimi's rows with every eighth head from the rows of gates that forget nothing. β is sigmoid(x),
    x normal.
    """
    op, (T, H, D) = OPS[name], shape
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, device=device)

    q, k = (normalize(normal(1, T, keys or H, D), dim=-1).to(dtype) for _ in range(2))
    out = [q, k, normal(1, T, H, D).to(dtype)]
    if gates in ("production", "mixed"):
        g = production.GATES[op.production](normal, (1, T, H, D) if op.gate == "diagonal" else (1, T, H))
        if gates == "mixed":
            g[:, :, ::SLOW] = production.slow(normal, (1, T, -(-H // SLOW), D))
        return [x.requires_grad_() for x in (*out, g, torch.sigmoid(normal(1, T, H)))]
    if op.gate:
        share = torch.arange(H, device=device) / max(1, H - 1)
        rate = math.log(2) / HALF_LIVES[0] * (HALF_LIVES[0] / HALF_LIVES[1]) ** share
        width = (D,) if op.gate == "diagonal" else ()
        spread = 2 ** (2 * torch.rand((H, *width), generator=draw, device=device) - 1) if width else 1.0
        factor = 2 * torch.rand((1, T, H, *width), generator=draw, device=device)
        g = -rate.view(H, *(1 for _ in width)) * spread * factor * (gates == "trained")
        out.append(g.to(dtype if width else torch.promote_types(dtype, torch.float32)))
    if op.beta:
        out.append(torch.sigmoid(normal(1, T, H)).to(dtype))
    return [x.requires_grad_() for x in out]


def gate_kinds(name: str, wanted: list[Gates]) -> list[Gates]:
    """The kinds of gates to measure an op with: an additive one that never forgets is linear attention."""
    op = OPS[name]
    named = {"production": bool(op.production), "mixed": op.production == "kimi"}
    known = [gates for gates in wanted if named.get(gates, True)]
    return known if op.gate and op.beta else known[:1]


def promised(name: str, gates: Gates) -> dict[str, float]:
    """What a caller knows of these gates and says in a call of ours."""
    bounded = gates in ("production", "mixed") and OPS[name].production == "kimi"
    return {"lower_bound": production.BOUND} if bounded else {}


class Unhidden(ContextParallel):
    """A ContextParallel whose exchange is waited for where it is posted: nothing runs beside it."""

    def strategy(self, chain: Chain, like: Affine) -> Scan:
        return Waited(super().strategy(chain, like))


@dataclass(frozen=True)
class Waited:
    """A strategy that has finished when `start` returns."""

    inner: Scan

    @property
    def name(self) -> str:
        return self.inner.name

    def cost(self, chain: Chain, like: Affine) -> Cost:
        return self.inner.cost(chain, like)

    def cost_back(self, chain: Chain, like: Affine) -> Cost:
        return self.inner.cost_back(chain, like)

    def start(self, chain: Chain, links: Sequence[Link], like: Affine, group: Group) -> Exchange:
        exchange = self.inner.start(chain, links, like, group)
        exchange.wait()
        return exchange

    def start_back(
        self, chain: Chain, links: Sequence[Link], like: Affine, group: Group, kept: Sequence[Tensor | None]
    ) -> Pending:
        pending = self.inner.start_back(chain, links, like, group, kept)
        pending.wait()
        return pending


class Swap(torch.autograd.Function):
    """Heads for sequence, or back, of several tensors ``[1, T, H, …]`` in one all-to-all."""

    @staticmethod
    def forward(ctx, group: Group, gather_tokens: bool, *tensors: Tensor) -> Any:
        ctx.group, ctx.gather_tokens = group, gather_tokens
        out = swap(group, gather_tokens, tensors)
        return out[0] if len(out) == 1 else tuple(out)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Any:
        return None, None, *swap(ctx.group, not ctx.gather_tokens, grads)


def swap(group: Group, gather_tokens: bool, tensors: Sequence[Tensor]) -> list[Tensor]:
    """``[1, T, H, …] → [1, P·T, H/P, …]`` (gather_tokens) or the reverse, as bytes of one message."""
    P, sent, shapes = group.size, [], []
    for x in tensors:
        _, T, H, *rest = x.shape
        cut = x.reshape(T, P, H // P, *rest).movedim(1, 0) if gather_tokens else x.reshape(P, T // P, H, *rest)
        shapes.append((cut.shape, x.dtype))
        sent.append(cut.reshape(P, -1).view(torch.uint8))
    rows = group.all_to_all(torch.cat(sent, 1)).wait().split([s.shape[1] for s in sent], 1)
    out = []
    for row, (shape, dtype) in zip(rows, shapes):
        x = row.contiguous().view(dtype).view(shape)  # [P, tokens, heads, …] of each rank
        out.append((x.flatten(0, 1) if gather_tokens else x.movedim(0, 1).flatten(1, 2))[None])
    return out


class Team:
    """The first P ranks: their group, and a context for every arm that splits the sequence. Collective over them.

    Attributes:
        group: its messages.
        contexts: by the arm's label.
        refused: for each op and gates, why arms are not timed, as found so far; empty for those that may be.
        errors: for each op and gates, of the arms that were compared.
    """

    def __init__(self, ranks: dist.ProcessGroup, alone: dist.ProcessGroup, transport: str = "auto") -> None:
        def make(scan: str, kind: type[ContextParallel] = ContextParallel) -> ContextParallel:
            return kind(ranks, scan=scan, validate="never", transport=transport)

        self.contexts = {"alone": ContextParallel(alone, scan="ring", validate="never")}
        if dist.get_world_size(ranks) > 1:
            self.contexts |= {scan: make(scan) for scan in (*STRATEGIES, "auto")}
            unhidden = {"LASP pattern": "ring", "LASP-2 pattern": "all_gather"}
            self.contexts |= {label: make(scan, Unhidden) for label, scan in unhidden.items()}
            for label, cp in self.contexts.items():
                if label != "alone":  # what an exchange costs is then known to all alike
                    cp.cost = self.contexts["auto"].cost
        self.group = make("ring").comm
        self.refused: dict[tuple[str, str], dict[str, str]] = {}
        self.errors: dict[tuple[str, str], dict[str, float]] = {}

    def arms(self, name: str, gates: Gates, T: int, which: Sequence[str] = ()) -> dict[str, Call]:
        """The function of the tensors giving the output, by label, of every arm this op and team have.

        `which` keeps those whose label starts with one of its words.
        """
        known, P = promised(name, gates), self.group.size
        op = functools.partial(getattr(ring_la, name), **known)
        out: dict[str, Call] = {"local": lambda *x: op(*x).o}
        for label, cp in self.contexts.items():
            layout = cp.layout(T * cp.size, "contiguous")
            out[label] = lambda *x, layout=layout: op(*x, layout=layout).o
        if P > 1:
            out["Ulysses pattern"] = ulysses(name, self.group, known)
        if name in FLA and self.group.on_cuda and importlib.util.find_spec("fla"):
            out["FLA local"] = fla(name, T, None, bounded=bool(known))
            if P > 1:
                out["FLA CP"] = fla(name, T, self.group, bounded=bool(known))
        if name == "gated_delta_rule" and self.group.on_cuda and importlib.util.find_spec("flash_qla"):
            out["FlashQLA local"] = flash_qla(T, None)
            if P > 1:
                out["FlashQLA CP"] = flash_qla(T, self.group)
        return {label: call for label, call in out.items() if not which or label.startswith(tuple(which))}


def exchanges(group: Group, like: Affine) -> dict[str, Callable[[], object]]:
    """Each strategy's exchange alone, of random maps like `like`, one link a rank."""
    chain = Chain.line(group.size)
    shape = transition_shape(like.kind, like.b.shape)
    A = None if shape is None else torch.rand(shape, device=group.device) / like.b.shape[-2]
    b = torch.randn(like.b.shape, device=group.device)
    links, like = [Link(Affine(like.kind, A, b))], Affine(like.kind, None, b)
    return {name: lambda s=s: s.start(chain, links, like, group).wait() for name, s in STRATEGIES.items()}


def ulysses(name: str, group: Group, known: dict[str, float]) -> Call:
    """The local kernel on this rank's heads of the whole sequence, between two all-to-alls."""
    op = functools.partial(getattr(ring_la, name), **known)

    def call(*x: Tensor) -> Tensor:
        whole = Swap.apply(group, True, *x)
        heads = whole[2].shape[2]
        if name == "retention":  # static decays: this rank's heads'
            decay = retention_decay(heads * group.size, whole[0].device)
            whole = (*whole, decay[group.rank * heads : (group.rank + 1) * heads])
        return Swap.apply(group, False, op(*whole).o)

    return call


def gradients(call: Call, x: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    """The output and the gradient of every input."""
    o = call(*x)
    return [o.detach(), *torch.autograd.grad(o, x, do.to(o.dtype))]


def error(call: Call, whole: Sequence[Tensor], true: Sequence[Tensor], do: Tensor, group: Group) -> float:
    """Largest relative error of a split call's output and gradients against those of the whole sequence. Collective.

    `whole` are the whole sequence's inputs, `true` what `gradients` gives for them, `do` the output's gradient.
    """
    T = do.shape[1] // group.size
    mine = slice(group.rank * T, (group.rank + 1) * T)
    local = [x.detach()[:, mine].clone().requires_grad_() for x in whole]
    got = gradients(call, local, do[:, mine])
    apart = torch.stack([(g.double() - t[:, mine]).square().sum() for g, t in zip(got, true)])
    norms = torch.stack([t.norm() for t in true]).clamp_min(1e-30)
    return (group.all_reduce(apart).wait().sqrt() / norms).max().item()


def truth(name: str, whole: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    """Output and gradients of the whole sequence on one device: the PyTorch kernels in fp64, on the same inputs. Heads
    go some at a time, which bounds the memory, but for retention, whose decays are those of all heads."""
    keys = whole[0].shape[2]
    parts = 1 if name == "retention" else math.gcd(keys, 8)

    def of(part: int) -> list[Tensor]:
        wide = [x.detach().chunk(parts, 2)[part].double().requires_grad_() for x in whole]
        return gradients(lambda *x: getattr(ring_la, name)(*x, backend="torch").o, wide, do.chunk(parts, 2)[part])

    return [torch.cat(found, 2) for found in zip(*map(of, range(parts)))]
