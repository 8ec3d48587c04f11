"""What a backend of the linear recurrences does: one rank's tokens, between two exchanges.

A *piece* is a run of consecutive tokens of one document. A backend never asks where the states that enter its pieces
come from; a sharded call is a packed one whose pieces get their states from other ranks. Where a `Border` says so, its
launches exchange these themselves.

What one part finds and another needs goes from hand to hand: `Local.summary` returns a `Summary` that `Local.output`
takes, `Local.adjoint` an `Adjoint` that `Local.gradients` takes. A backend remembers nothing between two calls that
either would not find again by itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..algebra import Rule, Transition

if TYPE_CHECKING:
    from .runtime.streams import SideStream

Forward = TypeVar("Forward")
"""What a backend finds for its summary that its output needs, too."""
Back = TypeVar("Back")
"""What it finds for its adjoint that its gradients need, too."""


class Inputs(NamedTuple):
    """What tokens bring, ``[B, T, heads, …]``; absent tensors are None.

    q, k ``[B,T,Hk,K]``, v ``[B,T,H,V]`` with H a multiple of Hk, g ``[B,T,H]`` or ``[B,T,H,K]`` (natural log, ≤ 0),
    beta ``[B,T,H]``, a and b ``[B,T,H,K]``. Under a rule that reads values q is ``[B,T,H,V]`` and k ``[B,T,H,K]``.
    Additive writes may have beta, which v is written times, and a ``[B,T,H]``, which v is added to the output times.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """What every rule has."""
        return self.q, self.k, self.v

    @property
    def state(self) -> tuple[int, int, int]:
        """H, K and V of the states."""
        return self.v.shape[2], self.k.shape[3], self.v.shape[3]

    def like_output(self, rule: Rule) -> Tensor:
        """The input that o has the shape and dtype of."""
        return self.v if rule.reads == "keys" else self.k


class OutputUse(NamedTuple):
    """What a call does with its output.

    Attributes:
        saved: a backward pass may follow, which takes `Output.saved`.
        final: it wants the states that leave; False: `Output.leaving` may be None.
        in_place: they may be written over the states that enter.
        alone: no states are exchanged with other ranks.
    """

    saved: bool = False
    final: bool = True
    in_place: bool = False
    alone: bool = False


PLAIN = OutputUse()
"""The output and the states that leave."""


@dataclass(frozen=True)
class Summary(Generic[Forward]):
    """What a rank's tokens do to the states that enter its pieces.

    Attributes:
        transition: of each piece (None for the identity, or where nobody asked).
        leaving: the state leaving each piece.
        found: what `output` need not find again.
    """

    transition: Tensor | None
    leaving: Tensor
    found: Forward


@dataclass(frozen=True)
class Output:
    """What a rank's tokens give.

    Attributes:
        o: ``[B, T, H, V]`` in v's dtype.
        leaving: the state leaving each piece (None where `OutputUse.final` is False).
        saved: what spares the gradients work (`Backward.saved`); empty unless `OutputUse.saved`.
    """

    o: Tensor
    leaving: Tensor | None
    saved: tuple[Tensor | None, ...] = ()


class Backward(NamedTuple):
    """What a backward pass is given, but for gradients of states.

    Attributes:
        S0: the states that entered, as `output` was given them.
        do: the gradient of o.
        saved: `Output.saved`, or nothing.
        gate: whether anybody wants g's gradient, which may be left out otherwise.
        queries: whether nobody wants any but that of q: all others may be left out then.
    """

    S0: Tensor | None
    do: Tensor
    saved: tuple[Tensor | None, ...] = ()
    gate: bool = True
    queries: bool = False


@dataclass(frozen=True)
class Adjoint(Generic[Back]):
    """The gradient reaching the states that enter, and what `gradients` need not find again."""

    entering: Tensor
    found: Back


class InputGradients(NamedTuple):
    """Gradients of the inputs (None where an input is, for g where nobody wants it, and for what a rule does not read)
    and of the states that enter (None where none do)."""

    inputs: Inputs
    entering: Tensor | None

    def like(self, inputs: Inputs) -> list[Tensor | None]:
        """Those of the inputs, in the dtypes of what they belong to."""
        pairs = zip(inputs, self.inputs)
        return [None if x is None or d is None else d if d.dtype == x.dtype else d.to(x.dtype) for x, d in pairs]


class SpanMaps(NamedTuple):
    """What each span (a run of chunks of one piece that one program works through) does to the state.

    Attributes:
        kind: the shape of the transitions.
        own: what each adds, ``[B, NS, H, K, V]``.
        transition: log2 of what is left of the state ``[B, NS, H]`` or ``[B, NS, H, K]``, dense ones themselves
            ``[B, NS, H, K, K]``; None for the identity.
        all: of every span; False: without those that no later span of this rank needs.
        zero: int32 ``[B, NS, H]``: which dense transitions are 0, and not written; None: nobody has looked. Of KDA's
            launches that carry states ``[2, B, NS, H]``: by how many chunks at spans' ends, and (gradients) at their
            beginnings that is known.
        squares: ``[B, NS, H, 8]``, where `zero` is: sums of squares of the other transitions' elements, the root of
            whose sum bounds what a transition leaves of a state.
        image: bf16 ``[B, NS, H, 2, K, K]``, transitions as kernels multiply by them that carry states themselves.
        half: the same of spans' first halves, of which they find maps on the way back. None: nobody wants them.
    """

    kind: Transition
    own: Tensor
    transition: Tensor | None
    all: bool
    zero: Tensor | None = None
    squares: Tensor | None = None
    image: Tensor | None = None
    half: Tensor | None = None


Mail = tuple[tuple[Tensor | int | None, ...], tuple[int, ...]]
"""What kernels take that send and receive states themselves (`wy/mail.cuh`): the mailboxes, and where states come from
and go. Between the two what spans do to states, and where these are put."""


class Border(Protocol):
    """The exchange of states at a rank's borders, as launches among those of a backend that scans over spans.

    States are those of spans ``[B, NS, H, K, V]`` or pieces ``[B, N, H, K, V]``; `reverse` is the way of gradients.

    Attributes:
        key: what two borders have in common that launch alike. memory: what their launches use and no call brings.
        beside: the stream that exchanges may run on beside the caller's; None: they stand in order.
        whole: (forward, back) whether `spans` sees to every piece. sends: whether any state goes.
            carries: whether any of what comes goes on.
    """

    key: Hashable
    memory: tuple[Tensor, ...]
    beside: SideStream | None
    whole: tuple[bool, bool]
    sends: tuple[bool, bool]
    carries: tuple[bool, bool]

    def mail(self, states: tuple[int, int, int], reverse: bool) -> Mail | None:
        """That of so many states [K, V], for those who exchange them in place of `spans`; None: that does."""
        ...

    def spans(
        self, maps: SpanMaps, S0: Tensor | None, entering: Tensor, leaving: Tensor, first: Tensor | None,
        reverse: bool, beside: bool, through: Tensor | None = None, final: bool = False,
    ) -> None:  # fmt: skip
        """Scan the spans of the pieces at the borders into `entering`: states go on to other ranks and come from there.
        Backward dense transitions are transposed.

        `first` ``[N, 2]``: each piece's first span, and how many it has. `beside`: other kernels run meanwhile.
        `final`: `leaving` takes what leaves those pieces. `through` ``[B, N, H, K, K]``: the transitions of whole
        pieces under dense maps, by which what comes then goes on (`carries`); `leaving` then holds what they add."""
        ...


class Local(Protocol[Forward, Back]):
    """One rank's tokens under one rule. States are ``[B, N, H, K, V]`` for N pieces, fp32 (fp64 for fp64 inputs).

    Made by ``backend(rule, inputs, cu, scale, …)``: `cu` holds the offsets ``[N+1]`` of the pieces in the tokens, the
    same for every batch row, as an integer tensor on their device; None: one piece.

    Attributes:
        prepares: whether `prepare` has anything to do.
        crosses: whether `output` and `gradients` take a `Border`: they then exchange states themselves, without
            `summary`, `adjoint` and the like.
    """

    prepares: ClassVar[bool]
    crosses: ClassVar[bool]

    def summary(self, S0: Tensor | None, through: bool, known: Summary[Forward] | None = None) -> Summary[Forward]:
        """The state leaving each piece, given those that enter, and if `through` the pieces' transitions. `known`: a
        summary of the same tokens from other states."""
        ...

    def prepare(self, summary: Summary[Forward]) -> Summary[Forward]:
        """Work of the output that needs no entering state, for while an exchange is under way."""
        ...

    def output(
        self, S0: Tensor | None, summary: Summary[Forward] | None = None, border: Border | None = None
    ) -> Output:
        """Everything, given the states that enter. `summary`: of the same tokens, from whatever states."""
        ...

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[Back]:
        """The gradient reaching the states that enter, given those of the output and of the states that leave."""
        ...

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[Back]) -> Adjoint[Back]:
        """Work of the gradients that needs no arriving gradient, for while an exchange is under way."""
        ...

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[Back] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        """All gradients, given those of the states that leave. `adjoint`: of the same backward pass, whatever those
        were."""
        ...
