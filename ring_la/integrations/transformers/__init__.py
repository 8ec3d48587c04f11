"""Models of Transformers on a split sequence.

    cp = ring_la.ContextParallel(group)
    model = parallelize(AutoModelForCausalLM.from_pretrained(name), cp)
    loss = model(input_ids=ids, labels=ids).loss      # the whole batch on every rank; the whole loss on every rank
    loss.backward()                                   # then sum the parameters' gradients over the group

`ContextTrainer` is the library's Trainer for such a model (`trainer`).

`parallelize` keeps the model, its class, its weights and its call, and leaves a `SplitModel` in it (`split`): settings,
the call under way, batches, forwards, checks. What crosses the sequence is done by ring_la:

    softmax attention         by name through the library's attention and mask registries (`attention`, `masks`)
    recurrences, convolutions the mixer's own forward, its functions that cross the sequence bound to ours (`mixers`)
    positions, labels, loss   from the layout (`inputs`, `loss`)
    router losses, caches     gathered (`loss`, `cache`)

Everything else must work token by token. That is not believed but measured, before the first step (`probe`): a module
that carries anything from one document to another is refused by its name.
"""

from typing import TYPE_CHECKING

from .model import parallelize

if TYPE_CHECKING:
    from .trainer import ContextTrainer

__all__ = ["ContextTrainer", "parallelize"]


def __getattr__(name: str) -> object:
    """`ContextTrainer` when it is asked for: the library's Trainer takes seconds to import, and needs Accelerate."""
    if name != "ContextTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .trainer import ContextTrainer

    return ContextTrainer
