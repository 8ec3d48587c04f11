"""Mixers of the library that carry a state along the sequence, and the functions of ours that do it instead.

    MIXERS["Qwen3NextGatedDeltaNet"] = {"causal_conv1d_fn": causal_conv1d_fn, "torch_chunk_gated_delta_rule": …}

An entry is a class's name and, for each function its forward calls that crosses the sequence, ours by the same name:
``operator(call, *args, **keywords)`` with the library's arguments and result. A parallelized mixer runs its own forward
with these names bound to ours; projections, gates, norms and the cache's book-keeping stay its own. What an entry
misses the probe finds. One that depends on what its layer says is an `OfLayer`. A mixer that crosses the sequence in
the middle of its forward has a forward of ours instead:
``forward(call, layer, *args, **keywords)``.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from ....errors import UnsupportedError
from ..call import Current, ModelCall
from ..names import cache_of
from . import (
    channelwise,
    convolution,
    delta,
    indexed,
    latents,
    lightning,
    mamba,
    own_attention,
    qwen4_exp,
    rwkv,
    xlstm,
    zaya,
)
from .entry import OfLayer

MIXERS: dict[str, Mapping[str, Callable | OfLayer] | Callable] = {
    **convolution.MIXERS,
    **delta.MIXERS,
    **mamba.MIXERS,  # type: ignore[dict-item]
    **lightning.MIXERS,
    **indexed.MIXERS,
    **latents.MIXERS,
    **qwen4_exp.MIXERS,
    **rwkv.MIXERS,
    **xlstm.MIXERS,
    **zaya.MIXERS,
    **channelwise.MIXERS,  # type: ignore[dict-item]
    **own_attention.MIXERS,
}
"""Class name → the functions that replace those its forward calls, or the whole forward."""

UNCACHED = set().union(*(m.UNCACHED for m in (channelwise, indexed, latents, qwen4_exp, xlstm)))
"""Classes whose state a split call cannot put into a cache."""


CONTINUED = {*latents.CLASSES, *channelwise.SCANS, *channelwise.OURS_WITH_CACHE}.union(
    *(m.MIXERS for m in (convolution, delta, mamba, lightning, rwkv, zaya))
)
"""Classes that go on from a filled cache on split tokens."""


OURS_WITH_CACHE = channelwise.OURS_WITH_CACHE | rwkv.OURS_WITH_CACHE
"""Classes whose forward is ours in every call with a cache, split or whole: the library's leaves nothing there, or what
is wrong."""


OF_ONE_SEQUENCE = channelwise.UNCACHED
"""Classes that keep what they remember in themselves, of one sequence alone."""


TAKING_BLOCKS = {"MiniMaxModel", *latents.CLASSES, *lightning.MIXERS}.union(
    *(m.MIXERS for m in (channelwise, convolution, delta, mamba, own_attention))
)
"""Classes whose operators go through `ModelCall.operator`, so that the model can be run block by block."""


def takes_blocks(kind: type) -> bool:
    """Whether the nearest entry of a class is in `TAKING_BLOCKS`."""
    return next((c.__name__ for c in kind.__mro__ if c.__name__ in MIXERS), None) in TAKING_BLOCKS


def entry_of(kind: type) -> Mapping[str, Callable | OfLayer] | Callable | None:
    """The entry of a class or the nearest of its parents that has one."""
    return next((MIXERS[c.__name__] for c in kind.__mro__ if c.__name__ in MIXERS), None)


def asked_of(kind: type) -> tuple[Callable[[nn.Module], float | None], ...]:
    """What modules of a class are asked before their forward is made: its functions depend on it."""
    entry = entry_of(kind)
    return tuple(f.says for f in entry.values() if isinstance(f, OfLayer)) if isinstance(entry, Mapping) else ()


def uncached(model: nn.Module) -> str | None:
    """The name of the first class in a model that is in `UNCACHED`."""
    return _first_of(UNCACHED, model)


def of_one_sequence(model: nn.Module) -> str | None:
    """The name of the first class in a model that is in `OF_ONE_SEQUENCE`."""
    return _first_of(OF_ONE_SEQUENCE, model)


def _first_of(names: set[str], model: nn.Module) -> str | None:
    kinds = (c.__name__ for module in model.modules() for c in type(module).__mro__)
    return next((name for name in kinds if name in names), None)


def goes_on(model: nn.Module) -> bool:
    """Whether every mixer of a model with an entry is in `CONTINUED`."""
    names = (next((c.__name__ for c in type(m).__mro__ if c.__name__ in MIXERS), None) for m in model.modules())
    return all(name is None or name in CONTINUED for name in names)


def scans(module: nn.Module) -> bool:
    """Whether a module's recurrence goes on from earlier tokens in ours alone."""
    return any(c.__name__ in channelwise.SCANS for c in type(module).__mro__)


def ours_with_cache(module: nn.Module) -> bool:
    """Whether a module's forward is ours in every call with a cache."""
    return any(c.__name__ in OURS_WITH_CACHE for c in type(module).__mro__)


def number_layers(model: nn.Module, undo: ExitStack | None = None) -> None:
    """Tell such modules which of a cache's layers is theirs, where the library does not; `undo` takes the way back."""
    for name, module in model.named_modules():
        if ours_with_cache(module) and not hasattr(module, "layer_idx"):
            module.layer_idx = next(int(part) for part in name.split(".") if part.isdigit())
            if undo is not None:
                undo.callback(delattr, module, "layer_idx")


def make_forward(module: nn.Module, current: Current) -> Callable:
    """The forward of a mixer, and of those of its class that say the same: ours in a split call, the library's
    otherwise but for `OURS_WITH_CACHE`.

    Raises:
        UnsupportedError: the class does not call a function its entry replaces (another version of the library).
    """
    kind = type(module)
    entry, own = entry_of(kind), kind.forward
    if callable(entry):

        @functools.wraps(own)
        def forward(self: Any, *args, **keywords):
            call = current.call
            if call is None and ours_with_cache(self) and cache_of(keywords) is not None:
                call = ModelCall(None)
            return own(self, *args, **keywords) if call is None else entry(call, self, *args, **keywords)

        return forward
    inner = inspect.unwrap(own)
    missing = [name for name in entry if name not in inner.__code__.co_names]
    if missing:
        raise UnsupportedError("model", f"a {kind.__name__} whose forward calls {', '.join(missing)}", "one without it")

    def bind(name: str, operator: Callable) -> Callable:
        original = inner.__globals__[name]

        @functools.wraps(original)
        def bound(*args, **keywords):
            call = current.call
            return original(*args, **keywords) if call is None else operator(call, *args, **keywords)

        return bound

    ours = {name: f.make(f.says(module)) if isinstance(f, OfLayer) else f for name, f in entry.items()}
    scope = {**inner.__globals__, **{name: bind(name, operator) for name, operator in ours.items()}}
    del scope["__name__"]  # by which torch.compile would look into the library's own globals instead
    code = inner.__code__.replace()  # torch.compile keeps what it compiled, of one scope, by the code object
    forward = types.FunctionType(code, scope, inner.__name__, inner.__defaults__, inner.__closure__)  # type: ignore[assignment]
    forward.__kwdefaults__ = inner.__kwdefaults__  # type: ignore[attr-defined]
    return functools.wraps(own)(forward)
