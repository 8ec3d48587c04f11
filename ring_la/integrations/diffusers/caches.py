"""Step caches of Diffusers on split tokens: every rank must decide alike, or some wait for those that left layers out.

    First Block Cache   decides by how much the first block's residual changed: sums over all ranks' tokens
    cache-dit           the same of its first blocks (`cache_dit`)
    TeaCache            the same of what the blocks are given (`tea_cache`, which is ours)
    SeaCache            decides by the whole latents, alike on all ranks
    the others          decide by a table or by how many steps there were, alike on all ranks

What they keep are this rank's tokens. Their settings are compared among the ranks with the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd import outside_graphs
from ...errors import UnsupportedError
from .cache_dit import PLACE, cache_dit_settings

KNOWN = {
    "FBCHeadBlockHook": "First Block Cache",
    "FBCBlockHook": "First Block Cache",
    "MagCacheHeadHook": "MagCache",
    "MagCacheBlockHook": "MagCache",
    "TaylorSeerCacheHook": "TaylorSeer",
    "PyramidAttentionBroadcastHook": "Pyramid Attention Broadcast",
    "FasterCacheBlockHook": "FasterCache",
    "FasterCacheDenoiserHook": "FasterCache",
    "SeaCacheRootHook": "SeaCache",
    "SeaCacheLeaderBlockHook": "SeaCache",
    "SeaCacheBlockHook": "SeaCache",
    "TeaCacheHook": "TeaCache",
}
"""Hooks that decide alike on all ranks, or are made to, and the caches they are of."""


def check_hooks(model: nn.Module, split: Any) -> str:
    """Refuse hooks of Diffusers but those of known caches, which then decide alike; the settings of these."""
    settings = {cache_dit_settings(model, split)} - {""}
    for name, module in split.modules:
        _refuse_offloading(name or type(model).__name__, module.__dict__.get("_hf_hook"))
        hooks = module.__dict__.get("_diffusers_hook")
        for place, hook in () if hooks is None else hooks.hooks.items():
            if place == PLACE:
                continue
            kind = type(hook).__name__
            if kind not in KNOWN:
                caches = ", ".join(dict.fromkeys(KNOWN.values()))
                got = f"{kind} on {name or type(model).__name__}"
                raise UnsupportedError("transformer", f"no hooks of Diffusers but those of {caches}", got)
            if kind == "FBCHeadBlockHook" and "_should_compute_remaining_blocks" not in hook.__dict__:
                hook._should_compute_remaining_blocks = functools.partial(_changed, hook, split)
                split.undo.callback(delattr, hook, "_should_compute_remaining_blocks")
            if kind == "TeaCacheHook" and not hook.deciding:
                hook.deciding = split.deciding
                split.undo.callback(setattr, hook, "deciding", ())
            config = getattr(hook, "config", hook)
            if kind == "FasterCacheDenoiserHook" and not config.is_guidance_distilled:
                expected = "FasterCache with is_guidance_distilled=True, which leaves the batch whole"
                raise UnsupportedError("transformer", expected, False)
            if getattr(config, "calibrate", False):
                raise UnsupportedError("transformer", "MagCache with its table", "calibrate=True", "Calibrate unsplit")
            settings.add(f"{kind}, {_settings(config)}")
    return "; ".join(sorted(settings))


def _refuse_offloading(name: str, hook: Any) -> None:
    """Accelerate's hooks that bring a layer's weights when it is called: layers are not called one by one here."""
    if any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,))):
        got = f"offloading of {name}"
        raise UnsupportedError("transformer", "weights that stay on a device in a call", got, "Offload whole models")


def _settings(config: object) -> str:
    """A cache's numbers and words by name; what is computed of them stays on the rank."""
    plain = (bool, int, float, str, tuple, list, type(None), torch.dtype)
    given = {n: x.tolist() if isinstance(x, Tensor) else x for n, x in sorted(vars(config).items())}
    return ", ".join(f"{n} {x}" for n, x in given.items() if isinstance(x, plain) and not n.startswith("_"))


@outside_graphs
def _changed(hook: Any, split: Any, residual: Tensor) -> bool:
    """Whether the residual of the first block changed by more than the threshold, over all ranks' tokens."""
    before = hook.state_manager.get_state().head_block_residual
    if before is None:
        return True
    return relative_change(residual, before, split.deciding) > hook.threshold


def relative_change(x: Tensor, before: Tensor, groups: Sequence[Any]) -> float:
    """``|x − before| / |before|`` by the L1 norm, over all ranks' tokens."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = torch.stack([(x - before).abs().sum(dtype=wide), before.abs().sum(dtype=wide)])
    for group in groups:
        sums = group.all_reduce(sums).wait()
    return float(sums[0] / sums[1])
