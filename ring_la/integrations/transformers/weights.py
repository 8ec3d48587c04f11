"""Weights of a model whose parameters are sharded by FSDP2: read, drawn and written in Transformers' own format.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shard_parameters(parallelize(model, cp), mesh, blocks=model.model.layers, methods=())
    load_weights(model, "folder/with/safetensors")        # or draw_weights(model)
    save_weights(model, "out")                            # what from_pretrained reads, from any split

No rank ever has the whole model. Names, stacked experts and dtypes are Transformers' own conversions. A rank reads the
slices of its shards, by the library's shard-on-read; what a conversion mixes along the sharded dimension (the
convolutions of Kimi-Linear) it reads whole, one parameter at a time. Writing, ranks gather a layer at a time, and each
file has one rank that keeps it until it is full.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
    set_param_for_module,
)
from transformers.modeling_utils import LoadStateDictConfig

from ...errors import ArgumentError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
"""Of one file, as the library cuts them."""


# -- reading -----------------------------------------------------------------------------------------------


def load_weights(model: PreTrainedModel, folder: str | Path, *, device: torch.device | str | None = None) -> int:
    """Fill a model that was made on the device "meta" from a folder of safetensors. Every rank calls it.

    Args:
        model: its parameters may be FSDP2's, on "meta" or not; dtypes are the parameters' own.
        folder: model.safetensors, or shards with their index, under the names the library's conversions know.
        device: where parameters and buffers go; None: the current GPU, or the CPU without one.

    Returns:
        Bytes this rank read of the files.

    Raises:
        ArgumentError: no such files; a weight of the model that is not there or has another shape.
    """
    from safetensors import safe_open

    files = _files(Path(folder))
    device, read = _device(device), [0]
    computed = list(_computed(model))
    with ExitStack() as open_files:
        there: dict[str, _Slice] = {}
        for file in files:
            opened = open_files.enter_context(safe_open(file, framework="pt", device="cpu"))
            there |= {name: _Slice(opened.get_slice(name), read) for name in opened.keys()}
        with _own_classes(model):
            mapping: list[Any] = get_model_conversion_mapping(model)
        mixed = _mixed(model, mapping, there)
        plain = {n: x for n, x in there.items() if n not in {n for _, names in mixed.values() for n in names}}
        config = LoadStateDictConfig(
            pretrained_model_name_or_path=str(folder),
            device_map={"": device},
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
            weight_mapping=mapping,
        )
        info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=plain, load_config=config)
        for name, (converter, sources) in mixed.items():
            for target, whole in _converted(model, name, converter, there, sources).items():
                set_param_for_module(model, target, _part(model.get_parameter(target), whole, device), info, None)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    wrong = sorted({*info.missing_keys} - {*tied} - {*_not_stored(model)})
    wrong += sorted(str(k) for k in info.mismatched_keys) + sorted(info.conversion_errors)
    if wrong:
        raise ArgumentError(
            "folder", "the weights of this model", f"{folder}, without or unlike {', '.join(wrong[:5])}"
        )
    type(model)._finalize_model_loading(model, config, info)
    for module, name, buffer in computed:
        module._buffers[name] = buffer.to(device)
    return read[0]


def folder_of(name: str) -> Path:
    """A folder with configuration and safetensors: this one, or what the Hub has under this name.

    Raises:
        OSError: neither.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))


class _Slice:
    """A tensor of a file that is read where it is asked for; what was read is added up."""

    def __init__(self, inner: Any, read: list[int]) -> None:
        self.inner, self.read = inner, read

    def get_shape(self) -> list[int]:
        return self.inner.get_shape()

    def get_dtype(self) -> str:
        return self.inner.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        x = self.inner[index]
        self.read[0] += x.nbytes
        return x


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return sorted({folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ArgumentError("folder", f"a folder with {SINGLE} or {INDEX}", str(folder))


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _not_stored(model: nn.Module) -> Iterator[str]:
    """Names in the state that files never hold."""
    return (n for n in model.state_dict() if n.endswith("_extra_state"))


def _computed(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Buffers that no file holds and that are there already: the library computes those of "meta" alone, and empties
    the others."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and not buffer.is_meta:
                yield module, name, buffer


def _mixed(
    model: PreTrainedModel, mapping: list[Any], there: Mapping[str, Any]
) -> dict[str, tuple[WeightConverter, dict[str, str]]]:
    """Sharded parameters whose conversion needs more than a rank's own slices, and the names it takes with their
    patterns."""
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    out: dict[str, tuple[WeightConverter, dict[str, str]]] = {}
    for name in sorted(there, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        p = state.get(target)
        if pattern is None or not isinstance(p, DTensor) or _by_slices(by_pattern[pattern], p):
            continue
        out.setdefault(target, (by_pattern[pattern], {}))[1][name] = pattern
    return out


def _by_slices(converter: WeightConverter, p: DTensor) -> bool:
    """Whether a rank's shard is the conversion of its own slices: experts stacked along the sharded dimension."""
    shards = [(p.device_mesh.size(i), x.dim) for i, x in enumerate(p.placements) if isinstance(x, Shard)]
    if not shards:
        return True
    stacked = isinstance(converter.operations[0], MergeModulelist) and converter.operations[0].dim == 0
    rest = all(isinstance(op, Concatenate) and op.dim > 0 for op in converter.operations[1:])
    return stacked and rest and all(dim == 0 and p.shape[0] >= ranks for ranks, dim in shards) and _all_have(p)


def _all_have(p: DTensor) -> bool:
    """Whether every rank has a row of it: chunks are of one size, so the last ranks may have none."""
    ranks = p.device_mesh.size(len(p.placements) - 1)
    return -(-p.shape[0] // ranks) * (ranks - 1) < p.shape[0]


def _converted(
    model: PreTrainedModel, name: str, converter: WeightConverter, there: Mapping[str, _Slice], sources: dict[str, str]
) -> dict[str, Tensor]:
    """The whole of what one conversion makes of its sources."""
    own = deepcopy(converter)
    for source, pattern in sources.items():
        whole: Any = there[source][...]
        own.add_tensor(name, source, pattern, whole)
    found = own.convert(name, model=model, config=model.config)
    return {n: x[0] if isinstance(x, list) else x for n, x in found.items()}


def _part(p: Tensor, whole: Tensor, device: torch.device) -> Tensor:
    """This rank's part of a whole tensor, in a parameter's dtype."""
    whole = whole.to(device, p.dtype)
    if not isinstance(p, DTensor):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local().clone()


# -- drawing -----------------------------------------------------------------------------------------------


@torch.no_grad()
def draw_weights(model: PreTrainedModel, *, seed: int = 0, device: torch.device | str | None = None) -> None:
    """Fill a model that was made on the device "meta" by its own initialisation, the same for any split.

    One module's parameters exist whole at a time, drawn alike on every rank, which keeps its part.
    """
    device = _device(device)
    owner: dict[str, PreTrainedModel] = {}
    for i, (name, module) in enumerate(model.named_modules()):
        above = owner.get(name.rpartition(".")[0], model)
        owner[name] = module if isinstance(module, PreTrainedModel) else above
        parameters = {n: p for n, p in module._parameters.items() if p is not None}
        buffers = {n: b for n, b in module._buffers.items() if b is not None}
        if not parameters and not buffers:
            continue
        for n, p in parameters.items():
            module._parameters[n] = nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device), p.requires_grad)
        for n, b in buffers.items():
            module._buffers[n] = torch.zeros(b.shape, dtype=b.dtype, device=device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(1_000_003 * seed + i)
            owner[name]._init_weights(module)
        for n, p in parameters.items():
            whole = module._parameters[n]
            assert whole is not None
            part = whole.data
            if isinstance(p, DTensor):
                part = _dtensor(_part(p, whole.data, device), p)
            module._parameters[n] = nn.Parameter(part, p.requires_grad)
    model.tie_weights()


def _dtensor(local: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# -- writing -----------------------------------------------------------------------------------------------


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
        ArgumentError: a folder that has weights already.
    """
    folder, ranks = Path(folder), _Ranks(model)
    if any(folder.glob("*.safetensors")):
        raise ArgumentError("folder", "one without weights", str(folder))
    ranks.meet()  # all have looked before anyone writes
    folder.mkdir(parents=True, exist_ok=True)
    cast = _cast(dtype)
    state = _once(model)
    groups = _groups(state)
    plan = _cut({n: cast(x) for g in groups for n, x in _as_stored(model, _meta(g)).items()}, file_bytes)
    held, most = defaultdict[str, dict[str, Tensor]](dict), 0
    for group in groups:
        whole = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in group.items()}
        for name, x in _as_stored(model, whole).items():
            file, owner = plan.where[name]
            if owner % ranks.size != ranks.index:
                continue
            held[file][name] = cast(x.detach()).to("cpu", copy=True).contiguous()
            most = max(most, sum(t.nbytes for tensors in held.values() for t in tensors.values()))
            if len(held[file]) == plan.tensors[file]:
                _write(held.pop(file), folder / file)
        del whole
    if ranks.index == 0:
        _describe(model, folder, plan, dtype)
    ranks.meet()
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
    with _own_classes(model):
        config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


class _Ranks:
    """The ranks a model is on: those its parameters are sharded and copied over, else all of the job.

    Attributes:
        index: of this rank among them. size: their number.
    """

    def __init__(self, model: nn.Module) -> None:
        meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self.groups: list[Any] = []
        self.index, self.size = 0, 1
        if mesh is not None:
            self.groups, self.size = mesh.get_all_groups(), mesh.size()
            self.index = mesh.mesh.flatten().tolist().index(dist.get_rank())
        elif dist.is_initialized():
            self.groups, self.index, self.size = [dist.group.WORLD], dist.get_rank(), dist.get_world_size()

    def meet(self) -> None:
        """All of them are here."""
        for group in self.groups:
            dist.barrier(group)


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


def _as_stored(model: PreTrainedModel, group: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names and in the shapes of files."""
    with _own_classes(model):
        return revert_weight_conversion(model, group)


@contextmanager
def _own_classes(model: nn.Module) -> Iterator[None]:
    """Models without the class FSDP2 gave them, which the library takes for somebody's own, without conversions."""
    changed: list[Any] = [m for m in model.modules() if isinstance(m, PreTrainedModel) and isinstance(m, FSDPModule)]
    classes = [type(m) for m in changed]
    try:
        for m in changed:
            m.__class__ = next(c for c in type(m).__mro__ if not issubclass(c, FSDPModule))
        yield
    finally:
        for m, kind in zip(changed, classes):
            m.__class__ = kind
