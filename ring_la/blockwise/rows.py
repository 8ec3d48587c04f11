"""Code that maps each token by itself, run block by block: forward and backward always see tensors of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import first_derivative_only, outside_graphs
from ..context import ShardedLayout
from ..errors import ArgumentError, describe_tensor
from .blocks import blocks_of, filled, fixed, together
from .linear import linear
from .per_token import per_token, written_out
from .sums import exact_sum, part_of
from .switch import at_once


def by_block(
    fn: Callable[..., Any],
    *x: Tensor,
    layout: ShardedLayout | None,
    shared: Sequence[Tensor | None] = (),
    module: nn.Module | None = None,
) -> Any:
    """``fn(*x, *shared)`` for code that maps each token by itself; under a deterministic layout with the same bits
    however the sequence is split and packed.

    Such code is a model's own between ring_la's operators: projections, norms, gates, MLPs. Under a deterministic
    layout it sees 64 tokens of a document at a time, ``[1, 64, …]``, zeros behind the last, where it must be finite;
    gradients of what tokens share are summed exactly. Else it is called once.

    Args:
        fn: of tensors ``[B, T, …]``, returning one or a tuple of such. An nn.Module's parameters get their gradients.
        x: this rank's tokens. layout: how they are split; None: they are not.
        shared: what `fn` takes after them, the same for all tokens.
        module: whose parameters `fn` reads without taking them.

    Returns:
        What `fn` does. Gradients of `shared` and of parameters are this rank's part: the whole on the first rank and
        zero on the others.

    Raises:
        ArgumentError: a tensor without this rank's tokens. UnsupportedError: a layout that cuts blocks.
    """
    if not fixed(layout):
        return fn(*x, *shared)
    _check(x, layout)
    if isinstance(fn, nn.Sequential) and type(fn) is nn.Sequential:
        for part in fn:
            x = (by_block(part, *x, layout=layout),)
        return x[0]
    if type(fn) is nn.Identity:
        return x[0]
    if isinstance(fn, nn.Linear) and type(fn) is nn.Linear:
        return linear(x[0], fn.weight, fn.bias, layout=layout)
    if at_once(x[0]):
        if getattr(fn, "by_element", False) or fn in BY_ELEMENT:
            return _as_it_is(fn, *x, *per_token(shared, x[0], layout))
        together = AT_ONCE.get(fn if isinstance(fn, FunctionType) else type(fn))
        if together is not None:
            return together(fn, layout, *x, *shared)
    return _apart(BlockwiseCall(fn, layout, len(x), len(shared)), *x, *shared, *_parameters(fn, module))


@outside_graphs
def _as_it_is(fn: Callable[..., Any], *x: Any) -> Any:
    """A call that no compiler fuses with others: it would contract products and sums that are apart here."""
    with written_out():
        return fn(*x)


BY_ELEMENT = frozenset([torch.sigmoid, torch.tanh, F.silu, F.elu, F.gelu, F.relu, F.softplus])
"""Functions of PyTorch that are by element (see `by_element`)."""
AT_ONCE: dict[Any, Callable[..., Any]] = {}
"""Of functions, and of modules by their class: ``(fn, layout, *x, *shared)`` for all tokens in a few launches, each row
with bits of its own, and gradients of what is shared summed exactly. `at_once` says when."""


def _check(x: Sequence[object], layout: ShardedLayout) -> None:
    for t in x:
        if not isinstance(t, Tensor) or t.dim() < 2:
            raise ArgumentError("x", "tensors [B, T, …]", describe_tensor(t))
        layout.require_local("x", t.shape[1])


def _parameters(fn: object, module: nn.Module | None) -> list[nn.Parameter]:
    """Those that `fn` reads and that want gradients."""
    source = fn if isinstance(fn, nn.Module) else module
    return [] if source is None else [p for p in source.parameters() if p.requires_grad]


def led_by_block(
    fn: Callable[..., Tensor], x: Tensor, lead: Tensor, layout: ShardedLayout, shared: Sequence[Tensor | None]
) -> Tensor:
    """`by_block` of a function that also takes what stands before each block, ``lead [B, blocks, …]``."""
    return _apart(BlockwiseCall(fn, layout, 2, len(shared), leads=1), x, lead, *shared)


class Place(NamedTuple):
    """A block: rows ``start … stop − 1`` of batch row `row`, of which it is block `number`."""

    row: int
    start: int
    stop: int
    number: int

    @property
    def tokens(self) -> tuple[int, int, int]:
        return self[:3]


class BlockwiseCall(NamedTuple):
    """Everything about one call but its tensors: the first `tokens` have blocks, the last `leads` of these as
    ``[B, blocks, …]``; the next `shared` are given to `fn` as they are."""

    fn: Callable[..., Any]
    layout: ShardedLayout
    tokens: int
    shared: int
    leads: int = 0

    def cut(self, i: int, t: Tensor, place: Place) -> Tensor:
        """A block of its tensor number `i`."""
        if i < self.tokens - self.leads:
            return filled(t, *place.tokens)
        return t[place.row : place.row + 1, place.number].clone(memory_format=torch.contiguous_format)

    def run(self, x: Sequence[Tensor], place: Place, shared: Sequence[Tensor | None], needs: Sequence[bool]) -> Block:
        """One block, with a graph of its own where gradients are wanted."""
        with torch.set_grad_enabled(any(needs)):
            leaves = [self.cut(i, t.detach(), place).requires_grad_(w) for i, (t, w) in enumerate(zip(x, needs))]
            out = self.fn(*leaves, *shared)
        return Block(place, leaves, out if isinstance(out, tuple) else (out,))

    def shape_of(self, x: Sequence[Tensor], shared: Sequence[Tensor | None]) -> Block:
        """A block of zeros, for a rank without tokens."""
        with torch.no_grad():
            zeros = [t.new_zeros(1, *t.shape[2:]) for t in x[self.tokens - self.leads :]] if self.leads else []
            out = self.fn(*(filled(t, 0, 0, 0) for t in x[: self.tokens - self.leads]), *zeros, *shared)
        return Block(Place(0, 0, 0, 0), [], out if isinstance(out, tuple) else (out,))


class Block(NamedTuple):
    """One block's own graph: its leaves and what came out."""

    place: Place
    leaves: list[Tensor]
    outs: tuple[Tensor, ...]


@outside_graphs
def _apart(call: BlockwiseCall, *tensors: Tensor | None) -> Any:
    out = _ByBlock.apply(call, *tensors)
    return out[0] if len(out) == 1 else out


class _ByBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: BlockwiseCall, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad[1:]
        x: Any = tensors[: call.tokens]
        given = tensors[call.tokens : call.tokens + call.shared]
        wanted = needs[call.tokens : call.tokens + call.shared]
        ctx.shared = [t if t is None else t.detach().requires_grad_(w) for t, w in zip(given, wanted)]
        blocks = blocks_of(call.layout)
        places = [Place(b, *block, i) for b in range(x[0].shape[0]) for i, block in enumerate(blocks)]
        done = [call.run(x, place, ctx.shared, needs) for place in places]
        outs = (done[0] if done else call.shape_of(x, ctx.shared)).outs
        parts = [[d.outs[i].detach()[0, : d.place.stop - d.place.start] for d in done] for i in range(len(outs))]
        ctx.way_back = call.layout.cp.comm.agreement.way_back()
        ctx.call, ctx.done, ctx.like = call, done if any(needs) else [], [(t.shape, t.dtype, t.device) for t in x]
        ctx.read = tensors[call.tokens + call.shared :]
        ctx.set_materialize_grads(False)
        B, T = x[0].shape[:2]
        return tuple(together(p, B, T, o) for p, o in zip(parts, outs))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        common = [t for t, w in zip((*ctx.shared, *ctx.read), needs[call.tokens :]) if w]
        dx: list[list[Tensor]] = [[] for _ in range(call.tokens)]
        sums: list[Tensor] = []
        for d in ctx.done:
            mine, ofall = _gradients(d, douts, common)
            for i, g in enumerate(mine):
                dx[i].append(g[0] if i >= call.tokens - call.leads else g[0, : d.place.stop - d.place.start])
            if common:
                sums.append(torch.cat([g.flatten() for g in ofall]))
        grads: list[Any] = [_joined(g, *like) if w else None for g, like, w in zip(dx, ctx.like, needs)]
        if not common:
            return None, *grads, *[None] * (len(needs) - call.tokens)
        ctx.way_back()
        flat = torch.stack(sums) if sums else torch.cat([t.detach().flatten() for t in common])[None][:0]
        whole = iter(exact_sum(flat, call.layout).split([t.numel() for t in common]))
        shared = iter([part_of(next(whole).view(t.shape), call.layout, t.detach()) for t in common])
        return None, *grads, *(next(shared) if w else None for w in needs[call.tokens :])


def _gradients(d: Block, douts: Sequence[Tensor | None], common: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """One block's gradients of its tokens (zero where none is wanted), and of what blocks share."""
    pairs = [(o, filled(g, *d.place.tokens)) for o, g in zip(d.outs, douts) if g is not None and o.requires_grad]
    wanted = [t for t in d.leaves if t.requires_grad]
    found: Any = [None] * (len(wanted) + len(common))
    if pairs:
        outs, cotangents = zip(*pairs)
        found = torch.autograd.grad(outs, [*wanted, *common], cotangents, retain_graph=True, allow_unused=True)
    found = iter([torch.zeros_like(t) if g is None else g for t, g in zip([*wanted, *common], found)])
    mine = [next(found) if t.requires_grad else t for t in d.leaves]
    return mine, list(found)


def _joined(parts: list[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat(parts).view(shape) if parts else torch.zeros(shape, dtype=dtype, device=device)
