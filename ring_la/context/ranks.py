"""`ContextRanks`: the group a sequence is split over, how its ranks exchange states, and what they agreed on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..algebra import Affine
from ..choices import AttentionChoice, HeadGroups, LayoutKind, ScanChoice, TransportChoice, ValidateChoice
from ..comm import Group
from ..errors import ArgumentError
from ..scan import CANONICAL, STRATEGIES, Chain, Cost, CostModel, Scan
from . import moves
from .arguments import check_choices, check_dense, check_head_groups, duration
from .grid import Grid, process_group
from .handle import OfThisProcess, enter
from .marks import Marks


class ContextRanks(OfThisProcess, ABC):
    """What a layout knows of its `ContextParallel`, which makes layouts of it. The arguments are described there."""

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        scan: ScanChoice = "auto",
        attention: AttentionChoice = "auto",
        transport: TransportChoice = "auto",
        head_groups: HeadGroups = 1,
        deterministic: bool = False,
        timeout: timedelta | float = 300.0,
        validate: ValidateChoice = "first",
    ) -> None:
        check_choices(scan, attention, transport, deterministic, validate)
        check_head_groups(head_groups)
        timeout = duration(timeout)
        self.comm = Group(process_group(group), timeout, transport)
        self.axes = Grid.of(group, self.comm, transport) if isinstance(group, DeviceMesh) and group.ndim == 2 else None
        if attention == "usp" and self.axes is None:
            raise ArgumentError("group", 'a DeviceMesh with axes "ulysses" and "ring" for attention="usp"', repr(group))
        self.scan_choice, self.attention, self.transport = scan, attention, transport
        self.head_groups: HeadGroups = head_groups
        self.deterministic, self.timeout, self.validate = deterministic, timeout, validate
        self.comm.agreement.backwards = validate != "never"
        if validate != "never":
            settings: dict[str, object] = dict(
                scan=scan, attention=attention, transport=transport, deterministic=self.deterministic
            )
            settings |= {"head_groups": head_groups, "validate": validate}
            if deterministic and self.device.type == "cpu":
                settings["threads (torch.get_num_threads())"] = torch.get_num_threads()  # on which bits depend
            self.comm.agreement.agree("the settings of ContextParallel", settings)
        self.comm.all_reduce(torch.zeros(1, device=self.device)).wait()  # every rank opens its connections here
        self.cost = CostModel.measure(self.comm) if scan == "auto" and self.size > 1 and not deterministic else None
        self.marks = Marks()
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
        how = f"scan={self.scan_choice!r}, attention={self.attention!r}"
        return f"ContextParallel(rank {self.rank} of {self.size}, {how})"

    @abstractmethod
    def layout(
        self,
        seq_len: int,
        kind: LayoutKind = "zigzag",
        cu_seqlens: Tensor | Sequence[int] | None = None,
        multiple_of: int | None = None,
        window: int | None = None,
    ) -> Any:
        """`ContextParallel.layout`: layouts stand above this class."""

    @abstractmethod
    def grid(self, shape: Sequence[int], counts: Sequence[int] | None = None) -> Any:
        """`ContextParallel.grid`."""

    @abstractmethod
    def scan(
        self, A: Tensor | None, b: Tensor, layout: Any = None, *, reverse: bool = False, exclusive: bool = False
    ) -> Tensor:
        """`ContextParallel.scan`."""

    def strategy(self, chain: Chain, like: Affine) -> Scan:
        """The scan strategy for maps like `like` over the segments of `chain`."""
        if self.deterministic:
            return CANONICAL
        if self.scan_choice != "auto":
            return STRATEGIES[self.scan_choice]
        if self.cost is None:
            return STRATEGIES["ring"]
        key = (chain, like.kind, like.b.shape, like.b.dtype)
        if key not in self._chosen:
            self._chosen[key] = STRATEGIES[self.cost.best(chain, like)]
        return self._chosen[key]

    def agree_on_layout(self, said: str | ArgumentError) -> None:
        """All ranks make the same layout, which is described; what is wrong with one rank's is an error on all."""
        error = said if isinstance(said, ArgumentError) else None
        if self.validate != "never":
            self.comm.agreement.agree("the layout", said if error is None else f"refused: {error}")
        if error is not None:
            raise error

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, in a new tensor; without gradients."""
        check_dense(x)
        if torch.compiler.is_compiling():
            return moves.sum_over_ranks(x, self.number)
        return self.comm.all_reduce(x).wait()

    def price(self, cost: Cost, like: Affine) -> float:
        """What an exchange of maps like `like` costs: seconds where the group was measured, else bytes received."""
        return self.cost.seconds(cost, like) if self.cost else cost.received
