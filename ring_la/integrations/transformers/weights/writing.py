"""Weights written as `save_pretrained` names them, from any split."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ....errors import ArgumentError
from .conversions import as_stored, own_classes
from .files import INDEX, SINGLE
from .parts import ModelRanks

FILE_BYTES = 5 * 10**9
"""Of one file, as the library cuts them."""


def save_weights(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> int:
    """Write config.json, shards of safetensors and their index, as `save_pretrained` names them. Every rank calls it.

    Args:
        model: on any split, or on none. dtype: of floating-point weights written; None: the model's own.
        file_bytes: of one file at most, but for a tensor that is larger.

    Returns:
        The most bytes of weights this rank's host held at once.

    Raises:
        ArgumentError: a folder that has weights already, or that a rank cannot write to; on every rank.
    """
    folder, ranks = Path(folder), ModelRanks(model)
    filled = ranks.first(str(folder) if any(folder.glob("*.safetensors")) else "")  # all look before anyone writes
    if filled:
        raise ArgumentError("folder", "one without weights", filled)
    files = WeightFiles(folder, ranks)
    files.attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
    cast = _cast(dtype)
    state = _once(model)
    groups = _groups(state)
    plan = _cut({n: cast(x) for g in groups for n, x in as_stored(model, _meta(g)).items()}, file_bytes)
    most = _write_mine(model, files, groups, plan, cast)
    if ranks.index == 0:
        files.attempt(lambda: _describe(model, folder, plan, dtype))
    files.meet()
    return most


class WeightFiles:
    """A folder's files. What a rank cannot write all are told at the end: until then it gathers on, as the others do.

    Attributes:
        folder: to write into. ranks: who do.
    """

    def __init__(self, folder: Path, ranks: ModelRanks) -> None:
        self.folder, self.ranks = folder, ranks
        self._problem = ""

    def attempt(self, write: Callable[[], None]) -> None:
        """Write, if all before could be written."""
        from safetensors import SafetensorError

        try:
            if not self._problem:
                write()
        except (OSError, SafetensorError) as error:
            self._problem = f"rank {self.ranks.index}: {error}"

    def meet(self) -> None:
        """When all have written: the error, on all, that one had."""
        problem = self.ranks.first(self._problem)
        if problem:
            raise ArgumentError("folder", "one that every rank can write to, with room", f"{self.folder} ({problem})")


def _write_mine(
    model: PreTrainedModel,
    files: WeightFiles,
    groups: list[dict[str, Tensor]],
    plan: _Plan,
    cast: Callable[[Tensor], Tensor],
) -> int:
    """Gather group by group, keep what is for files of this rank, write each when full; the most bytes kept at once."""
    held, most, ranks = defaultdict[str, dict[str, Tensor]](dict), 0, files.ranks
    for group in groups:
        whole = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in group.items()}
        for name, x in as_stored(model, whole).items():
            file, owner = plan.where[name]
            if owner % ranks.size != ranks.index:
                continue
            held[file][name] = cast(x.detach()).to("cpu", copy=True).contiguous()
            most = max(most, sum(t.nbytes for tensors in held.values() for t in tensors.values()))
            if len(held[file]) == plan.tensors[file]:
                files.attempt(partial(_write, held.pop(file), files.folder / file))
        del whole
    return most


class _Plan:
    """Which file a tensor is in, and whose that file is."""

    def __init__(self, files: dict[str, list[str]], total: int) -> None:
        self.files, self.total = files, total
        self.where = {n: (file, i) for i, (file, names) in enumerate(files.items()) for n in names}
        self.tensors = {file: len(names) for file, names in files.items()}


def _cut(tensors: Mapping[str, Tensor], most: int) -> _Plan:
    """Files of at most so many bytes, in the order of the tensors."""
    files: list[list[str]] = [[]]
    size = 0
    for name, x in tensors.items():
        if files[-1] and size + x.nbytes > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += x.nbytes
    n = len(files)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return _Plan(dict(zip(names, files)), sum(x.nbytes for x in tensors.values()))


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, {"format": "pt"})


def _describe(model: PreTrainedModel, folder: Path, plan: _Plan, dtype: torch.dtype | None) -> None:
    """The files beside the weights."""
    if len(plan.files) > 1:
        index = {"metadata": {"total_size": plan.total}, "weight_map": {n: f for n, (f, _) in plan.where.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    config = deepcopy(model.config)
    with own_classes(model):
        config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _cast(dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    return lambda x: x if dtype is None or not x.is_floating_point() else x.to(dtype)


def _once(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are stored, each tied one under its first name alone."""
    seen: set[int] = set()
    out = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor) and id(x) not in seen:
            seen.add(id(x))
            out[name] = x
    return out


def _groups(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What is converted together: a layer, by the first number in its names; the rest is a group a tensor."""
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, x in state.items():
        words = name.split(".")
        first = next((i for i, word in enumerate(words) if word.isdigit()), None)
        groups[name if first is None else ".".join(words[: first + 1])][name] = x
    return list(groups.values())


def _meta(group: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in group.items()}
