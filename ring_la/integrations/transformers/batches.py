"""From whole batches to this rank's part of them: layouts, and that every rank was given the same."""

from __future__ import annotations

import zlib
from typing import Any

from torch import Tensor

from ...context import ShardedLayout
from ...errors import ArgumentError, DisagreementError, PeerError, RingLAError
from .call import ModelCall
from .inputs import Words, read
from .loss import ROWS
from .settings import Settings


class Batches:
    """The batches a model is called with.

    Attributes:
        groups: ranks that are given the same: those of a sequence, and those that have parts of the same weights.
    """

    def __init__(self, settings: Settings) -> None:
        self.cp, self.kind = settings.cp, settings.kind
        self.groups = [settings.cp.comm]
        self._layouts: dict[tuple, ShardedLayout] = {}
        self._compared = False

    def read(self, arguments: dict[str, Any], words: Words) -> tuple[ModelCall, dict[str, Any]]:
        """This rank's part of a call. What one rank refuses all refuse; batches are compared as cp.validate says."""
        validate = self.cp.validate
        try:
            call, local = read(self._layout, arguments, words)
        except RingLAError as error:
            if validate != "never":
                try:
                    self._agree("the arguments of the model", f"refused: {error}")
                except PeerError:  # the others compared such a call before: this rank's own error
                    raise error from None
            raise
        if arguments.get("layout") is None and (validate == "always" or (validate == "first" and not self._compared)):
            tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and not x.is_floating_point()}
            sums = {n: zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes()) for n, x in tensors.items()}
            numbers = {n: x for n, x in arguments.items() if isinstance(x, (int, float))}
            self._agree("the whole batch, which every rank must be given", sums | numbers, ROWS)
            self._compared = True
        return call, local

    def _agree(self, what: str, value: object, hint: str = "") -> None:
        for group in self.groups:
            group.agreement.agree(what, value, hint)

    def _layout(self, seq_len: int, offsets: tuple[int, ...] | None) -> ShardedLayout:
        """The layout of a whole batch; the last one is kept. Blocks of a deterministic one may leave a rank without."""
        if self.too_short(seq_len, offsets) and not self.cp.deterministic:
            raise ArgumentError("input_ids", f"at least a token for each of {self.cp.size} ranks", seq_len)
        return self._layouts[seq_len, offsets]

    def too_short(self, seq_len: int, offsets: tuple[int, ...] | None = None) -> bool:
        """Whether a rank would get no token of a whole batch."""
        return self.least(seq_len, offsets) == 0

    def least(self, seq_len: int, offsets: tuple[int, ...] | None = None) -> int:
        """The fewest tokens a rank gets of a whole batch."""
        key = (seq_len, offsets)
        if key not in self._layouts:
            try:
                layout = self.cp.layout(seq_len, self.kind, offsets)  # type: ignore[arg-type]
            except DisagreementError as error:
                raise DisagreementError(f"{error}\n{ROWS}") from None
            self._layouts = {key: layout}
        return min(self._layouts[key].lengths)
