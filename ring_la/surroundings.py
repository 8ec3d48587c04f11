"""What a captured step reads from around it: names it closes over, weights, gradients, numbers of an optimizer.

A graph takes all of it for granted. `Surroundings` finds what Python can tell; a `Snapshot` is how it was at a capture,
and says by name what is different at a replay. Not seen: what lies deeper than names of the step and of the functions
it closes over, such as an attribute of an object that is no module.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import UnsupportedError

PLAIN = (int, float, bool, str, type(None))
HELD = (Tensor, nn.Module, Optimizer)
Names = dict[str, Callable[[], Any]]


class Surroundings:
    """The names that a step reads from around it, and what stands behind them."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._names: Names = {}
        _collect(step, self._names, set())

    def training(self) -> tuple[bool, ...]:
        """Of each module whether it is training: a graph has dropout or has none."""
        return tuple(x.training for x in self._values().values() if isinstance(x, nn.Module))

    def snapshot(self) -> Snapshot:
        """How all of it is now."""
        values = self._values()
        first = {id(x): n for n, x in reversed(values.items())}  # a model may have several names
        modules = {n: x for n, x in values.items() if isinstance(x, nn.Module) and first[id(x)] == n}
        optimizers = {n: x for n, x in values.items() if isinstance(x, Optimizer)}
        places = [place for n, x in modules.items() for place in _places(n, x)]
        leaves: dict[int, Tensor] = {id(p): p for x in modules.values() for p in x.parameters() if p.requires_grad}
        leaves |= {id(p): p for x in optimizers.values() for group in x.param_groups for p in group["params"]}
        leaves |= {id(x): x for x in values.values() if isinstance(x, Tensor) and x.is_leaf and x.requires_grad}
        numbers = [number for n, x in optimizers.items() for number in _numbers(n, x)]
        return Snapshot(self._names, values, places, numbers, [_gradient(p) for p in leaves.values()])

    def _values(self) -> dict[str, Any]:
        return {n: x for n, read in self._names.items() if isinstance(x := _read(read), (*PLAIN, *HELD))}


class HeldPlace(NamedTuple):
    """Where a module keeps a weight, a buffer or a module, and what was there; of tensors where they lay."""

    name: str
    holder: Mapping[str, Any]
    key: str
    held: Any
    address: int

    def moved(self) -> str | None:
        """What is wrong, if it is no longer there."""
        if self.holder.get(self.key) is not self.held:
            return "another one"
        return "the same at another address" if self.address and self.held.data_ptr() != self.address else None


class Number(NamedTuple):
    """A number or a flag of an optimizer."""

    name: str
    group: Mapping[str, Any]
    key: str
    value: object


class Gradient(NamedTuple):
    """A tensor that may get a gradient, and the one that it has."""

    leaf: Tensor
    grad: Tensor | None
    version: int


class Written(NamedTuple):
    """A gradient that a graph writes.

    Attributes:
        adds: it adds to what is there, or fills it in place. fresh: there was none when it was captured.
    """

    leaf: Tensor
    grad: Tensor | None
    adds: bool
    fresh: bool


class Snapshot:
    """How the surroundings of a step were when it was captured: made before the capture, `close`d behind it."""

    def __init__(
        self,
        names: Names,
        values: dict[str, Any],
        places: list[HeldPlace],
        numbers: list[Number],
        before: list[Gradient],
    ) -> None:
        self._names, self._values, self._places, self._numbers = names, values, places, numbers
        self._addresses = {n: _address(x) for n, x in values.items()}
        self._before, self._written = before, list[Written]()

    def close(self) -> None:
        """Behind the capture.

        Raises:
            UnsupportedError: the step gives one of its names something else, which no replay does.
        """
        for name, value in self._values.items():
            now = _read(self._names[name])
            if now is not value and not (isinstance(value, PLAIN) and now == value):
                hint = f"Change {name} in place, on the device, or outside of the step"
                raise UnsupportedError(name, "what the step leaves as it was: a replay repeats no Python", now, hint)
        self._places = [x for x in self._places if x.moved() is None]  # the rest the step sets anew, each time
        for leaf, old, before in self._before:
            _, new, after = _gradient(leaf)
            if new is not old or before != after:
                self._written.append(Written(leaf, new, adds=new is old, fresh=old is None))
            leaf.grad = old  # nothing is computed yet
        self._before = []  # whose memory is not the graph's

    def check(self) -> None:
        """At a replay.

        Raises:
            UnsupportedError: something is no longer what the graph has, by name.
        """
        for name, value in self._values.items():
            now = _read(self._names[name])
            same = now == value if isinstance(value, PLAIN) else now is value and _address(now) == self._addresses[name]
            if not same:
                hint = "Give it to the step as an argument, or release() the step"
                raise UnsupportedError(name, f"what was captured, {_word(value)}", _word(now), hint)
        for place in self._places:
            moved = place.moved()
            if moved is not None:
                hint = "Copy into it, or release() the step, which is captured again then"
                raise UnsupportedError(place.name, "what was captured, where it was", moved, hint)
        for name, group, key, value in self._numbers:
            if group.get(key) != value:
                hint = f"A tensor on the device, filled in place, may change ({key}=torch.tensor(…, device=…))"
                raise UnsupportedError(name, f"the number that was captured, {value}", group.get(key), hint)

    def attach(self) -> None:
        """Gradients that a replay wrote are those that its leaves have.

        Raises:
            UnsupportedError: a gradient is not there that the graph adds to, or one is that it does not know.
        """
        for leaf, grad, adds, fresh in self._written:
            if adds and leaf.grad is not grad:
                raise _gradient_error(leaf, "the one that was captured, which the graph adds to", leaf.grad)
            if fresh and leaf.grad is not None:
                raise _gradient_error(leaf, "None, as at the capture: the graph adds to none", leaf.grad)
            leaf.grad = grad


def _gradient_error(leaf: Tensor, expected: str, got: Tensor | None) -> UnsupportedError:
    hint = "Begin the step with zero_grad(), or always call zero_grad(set_to_none=False) outside of it"
    name = f"the gradient of a tensor of shape {list(leaf.shape)}"
    return UnsupportedError(name, expected, "None" if got is None else "another gradient", hint)


def _collect(step: Any, names: Names, seen: set[int]) -> None:
    """The names of a step, and of the functions that it closes over."""
    step = getattr(step, "_torchdynamo_orig_callable", step)
    if id(step) in seen:
        return
    seen.add(id(step))
    if isinstance(step, functools.partial):
        for n, x in [*enumerate(step.args), *step.keywords.items()]:
            names[f"argument {n} of the partial"] = functools.partial(_itself, x)
        _collect(step.func, names, seen)
    elif isinstance(step, nn.Module):
        names.setdefault(type(step).__name__, lambda: step)
    elif isinstance(step, MethodType):
        owner = step.__self__
        if isinstance(owner, nn.Module):
            _collect(owner, names, seen)
        else:
            held = [n for n, x in getattr(owner, "__dict__", {}).items() if isinstance(x, HELD)]
            names |= {f"self.{n}": functools.partial(getattr, owner, n, None) for n in held}
        _collect(step.__func__, names, seen)
    elif isinstance(step, FunctionType):
        for name, cell in zip(step.__code__.co_freevars, step.__closure__ or ()):
            names.setdefault(name, functools.partial(getattr, cell, "cell_contents"))
            _collect(_read(names[name]), names, seen)
        for name in _globals(step.__code__) & step.__globals__.keys():
            names.setdefault(name, functools.partial(step.__globals__.get, name))


def _globals(code: CodeType) -> set[str]:
    """Global names that a function reads, and those within it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals(x) for x in code.co_consts if isinstance(x, CodeType)))


def _places(name: str, root: nn.Module) -> Iterator[HeldPlace]:
    for path, module in root.named_modules():
        for holder in (module._modules, module._parameters, module._buffers):
            for key, held in holder.items():
                yield HeldPlace(".".join(filter(None, (name, path, key))), holder, key, held, _address(held))


def _numbers(name: str, optimizer: Optimizer) -> Iterator[Number]:
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, (*PLAIN, tuple)):
                yield Number(f"{key} of {name}", group, key, value)


def _gradient(leaf: Tensor) -> Gradient:
    grad = leaf.grad
    return Gradient(leaf, grad, 0 if grad is None or grad.is_inference() else grad._version)


def _address(x: object) -> int:
    """Where a plain tensor lies; 0 of all else."""
    plain = type(x) in (Tensor, nn.Parameter, nn.Buffer) and isinstance(x, Tensor) and x.layout == torch.strided
    return x.data_ptr() if plain else 0  # type: ignore[attr-defined]


def _itself(x: object) -> object:
    return x


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ValueError:  # a name that has nothing yet
        return None


def _word(x: object) -> str:
    return repr(x) if isinstance(x, PLAIN) else f"a {type(x).__name__}"
