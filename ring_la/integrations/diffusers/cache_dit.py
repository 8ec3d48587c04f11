"""cache-dit's block caches (DBCache) on split tokens, where it is installed and enabled on a split model.

It calls a list's blocks from a loop of its own, in front of our hooks: the loop is given whole tokens, its first blocks
give this rank's. So the loop asks for its input cut the same way, by the hook that it looks for on its first block
(one of Diffusers' context parallelism), and what it decides by, a change of the first blocks' residual, is summed over
all ranks' tokens, as for First Block Cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd import outside_graphs
from ...errors import UnsupportedError
from .plans import TokenRows

PLACE = "ring_la"
"""Under which a block's registry of hooks has ours."""


def cache_dit_settings(model: Any, split: Any) -> str:
    """Have a cache of cache-dit on this model decide alike on all ranks; its settings, "" where there is none.

    Raises:
        UnsupportedError: it is set up as split tokens do not allow.
    """
    manager = getattr(model, "_context_manager", None)
    if manager is None or not getattr(model, "_is_cached", False):
        return ""
    config = getattr(model, "_context_kwargs", {}).get("cache_config")
    _check(model, split, config)
    if PLACE not in manager.__dict__:
        setattr(manager, PLACE, True)
        manager.similarity = functools.partial(_similar, split, manager.similarity)
        split.undo.callback(_forget, manager)
        for path, kind in split.plan.blocks.items():
            _mark(model.get_submodule(path), split, split.plan.classes[kind].arguments)
    return f"cache-dit, {'' if config is None else sorted((n, str(x)) for n, x in vars(config).items())}"


def _check(model: Any, split: Any, config: Any) -> None:
    if split.plan.last in split.plan.blocks or split.plan.refiners:
        expected = "a model that is gathered behind its blocks, by a layer of its own"
        raise UnsupportedError("cache-dit", expected, type(model).__name__)
    first = getattr(config, "Fn_compute_blocks", 1)
    if first < 1:
        raise UnsupportedError("cache-dit", "Fn_compute_blocks of 1 at least", first)
    extra = getattr(config, "extra_cache_config", None) or config
    if getattr(extra, "important_condition_threshold", 0.0):
        raise UnsupportedError("cache-dit", "important_condition_threshold=0, all tokens alike", "another one")


def _mark(blocks: Any, split: Any, arguments: Any) -> None:
    """Put a hook on the first block that cuts what the loop over them was given."""
    from diffusers.hooks.context_parallel import ContextParallelInput
    from diffusers.hooks.hooks import HookRegistry

    role = next(r for r in arguments.values() if isinstance(r, TokenRows))
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        return
    registry = HookRegistry.check_if_exists_or_initialize(blocks[0])
    registry.hooks[PLACE] = _hook_class()({PLACE: ContextParallelInput(role.dim)}, _cutting(split, role))
    split.undo.callback(registry.hooks.pop, PLACE, None)


def _cutting(split: Any, role: TokenRows) -> Callable[[Tensor], Tensor]:
    return lambda x: split.call.streams.shard("hidden_states", x, role.streams, role.dim)


@functools.cache
def _hook_class() -> type:
    """Of the hooks that cache-dit looks for. Ours is asked to cut, and never registered to run."""
    from diffusers.hooks.context_parallel import ContextParallelSplitHook

    class RankTokens(ContextParallelSplitHook):
        def __init__(self, metadata: dict[str, Any], cut: Callable[[Tensor], Tensor]) -> None:
            self.metadata, self._cut = metadata, cut

        def _prepare_cp_input(self, x: Tensor, cp_input: object) -> Tensor:
            return self._cut(x)

    return RankTokens


@outside_graphs
def _similar(split: Any, own: Callable[..., bool], before: Tensor, now: Tensor, **how: Any) -> bool:
    """What cache-dit's own comparison says of two numbers whose ratio is that of all ranks' tokens."""
    if before.shape == now.shape:
        wide = torch.promote_types(now.dtype, torch.float32)
        sums = torch.stack([(before - now).abs().sum(dtype=wide), before.abs().sum(dtype=wide)])
        for group in split.deciding:
            sums = group.all_reduce(sums).wait()
        before, now = sums[1], sums[1] - sums[0]
    return own(before, now, **how | {"parallelized": False})


def _forget(manager: Any) -> None:
    for name in ("similarity", PLACE):
        manager.__dict__.pop(name, None)
