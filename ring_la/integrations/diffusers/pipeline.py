"""`parallelize` of a whole pipeline: guidance, the decoder and the text encoders beside its transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...choices import AttentionChoice
from ...comm import Group
from ...context import ContextParallel
from ...errors import ArgumentError, DisagreementError, UnsupportedError
from .autoencoder import RowDecoder
from .catalogue import PLANS
from .guidance import Guidance, guided_class


class Axes(NamedTuple):
    """Over which ranks a pipeline is split: `sequence` one call's tokens, `guidance` (None: none) its calls or rows,
    `whole` the decoder."""

    sequence: ContextParallel
    guidance: ContextParallel | None
    whole: ContextParallel


def is_pipeline(model: object) -> bool:
    """Whether this is a pipeline of Diffusers (or one like it: with components, and no model itself)."""
    return not isinstance(model, nn.Module) and isinstance(getattr(model, "components", None), dict)


def transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """A pipeline's transformers by name."""
    found = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module) and n.startswith("transformer")}
    if not found:
        raise UnsupportedError("transformer", "a pipeline with a transformer", type(pipe).__name__)
    return found


def controlnets_of(pipe: Any) -> list[nn.Module]:
    """A pipeline's ControlNets that can be split; others run whole on every rank."""
    found = [m for n, m in pipe.components.items() if isinstance(m, nn.Module) and n.startswith("controlnet")]
    each = [net for m in found for net in _nets(m)]
    return [net for net in each if type(net).__name__ in PLANS]


def _nets(model: nn.Module) -> list[nn.Module]:
    """The ControlNets that one may be made of."""
    nets = getattr(model, "nets", None)
    return list(nets) if isinstance(nets, nn.ModuleList) else [model]


def agree_on(cp: ContextParallel, cfg: object, options: dict[str, object]) -> None:
    """Refuse, on every rank, options in which ranks differ, before some of them make groups that the others do not."""
    axis = isinstance(cfg, (dist.ProcessGroup, DeviceMesh))
    if cp.validate != "never":
        cp.comm.agreement.agree("the options of parallelize", {"cfg": "an axis" if axis else repr(cfg)} | options)


def axes_of(cp: ContextParallel, cfg: object) -> Axes:
    """The axes that `cfg` asks for. Collective."""
    if isinstance(cfg, (dist.ProcessGroup, DeviceMesh)):
        return Axes(cp, _alike(cp, cfg, "ring"), cp)
    if not isinstance(cfg, int) or isinstance(cfg, bool) or cfg < 1 or cp.size % cfg:
        expected = f"a number that divides the {cp.size} ranks of cp, or the axis beside cp's (a DeviceMesh)"
        raise ArgumentError("cfg", expected, repr(cfg))
    if cfg == 1:
        return Axes(cp, None, cp)
    if cp.axes is not None:
        expected = "the axis itself beside a cp of two axes (mesh['cfg'] beside mesh['ulysses', 'ring'])"
        raise UnsupportedError("cfg", expected, cfg)
    each, ranks = cp.size // cfg, cp.comm.global_ranks
    sequences = [ranks[n * each : (n + 1) * each] for n in range(cfg)]
    across = [ranks[n::each] for n in range(each)]
    return Axes(_alike(cp, _new_group(cp, sequences)), _alike(cp, _new_group(cp, across), "ring"), cp)


def _new_group(cp: ContextParallel, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """The one of some new groups that this rank is in. Collective over `cp`."""
    world, whole = dist.distributed_c10d._world, cp.size == dist.get_world_size()
    # groups are found by how many there are, or were made: ranks that have others would wait for each other for ever
    made = world.group_count if whole else len(world.pg_names)
    cp.comm.agreement.agree("the number of process groups they have: give cfg a DeviceMesh's axis", {"groups": made})
    if whole:
        groups = [dist.new_group(list(ranks)) for ranks in parts]  # all ranks make all
        return next(g for g, ranks in zip(groups, parts) if dist.get_rank() in ranks)
    mine = next(ranks for ranks in parts if dist.get_rank() in ranks)
    return dist.new_group(list(mine), use_local_synchronization=True)


def _alike(
    cp: ContextParallel, group: dist.ProcessGroup | DeviceMesh, attention: AttentionChoice | None = None
) -> ContextParallel:
    """A ContextParallel of other ranks with the same settings."""
    how: dict[str, Any] = dict(
        scan=cp.scan_choice, attention=attention or cp.attention, transport=cp.transport, head_groups=cp.head_groups
    )
    return ContextParallel(group, **how, timeout=cp.timeout, validate=cp.validate)


class SplitPipeline:
    """What `parallelize` leaves in a pipeline, under the name ``_ring_la``."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.guided: list[Guidance] = []
        self.undo = ExitStack()

    def adopt(self, pipe: Any, vae: bool, text: bool) -> None:
        """All but the tokens: guidance, decoder, text. On an error, `undo` holds what was done."""
        pipe._ring_la = self
        self.undo.callback(_forget, pipe)
        model: Any
        for model in transformers_of(pipe).values() if self.axes.guidance is not None else ():
            model._ring_la_guidance = Guidance(self.axes.guidance)
            self.guided.append(model._ring_la_guidance)
            self.undo.callback(delattr, model, "_ring_la_guidance")
            self.undo.callback(setattr, model, "__class__", type(model))
            model.__class__ = guided_class(type(model))
        if self.guided:
            kind = type(pipe)
            self.undo.callback(setattr, pipe, "__class__", kind)
            pipe.__class__ = _restarting_class(kind, self.guided)
        if vae:
            if getattr(pipe, "vae", None) is None:
                raise UnsupportedError("vae", "False for a pipeline without one", True)
            RowDecoder(self.axes.whole).adopt(pipe.vae, self.undo)
        if text:
            if not callable(getattr(pipe, "encode_prompt", None)):
                raise UnsupportedError("text", "False for a pipeline without encode_prompt", True)
            pipe.encode_prompt = functools.partial(_sent_by_one, self.axes.whole.comm, pipe.encode_prompt)
            self.undo.callback(delattr, pipe, "encode_prompt")


def _restarting_class(kind: type, guided: list[Guidance]) -> type:
    """The same class of pipelines, whose calls begin with nothing known of their steps, and end with all answered."""

    @functools.wraps(kind.__call__)
    def call(self, *args, **keywords):
        for guidance in guided:
            guidance.restart(True)
        try:
            out = kind.__call__(self, *args, **keywords)
        except DisagreementError:  # NaN of a step that was not filled in is what differs
            for guidance in guided:
                guidance.finish()
            raise
        else:
            for guidance in guided:
                guidance.finish()
            return out
        finally:
            for guidance in guided:
                guidance.restart(False)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _forget(pipe: Any) -> None:
    del pipe._ring_la


def _sent_by_one(group: Group, encode: Any, *args, **keywords) -> object:
    """What the text encoders of the first rank say, on every rank."""
    said: list[Any] = [None]
    error: Exception | None = None
    tensors: list[Tensor] = []
    if group.rank == 0:
        try:
            out = encode(*args, **keywords)
            said[0] = _without_tensors(out, tensors), [(list(t.shape), t.dtype) for t in tensors]
        except Exception as e:  # the others must not wait for it
            said[0], error = e, e
    dist.broadcast_object_list(said, src=group.global_ranks[0], group=group.group)
    if isinstance(said[0], Exception):
        raise error or said[0]
    form, kinds = said[0]
    others = range(1, group.size)
    if group.rank == 0:
        waiting = [group.exchange({r: t for r in others}, {}) for t in tensors]
    else:
        tensors = [torch.empty(shape, dtype=dtype, device=group.device) for shape, dtype in kinds]
        waiting = [group.exchange({}, {0: t}) for t in tensors]
    for one in waiting:
        one.wait()
    return _with_tensors(form, tensors)


class _Place(NamedTuple):
    """Where a tensor stands."""

    number: int


def _without_tensors(x: Any, tensors: list[Tensor]) -> object:
    if isinstance(x, Tensor):
        tensors.append(x)
        return _Place(len(tensors) - 1)
    if isinstance(x, dict):
        return {n: _without_tensors(one, tensors) for n, one in x.items()}
    return type(x)([_without_tensors(one, tensors) for one in x]) if type(x) in (tuple, list) else x


def _with_tensors(x: Any, tensors: list[Tensor]) -> object:
    if isinstance(x, _Place):
        return tensors[x.number]
    if isinstance(x, dict):
        return {n: _with_tensors(one, tensors) for n, one in x.items()}
    return type(x)([_with_tensors(one, tensors) for one in x]) if type(x) in (tuple, list) else x
