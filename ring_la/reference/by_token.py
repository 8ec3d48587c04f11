"""A recurrence's definition read one token at a time, in fp64: what its own `token` function says, and nothing else.

    token(S, **what a token brings) -> (S, o)

Every document starts from its initial state; `token` gets each tensor of its token as ``[N, H, …]`` (heads of q and k
repeated for the value heads they serve), tensors that all tokens share whole, and q times `scale`. S is one tensor, or
a tuple where the state has several parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_la.errors import ArgumentError
from ring_la.outputs import LinearAttentionOutput
from ring_la.reference.arguments import documents, expect_local, expect_shape
from ring_la.reference.token_loop import LoopOptions

State = Tensor | tuple[Tensor, ...]
Token = Callable[..., tuple[State, Tensor]]


def read(S: Tensor, q: Tensor) -> Tensor:
    """Sᵀ q, of ``S [N, H, K, V]`` and ``q [N, H, K]``."""
    return (q[..., None] * S).sum(-2)


def outer(k: Tensor, v: Tensor) -> Tensor:
    """k vᵀ ``[N, H, K, V]``."""
    return k[..., None] * v[..., None, :]


class Loop(NamedTuple):
    """How tokens change a state.

    Attributes:
        token: the equations of one token.
        shapes: an argument's dimensions, a letter each (see `recurrences.arguments`).
        queries, keys: arguments that `use_qk_l2norm` brings to unit length; `scale` multiplies the queries.
        states: dimensions of the state's parts after the N.
        default_scale: where the caller gives none; None: K**-0.5.
    """

    token: Token
    shapes: Mapping[str, str]
    queries: Sequence[str]
    keys: Sequence[str]
    states: Sequence[str]
    default_scale: float | None


def by_token(name: str, loop: Loop, own: inspect.Signature) -> Callable[..., LinearAttentionOutput]:
    """The reference function of a recurrence of this name, whose own arguments are `own`."""
    common = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(LoopOptions).parameters.values()]

    def function(*args: Any, **keywords: Any) -> LinearAttentionOutput:
        options = LoopOptions(**{p.name: keywords.pop(p.name) for p in common if p.name in keywords})
        bound = own.bind(*args, **keywords)
        bound.apply_defaults()
        return run(loop, bound.arguments, options)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`ring_la.{name}` a token at a time, in fp64."
    function.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), *common], return_annotation=LinearAttentionOutput
    )
    return function


def run(loop: Loop, given: Mapping[str, Any], options: LoopOptions) -> LinearAttentionOutput:
    """Every document, a token at a time."""
    expect_local(options.layout, options.backend, options.mode)
    x = {n: t.double() for n, t in given.items() if isinstance(t, Tensor)}
    flags = {n: t for n, t in given.items() if n not in x}
    sizes = _sizes(loop, x)
    heads = {n: loop.shapes[n].replace("G", "H").find("H") for n in x}
    x = {n: t if heads[n] < 0 else t.repeat_interleave(sizes["H"] // t.shape[heads[n]], heads[n]) for n, t in x.items()}
    scale = options.scale
    if scale is None:
        scale = sizes["K"] ** -0.5 if loop.default_scale is None else loop.default_scale
    if options.use_qk_l2norm:
        x |= {n: x[n] * torch.rsqrt((x[n] ** 2).sum(-1, keepdim=True) + 1e-6) for n in (*loop.queries, *loop.keys)}
    x |= {n: scale * x[n] for n in loop.queries}
    along = {n: t for n, t in x.items() if "T" in loop.shapes[n]}
    shared = {n: t for n, t in x.items() if n not in along}
    outputs, states = [], []
    spans = documents(sizes["B"], sizes["T"], options.cu_seqlens)
    start = _start(loop, options.initial_state, spans[-1].states.stop, sizes, next(iter(x.values())))
    for d in spans:
        S: State = tuple(part[d.states] for part in start)
        S = S[0] if len(S) == 1 else S
        for here in d.each(*along.values()):
            S, o = loop.token(S, **shared, **dict(zip(along, here)), **flags)
            outputs.append(o if loop.queries else scale * o)
        states.append(S if isinstance(S, tuple) else (S,))
    final: Any = tuple(torch.cat(parts) for parts in zip(*states))
    o = torch.stack(outputs, 1)
    return LinearAttentionOutput(o, (final[0] if len(final) == 1 else final) if options.output_final_state else None)


def _sizes(loop: Loop, x: Mapping[str, Tensor]) -> dict[str, int]:
    """The sizes by letter, after checking that all tensors have theirs."""
    sizes: dict[str, int] = {}
    for n, t in x.items():
        if t.dim() != len(loop.shapes[n]):
            raise ArgumentError(n, f"dimensions {', '.join(loop.shapes[n])}", list(t.shape))
        for letter, size in zip(loop.shapes[n], t.shape):
            sizes[letter] = max(size, sizes.get(letter, size)) if letter == "H" else sizes.get(letter, size)
    sizes.setdefault("H", sizes.get("G", 1))
    sizes.setdefault("G", sizes["H"])
    for n, t in x.items():
        dims = {f"{letter}{i}": sizes[letter] for i, letter in enumerate(loop.shapes[n])}
        fewer = {d: (size, sizes["G"]) if d[0] == "H" else size for d, size in dims.items()}
        expect_shape(n, t, **fewer)
    return sizes


def _start(loop: Loop, initial: State | None, N: int, sizes: Mapping[str, int], like: Tensor) -> tuple[Tensor, ...]:
    """The parts of the states before all documents."""
    shapes = [[N, *(sizes[letter] for letter in part)] for part in loop.states]
    if initial is None:
        return tuple(like.new_zeros(shape, dtype=torch.float64) for shape in shapes)
    parts = initial if isinstance(initial, tuple) else (initial,)
    if [list(p.shape) for p in parts] != shapes:
        raise ArgumentError("initial_state", str(shapes), [list(p.shape) for p in parts])
    return tuple(p.double() for p in parts)
