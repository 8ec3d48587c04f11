"""Experts of Transformers' mixtures spread over the ranks of a sequence: weights, gradients and optimizer states too.

Every class of experts that the library lets choose its implementation (`use_experts_implementation`) keeps its weights
stacked by expert and takes ``(tokens [N, D], chosen [N, k], weights [N, k])``. Their parameters become shards along the
experts, and their forward an exchange (`ring_la.nn.expert_ranks`) around three grouped products. Routers, their losses
and experts that every token passes stay as they were.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from ...errors import ArgumentError, UnsupportedError
from ...grouped_gemm import grouped_gemm
from ...kernels.fused.swiglu import swiglu
from ...nn.expert_ranks import ExpertRanks


def split_experts(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Spread the experts of a parallelized model over the ranks of its sequences. In place; before FSDP2.

    Each rank gets the gradients of its experts whole, so nothing sums them over these ranks; `shard_parameters` shards
    them over the other axes. With average=True a rank gets their average over these ranks, as others' gradients are.

    Args:
        model: what `parallelize(model, cp)` returned, on any device, "meta" too.
        mesh: of one axis, the ranks of `cp`, such as ``TrainingMesh.context``.

    Returns:
        The modules whose parameters are spread.

    Raises:
        ArgumentError: another mesh, a model that is not parallelized. UnsupportedError: no experts, or some of a class
            that says nothing of its layout.
    """
    split: Any = getattr(model, "_ring_la", None)
    if split is None:
        raise ArgumentError("model", "one that parallelize was given", "one that is not")
    group = split.settings.cp.comm
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError("mesh", "a DeviceMesh of one axis", type(mesh).__name__)
    if mesh.ndim != 1 or mesh.mesh.tolist() != list(group.global_ranks):
        raise ArgumentError("mesh", f"one axis of the ranks {list(group.global_ranks)}", mesh)
    found = [(name, m) for name, m in model.named_modules() if is_experts(m)]
    if not found:
        raise UnsupportedError("model", "a mixture whose experts are stacked tensors", type(model).__name__)
    for name, module in found:
        _spread(name, module, mesh, group, split.settings.scale)
    return [module for _, module in found]


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a mixture's experts, stacked, of a class that the library knows the layout of."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def _spread(name: str, module: Any, mesh: DeviceMesh, group: Any, scale: int) -> None:
    """One module's parameters and forward; gradients are `scale` times what they are to be."""
    experts = {p.shape[0] for p in module.parameters(recurse=False)}
    if len(experts) != 1 or any(True for child in module.children() for _ in child.parameters()):
        got = f"{name} ({type(module).__name__})"
        raise UnsupportedError("model", "experts whose parameters are all stacked by expert", got)
    for n, p in list(module.named_parameters(recurse=False)):
        shard = distribute_tensor(p.data, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[n] = nn.Parameter(shard, p.requires_grad)
    ranks = ExpertRanks(experts.pop(), group)

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen, weights = (x.reshape(-1, x.shape[-1]) for x in (top_k_index, top_k_weights))
        o = ranks(rows, chosen, weights, ExpertProducts(self, scale))
        return o if o.shape == hidden_states.shape else o.view(hidden_states.shape)  # FSDP2 warns of views

    module.forward = types.MethodType(forward, module)


class ExpertProducts:
    """The products of a rank's experts, of whatever class: rows sorted by expert, and how many each has.

    scale: what gradients of weights are divided by.
    """

    def __init__(self, experts: Any, scale: int = 1) -> None:
        self.experts, self.scale = experts, scale

    def __call__(self, x: Tensor, sizes: Tensor) -> Tensor:
        e = self.experts
        h = self._linear(x, sizes, "gate_up_proj" if e.has_gate else "up_proj")
        h = self._gated(h) if e.has_gate else e.act_fn(h)
        y = self._linear(h, sizes, "down_proj")
        return e.post_expert_norm(y) if getattr(e, "has_post_expert_norm", False) else y

    def _gated(self, h: Tensor) -> Tensor:
        e = self.experts
        usual, silu = type(e)._apply_gate.__name__ == "_default_apply_gate", ("SiLU", "SiLUActivation")
        return swiglu(h) if usual and type(e.act_fn).__name__ in silu else e._apply_gate(h)

    def _linear(self, x: Tensor, sizes: Tensor, name: str) -> Tensor:
        weight = self._weight(name).to(x.dtype)
        y = grouped_gemm(x, weight if self.experts.is_transposed else weight.mT, sizes)
        if not self.experts.has_bias:
            return y
        bias = self._weight(f"{name}_bias").to(x.dtype)
        return y + bias.repeat_interleave(sizes, 0, output_size=len(x))

    def _weight(self, name: str) -> Tensor:
        weight = _local(getattr(self.experts, name))
        return weight if self.scale == 1 else _Divided.apply(weight, self.scale)


class _Divided(torch.autograd.Function):
    """A weight, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, by: int) -> Tensor:
        ctx.by = by
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.by, None


def chosen_experts(
    module: Any, rows: Tensor, chosen: Tensor, weights: Tensor, experts: int, first: int = 0, here: int | None = None
) -> Tensor:
    """What chosen experts, of so many, make of few tokens ``rows [N, D]``: one result for each of ``chosen [N, k]``,
    weighed, ``[N k, D]``; zeros where it is none of the `here` from `first` on, whose weights a module has.

    Rows are sorted by expert on the device, and on a GPU the host waits for nothing, but for biases of some experts.
    """
    here, shares = experts if here is None else here, weights.reshape(-1, 1)
    out = torch.zeros(chosen.numel(), rows.shape[1], dtype=(rows[:1] * shares[:1]).dtype, device=rows.device)
    if not here:
        return out
    expert = chosen.flatten() if here == experts else (chosen.flatten() - first) % experts  # others' come last
    order, sizes = expert.argsort(stable=True), torch.zeros(experts, dtype=torch.int64, device=rows.device)
    sizes = sizes.scatter_add_(0, expert, torch.ones_like(expert))[:here]
    if here < experts and (module.has_bias or rows.device.type == "cpu"):
        order = order[: int(sizes.sum())]  # else what is others' comes last, as zeros, and nobody counts it
    out[order] = (ExpertProducts(module)(rows[order // chosen.shape[1]], sizes) * shares[order]).to(out.dtype)
    return out


def _local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p
