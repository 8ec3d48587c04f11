"""What a backend of the linear recurrences does: one rank's tokens, between two exchanges.

A *piece* is a run of consecutive tokens of one document. A backend never communicates and never asks where the
states that enter its pieces come from; a sharded call is a packed one whose pieces get their states from
other ranks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


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


class Local(Protocol):
    """One rank's tokens under one rule. States are ``[B, N, H, K, V]`` for N pieces, fp32 (fp64 for fp64 inputs).

    Made by ``Backend(rule, inputs, cu, scale)``: `cu` holds the offsets ``[N+1]`` of the pieces in the tokens, the
    same for every batch row, as an integer tensor on their device; None: one piece.

    Attributes:
        prepares: whether `prepare` has anything to do.
    """

    prepares: bool

    def summary(self, S0: Tensor | None, through: bool) -> tuple[Tensor | None, Tensor]:
        """The transition of each piece (None for the identity, or unless `through`) and the state leaving it."""
        ...

    def prepare(self) -> None:
        """Work of the output that needs no entering state, for while an exchange is under way."""
        ...

    def output(self, S0: Tensor | None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, H, V]`` in v's dtype, and the state leaving each piece, given the states that enter."""
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
        """The gradients of the inputs (None where an input is) and of the states that enter.

        gate=False allows to leave out g's, where nobody wants it.
        """
        ...

    def kept(self) -> tuple[Tensor | None, ...]:
        """What, given to `make_local` with the same tokens, spares `gradients` what `output` has computed."""
        ...
