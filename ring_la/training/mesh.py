"""Data, FSDP and context axes on one set of ranks, and FSDP2 over them.

    data × fsdp × context = ranks, context innermost (it talks most, so it stays within a host)

A sequence is split over "context"; "data" and "fsdp" take different sequences. Parameters and optimizer states are
sharded over fsdp × context and replicated over data, so context ranks share their memory too. Every rank's loss is a
part: the gradient is the *sum* over all ranks, which `shard_parameters` tells FSDP2 (its default is the mean).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from ..checks import check_flag, check_int, check_kind, is_int
from ..errors import ArgumentError, UnsupportedError, describe_tensor

AXES = ("data", "fsdp", "context")


@dataclass(frozen=True)
class TrainingMesh:
    """The ranks of a run by axis.

    Attributes:
        axes: DeviceMesh with axes "data", "fsdp" and "context".
        parameters: the same ranks as FSDP2 wants them: axes "data" (copies) and "shard" (fsdp × context).
    """

    axes: DeviceMesh
    parameters: DeviceMesh

    @classmethod
    def make(cls, device_type: str, *, data: int = 1, fsdp: int = 1, context: int = -1) -> TrainingMesh:
        """Collective over the default group. One axis may be −1: what is left of the ranks.

        Raises:
            ArgumentError: the axes do not multiply to the number of ranks.
        """
        check_kind("device_type", device_type, str)
        data, fsdp, context = axis_sizes(dist.get_world_size(), data=data, fsdp=fsdp, context=context)
        axes = init_device_mesh(device_type, (data, fsdp, context), mesh_dim_names=AXES)
        parameters = init_device_mesh(device_type, (data, fsdp * context), mesh_dim_names=("data", "shard"))
        return cls(axes, parameters)

    @property
    def context(self) -> DeviceMesh:
        """The ranks that share this rank's sequences, for `ContextParallel`."""
        return self.axes["context"]

    @property
    def replicas(self) -> int:
        """Sequences worked on at once: data × fsdp."""
        return self.axes.size(0) * self.axes.size(1)

    @property
    def replica(self) -> int:
        """Which of them is this rank's."""
        data, fsdp, _ = self.axes.get_coordinate() or (0, 0, 0)
        return data * self.axes.size(1) + fsdp

    def __str__(self) -> str:
        return " × ".join(f"{name} {self.axes.size(i)}" for i, name in enumerate(AXES))


def axis_sizes(ranks: int, *, data: int = 1, fsdp: int = 1, context: int = -1) -> tuple[int, int, int]:
    """The sizes of the axes data, fsdp and context over so many ranks. One may be −1: what is left of them.

    Raises:
        ArgumentError: the axes do not multiply to the number of ranks.
    """
    sizes = [data, fsdp, context]
    named = ", ".join(f"{name}={n}" for name, n in zip(AXES, sizes))
    check_int("ranks", ranks, 1)
    if sizes.count(-1) > 1 or any(not is_int(n) or (n < 1 and n != -1) for n in sizes):
        raise ArgumentError("data, fsdp, context", "sizes ≥ 1, one of them −1 at most", named)
    known = 1
    for n in sizes:
        known *= n if n > 0 else 1
    if ranks % known or (-1 not in sizes and known != ranks):
        raise ArgumentError("data, fsdp, context", f"a product of {ranks}, the number of ranks", named)
    data, fsdp, context = (n if n > 0 else ranks // known for n in sizes)
    return data, fsdp, context


def shard_parameters(
    model: nn.Module,
    mesh: TrainingMesh,
    *,
    blocks: Iterable[nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    methods: Iterable[str] = ("loss", "loss_in_rounds"),
    experts: Iterable[nn.Module] = (),
    average: bool = False,
) -> nn.Module:
    """FSDP2 (`fully_shard`) over the mesh, with gradients summed over all its ranks in fp32. In place.

    Args:
        model: its parameters on every rank alike.
        blocks: modules gathered one at a time; None: ``model.blocks``.
        dtype: what parameters are gathered in and computed with; None: their own. Optimizers see their own.
        methods: names of methods that are called instead of the forward; those that `model` has not are left out.
        experts: modules whose parameters are spread over the context ranks already (`split_experts`): they are sharded
            over fsdp alone, along dimension 1; on one replica, and of `dtype`, they are as they should be, and FSDP2,
            which would copy them and their gradients, leaves them alone.
        average: gradients are averaged over all ranks, as the Trainer wants, and ``parallelize(average=True)`` with it.

    Raises:
        ArgumentError: a module that is no part of `model`, or what is no mesh or dtype. UnsupportedError: a context
            rank without an expert, whose parts FSDP2 gives another shape.
    """
    check_kind("model", model, nn.Module)
    check_flag("average", average)
    for name, given in (("blocks", blocks), ("methods", methods), ("experts", experts)):
        if isinstance(given, str) or (not isinstance(given, Iterable) and not (given is None and name == "blocks")):
            what = "names of methods" if name == "methods" else "modules"
            raise ArgumentError(name, f"a list of {what}", describe_tensor(given))
    if blocks is None and not hasattr(model, "blocks"):
        raise ArgumentError("blocks", f"modules of {type(model).__name__}, which has no `blocks`", None)
    own: Any = model
    experts, blocks = list(experts), list(own.blocks if blocks is None else blocks)
    _check(model, mesh, blocks, experts, dtype)
    _refuse_without(experts, mesh.axes.size(2))
    gathered = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)  # type: ignore[arg-type]
    ranks = mesh.parameters if mesh.parameters.size(0) > 1 else mesh.parameters["shard"]
    others = mesh.axes["data", "fsdp"] if mesh.axes.size(0) > 1 else mesh.axes["fsdp"]
    there = {p for m in experts for p in m.parameters()}
    if mesh.replicas > 1 or not all(dtype in (None, p.dtype) for p in there):
        there = set()
        for module in experts:
            fully_shard(module, mesh=others, mp_policy=gathered, shard_placement_fn=lambda p: Shard(1))
    for block in blocks:
        fully_shard(block, mesh=ranks, mp_policy=gathered, ignored_params=there)
    fully_shard(model, mesh=ranks, mp_policy=gathered, ignored_params=there)
    for module in model.modules():
        if isinstance(module, FSDPModule) and not average:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in filter(partial(hasattr, model), methods):
        register_fsdp_forward_method(model, name)
    return model


def _check(model: nn.Module, mesh: object, blocks: list[nn.Module], experts: list[nn.Module], dtype: object) -> None:
    """Refuse what is no part of the model, by name: FSDP2 would shard it, and leave the model as it is."""
    if not isinstance(mesh, TrainingMesh):
        raise ArgumentError("mesh", "a TrainingMesh", type(mesh).__name__)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError("dtype", "a floating torch.dtype or None", repr(dtype))
    parts = set(model.modules())
    for name, modules in (("blocks", blocks), ("experts", experts)):
        for module in modules:
            if module not in parts:
                raise ArgumentError(name, f"modules of {type(model).__name__}", type(module).__name__)


def _refuse_without(experts: list[nn.Module], ranks: int) -> None:
    """Refuse experts that leave one of the context ranks without any: FSDP2 gives its parts another shape."""
    for p in (p for module in experts for p in module.parameters()):
        each = -(-p.shape[0] // ranks)
        if each * (ranks - 1) >= p.shape[0]:
            expected = f"one for each of {ranks} context ranks, {each} to a rank"
            raise UnsupportedError("experts", expected, p.shape[0], "Leave them whole, or take fewer context ranks")
