"""Tensor parallelism by Transformers' own plans beside a context axis.

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("tensor", "context"))
    model = parallelize(model, ContextParallel(mesh["context"]))
    tensor_parallel(model, mesh["tensor"])

A plan (``model.tp_plan``) says which projections are cut by their outputs or inputs. Softmax attention then runs on
this rank's heads, and its keys travel among the context ranks that have the same ones. Recurrences run on all heads
where the plan gathers what their projections make, as those of Qwen3-Next and Qwen3.5 do.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from ...comm import Group
from ...context import agree_on_weights
from ...errors import ArgumentError, UnsupportedError
from .mixers import entry_of

WHOLE = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "replicate")
"""Styles of a plan after which a layer's forward has whole tensors, as it would without."""


def tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """Cut the projections of a parallelized model over the ranks of `mesh`, by the model's own plan. In place.

    Every rank calls it with the same whole weights. Gradients are summed over the context ranks alone
    (`sum_gradients`); those of cut weights are DTensors of this rank's part. `clip_gradients` clips them by the whole
    norm, `save_weights` writes the whole weights; the model's own `save_pretrained` then raises UnsupportedError.

    Args:
        model: what `parallelize(model, cp)` returned, in memory.
        mesh: of one axis, ranks that are given the same tokens: each has other context ranks.

    Raises:
        ArgumentError: another mesh, a model that is not parallelized or is cut already.
        DisagreementError: the ranks of `mesh` were given other weights.
        UnsupportedError: a model without a plan; a plan that cuts the heads of a layer whose kernels are ours, one of
            attention's heads, or a head that is the embedding.
    """
    split: Any = getattr(model, "_ring_la", None)
    if split is None or any(isinstance(p, DTensor) or p.is_meta for p in model.parameters()):
        raise ArgumentError("model", "one that parallelize was given, whole and in memory", type(model).__name__)
    context = set(split.settings.cp.comm.global_ranks)
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError("mesh", "a DeviceMesh of one axis", type(mesh).__name__)
    if mesh.ndim != 1 or len(context & set(mesh.mesh.tolist())) > 1:
        raise ArgumentError("mesh", f"one axis with at most one of the context ranks {sorted(context)}", mesh)
    if mesh.size() == 1:
        return model
    if not model.tp_plan:
        raise UnsupportedError("model", "one with a tensor parallel plan", type(model).__name__)
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    _refuse_cut_mixers(model, plan)
    _refuse_cut_ties(model, plan)
    _refuse_parts_of_heads(model, plan, mesh.size())
    cp = split.settings.cp
    group = Group(mesh.get_group(), cp.comm.timeout, "torch")
    agree_on_weights(model, group, cp.validate)
    split.batches.groups.append(group)
    model.save_pretrained = _refuse_to_save  # type: ignore[method-assign]
    return apply_tensor_parallelism(model, mesh, plan)


def _refuse_to_save(save_directory: object, *args: object, **keywords: object) -> None:
    """In place of the library's, which reads memory that a cut weight has not."""
    hint = "ring_la.integrations.transformers.weights.save_weights(model, folder) writes the same files"
    raise UnsupportedError("save_pretrained", "save_weights, called on every rank", "a cut model", hint)


def _refuse_cut_mixers(model: nn.Module, plan: dict[str, str]) -> None:
    """Refuse plans that leave a mixer of our own with some of its heads."""
    mixers = [(name, m) for name, m in model.named_modules() if entry_of(type(m)) is not None]
    for name, style in plan.items():
        for mixer, module in mixers:
            if name.startswith(f"{mixer}.") and style not in WHOLE:
                got = f"{name} ({style}) in {type(module).__name__}"
                raise UnsupportedError("model", "a plan that leaves this layer its whole projections", got)


def _refuse_parts_of_heads(model: PreTrainedModel, plan: dict[str, str], ranks: int) -> None:
    """Refuse plans that leave a rank a part of a head."""
    config = model.config.get_text_config()
    if any(style not in WHOLE and name.endswith(("q_proj", "k_proj", "qkv_proj")) for name, style in plan.items()):
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % ranks:
                raise UnsupportedError(name, f"a multiple of the {ranks} ranks of mesh", heads)


def _refuse_cut_ties(model: PreTrainedModel, plan: dict[str, str]) -> None:
    """Refuse plans under which an embedding and a head would become two weights."""
    ends = [m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    tied = len({id(weight) for weight in ends}) < len(ends)
    cut = [n for n, p in model.named_parameters(remove_duplicate=False) if n in plan and any(p is w for w in ends)]
    if tied and cut:
        raise UnsupportedError("tie_word_embeddings", "False with a plan that cuts the head", f"True, and {cut[0]}")
