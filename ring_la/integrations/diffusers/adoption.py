"""What `parallelize` puts into a transformer: split processors, and hooks before blocks and behind layers."""

from __future__ import annotations

import copy
import functools
from contextlib import ExitStack

from torch import nn

from ...errors import UnsupportedError
from .ahead import keys_first_class
from .checks import blocks_of, check_block, other_version, refiners_of
from .cutting import whole_streams
from .layer_hooks import HookedLayers, LayerHooks
from .linear import LINEAR, linear_class
from .model import SplitDenoiser
from .modulation import StepLayers, plain
from .modules import split_forward
from .plans import AttentionPlan, BlockPlan, StepPlan
from .processors import split_class


def adopt(split: SplitDenoiser, model: nn.Module, undo: ExitStack) -> None:
    """Replace processors and hook the modules; `undo` takes the way back.

    Raises:
        UnsupportedError: the model is not as its plan knows it; `undo` holds what was done.
    """
    plan, library = split.plan, type(model).__module__
    model._ring_la = split  # type: ignore[assignment]
    split.modules = list(model.named_modules())
    undo.callback(delattr, model, "_ring_la")
    missing = [n for n in plan.inputs if n not in split.signature.parameters]
    if missing:
        raise other_version(type(model).__name__, f"no argument {missing[0]}")
    undo.callback(model.register_forward_pre_hook(split.enter, with_kwargs=True).remove)
    classes = ProcessorClasses(split)
    for name, block, kind in blocks_of(model, plan):
        spec = plan.classes[kind]
        names = check_block(name, block, kind, spec, library)
        classes.adopt(block, spec, undo)
        if split.posting is not None:
            split.posting.adopt(block, spec, undo)
        _adopt_modules(split, name, block, spec, undo)
        # one path for all blocks, so that torch.compile compiles them once
        path = ".".join(part for part in name.split(".") if not part.isdigit())
        hook = functools.partial(split.before_block, path, spec, names, tuple(s for _, s, _ in whole_streams(spec)))
        undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
    if plan.cuts_whole_text:
        undo.callback(block.register_forward_hook(split.widen).remove)
    for path, blocks in refiners_of(model, plan):
        refiner = plan.refiners[path]
        for n, block in enumerate(blocks):
            names = check_block(f"{path}.{n}", block, refiner.kind, refiner.block, library)
            classes.adopt(block, refiner.block, undo)
            hook = functools.partial(split.before_refiner, path, refiner.block, names, n == 0)
            undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for block in blocks if refiner.added else blocks[-1:]:
            undo.callback(block.register_forward_hook(functools.partial(split.refined, refiner.stream)).remove)
    _adopt_outputs(split, model, undo)
    if plan.steps is not None and split.cp.size > 1:
        _adopt_steps(split, model, plan.steps, undo)


def _adopt_outputs(split: SplitDenoiser, model: nn.Module, undo: ExitStack) -> None:
    """Hooks behind layers: those whose output is cut, and those whose output is gathered."""
    plan = split.plan
    places = [HookedLayers(path, functools.partial(split.split_output, roles)) for path, roles in plan.outputs.items()]
    places.append(HookedLayers(plan.last, split.gather, last=True))
    places += [
        HookedLayers(path, functools.partial(split.gather, stream=stream)) for path, stream in plan.gathered.items()
    ]
    split.behind = LayerHooks(model, places)
    undo.callback(split.behind.remove)
    if plan.layers_behind:
        undo.callback(model.register_forward_hook(split.divide_gradient).remove)


def _adopt_steps(split: SplitDenoiser, model: nn.Module, plan: StepPlan, undo: ExitStack) -> None:
    found = [
        plain(block.get_submodule(path))
        for _, block, kind in blocks_of(model, split.plan)
        for path in plan.layers.get(kind, ())
        if _has(block, path)
    ]
    layers = [layer for layer in found if type(layer) is nn.Linear]
    if layers:
        split.steps = StepLayers(split.cp.comm, layers)
        split.steps.adopt()
        undo.callback(split.steps.restore)
        undo.callback(model.get_submodule(plan.embedding).register_forward_hook(split.step).remove)


def _adopt_modules(split: SplitDenoiser, name: str, block: nn.Module, spec: BlockPlan, undo: ExitStack) -> None:
    """Replace the forwards of modules that reach beyond their own tokens."""
    for label, known in spec.modules.items():
        module = block.get_submodule(label) if _has(block, label) else None
        if module is None:
            continue
        kind = type(module).__name__
        if kind not in known:
            raise UnsupportedError("transformer", " or ".join(known), f"{name}.{label}, a {kind}")
        module.forward = functools.partial(split_forward(type(module), split), module)
        undo.callback(delattr, module, "forward")


class ProcessorClasses:
    """The classes of a model's split processors: one for all of a kind, which torch.compile then compiles once."""

    def __init__(self, split: SplitDenoiser) -> None:
        self._split = split
        self._made: dict[tuple, type] = {}

    def adopt(self, block: nn.Module, spec: BlockPlan, undo: ExitStack) -> None:
        """Replace a block's processors."""
        for label, known in spec.attention.items():
            module = block.get_submodule(label) if _has(block, label) else None
            if module is not None and known.streams is not None:
                processor = module.processor
                undo.callback(setattr, module, "processor", processor)
                module.processor = copy.copy(processor)
                module.processor.__class__ = self._of(type(processor), known)

    def _of(self, kind: type, spec: AttentionPlan) -> type:
        key, split = (kind, spec.streams, spec.keys), self._split
        if key not in self._made:
            if kind.__name__ in LINEAR:
                made = linear_class(kind, split)
            elif spec.keys is not None:
                made = split_class(kind, functools.partial(split.attend_others, spec.streams, spec.keys))
            else:
                made = split_class(kind, functools.partial(split.attend, spec.streams))
            if split.posting is not None and spec.keys is None and spec.streams is not None:
                made = keys_first_class(kind, made, spec.streams, split.posting)
            self._made[key] = made
        return self._made[key]


def _has(block: nn.Module, path: str) -> bool:
    return path in dict(block.named_modules())
