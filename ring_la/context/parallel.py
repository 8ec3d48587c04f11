"""`ContextParallel`: the group a sequence is split over, how its ranks exchange states, and its layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..algebra import Affine
from ..choices import AttentionChoice, LayoutKind, ScanChoice, TransportChoice, ValidateChoice
from ..comm import Group, Route
from ..errors import ArgumentError, Facts, PeerError, RingLAError
from ..layout import Layout
from ..scan import CANONICAL, STRATEGIES, Chain, Cost, CostModel, Scan
from . import moves
from .arguments import check_choices, check_dim, check_labels, check_length, describe, duration
from .gather import Gather
from .grid import Grid, process_group
from .handle import OfThisProcess, enter

CANONICAL_CHUNK = 64


class ContextParallel(OfThisProcess):
    """One sequence over the ranks of a group.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group; or, for attention="usp",
            a two-dimensional DeviceMesh with axes named "ulysses" and "ring", over all ranks of which the sequence
            is split. Creating a ContextParallel is collective over the group.
        scan: how states travel between ranks: "auto", "ring", "pipelined", "all_gather", "doubling" or
            "all_to_all". "auto" measures latency and bandwidth of the group once, here, and picks for each
            shape by a cost model.
        attention: how softmax attention exchanges keys and values: "auto" or one of ATTENTION.
        transport: what carries the messages: "torch" (torch.distributed's backend of the group), "symmetric" (memory of
            the GPUs of one host, mapped by all: one small kernel a message; a ring of softmax attention copies keys and
            values from their owner's memory), or "auto": "torch", but for that ring and a ring of states where GPUs
            reach each other's memory.
        deterministic: forward results of the recurrences do not depend on the number of ranks, bit for bit:
            segment borders fall on multiples of 64 tokens and states are folded in one canonical order.
        timeout: a timedelta or seconds. A peer that takes longer becomes a PeerError on gloo; on NCCL the
            process group's own timeout governs.
        validate: "first" compares shapes, dtypes and layouts among ranks the first time a layout sees them;
            "always" does so in every call and also checks values (gates ≤ 0, no NaN), which synchronises;
            "never" trusts the caller.

    Raises:
        ArgumentError: naming the argument.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        scan: ScanChoice = "auto",
        attention: AttentionChoice = "auto",
        transport: TransportChoice = "auto",
        deterministic: bool = False,
        timeout: timedelta | float = 300.0,
        validate: ValidateChoice = "first",
    ) -> None:
        check_choices(scan, attention, transport, deterministic, validate)
        timeout = duration(timeout)
        self.comm = Group(process_group(group), timeout, transport)
        self.grid = Grid.of(group, self.comm, transport) if isinstance(group, DeviceMesh) and group.ndim == 2 else None
        if attention == "usp" and self.grid is None:
            raise ArgumentError("group", 'a DeviceMesh with axes "ulysses" and "ring" for attention="usp"', repr(group))
        self.scan, self.attention, self.transport = scan, attention, transport
        self.deterministic, self.timeout, self.validate = deterministic, timeout, validate
        if validate != "never":
            settings = dict(scan=scan, attention=attention, transport=transport, deterministic=self.deterministic)
            self.comm.agreement.agree("the settings of ContextParallel", settings | {"validate": validate})
        self.comm.all_reduce(torch.zeros(1, device=self.device)).wait()  # every rank opens its connections here
        self.cost = CostModel.measure(self.comm) if scan == "auto" and self.size > 1 and not deterministic else None
        self._chosen: dict[object, Scan] = {}
        self.number = enter(self)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks the sequence is split over."""
        return self.comm.size

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live: its CUDA device under NCCL, else the CPU."""
        return self.comm.device

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.size}, scan={self.scan!r}, attention={self.attention!r})"

    def layout(
        self,
        seq_len: int,
        kind: LayoutKind = "zigzag",
        cu_seqlens: Tensor | Sequence[int] | None = None,
        multiple_of: int | None = None,
    ) -> ShardedLayout:
        """The split of a sequence of `seq_len` tokens over this group; collective unless validate="never".

        Args:
            seq_len: tokens of the whole sequence; any number ≥ 1.
            kind: "contiguous", "zigzag" or "striped".
            cu_seqlens: offsets ``[N+1]`` of packed documents in the whole sequence, on any device.
            multiple_of: segment borders fall on multiples of this; None: 64 if deterministic, else 1.

        Raises:
            ArgumentError: a bad argument. DisagreementError: the ranks ask for different layouts.
        """
        return ShardedLayout(self, seq_len, kind, cu_seqlens, multiple_of)

    def strategy(self, chain: Chain, like: Affine) -> Scan:
        """The scan strategy for maps like `like` over the segments of `chain`."""
        if self.deterministic:
            return CANONICAL
        if self.scan != "auto":
            return STRATEGIES[self.scan]
        if self.cost is None:
            return STRATEGIES["ring"]
        key = (chain, like.kind, like.b.shape, like.b.dtype)
        if key not in self._chosen:
            self._chosen[key] = STRATEGIES[self.cost.best(chain, like)]
        return self._chosen[key]

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, in a new tensor; without gradients."""
        if torch.compiler.is_compiling():
            return moves.sum_over_ranks(x, self.number)
        return self.comm.all_reduce(x).wait()

    def price(self, cost: Cost, like: Affine) -> float:
        """What an exchange of maps like `like` costs: seconds where the group was measured, else bytes received."""
        return self.cost.seconds(cost, like) if self.cost else cost.received


class ShardedLayout(OfThisProcess, Layout):
    """A `Layout` bound to its `ContextParallel`: the layout of an operator's arguments, and the ways to change it.

    Attributes:
        cp: the ContextParallel it belongs to.
        number: what compiled graphs know it by.
        positions: int64 ``[T_local]``, position of each local token in its document.
    """

    def __init__(
        self,
        cp: ContextParallel,
        seq_len: int,
        kind: LayoutKind = "zigzag",
        cu_seqlens: Tensor | Sequence[int] | None = None,
        multiple_of: int | None = None,
    ) -> None:
        self.cp = cp
        self._seen: set[object] = set()
        if multiple_of is None:
            multiple_of = CANONICAL_CHUNK if cp.deterministic else 1
        error: ArgumentError | None = None
        try:
            if cp.deterministic and isinstance(multiple_of, int) and multiple_of % CANONICAL_CHUNK:
                expected = f"a multiple of {CANONICAL_CHUNK} with deterministic=True"
                raise ArgumentError("multiple_of", expected, multiple_of)
            super().__init__(seq_len, kind, cp.size, cp.rank, cu_seqlens, multiple_of)
        except ArgumentError as e:
            error = e
        if cp.validate != "never":
            cp.comm.agreement.agree("the layout", f"refused: {error}" if error else describe(self))
        if error is not None:
            raise error
        _ = self.lengths  # found now: torch.compile cannot trace the first read of a cached property
        self.number = enter(self)

    @property
    def positions(self) -> Tensor:
        return self._index("positions", lambda: self.positions_of(self.tokens()))

    @property
    def documents(self) -> Tensor:
        """Document of each local token, int64 ``[T_local]``."""
        return self._index("documents", lambda: self.documents_of(self.tokens()))

    @cached_property
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
        return self.kept(("index", name), lambda: make().to(self.cp.device))

    # -- agreement -----------------------------------------------------------------------------------------

    def agree(self, call: str, signature: tuple[tuple[str, object], ...] | None, error: Exception | None) -> None:
        """All ranks compare a call, by names and what they stand for; an error on one is raised on every rank that
        compares.

        With validate="first" a signature already seen on this layout is not compared again.
        """
        known = error is None and (call, signature) in self._seen
        if self.cp.validate == "always" or (self.cp.validate == "first" and not known):
            report = f"refused: {error}" if error else {"call": call} | dict(signature)
            try:
                self.cp.comm.agreement.agree(f"the arguments of {call}", report)
            except PeerError:
                if error is not None:  # the others skipped a comparison they had made before: this rank's own error
                    raise error from None
                raise
            self._seen.add((call, signature))
        if error is not None:
            raise error

    # -- moving tokens -------------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of the whole ``x [..., seq_len, ...]`` along `dim`. No communication.

        Differentiable: the gradient of `x` is this rank's part, zero for other ranks' tokens.
        """
        check_length(x, dim, self.seq_len, "the whole sequence")
        return x.index_select(dim, self.local_tokens.to(x.device))

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence, on every rank, from its parts ``x [..., T_local, ...]`` along `dim`.

        Differentiable: gradients flowing into the result are summed over the ranks.
        """
        if torch.compiler.is_compiling():
            return moves.gather(x, self.number, dim, self.seq_len)
        self._agree_on_tokens("gather", x, dim)
        return Gather.apply(x.movedim(dim, 0), self, self.cp.comm).movedim(0, dim)

    def convert(self, x: Tensor, other: ShardedLayout, dim: int = 1) -> Tensor:
        """This rank's tokens under `other`, a layout of the same sequence, by one all-to-all. Differentiable."""
        if not isinstance(other, ShardedLayout) or other.cp is not self.cp:
            raise ArgumentError("other_layout", "a layout made by the same ContextParallel", other)
        if other.seq_len != self.seq_len:
            raise ArgumentError("other_layout", f"a layout of {self.seq_len} tokens", f"one of {other.seq_len}")
        if torch.compiler.is_compiling():
            return moves.convert(x, self.number, other.number, dim, other.local_length)
        self._agree_on_tokens("convert", x, dim, ("other_layout", other.split))
        if other.split == self.split:
            return x
        route = self.route(("convert", other.split), lambda: [other.tokens(r) for r in range(self.world_size)])
        return route(x, dim)

    def targets(self, ids: Tensor, ignore_index: int = -100, dim: int = 1) -> Tensor:
        """Next-token labels of this rank's tokens: each token's successor in its document.

        Args:
            ids: token ids of this rank, ``[B, T_local]`` or ``[T_local]``, signed integers.
            ignore_index: the label of a document's last token.

        Returns:
            The labels, like `ids`.
        """
        if isinstance(ids, Tensor) and ids.dim() == 1:
            dim = 0
        if torch.compiler.is_compiling():
            return moves.targets(ids, self.number, ignore_index, dim)
        check = partial(check_labels, ids, ignore_index)
        self._agree_on_tokens("targets", ids, dim, ("ignore_index", ignore_index), name="ids", check=check)
        route = self.route("targets", lambda: [self.successors(r) for r in range(self.world_size)])
        following = route(ids, dim)
        last = (self.successors(self.rank) < 0).to(ids.device)
        shape = [1] * ids.dim()
        shape[dim] = -1
        return following.masked_fill(last.view(shape), ignore_index)

    def route(self, name: object, wants: Callable[[], Sequence[Tensor]], neighbours: bool = False) -> Route:
        """A route for rows of this layout, made once and kept under `name`."""
        return self.kept(("route", name), lambda: Route(self, wants(), self.cp.comm, neighbours))

    def kept(self, name: object, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for this layout and kept under `name`."""
        kept = self.__dict__.setdefault("_kept", {})
        if name not in kept:
            kept[name] = make()
        return kept[name]

    def _agree_on_tokens(
        self,
        call: str,
        x: Tensor,
        dim: int,
        *rest: tuple[str, object],
        name: str = "x",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Check this rank's tokens along `dim`, and that all ranks bring the same but for their number."""
        error = None
        try:
            check_dim(x, dim, name)
            if x.shape[dim] == self.seq_len:
                self.require_local(name, self.seq_len)
            check_length(x, dim, self.local_length, "this rank's tokens", name)
            check()
        except RingLAError as e:
            error = e
        signature = None
        if error is None:
            signature = (("dim", dim), (name, Facts.of(x, dim)), *rest, ("gradients", torch.is_grad_enabled()))
        self.agree(call, signature, error)
