"""`ContextParallel`: the group a sequence is split over, how its ranks exchange states, and its layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .algebra import Affine
from .autograd import first_derivative_only, outside_graphs
from .choices import AttentionChoice, LayoutKind, ScanChoice, TransportChoice, ValidateChoice
from .comm import TRANSPORTS, Group, Route
from .errors import ArgumentError, Facts, PeerError, RingLAError, UnsupportedError
from .layout import Layout
from .scan import CANONICAL, STRATEGIES, Chain, Cost, CostModel, Scan

ATTENTION = ("auto", "ring", "all_gather", "ulysses", "usp")
VALIDATE = ("first", "always", "never")
CANONICAL_CHUNK = 64
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


class _OfThisProcess:
    """A handle of something of this process: a copy is the handle itself, and there is no pickle."""

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    def __reduce__(self):
        hint = "Pickle what it was made of, and make another there"
        raise UnsupportedError(type(self).__name__, "one that stays in its process", "a pickle", hint)


class ContextParallel(_OfThisProcess):
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
        _one_of("scan", scan, ("auto", *STRATEGIES))
        _one_of("attention", attention, ATTENTION)
        _one_of("transport", transport, TRANSPORTS)
        _one_of("validate", validate, VALIDATE)
        timeout = _duration(timeout)
        if not isinstance(deterministic, bool):
            raise ArgumentError("deterministic", "True or False", repr(deterministic))
        if deterministic and scan not in ("auto", "ring"):
            raise ArgumentError(
                "scan", '"auto" or "ring" with deterministic=True', repr(scan), "States fold in one order"
            )
        self.comm = Group(_process_group(group), timeout, transport)
        self.grid = Grid.of(group, self.comm, transport) if isinstance(group, DeviceMesh) and group.ndim == 2 else None
        if attention == "usp" and self.grid is None:
            raise ArgumentError("group", 'a DeviceMesh with axes "ulysses" and "ring" for attention="usp"', repr(group))
        self.scan, self.attention, self.transport = scan, attention, transport
        self.deterministic, self.timeout, self.validate = deterministic, timeout, validate
        if validate != "never":
            settings = dict(scan=scan, attention=attention, transport=transport, deterministic=self.deterministic)
            self.comm.agree("the settings of ContextParallel", settings | {"validate": validate})
        self.comm.all_reduce(torch.zeros(1, device=self.device)).wait()  # every rank opens its connections here
        self.cost = CostModel.measure(self.comm) if scan == "auto" and self.size > 1 and not deterministic else None
        self._chosen: dict[object, Scan] = {}

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

    def price(self, cost: Cost, like: Affine) -> float:
        """What an exchange of maps like `like` costs: seconds where the group was measured, else bytes received."""
        return self.cost.seconds(cost, like) if self.cost else cost.received


@dataclass(frozen=True)
class Grid:
    """The axes of a two-dimensional mesh, as attention uses them.

    Attributes:
        ulysses: ranks that exchange tokens for heads.
        ring: ranks that hold the same heads.
        holders: for each rank of `ring`, the ranks of the whole group it exchanged tokens with.
    """

    ulysses: Group
    ring: Group
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, whole: Group, transport: str) -> Grid:
        """The axes of `mesh`, whose ranks are those of `whole`."""
        carried = "torch" if transport == "torch" else "auto"
        ulysses, ring = (Group(mesh.get_group(axis), whole.timeout, carried) for axis in ("ulysses", "ring"))
        by_ring = mesh.mesh if mesh.mesh_dim_names == ("ring", "ulysses") else mesh.mesh.T
        rows = [sorted(row) for row in by_ring.tolist()]
        lines = [next(row for row in rows if rank in row) for rank in ring.global_ranks]
        return cls(ulysses, ring, tuple(tuple(whole.global_ranks.index(r) for r in line) for line in lines))


class ShardedLayout(_OfThisProcess, Layout):
    """A `Layout` bound to its `ContextParallel`: the layout of an operator's arguments, and the ways to change it.

    Attributes:
        cp: the ContextParallel it belongs to.
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
            cp.comm.agree("the layout", f"refused: {error}" if error else _describe(self))
        if error is not None:
            raise error
        _ = self.lengths  # found now: torch.compile cannot trace the first read of a cached property

    @cached_property
    def positions(self) -> Tensor:
        return self.positions_of(self.tokens()).to(self.cp.device)

    @cached_property
    def documents(self) -> Tensor:
        """Document of each local token, int64 ``[T_local]``."""
        return self.documents_of(self.tokens()).to(self.cp.device)

    @cached_property
    def cu_pieces(self) -> Tensor:
        """Local offsets ``[pieces+1]`` of this rank's pieces, int32 on its device."""
        return torch.tensor(self.piece_offsets, dtype=torch.int32, device=self.cp.device)

    @cached_property
    def _local(self) -> Tensor:
        return self.tokens().to(self.cp.device)

    # -- agreement -----------------------------------------------------------------------------------------

    @outside_graphs
    def agree(self, call: str, signature: tuple[tuple[str, object], ...] | None, error: Exception | None) -> None:
        """All ranks compare a call, by names and what they stand for; an error on one is raised on every rank that
        compares.

        With validate="first" a signature already seen on this layout is not compared again.
        """
        known = error is None and (call, signature) in self._seen
        if self.cp.validate == "always" or (self.cp.validate == "first" and not known):
            report = f"refused: {error}" if error else {"call": call} | dict(signature)
            try:
                self.cp.comm.agree(f"the arguments of {call}", report)
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
        self._check_length(x, dim, self.seq_len, "the whole sequence")
        return x.index_select(dim, self._local.to(x.device))

    @outside_graphs
    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence, on every rank, from its parts ``x [..., T_local, ...]`` along `dim`.

        Differentiable: gradients flowing into the result are summed over the ranks.
        """
        self._agree_on_tokens("gather", x, dim)
        return _Gather.apply(x.movedim(dim, 0), self).movedim(0, dim)

    @outside_graphs
    def convert(self, x: Tensor, other: ShardedLayout, dim: int = 1) -> Tensor:
        """This rank's tokens under `other`, a layout of the same sequence, by one all-to-all. Differentiable."""
        if not isinstance(other, ShardedLayout) or other.cp is not self.cp:
            raise ArgumentError("other_layout", "a layout made by the same ContextParallel", other)
        if other.seq_len != self.seq_len:
            raise ArgumentError("other_layout", f"a layout of {self.seq_len} tokens", f"one of {other.seq_len}")
        self._agree_on_tokens("convert", x, dim, ("other_layout", other.split))
        if other.split == self.split:
            return x
        route = self.route(("convert", other.split), lambda: [other.tokens(r) for r in range(self.world_size)])
        return route(x, dim)

    @outside_graphs
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

        def check() -> None:
            if ids.dtype not in SIGNED:
                raise ArgumentError("ids", f"one of {', '.join(map(str, SIGNED))}", ids.dtype)
            held = torch.iinfo(ids.dtype)
            if not isinstance(ignore_index, int) or not held.min <= ignore_index <= held.max:
                raise ArgumentError("ignore_index", f"an int that {ids.dtype} holds", repr(ignore_index))

        self._agree_on_tokens("targets", ids, dim, ("ignore_index", ignore_index), name="ids", check=check)
        route = self.route("targets", lambda: [self._successors(r) for r in range(self.world_size)])
        following = route(ids, dim)
        last = (self._successors(self.rank) < 0).to(ids.device)
        shape = [1] * ids.dim()
        shape[dim] = -1
        return following.masked_fill(last.view(shape), ignore_index)

    def _successors(self, rank: int) -> Tensor:
        tokens = self.tokens(rank)
        last = torch.isin(tokens + 1, torch.tensor(self.cu_seqlens))
        return torch.where(last, -1, tokens + 1)

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
            self._check_length(x, dim, self.local_length, "this rank's tokens", name)
            check()
        except RingLAError as e:
            error = e
        signature = None
        if error is None:
            signature = (("dim", dim), (name, Facts.of(x, dim)), *rest, ("gradients", torch.is_grad_enabled()))
        self.agree(call, signature, error)

    def _check_length(self, x: Tensor, dim: int, length: int, what: str, name: str = "x") -> None:
        if not isinstance(dim, int):
            raise ArgumentError("dim", "an int", repr(dim))
        if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim():
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(name, f"a tensor with dimension {dim}", got)
        if x.shape[dim] != length:
            if x.shape[dim] == self.seq_len:
                self.require_local(name, self.seq_len)
            raise ArgumentError(name, f"{length} along dimension {dim} ({what})", list(x.shape))


class _Gather(torch.autograd.Function):
    """All ranks' rows, in sequence order; the gradient is summed over ranks and cut again."""

    @staticmethod
    def forward(ctx, x: Tensor, layout: ShardedLayout) -> Tensor:
        ctx.layout = layout
        longest = max(layout.lengths)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = layout.cp.comm.all_gather(padded).wait()
        rows = torch.cat([part[:n] for part, n in zip(parts, layout.lengths)])
        out = torch.empty_like(rows)
        out[layout.order.to(x.device)] = rows
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor):
        layout = ctx.layout
        rows = grad[layout.order.to(grad.device)].split(list(layout.lengths))
        padded = grad.new_zeros(layout.world_size, max(layout.lengths), *grad.shape[1:])
        for part, row in zip(padded, rows):
            part[: len(row)] = row
        return layout.cp.comm.all_to_all(padded).wait().sum(0)[: layout.local_length], None


def _describe(layout: Layout) -> str:
    """A layout in few words, equal on two ranks only if the layouts are."""
    cu = layout.cu_seqlens
    shown = str(list(cu)) if len(cu) <= 9 else f"{len(cu) - 1} documents, hash {hash(cu):x}"
    return f"seq_len={layout.seq_len}, kind={layout.kind}, cu_seqlens={shown}, multiple_of={layout.multiple_of}"


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if isinstance(group, DeviceMesh):
        if group.ndim == 1:
            return group.get_group()
        if group.ndim != 2 or set(group.mesh_dim_names or ()) != {"ulysses", "ring"}:
            got = f"one of shape {tuple(group.shape)} with axes {group.mesh_dim_names}"
            expected = 'a one-dimensional DeviceMesh, or a two-dimensional one with axes "ulysses" and "ring"'
            raise ArgumentError("group", expected, got, 'Pick an axis: mesh["context"]')
        ranks = sorted(group.mesh.flatten().tolist())
        return dist.new_group(ranks, use_local_synchronization=True) if len(ranks) < dist.get_world_size() else None
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group", "a ProcessGroup, a DeviceMesh or None", type(group).__name__)
    return group


def _duration(timeout: timedelta | float) -> timedelta:
    try:
        duration = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):  # no number, or none that a timedelta can hold
        duration = timedelta(0)
    if duration <= timedelta(0):
        raise ArgumentError("timeout", "a positive timedelta or number of seconds", repr(timeout))
    return duration


def _one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ArgumentError(name, f"one of {', '.join(choices)}", repr(value))
