"""Weights read from a folder of safetensors, by every rank what its shards need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, set_param_for_module
from transformers.modeling_utils import LoadStateDictConfig

from ....errors import ArgumentError
from .conversions import converted, mixed, own_classes
from .files import Slice, files_of, slices_of
from .parts import ModelRanks, device_of, part_of


def load_weights(model: PreTrainedModel, folder: str | Path, *, device: torch.device | str | None = None) -> int:
    """Fill a model that was made on the device "meta" from a folder of safetensors. Every rank calls it.

    Args:
        model: its parameters may be FSDP2's, on "meta" or not; dtypes are the parameters' own.
        folder: model.safetensors, or shards with their index, under the names the library's conversions know.
        device: where parameters and buffers go; None: the current GPU, or the CPU without one.

    Returns:
        Bytes this rank read of the files.

    Raises:
        ArgumentError: no such files; a weight of the model that is not there or has another shape. What one rank cannot
            read of a sharded model is raised on all.
    """
    device, read = device_of(device), [0]
    mine: Exception | None = None
    info: Any = None
    config: Any = None
    computed = list(_computed(model))
    try:
        with ExitStack() as opened:
            there = slices_of(files_of(Path(folder)), opened, read)
            info, config = _fill(model, folder, there, device)
        _refuse_other(model, folder, info)
    except Exception as error:  # of any kind: it is raised below, when the other ranks know
        mine = error
    _meet(model, mine)
    type(model)._finalize_model_loading(model, config, info)
    for module, name, buffer in computed:
        module._buffers[name] = buffer.to(device)
    return read[0]


def _meet(model: nn.Module, mine: Exception | None) -> None:
    """Raise this rank's error, or that of another rank which has shards of the model: none goes on without it."""
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    other = ModelRanks(model).first("" if mine is None else str(mine)) if sharded else ""
    if mine is not None:
        raise mine
    if other:
        raise ArgumentError("folder", "weights that every rank can read", f"on another rank {other}")


def _refuse_other(model: PreTrainedModel, folder: str | Path, info: Any) -> None:
    """Refuse weights of another model."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    wrong = sorted({*info.missing_keys} - {*tied} - {*_not_stored(model)})
    wrong += sorted(str(k) for k in info.mismatched_keys) + sorted(info.conversion_errors)
    if wrong:
        raise ArgumentError(
            "folder", "the weights of this model", f"{folder}, without or unlike {', '.join(wrong[:5])}"
        )


def _fill(
    model: PreTrainedModel, folder: str | Path, there: Mapping[str, Slice], device: torch.device
) -> tuple[Any, LoadStateDictConfig]:
    """Parameters and buffers from what is there; the library's account of it, and the configuration it went by."""
    with own_classes(model):
        mapping: list[Any] = get_model_conversion_mapping(model)
    whole = mixed(model, mapping, there)
    plain = {n: x for n, x in there.items() if n not in {n for _, names in whole.values() for n in names}}
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        device_map={"": device},
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        weight_mapping=mapping,
    )
    info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=plain, load_config=config)
    quantizer: Any = None  # the library asks for one, and takes none
    for name, (converter, sources) in whole.items():
        for target, x in converted(model, name, converter, there, sources).items():
            set_param_for_module(model, target, part_of(model.get_parameter(target), x, device), info, quantizer)
    return info, config


def _computed(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Buffers that no file holds and that are there already: the library computes those of "meta" alone, and empties
    the others."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and not buffer.is_meta:
                yield module, name, buffer


def _not_stored(model: nn.Module) -> Iterator[str]:
    """Names in the state that files never hold."""
    return (n for n in model.state_dict() if n.endswith("_extra_state"))
