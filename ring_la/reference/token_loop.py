"""One token at a time: the loop every linear recurrence of the reference runs through.

A recurrence is a `Rule` (how a token changes the state) and the tensors its tokens bring; `recurrence` turns a function
that describes these into the public function, adding the keywords all recurrences have in common.

Shapes: q, k [B, T, Hk, K]; v [B, T, H, V] with H a multiple of Hk (value head h reads q/k head h // (H // Hk));
g [B, T, H] or [B, T, H, K] by the rule's decay; beta [B, T, H]; a, b [B, T, H, K]. g, beta, a and b may also come with
Hk heads. States are [N, H, K, V], N documents.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.errors import ArgumentError
from ring_la.outputs import LinearAttentionOutput
from ring_la.reference.arguments import Document, documents, expect_local, expect_shape


class TokenLoop(NamedTuple):
    """What makes one recurrence a token loop: its rule, and what its tokens bring."""

    rule: Rule
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    default_scale: float | None = None
    """Scale where the caller gives none; None means K**-0.5."""
    causal: bool = True
    """False: every token reads the state after its document's last token."""
    readout: Callable[[Tensor], Tensor] = lambda o: o
    """What becomes of scale · Sᵀ q."""
    names: Mapping[str, str] = {}
    """The caller's names of q, k, v, g where they differ, for error messages."""


def step(
    rule: Rule, S: Tensor, k: Tensor, v: Tensor, g: Any = None, beta: Any = None, a: Any = None, b: Any = None
) -> Tensor:
    """The state [N, H, K, V] after one token, whose tensors are [N, H, ...]: `Rule`'s equations, as they stand."""
    decayed = S
    if rule.decay == "scalar":
        decayed = g.exp()[..., None, None] * S
    elif rule.decay == "diagonal":
        decayed = g.exp()[..., None] * S
    if rule.write == "additive":
        return decayed + k[..., None] * v[..., None, :]
    if rule.write == "delta":
        recalled = (k[..., None] * decayed).sum(-2)
        return decayed + (beta[..., None] * k)[..., None] * (v - recalled)[..., None, :]
    recalled = (a[..., None] * S).sum(-2)
    return decayed + b[..., None] * recalled[..., None, :] + k[..., None] * v[..., None, :]


def read(q: Tensor, S: Tensor) -> Tensor:
    """Sᵀ q."""
    return (q[..., None] * S).sum(-2)


def check(r: TokenLoop) -> None:
    """Check the shapes of what the tokens bring."""
    name = {field: r.names.get(field, field) for field in ("q", "k", "v", "g")}
    expect_shape(name["q"], r.q, B=None, T=None, H=None, K=None)
    B, T, Hk, K = r.q.shape
    expect_shape(name["k"], r.k, B=B, T=T, H=Hk, K=K)
    expect_shape(name["v"], r.v, B=B, T=T, H=None, V=None)
    H = r.v.shape[2]
    if H % Hk:
        raise ArgumentError(name["v"], f"a number of heads that is a multiple of the {Hk} of {name['q']}", H)
    heads = (Hk, H)
    if r.rule.decay == "scalar":
        expect_shape(name["g"], r.g, B=B, T=T, H=heads)
    if r.rule.decay == "diagonal":
        expect_shape(name["g"], r.g, B=B, T=T, H=heads, K=K)
    if r.rule.write == "delta":
        expect_shape("beta", r.beta, B=B, T=T, H=heads)
    if r.rule.write == "dplr":
        expect_shape("a", r.a, B=B, T=T, H=heads, K=K)
        expect_shape("b", r.b, B=B, T=T, H=heads, K=K)


class LoopOptions(NamedTuple):
    """The keywords all recurrences have in common; `ring_la.reference.recurrences` says what they mean."""

    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm: bool = False
    layout: object = None
    cu_seqlens: Tensor | Sequence[int] | None = None
    mode: str = "auto"
    backend: str | None = None


def token_loop(r: TokenLoop, options: LoopOptions) -> LinearAttentionOutput:
    """Run a recurrence over each document, a token at a time."""
    expect_local(options.layout, options.backend, options.mode)
    check(r)
    B, T, H, V = r.v.shape
    K = r.q.shape[-1]
    brought: tuple[Any, ...] = (r.q, r.k, r.v, r.g, r.beta, r.a, r.b)
    q: Any
    token: list[Any]
    q, *token = (None if x is None else x.double().repeat_interleave(H // x.shape[2], dim=2) for x in brought)
    if options.use_qk_l2norm:
        q, token[0] = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, token[0]))
    scale = options.scale
    if scale is None:
        scale = K**-0.5 if r.default_scale is None else r.default_scale
    spans = documents(B, T, options.cu_seqlens)
    N = spans[-1].states.stop
    initial_state = q.new_zeros(N, H, K, V) if options.initial_state is None else options.initial_state
    expect_shape("initial_state", initial_state, N=N, H=H, K=K, V=V)

    outputs, states = [q.new_zeros(B, 0, H, V)], []
    for document in spans:
        o, S = _document(r, initial_state[document.states].double(), q, token, document)
        outputs.append(o)
        states.append(S)
    o = r.readout(scale * torch.cat(outputs, dim=1))
    return LinearAttentionOutput(o, torch.cat(states) if options.output_final_state else None)


def _document(r: TokenLoop, S: Tensor, q: Tensor, token: Sequence[Any], document: Document) -> tuple[Tensor, Tensor]:
    """Sᵀ q of a document's tokens ``[N, T, H, V]``, and the state after them, given the state `S` before."""
    outputs = [S.new_zeros(len(S), 0, S.shape[1], S.shape[3])]
    for query, *here in document.each(q, *token):
        S = step(r.rule, S, *here)
        if r.causal:
            outputs.append(read(query, S)[:, None])
    if not r.causal:
        outputs.append(read(q[document.rows, document.tokens], S[:, None]))
    return torch.cat(outputs, dim=1), S


def recurrence(describe: Callable[..., TokenLoop]) -> Callable[..., LinearAttentionOutput]:
    """The public function of a recurrence: `describe`'s own arguments, then the keywords common to all."""
    own = inspect.signature(describe)
    fields = inspect.signature(LoopOptions).parameters.values()
    common = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fields]

    @functools.wraps(describe)
    def function(*args: Any, **keywords: Any) -> LinearAttentionOutput:
        options = LoopOptions(**{p.name: keywords.pop(p.name) for p in common if p.name in keywords})
        return token_loop(describe(*args, **keywords), options)

    signature = own.replace(parameters=[*own.parameters.values(), *common], return_annotation=LinearAttentionOutput)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
