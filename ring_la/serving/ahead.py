"""What lets a step be taken before the host knows its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..capturing import CapturedStep


def goes_ahead(device: torch.device) -> bool:
    """Whether steps are taken before the host knows their tokens: where the host would be waited for."""
    return device.type == "cuda"


class OnTheWay:
    """Numbers on their way to the host, behind what is launched on their device so far and nothing else."""

    def __init__(self, x: Tensor) -> None:
        self._there = None
        if x.is_cuda:
            here = torch.cuda.current_stream(x.device)  # of which the process may have another device's at hand
            x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu").copy_(x, non_blocking=True)
            self._there = here.record_event()
        self._x = x if self._there is not None else x.clone()

    def there(self, step: CapturedStep | None = None) -> Tensor:
        """The numbers, once they are there, behind calls of that step, of which a rank that died is named."""
        if self._there is not None and step is not None:
            step.finish(self._there)
        elif self._there is not None:
            self._there.synchronize()
        return self._x
