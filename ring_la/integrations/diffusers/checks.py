"""What of a model, and of a call, cannot run on a split sequence; refused by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ...errors import ArgumentError, UnsupportedError
from .compare import tensors_in
from .plans import BlockPlan, ModelPlan


def blocks_of(model: nn.Module, plan: ModelPlan) -> Iterator[tuple[str, nn.Module, str]]:
    """The name of each module that is given a part of its tokens, the module, and its class's name in the plan. Those
    of refiners are not among them."""
    for place, kind in plan.blocks.items():
        path, _, inside = place.partition(".*.")
        found = _at(model, path)
        if isinstance(found, nn.ModuleList) and inside:
            yield from ((f"{path}.{n}.{inside}", _at(block, inside), kind) for n, block in enumerate(found))
        elif isinstance(found, nn.ModuleList):
            yield from ((f"{path}.{n}", block, kind) for n, block in enumerate(found))
        elif isinstance(found, nn.ModuleDict):
            yield from ((f"{path}.{n}", block, kind) for n, block in found.items())
        elif isinstance(found, nn.Module):
            yield path, found, kind
        else:
            raise other_version(type(model).__name__, f"no list of blocks {path}")


def refiners_of(model: nn.Module, plan: ModelPlan) -> Iterator[tuple[str, nn.ModuleList]]:
    """The names of a model's lists of refiners, and the lists."""
    for path in plan.refiners:
        found = _at(model, path)
        if not isinstance(found, nn.ModuleList):
            raise other_version(type(model).__name__, f"no list of blocks {path}")
        if len(found):
            yield path, found


def _at(model: nn.Module, path: str) -> Any:
    """A module's part, by names with dots between; None where there is none."""
    return functools.reduce(lambda found, name: getattr(found, name, None), path.split("."), model)


def check_block(name: str, block: nn.Module, kind: str, spec: BlockPlan, model: str) -> tuple[str, ...]:
    """Refuse a block that is not as its plan knows it; the names of its arguments, in order. `model`: its model's
    module, of whose library the block must be."""
    if type(block).__name__ != kind or type(block).__module__.split(".")[0] != model.split(".")[0]:
        raise UnsupportedError("transformer", f"a {kind}", f"{name}, a {type(block).__name__}")
    taken = inspect.signature(type(block).forward).parameters
    taken = [n for n, p in taken.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]  # type: ignore[assignment]
    if set(taken) != set(spec.arguments):
        odd = sorted(set(taken) ^ set(spec.arguments))
        raise other_version(f"{name} ({kind})", f"arguments that differ in {', '.join(odd)}")
    for label, module in block.named_modules():
        if not hasattr(module, "processor"):
            continue
        known = spec.attention.get(label)
        processor, where = module.processor, f"{name}.{label}"
        if known is None or type(processor).__name__ not in known.processors:
            expected = f"an attention with {' or '.join(known.processors)}" if known else "no attention there"
            raise UnsupportedError("transformer", expected, f"{where} with {type(processor).__name__}")
    return tuple(taken)


def check_call(
    model: nn.Module, plan: ModelPlan, signature: inspect.Signature, given: Mapping[str, Any]
) -> list[tuple[str, object]]:
    """Refuse arguments that a split call has no part for, and what was changed in the model since; the processors of
    its split attention, by where they are."""
    for name, value in given.items():
        default = signature.parameters[name].default
        if name in (*plan.inputs, *plan.residuals) or value is None or value is default:
            continue
        if isinstance(value, dict) and set(value) <= {"scale"}:  # LoRA's, which the library takes out itself
            continue
        hint = "Its tokens would not be split" if tensors_in(value) else "The plan does not know what it changes"
        raise UnsupportedError(name, "its default on a split sequence", type(value).__name__, hint)
    latents = given[plan.latents]
    if not isinstance(latents, Tensor) and not (
        isinstance(latents, list) and all(map(Tensor.__instancecheck__, latents))
    ):
        raise ArgumentError(plan.latents, "a tensor, or a list of one for each batch row", type(latents).__name__)
    blocks = [(name, block, plan.classes[kind]) for name, block, kind in blocks_of(model, plan)]
    for path, refiners in refiners_of(model, plan):
        blocks += [(f"{path}.{n}", block, plan.refiners[path].block) for n, block in enumerate(refiners)]
    processors: list[tuple[str, object]] = []
    for name, block, spec in blocks:
        for label, module in block.named_modules():
            known = spec.attention.get(label)
            if known is None or not known.streams:
                continue
            if not getattr(module.processor, "ring_la", False):
                got = f"{name}.{label} with {type(module.processor).__name__}, set afterwards"
                raise UnsupportedError("transformer", "the processors of parallelize", got)
            processors.append((f"{name}.{label}", module.processor))
    return processors


def other_version(what: str, got: str) -> UnsupportedError:
    """An error of a model that is not as its plan knows it."""
    return UnsupportedError("transformer", f"{what} as the plan knows it", got, "Another version of Diffusers")
