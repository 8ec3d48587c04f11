"""Weights of which each rank has a part: whole for a moment while a prompt is read, cut where a token is decoded.

A large weight ``[rows, …]`` is in P parts of ``⌈rows / P⌉`` rows, the last ones filled up with zeros. The same parts
serve both ways:

    a prompt    the parts of a unit (a block, an embedding, a head) are gathered while the unit before it runs, and
                forgotten behind it, as FSDP2 does; two units' weights exist at once, and tokens are split as ever
    a token     ``y = x Wᵀ`` is a rank's rows of it, and one all-gather of ``y``: all ranks have the same token

No sum is cut into parts, so a cut product is the whole one's as far as its kernel is. What is small stays whole on
every rank. Outside a call a sharded parameter is a DTensor, so who multiplies by it in another way gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..comm import Group, Pending
from ..context import ContextParallel
from ..errors import UnsupportedError

LEAST = 2**26
"""Bytes from which a weight is sharded: each costs a token a message, which is more time than reading so many bytes."""


@dataclass(frozen=True, eq=False)
class WeightPart:
    """A rank's part of a weight.

    Attributes:
        stored: ``[⌈rows / P⌉, …]``, zeros behind this rank's rows. rows: of the whole weight.
        first: which of them is this rank's first. here: how many are this rank's.
    """

    stored: Tensor
    rows: int
    first: int
    here: int


@dataclass(frozen=True, eq=False)
class Unit:
    """What is gathered at once: sharded parameters in a module, each by the module that has it and its name."""

    module: nn.Module
    names: list[tuple[nn.Module, str]]


class ShardedWeights:
    """The sharded weights of a model, for calls without gradients. Collective: all ranks take the same, then settle.

    Args:
        cp: the ranks. cut: whether the call under way is of tokens that all ranks have alike, so that products are cut.

    Attributes:
        comm: the ranks, where results of cut products meet.
    """

    def __init__(self, cp: ContextParallel, cut: Callable[[], bool]) -> None:
        self.comm, self._cut, self._timeout = cp.comm, cut, cp.timeout
        group: Any = self.comm.group  # which only a group that has ended lacks
        self._mesh = DeviceMesh.from_group(group, self.comm.device.type)
        self._taken: list[tuple[nn.Module, str]] = []
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._parts: dict[tuple[nn.Module, str], WeightPart] = {}
        self._gathering: Gathering | None = None

    def take(self, module: nn.Module, names: Iterable[str], forward: Callable[..., Tensor]) -> None:
        """Shard parameters of a module by their first dimension, if one of them is large; on "meta" or in memory.

        forward: in place of the module's own where products are cut.
        """
        params = [(name, p) for name in names if (p := module._parameters.get(name)) is not None]
        if max(p.numel() * p.element_size() for _, p in params) < LEAST:
            return
        for name, p in params:
            if id(p) not in self._made:  # else a weight that two modules have
                shard = distribute_tensor(p.data, self._mesh, [Shard(0)], src_data_rank=None)
                self._made[id(p)] = p, nn.Parameter(shard, requires_grad=False)
            module._parameters[name] = self._made[id(p)][1]
            self._taken.append((module, name))
        changed: Any = module
        own, first = module.forward, params[0][0]

        def either(*args: Any, **keywords: Any) -> Any:
            if not isinstance(module._parameters[first], DTensor):
                return own(*args, **keywords)
            if not self._cut():
                got = f"{type(module).__name__} outside the blocks whose weights are gathered"
                raise UnsupportedError("model", "one whose modules are called as modules", got)
            return forward(*args, **keywords)

        changed.forward = either

    def take_linears(self, model: nn.Module, but: Iterable[nn.Module] = ()) -> None:
        """Shard linear layers and tables of embeddings, but those whose weights other modules read."""
        left = {id(module) for module in but}
        for module in model.modules():
            kind: Any = type(module)
            if id(module) in left:
                continue
            if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
                self.take(module, ("weight", "bias"), partial(self._linear, module))
            elif isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward and module.max_norm is None:
                self.take(module, ("weight",), partial(self._embedding, module))

    def settle(self, model: nn.Module) -> None:
        """All weights are in memory: from here on the model can be called."""
        settled: dict[int, tuple[nn.Parameter, nn.Parameter, WeightPart]] = {}
        for module, name in self._taken:
            p = module._parameters[name]
            assert p is not None
            if id(p) not in settled:
                settled[id(p)] = p, *self._settled(p.data)
            _, module._parameters[name], self._parts[module, name] = settled[id(p)]
        self._made.clear()
        model.requires_grad_(False)
        beside = self.comm
        if self.comm.size == dist.get_world_size():  # what is gathered ahead then holds up no other messages
            ranks: Any = dist.new_group(timeout=self._timeout)
            beside = Group(ranks, self._timeout, "torch")
        self._gathering = Gathering(model, self._parts, beside, self._cut)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around calls of the model's parts, one after the other, as if they were one call of it."""
        assert self._gathering is not None  # it is settled
        self._gathering.begin()
        try:
            yield
        finally:
            self._gathering.end()

    def part(self, module: nn.Module, name: str) -> WeightPart:
        """This rank's part of a parameter."""
        return self._parts[module, name]

    def _settled(self, shard: Any) -> tuple[nn.Parameter, WeightPart]:
        """A shard in memory of its own, filled up to the size that all ranks have."""
        local, rows = shard.to_local(), shard.shape[0]
        size, here = -(-rows // self.comm.size), local.shape[0]
        stored = local
        if here < size or not local.is_cuda or local.untyped_storage().nbytes() > local.nbytes:  # on CPUs: of a file
            stored = local.new_zeros(size, *local.shape[1:])
            stored[:here] = local
        again = DTensor.from_local(
            stored[:here], self._mesh, [Shard(0)], run_check=False, shape=shard.shape, stride=shard.stride()
        )
        part = WeightPart(stored, rows, min(rows, size * self.comm.rank), here)
        return nn.Parameter(again, requires_grad=False), part

    # -- cut products --------------------------------------------------------------------------------------

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        """``x Wᵀ + b`` by this rank's rows of W, then all ranks' side by side."""
        weight = self.part(module, "weight")
        bias = None if module.bias is None else self.part(module, "bias").stored
        with self.comm.streams.in_order():
            y = self.comm.all_gather(F.linear(x, weight.stored, bias)).wait()
        return y.movedim(0, -2).flatten(-2)[..., : weight.rows].contiguous()

    def _embedding(self, module: nn.Embedding, ids: Tensor) -> Tensor:
        """The rows of tokens that this rank has, zeros of the others, and the ranks' sum."""
        part = self.part(module, "weight")
        at = ids - part.first
        here = (at >= 0) & (at < part.here)
        x = F.embedding(torch.where(here, at, 0), part.stored) * here[..., None]
        with self.comm.streams.in_order():
            return self.comm.all_reduce(x).wait()


class Gathering:
    """Units gathered one ahead, in the order in which the model calls them, which the first call shows.

    Args:
        model: whose weights. parts: this rank's, all settled. comm: the ranks.
        cut: whether the call under way gathers nothing.
    """

    def __init__(
        self, model: nn.Module, parts: dict[tuple[nn.Module, str], WeightPart], comm: Group, cut: Callable[[], bool]
    ) -> None:
        self._parts, self._comm, self._cut = parts, comm, cut
        self._after: dict[Unit, Unit] = {}
        self._seen: set[Unit] = set()
        self._last: Unit | None = None
        self._ahead: tuple[Unit, list[Pending]] | None = None
        self._sharded: dict[Unit, list[nn.Parameter | None]] = {}
        model.register_forward_pre_hook(self.begin)
        model.register_forward_hook(self.end, always_call=True)
        for unit in units_of(model, parts):
            unit.module.register_forward_pre_hook(partial(self._enter, unit))
            unit.module.register_forward_hook(partial(self._leave, unit), always_call=True)

    def begin(self, *_: object) -> None:
        """A call begins with its first unit."""
        self._last = None

    def end(self, *_: object) -> None:
        """What was gathered for nobody, as a call failed or another way was taken, is gone."""
        ahead, self._ahead = self._ahead, None
        for pending in () if ahead is None else ahead[1]:
            pending.wait()

    def _enter(self, unit: Unit, *_: object) -> None:
        """A unit is called: its weights are whole, and the next one's come meanwhile."""
        if self._cut():
            return
        if self._ahead is None or self._ahead[0] is not unit:
            self.end()
            self._ahead = unit, self._post(unit)
        posted, self._ahead = self._ahead[1], None
        whole = [pending.wait().flatten(0, 1)[: self._parts[name].rows] for name, pending in zip(unit.names, posted)]
        self._sharded[unit] = [module._parameters[name] for module, name in unit.names]
        for (module, name), x in zip(unit.names, whole):
            module._parameters[name] = nn.Parameter(x, requires_grad=False)
        if self._last is not None and unit not in self._seen:
            self._after[self._last] = unit
        self._seen.add(unit)
        self._last = unit
        if unit in self._after:
            self._ahead = self._after[unit], self._post(self._after[unit])

    def _leave(self, unit: Unit, *_: object) -> None:
        """It is done, or has failed."""
        for (module, name), p in zip(unit.names, self._sharded.pop(unit, ())):
            module._parameters[name] = p

    def _post(self, unit: Unit) -> list[Pending]:
        return [self._comm.all_gather(self._parts[name].stored) for name in unit.names]


def units_of(model: nn.Module, names: Iterable[tuple[nn.Module, str]]) -> list[Unit]:
    """Sharded parameters by the block they are in, the outermost element of a list of modules, or the module itself."""
    block_of: dict[nn.Module, nn.Module] = {}
    for blocks in model.modules():
        for block in blocks if isinstance(blocks, nn.ModuleList) else ():
            for module in block.modules():
                block_of.setdefault(module, block)
    units: dict[nn.Module, Unit] = {}
    for module, name in names:
        block = block_of.get(module, module)
        units.setdefault(block, Unit(block, [])).names.append((module, name))
    return list(units.values())


def held_weights(model: nn.Module) -> int:
    """Bytes of a model's weights and buffers on this rank, while it is not called."""
    local = (x.to_local() if isinstance(x, DTensor) else x for x in (*model.parameters(), *model.buffers()))
    return sum(x.untyped_storage().nbytes() if x.numel() else 0 for x in local)
