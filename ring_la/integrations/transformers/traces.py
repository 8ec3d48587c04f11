"""What the modules of a model take and give in a run, one row a token, seen through hooks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError

SKETCH = 4
"""Random directions a row is projected on."""


@dataclass(frozen=True)
class Trace:
    """What a module took and gave, one row a token, on a few random directions ``[T, SKETCH]``; None: no such rows."""

    before: Tensor | None
    after: Tensor


class Watch:
    """Hooks on every module of a model while it runs, as a context manager.

    Attributes:
        inside: names of the modules being run, outermost first; where one fails, it stays the last.
        traces: of the modules that give a row a token, in the order they finish.
    """

    def __init__(self, model: nn.Module, length: int, inside: list[str]) -> None:
        self.model, self.length, self.inside = model, length, inside
        self.traces: dict[str, Trace] = {}
        self._hooks: list = []

    def __enter__(self) -> Watch:
        for name, module in self.model.named_modules():
            if name:
                before, after = partial(self._before, name), partial(self._after, name)
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, name: str, module: nn.Module, args: tuple, keywords: dict) -> None:
        self.inside.append(name)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            got = "statistics of this rank's tokens, in training"
            raise UnsupportedError("model", "norms of one token at a time", got)

    def _after(self, name: str, module: nn.Module, args: tuple, keywords: dict, output: object) -> None:
        self.inside.pop()
        after = sketch(output, self.length, integers=False)  # an indexer's results are places
        if after is not None:
            taken = (sketch(x, self.length) for x in (*args, *keywords.values()))
            self.traces[name] = Trace(next((x for x in taken if x is not None), None), after)


def sketch(x: object, length: int, integers: bool = True) -> Tensor | None:
    """A tensor with one row a token (or the first of a module's results), projected: ``[length, SKETCH]``."""
    if not isinstance(x, (Tensor, tuple, list)):
        x = getattr(x, "last_hidden_state", getattr(x, "logits", None))
    x = x[0] if isinstance(x, (tuple, list)) and x else x
    if not isinstance(x, Tensor):
        return None
    x = x[0] if x.dim() > 1 and x.shape[0] == 1 else x
    if x.dim() < 1 or x.shape[0] != length:
        return None
    x = torch.view_as_real(x) if x.is_complex() else x
    if not x.is_floating_point() and not integers:
        return None
    if not x.is_floating_point():  # ids: what an embedding takes
        return x.detach().reshape(length, -1)[:, :1].float().expand(-1, SKETCH).cpu()
    flat = x.detach().reshape(length, -1).float()
    directions = torch.randn(flat.shape[1], SKETCH, generator=torch.Generator().manual_seed(flat.shape[1]))
    return (flat @ directions.to(flat.device)).cpu()
