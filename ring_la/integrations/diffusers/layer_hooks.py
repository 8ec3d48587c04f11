"""Hooks behind layers that others may take the place of.

An adapter (LoRA) that is loaded wraps a layer and stands in its place; one that is unloaded gives the place back. A
hook on the module that was there would see a layer's output without the adapter's part, or nothing. So hooks belong to
places, by path, and follow what stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle


class HookedLayers(NamedTuple):
    """Where a hook stands.

    Attributes:
        path: a layer, a dict of layers, or a list.
        hook: behind each of them. last: of a list behind the last one alone.
    """

    path: str
    hook: Callable
    last: bool = False

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """What stands there now."""
        found = model.get_submodule(self.path)
        if isinstance(found, nn.ModuleList) and self.last:
            found = found[-1]
        if isinstance(found, nn.ModuleDict):
            return list(found.values())
        return list(found) if isinstance(found, nn.ModuleList) else [found]


class LayerHooks:
    """The hooks of one model, at the places they were given."""

    def __init__(self, model: nn.Module, places: Sequence[HookedLayers]) -> None:
        self._model, self._places = model, places
        self._hooked: list[tuple[nn.Module, RemovableHandle]] = []
        self.follow()

    def follow(self) -> None:
        """Hook what stands at the places now."""
        found = [(layer, place.hook) for place in self._places for layer in place.layers(self._model)]
        if [layer for layer, _ in found] != [layer for layer, _ in self._hooked]:
            self.remove()
            self._hooked = [(layer, layer.register_forward_hook(hook)) for layer, hook in found]

    def remove(self) -> None:
        """The way back."""
        for _, handle in self._hooked:
            handle.remove()
        self._hooked = []
