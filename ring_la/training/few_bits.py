"""torchao's AdamW with moments of 8 or 4 bits, in loops that set `lr`, and in checkpoints of any number of ranks.

A moment is quantised in blocks of this rank's part, as numbers in order, so blocks end elsewhere on another number of
ranks. `state_dict` therefore has moments in fp32, as AdamW's own, and `load_state_dict` quantises them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch
from torch.distributed.tensor import DTensor
from torchao import optim  # pyright: ignore[reportMissingImports]

MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""Their names in an optimizer's state, and whether they are signed."""


class FewBits:
    """What is ours of an optimizer of torchao: to stand before it among a class's bases."""

    def step(self, closure: Any = None) -> Any:
        """torchao's, with a learning rate that may have become a float since, as loops and schedulers set it."""
        own: Any = self
        for group in own.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        # a cache that ranks share knows a DTensor by its whole shape: not by its part's, nor by its bits
        with functorch.patch(enable_autograd_cache=False):
            return super().step(closure)  # type: ignore[misc]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As AdamW's: moments in fp32, in host memory where they are of few bits on the device."""
        told = super().state_dict()  # type: ignore[misc]
        wide = {k: {name: _wide(x) for name, x in state.items()} for k, state in told["state"].items()}
        groups = [{**group, "lr": float(group["lr"])} for group in told["param_groups"]]
        return {**told, "state": wide, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own: Any = self
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = dict(zip(names, (p for group in own.param_groups for p in group["params"])))
        states = {}
        for key, given in state_dict["state"].items():
            states[key] = dict(given)
            for name in MOMENTS.keys() & given.keys():
                moment = own._new_buffer(parameters[key], MOMENTS[name])
                fill(_part(moment), _part(given[name]))
                states[key][name] = moment
        super().load_state_dict({**state_dict, "state": states})  # type: ignore[misc]


class AdamW8bit(FewBits, optim.AdamW8bit):
    """torchao's."""


class AdamW4bit(FewBits, optim.AdamW4bit):
    """torchao's."""


def fill(moment: Tensor, values: Tensor) -> None:
    """Copy values into a moment: what one of these blocks had held comes out as it was, to the last bit.

    A block's scale is its largest magnitude. That of a negative number is not found again: the lowest code stands for
    less than −1. So where values do not come out as they are, that number is tried as the scale would have been.
    """
    values = values.to(moment.device, torch.float32) if hasattr(moment, "qmap") else values
    moment.copy_(values)
    if not getattr(moment, "signed", False):
        return
    few: Any = moment
    blocks = values.reshape(-1, few.block_size)

    def wrong() -> Tensor:
        return (few.dequantize().view_as(blocks) != blocks).any(1, keepdim=True)

    lowest, place = blocks.min(1, keepdim=True)
    chosen, tried = blocks, lowest / few.qmap[0].abs()
    up, down = torch.full_like(tried, torch.inf), torch.full_like(tried, -torch.inf)
    above, below = torch.nextafter(tried, up), torch.nextafter(tried, down)
    for scale in (tried, above, below, torch.nextafter(above, up), torch.nextafter(below, down)):
        chosen = torch.where(wrong(), blocks.scatter(1, place, scale), chosen)
        few.copy_(chosen.view_as(values))
    few.copy_(torch.where(wrong(), blocks, chosen).view_as(values))


def _part(x: Tensor) -> Tensor:
    """This rank's part."""
    return x.to_local() if isinstance(x, DTensor) else x


def _wide(x: Any) -> Any:
    """What a moment of few bits stands for, in fp32 and host memory; anything else as it is."""
    part = _part(x) if isinstance(x, Tensor) else x
    if not hasattr(part, "qmap"):
        return x
    wide = part.dequantize()
    if not isinstance(x, DTensor):
        return wide.cpu()
    mesh, placements = x.device_mesh, x.placements
    return DTensor.from_local(wide, mesh, placements, run_check=False, shape=x.shape, stride=x.stride()).cpu()
