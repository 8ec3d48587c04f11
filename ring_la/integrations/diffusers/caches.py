"""Step caches of Diffusers on split tokens: every rank must decide alike, or some wait for those that left layers out.

    First Block Cache   decides by how much the first block's residual changed: sums over all ranks' tokens
    MagCache            decides by a table of the host's, alike on all ranks

What they keep are this rank's tokens. Their settings are compared among the ranks with the inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd import outside_graphs
from ...errors import UnsupportedError

KNOWN = ("FBCHeadBlockHook", "FBCBlockHook", "MagCacheHeadHook", "MagCacheBlockHook")


def check_hooks(name: str, block: nn.Module, split: Any) -> str:
    """Refuse hooks of Diffusers on a block but those of known caches, which then decide alike; their settings."""
    hooks = getattr(block, "_diffusers_hook", None)
    settings = []
    for hook in () if hooks is None else hooks.hooks.values():
        kind = type(hook).__name__
        if kind not in KNOWN:
            expected = "no hooks of Diffusers on blocks but those of First Block Cache and MagCache"
            raise UnsupportedError("transformer", expected, f"{kind} on {name}")
        if kind == "FBCHeadBlockHook":
            if "_should_compute_remaining_blocks" not in hook.__dict__:
                hook._should_compute_remaining_blocks = functools.partial(_changed, hook, split)
                split.undo.callback(delattr, hook, "_should_compute_remaining_blocks")
            settings.append(f"First Block Cache, threshold {hook.threshold}")
        elif kind == "MagCacheHeadHook":
            if hook.config.calibrate:
                raise UnsupportedError("transformer", "MagCache with its table", "calibrate=True", "Calibrate unsplit")
            c = hook.config
            table = [float(x) for x in c.mag_ratios]
            limits = f"{c.threshold}, {c.max_skip_steps}, {c.retention_ratio}, {c.num_inference_steps}"
            settings.append(f"MagCache, {limits}, {table}")
    return "; ".join(settings)


@outside_graphs
def _changed(hook: Any, split: Any, residual: Tensor) -> bool:
    """Whether the residual of the first block changed by more than the threshold, over all ranks' tokens."""
    before = hook.state_manager.get_state().head_block_residual
    if before is None:
        return True
    wide = torch.promote_types(residual.dtype, torch.float32)
    sums = torch.stack([(residual - before).abs().sum(dtype=wide), before.abs().sum(dtype=wide)])
    for group in split.deciding:
        sums = group.all_reduce(sums).wait()
    return float(sums[0] / sums[1]) > hook.threshold
