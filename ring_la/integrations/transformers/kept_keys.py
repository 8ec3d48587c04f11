"""What a cache's layers have in place of keys where these stay on the ranks that read them (`ring_la.keystore`).

A split call's attention asks for what stands before its tokens, and when the call is done this rank's new keys are
taken, so nothing is gathered. Latents are kept as the library has them: in the places of keys, their rotary keys in
those of values.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...context import ShardedLayout
from ...keystore import KeyRows, KeyStore, LayerKeys


class KeptKeys:
    """The keys of one call's sequences.

    Args:
        store: where they are. layers: a layer's number in it, by its number in the cache. before: the sequences so far,
            which are not written to; None: they begin.

    Attributes:
        after: with the call's tokens; None as long as none are taken.
    """

    def __init__(self, store: KeyStore, layers: Mapping[int, int], before: KeyRows | None) -> None:
        self._store, self._layers, self._before = store, layers, before
        self.after: KeyRows | None = None

    def before(self, layer: int) -> LayerKeys | None:
        """What a layer has of the tokens before the call's; None: there are none."""
        return None if self._before is None else self._before[self._layers[layer]]

    def take(self, layer: int, k: Tensor, v: Tensor, layout: ShardedLayout | None) -> None:
        """A layer's new keys and values ``[B, heads, T, ·]``: of this rank's tokens of a layout, or of all tokens, the
        same on all ranks, which share them out (None)."""
        if self.after is None:
            before = self._store.open(len(k)) if self._before is None else self._before
            self.after = before.advanced(tokens=k.shape[2]) if layout is None else before.extended(layout)
        self.after[self._layers[layer]].put(k.transpose(1, 2), v.transpose(1, 2))
