"""What `parallelize` leaves in a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ...errors import UnsupportedError
from .attention import AttentionNames
from .batches import Batches
from .call import Current, ModelCall, Returned
from .checks import Checks
from .loss import cross_entropy
from .modules import ModuleForwards
from .settings import Settings


@dataclass(frozen=True)
class CacheSupport:
    """What a model does with a cache.

    Attributes:
        name: of the model's argument and result that is its cache.
        without: the class that keeps it from having one after a split call, or None.
    """

    name: str
    without: str | None


@dataclass(frozen=True, eq=False)
class SplitModel:
    """What `parallelize` leaves in a model, under the name ``_ring_la`` of each of its modules.

    Attributes:
        settings: as given.
        current: the call under way.
        batches: what makes of a whole batch this rank's part.
        forwards: the classes' forwards.
        attention: which attention function its configurations name.
        checks: what is looked at before calls.
        cache: what it does with a cache.
        loss: the model's own loss function.
        model: the model, weakly.
    """

    settings: Settings
    current: Current
    batches: Batches
    forwards: ModuleForwards
    attention: AttentionNames
    checks: Checks
    cache: CacheSupport
    loss: Callable
    model: Callable[[], nn.Module | None]

    @property
    def call(self) -> ModelCall | None:
        """The split call under way, or whose backward pass is."""
        return self.current.call

    def __deepcopy__(self, memo: dict) -> SplitModel:
        """Copies of parts, which adapters make, belong to the same model; a copy of the model would share its calls."""
        if id(self.model()) in memo:
            raise UnsupportedError("model", "a copy made before parallelize", "a parallelized one")
        return self

    def loss_function(self, logits: Tensor, labels: Tensor, vocab_size: int, **keywords):
        """The loss function of the model: in a split call that of the whole batch."""
        call = self.call
        if call is None:
            return self.loss(logits=logits, labels=labels, vocab_size=vocab_size, **keywords)
        loss = (call.blocks.cross_entropy if call.blocks else cross_entropy)(call, logits, vocab_size)
        if not (call.blocks and call.losses):  # one for all blocks
            call.losses.append(Returned.of(loss))
        return loss
