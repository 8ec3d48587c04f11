"""What a recurrence is made of: its definition, what it makes of a call's tensors, and the keywords all have in common.

Values only: nothing here checks or runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..algebra import Rule
from ..kernels import Inputs
from ..linear import CommonOptions as CommonOptions
from ..outputs import LinearAttentionOutput
from .arguments import Argument


class Normalizer(NamedTuple):
    """A denominator ``scale · qᵀ Σ k + eps`` of linear attention without a direction: tokens' own q and k."""

    q: Tensor
    k: Tensor
    eps: float


class Recurrence(NamedTuple):
    """One recurrence, with the tensors of a call.

    Attributes:
        rule: how a token changes the state.
        inputs: what tokens bring.
        causal: False: every token reads the state after its document's last token.
        readout: what becomes of ``scale · Sᵀ q``; None: it is o.
        names: the caller's names of the inputs where they differ, for messages.
        normalizer: what o is divided by; without a direction only. States have Σ k as one more column then.
        decays: the heads' log-decays where every token's are the same: what gives them, or the caller's tensor.
        wide_queries: q may be fp32 beside narrower k and v; its gradient is then not rounded.
        unit: q and k are of unit length already where that was asked for.
    """

    rule: Rule
    inputs: Inputs
    causal: bool = True
    readout: Callable[[Tensor], Tensor] | None = None
    names: Mapping[str, str] = {}
    decays: Callable[[], tuple[float, ...]] | Tensor | None = None
    normalizer: Normalizer | None = None
    wide_queries: bool = False
    unit: bool = False

    def read(self, o: Tensor) -> Tensor:
        """o, of ``scale · Sᵀ q``."""
        return o if self.readout is None else self.readout(o)

    def made_unit(self, options: CommonOptions) -> bool:
        """Whether its q and k are still to be brought to unit length."""
        return options.use_qk_l2norm and not self.unit

    def name(self, field: str) -> str:
        """What the caller calls an input."""
        return self.names.get(field, field)


COMMON = """
Common keywords:
    scale: multiplies the output; None: {scale}.
    initial_state: the state before each document, {states}; N is B, or the number of packed documents.
        Replicated under a layout; its gradient is the whole one on every rank.
    output_final_state: also return the state after each document, {states} fp32 (fp64 for fp64 inputs), on
        every rank; gradients flowing into it are summed over the ranks.
    use_qk_l2norm: replace q and k by ``x · rsqrt(Σ x² + 1e-6)``.
    layout: how the sequence is split over ranks (`ContextParallel.layout`); T is then this rank's length. None: one
        device. Collective: every rank calls, forward and backward.
    cu_seqlens: offsets ``[N+1]`` of documents packed into one batch row on one device; empty ones are allowed.
    mode: "chunk", "recurrent" (token by token, for decoding) or "auto".
    backend: None (the fastest that can), "triton", "torch" or "reference" (fp64 token loop, one device).
    in_place: write the state after each document over `initial_state`, which is then the final state returned. For
        decoding: one device, no gradients.

Returns:
    LinearAttentionOutput(o ``[B, T, H, V]`` in the values' dtype, final_state or None).

Raises:
    ArgumentError: a wrong shape, dtype, device or choice, by name; under a layout on every rank.
    UnsupportedError: a combination that is not supported, and what would work.
    DisagreementError: the ranks' arguments do not fit together.
"""


class OwnArguments(NamedTuple):
    """The arguments of a description but for `options`: those that may come by position, all, what they are where
    nobody gives them, and those that may be None."""

    positional: tuple[str, ...]
    names: frozenset[str]
    defaults: dict[str, Any]
    optional: frozenset[str]

    @classmethod
    def of(cls, describe: Callable[..., Any]) -> OwnArguments:
        parameters = {n: p for n, p in inspect.signature(describe).parameters.items() if n != "options"}
        positional = tuple([n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD])
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        return cls(
            positional, frozenset(parameters), defaults, frozenset([n for n, x in defaults.items() if x is None])
        )

    def given(self, call: functools.partial[Any]) -> dict[str, Any]:
        """A call's arguments by name."""
        given = dict(zip(self.positional, call.args)) | call.keywords
        if len(given) == len(call.args) + len(call.keywords):
            given = self.defaults | given
            if given.keys() == self.names:
                return given
        inspect.signature(call.func).bind(*call.args, **call.keywords, options=None)  # says what is wrong
        raise AssertionError(sorted(given))


@dataclass(frozen=True)
class Definition:
    """What is known of a recurrence before any call: tests, tables and benchmarks follow from it.

    Attributes:
        name: of the public function, and of its reference.
        describe: from the function's own arguments to a `Recurrence`; with an argument `options` (`CommonOptions`) the
            whole call, made of other recurrences (see `composed`).
        reference: the same function as an fp64 token loop, or None.
        paper: where it comes from.
        equation: what a token does to the state, in a line.
        arguments: the tensors it takes, by name.
        default_scale: the scale where the caller gives none; None means K**-0.5.
        states: the parts of its state, the dimensions after N a letter each.
        flags: its own arguments that are no tensors, for examples.
        sizes: for examples, those of its own letters.
        same_bits: of one made of others: what it does to tokens goes through `ring_la.by_block`, so that under a
            deterministic layout its bits do not depend on the split; else such a layout is refused.
        check: of one made of others: refuses sizes, by letter, that do not fit together.
        at_once: of one under a single rule: its description for all tokens of a rank in one go, under the deterministic
            layout it takes first; what tokens do there has bits of their own (see `blockwise.by_element`). None, or
            what gives None: there is none.
        opaque: of one made of others: on one device, too, it is one node to a compiler, which cannot follow what the
            host does between its parts.
        alone: `describe` for calls without a layout, where that differs.
    """

    name: str
    describe: Callable[..., Any]
    reference: Callable[..., LinearAttentionOutput] | None
    paper: str
    equation: str = ""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    default_scale: float | None = None
    states: tuple[str, ...] = ("HKV",)
    flags: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    same_bits: bool = False
    check: Callable[[Mapping[str, int]], None] | None = None
    opaque: bool = False
    at_once: Callable[..., Recurrence | None] | None = None
    alone: Callable[..., Any] | None = None

    @property
    def composed(self) -> bool:
        """Whether it is made of other recurrences, rather than one rule over one scan."""
        return "options" in inspect.signature(self.describe).parameters

    @functools.cached_property
    def own(self) -> OwnArguments:
        """The arguments of its description."""
        return OwnArguments.of(self.describe)

    @property
    def shared(self) -> tuple[str, ...]:
        """Arguments that all tokens share: their gradient is each rank's part."""
        return tuple(n for n, a in self.arguments.items() if a.shared)

    def scale(self, options: CommonOptions, channels: int) -> float:
        """The scale of a call whose keys have so many channels."""
        if options.scale is not None:
            return float(options.scale)
        return float(channels**-0.5) if self.default_scale is None else self.default_scale

    @property
    def keywords(self) -> str:
        """What the function's docstring says of its source and of the common keywords."""
        scale = "K**-0.5" if self.default_scale is None else f"{self.default_scale:g}"
        parts = [f"``[{', '.join(('N', *part))}]``" for part in self.states]
        states = parts[0] if len(parts) == 1 else f"a tuple of {', '.join(parts)}"
        return f"\nSource: {self.paper}.\n" + COMMON.format(scale=scale, states=states)
