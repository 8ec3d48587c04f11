"""`AgreedLayout`: a layout whose ranks have agreed on it, what it keeps for them, and this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ..autograd import outside_graphs
from ..choices import LayoutKind
from ..comm import Entry, Route, refusal
from ..errors import ArgumentError, Facts, PeerError, RingLAError
from ..kept import MadeOnce, once
from ..layout import Layout
from . import moves
from .arguments import check_dense, check_dim, check_length, describe
from .handle import OfThisProcess, enter
from .marks import fingerprint
from .ranks import ContextRanks

CANONICAL_CHUNK = 64


class AgreedLayout(OfThisProcess, Layout):
    """A `Layout` bound to its `ContextParallel`; `ShardedLayout` adds what moves tokens, and says what the rest is."""

    def __init__(
        self,
        cp: ContextRanks,
        seq_len: int,
        kind: LayoutKind = "zigzag",
        cu_seqlens: Tensor | Sequence[int] | None = None,
        multiple_of: int | None = None,
        window: int | None = None,
    ) -> None:
        self.cp = cp
        self.bindings = 0
        self.kept = MadeOnce()
        self._seen: dict[object, Entry] = {}
        if multiple_of is None:
            multiple_of = CANONICAL_CHUNK if cp.deterministic else 1
        error: ArgumentError | None = None
        try:
            if cp.deterministic and isinstance(multiple_of, int) and multiple_of % CANONICAL_CHUNK:
                expected = f"a multiple of {CANONICAL_CHUNK} with deterministic=True"
                raise ArgumentError("multiple_of", expected, multiple_of)
            super().__init__(seq_len, kind, cp.size, cp.rank, cu_seqlens, multiple_of, cp.deterministic, window)
        except ArgumentError as e:
            error = e
        cp.agree_on_layout(error or describe(self))
        _ = self.lengths  # found now: torch.compile cannot trace the first read of a cached property
        self.number = enter(self)

    @property
    def positions(self) -> Tensor:
        return self._index("positions", lambda: self.positions_of(self.tokens()))

    @property
    def documents(self) -> Tensor:
        """Document of each local token, int64 ``[T_local]``."""
        return self._index("documents", lambda: self.documents_of(self.tokens()))

    @once
    def cu_pieces(self) -> Tensor:
        """Local offsets ``[pieces+1]`` of this rank's pieces, int32 on its device."""
        return torch.tensor(self.piece_offsets, dtype=torch.int32, device=self.cp.device)

    @property
    def local_tokens(self) -> Tensor:
        """Index of each local token in the sequence, int64 ``[T_local]``."""
        return self._index("local_tokens", self.tokens)

    def _index(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """An index of this rank's tokens on its device, made once."""
        if torch.compiler.is_compiling():
            return moves.layout_index(self.number, name, self.local_length, self.cp.device)
        return self.kept(Tensor, lambda: make().to(self.cp.device), name)

    # -- agreement -----------------------------------------------------------------------------------------

    @outside_graphs
    def agree(
        self, call: str, signature: tuple[tuple[str, object], ...] | None, error: Exception | None
    ) -> Entry | None:
        """All ranks compare a call, by names and what they stand for; an error on one is raised on every rank that
        compares.

        With validate="first" a signature already seen on this layout is not compared again. Returns what `again` takes.
        """
        entry, error = None, error or self.cp.several_threads()
        if self.cp.validate != "never" and self.cp.size > 1:
            agreement, what, key = self.cp.comm.agreement, f"the arguments of {call}", (call, signature)
            known = self._seen.get(key) if error is None else None
            if known is not None and self.cp.validate == "first":
                agreement.again(known)
                return known
            report = {"call": call} | dict(signature or ()) | {"layout": describe(self)}
            entry = self._seen[key] = self._compare(what, f"refused: {error}" if error else report, error)
        if error is not None:
            raise error
        return entry

    def again(self, entry: Entry | None) -> None:
        """This rank comes to a call like one that `agree` has compared; nobody waits."""
        error = self.cp.several_threads()
        if error is not None:
            self.agree("a call like one before", None, error)  # raises, on every rank
        if entry is not None:
            self.cp.comm.agreement.again(entry)

    def _compare(self, what: str, report: object, error: Exception | None) -> Entry:
        """Compare a call now. Where the others skip it, having made such a call before, this rank's own error goes
        first."""
        try:
            return self.cp.comm.agreement.agree(what, report, alike=refusal(error))
        except PeerError:
            if error is not None:
                raise error from None
            raise

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of the whole ``x [..., seq_len, ...]`` along `dim`. No communication.

        Differentiable: the gradient of `x` is this rank's part, zero for other ranks' tokens.
        """
        check_length(x, dim, self.seq_len, "the whole sequence")
        out = x.index_select(dim, self.local_tokens.to(x.device))
        bound = self.bindings > 0 and not torch.compiler.is_compiling()
        self.cp.marks.put(out, self, fingerprint(x) if bound else None)
        return out

    def route(self, name: Hashable, wants: Callable[[], Sequence[Tensor]], neighbours: bool = False) -> Route:
        """A route for rows of this layout, made once and kept under `name`."""
        return self.kept(Route, lambda: Route(self, wants(), self.cp.comm, neighbours), name)

    def _agree_on_tokens(
        self,
        call: str,
        x: Tensor,
        dim: int,
        *rest: tuple[str, object],
        name: str = "x",
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Check this rank's tokens along `dim`, and that all ranks bring the same but for their number."""
        error = None
        try:
            check_dim(x, dim, name)
            if x.shape[dim] == self.seq_len:
                self.require_local(name, self.seq_len)
            check_length(x, dim, self.local_length, "this rank's tokens", name)
            check_dense(x, name)
            self.cp.marks.require(name, x, self)
            check()
        except RingLAError as e:
            error = e
        signature = None
        if error is None:
            what = (name, Facts.of(x, dim)), (f"device of {name}", x.device.type)
            signature = (("dim", dim), *what, *rest, ("gradients", torch.is_grad_enabled()))
        self.agree(call, signature, error)
