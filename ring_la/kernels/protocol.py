"""What a backend of the linear recurrences does: one rank's tokens, between two exchanges.

A *piece* is a run of consecutive tokens of one document. A backend never communicates and never asks where the
states that enter its pieces come from; a sharded call is a packed one whose pieces get their states from
other ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from torch import Tensor

from ..algebra import Transition


class Inputs(NamedTuple):
    """What tokens bring, ``[B, T, heads, …]``; absent tensors are None.

    q, k ``[B,T,Hk,K]``, v ``[B,T,H,V]`` with H a multiple of Hk, g ``[B,T,H]`` or ``[B,T,H,K]`` (natural log, ≤ 0),
    beta ``[B,T,H]``, a and b ``[B,T,H,K]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


class Border(Protocol):
    """The exchange of states at a rank's borders, as launches among those of a backend that scans over segments.

    States and maps are those of `Local`, of segments ``[B, NS, H, …]`` or pieces ``[B, N, H, …]``; `reverse` is the way
    of gradients.

    Attributes:
        key: what two borders have in common that launch alike. memory: what their launches use and no call brings.
        beside: the stream that exchanges may run on beside the caller's; None: they stand in order.
        whole: (forward, back) whether `segments` sees to every piece. arrives: whether any state comes. carries:
            whether any of what comes goes on.
    """

    key: Hashable
    memory: tuple[Tensor, ...]
    beside: object
    whole: tuple[bool, bool]
    arrives: tuple[bool, bool]
    carries: tuple[bool, bool]

    def segments(
        self, kind: Transition, A: Tensor | None, b: Tensor, S0: Tensor | None, entering: Tensor, leaving: Tensor,
        first: Tensor | None, reverse: bool, beside: bool,
    ) -> None:  # fmt: skip
        """Scan the segments of the pieces at the borders into `entering`, given their maps (log2 A, b): states go on to
        other ranks and come from there. `first` ``[N, 2]``: each piece's first segment, and how many it has. `beside`:
        other kernels run meanwhile."""
        ...

    def dense(self, A: Tensor | None, entering: Tensor, leaving: Tensor, reverse: bool) -> None:
        """The same for dense maps (A, `leaving`) of whole pieces: fill `entering` where a state comes from elsewhere. A
        is not read where nothing goes on; backward it is transposed. B must be 1 or N."""
        ...


class Local(Protocol):
    """One rank's tokens under one rule. States are ``[B, N, H, K, V]`` for N pieces, fp32 (fp64 for fp64 inputs).

    Made by ``Backend(rule, inputs, cu, scale)``: `cu` holds the offsets ``[N+1]`` of the pieces in the tokens, the
    same for every batch row, as an integer tensor on their device; None: one piece.

    Attributes:
        prepares: whether `prepare` has anything to do.
        crosses: whether `output` and `gradients` take a `Border` as their last argument: they then exchange states
            themselves, without `summary`, `adjoint` and the like.
    """

    prepares: bool
    crosses: bool

    def summary(self, S0: Tensor | None, through: bool) -> tuple[Tensor | None, Tensor]:
        """The transition of each piece (None for the identity, or unless `through`) and the state leaving it."""
        ...

    def prepare(self) -> None:
        """Work of the output that needs no entering state, for while an exchange is under way."""
        ...

    def output(self, S0: Tensor | None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, H, V]`` in v's dtype, and the state leaving each piece (see `make_local`), given the states that
        enter."""
        ...

    def adjoint(self, do: Tensor, dS_end: Tensor | None) -> Tensor:
        """The gradient reaching the states that enter, given those of the output and of the states that leave."""
        ...

    def prepare_gradients(self, S0: Tensor | None, do: Tensor, gate: bool = True) -> None:
        """Work of the gradients that needs no arriving gradient, for while an exchange is under way; between `adjoint`
        and `gradients`, with the same `S0`, `do` and `gate`."""
        ...

    def gradients(
        self, S0: Tensor | None, do: Tensor, dS_end: Tensor | None, gate: bool = True
    ) -> tuple[Inputs, Tensor]:
        """The gradients of the inputs (None where an input is) and of the states that enter (unread where none do).

        gate=False allows to leave out g's, where nobody wants it.
        """
        ...

    def kept(self) -> tuple[Tensor | None, ...]:
        """What, given to `make_local` with the same tokens, spares `gradients` what `output` has computed."""
        ...
