"""What a captured step reads from around it: names of its function, weights, gradients, numbers of an optimizer.

A graph takes all of it for granted. `Surroundings` finds what Python can tell; a `Snapshot` is how it was at a capture,
and says by name what is different at a replay. It holds what the step reads and does not write, and nothing else: a
name that its function reads and never binds, weights of the modules it reaches, an optimizer that it steps, gradients
that it writes. Not seen: attributes of objects that are no modules, and what functions of other files read.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import UnsupportedError

PLAIN = (int, float, bool, str, type(None))
Names = dict[str, Callable[[], Any]]


class Surroundings:
    """The names that a step reads from around it, and the modules that it reaches by them."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        function = _function(step)
        self._names: Names = {} if function is None else _read_names(function)
        self._modules = _modules(step)

    def training(self) -> tuple[bool, ...]:
        """Of each module whether it is training: a graph has dropout or has none."""
        return tuple(x.training for x in self._modules)

    def snapshot(self) -> Snapshot:
        """How all of it is now."""
        self._modules = _modules(self._step)
        return Snapshot(self._names, self._modules)


class HeldPlace(NamedTuple):
    """Where a module keeps a weight or a module, and what was there; of tensors where they lay."""

    name: str
    holder: Mapping[str, Any]
    key: str
    held: Any
    address: int

    def moved(self) -> str | None:
        """What is wrong, if it is no longer there."""
        elsewhere = self.address and self.held.data_ptr() != self.address
        if self.holder.get(self.key) is not self.held:
            return "another one"
        return "the same at another address" if elsewhere else None


class HeldNumber(NamedTuple):
    """A number or a flag of an optimizer."""

    name: str
    group: Mapping[str, Any]
    key: str
    value: object


class WrittenGradient(NamedTuple):
    """A gradient that a graph writes.

    Attributes:
        adds: it adds to what is there, or fills it in place. fresh: there was none when it was captured.
    """

    leaf: Tensor
    grad: Tensor | None
    adds: bool
    fresh: bool


class Snapshot:
    """How the surroundings of a step are when it is captured, which happens within `with` it; then it is closed."""

    def __init__(self, names: Names, modules: list[nn.Module]) -> None:
        self._names, self._values = names, {n: _read(read) for n, read in names.items()}
        self._addresses = {n: _address(x) for n, x in self._values.items()}
        self._places = [place for x in modules for place in _places(x)]
        self._alive = [x for module in modules for x in module.buffers()]  # a replaced one is still the graph's
        self._before = [(x, x.grad, _version(x.grad)) for x in _leaves(modules)]
        self._written: list[WrittenGradient] = []
        self._optimizers: list[Optimizer] = []
        self._numbers: list[HeldNumber] = []

    def __enter__(self) -> Snapshot:
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizers.append(optimizer))
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def close(self) -> None:
        """Behind the capture: what the step has changed itself is not held, but its gradients."""
        kept = {n: x for n, x in self._values.items() if self._same(n)}
        self._values = {n: x for n, x in kept.items() if isinstance(x, (*PLAIN, Tensor, nn.Module))}
        self._places = [x for x in self._places if x.moved() is None]
        optimizers = {id(x): x for x in self._optimizers}.values()
        self._numbers = [number for x in optimizers for number in _numbers(x)]
        for leaf, old, before in self._before:
            new = leaf.grad
            if new is not old or before != _version(new):
                self._written.append(WrittenGradient(leaf, new, adds=new is old, fresh=old is None))
            leaf.grad = old  # nothing is computed yet
        self._before, self._optimizers = [], []  # whose memory is not the graph's

    def check(self) -> None:
        """At a replay.

        Raises:
            UnsupportedError: something is no longer what the graph has, by name.
        """
        for name, value in self._values.items():
            if not self._same(name):
                hint = "Give it to the step as an argument, or release() the step"
                now = _word(_read(self._names[name]))
                raise UnsupportedError(name, f"what was captured, {_word(value)}", now, hint)
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

    def _same(self, name: str) -> bool:
        """Whether a name has what it had."""
        value, now = self._values[name], _read(self._names[name])
        if isinstance(value, PLAIN):
            return type(now) is type(value) and now == value
        return now is value and _address(now) == self._addresses[name]


def _gradient_error(leaf: Tensor, expected: str, got: Tensor | None) -> UnsupportedError:
    hint = "Begin the step with zero_grad(), or always call zero_grad(set_to_none=False) outside of it"
    name = f"the gradient of a tensor of shape {list(leaf.shape)}"
    return UnsupportedError(name, expected, "None" if got is None else "another gradient", hint)


# -- what a step reads ---------------------------------------------------------------------------------------


def _function(step: Any) -> FunctionType | None:
    """The user's own function of a step, without what is wrapped around it."""
    step = inspect.unwrap(getattr(step, "_torchdynamo_orig_callable", step))
    while isinstance(step, functools.partial):
        step = inspect.unwrap(step.func)
    step = step.__func__ if isinstance(step, MethodType) else step
    step = inspect.unwrap(step)
    return step if isinstance(step, FunctionType) else None


def _read_names(function: FunctionType) -> Names:
    """Names that a function reads from its closure and its file, and never binds."""
    loads, stores = _touched(function.__code__)
    names: Names = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if name in loads - stores:
            names[name] = functools.partial(getattr, cell, "cell_contents")
    for name in (loads - stores) & function.__globals__.keys() - names.keys():
        names[name] = functools.partial(function.__globals__.get, name)
    return names


def _touched(code: CodeType) -> tuple[set[str], set[str]]:
    """Names of closures and files that code reads, and that it binds; that of functions within it, too."""
    loads, stores = set(), set()
    for i in dis.get_instructions(code):
        if i.opname in ("LOAD_DEREF", "LOAD_GLOBAL"):
            loads.add(i.argval)
        elif i.opname in ("STORE_DEREF", "DELETE_DEREF", "STORE_GLOBAL", "DELETE_GLOBAL"):
            stores.add(i.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for mine, found in zip((loads, stores), _touched(inner)):
                mine |= found
    return loads, stores


def _modules(step: Any) -> list[nn.Module]:
    """Modules that a step is, or reaches by its names, its defaults and functions among these."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    waiting = [step]
    while waiting:
        x = waiting.pop()
        x = getattr(x, "_torchdynamo_orig_callable", x)
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, nn.Module):
            found[id(x)] = x
        elif isinstance(x, functools.partial):
            waiting += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, MethodType):
            waiting += [x.__func__, *([x.__self__] if isinstance(x.__self__, nn.Module) else [])]
        elif isinstance(x, FunctionType):
            waiting += [_read(functools.partial(getattr, cell, "cell_contents")) for cell in x.__closure__ or ()]
            waiting += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
            named = _touched(x.__code__)[0] & x.__globals__.keys()
            waiting += [y for n in named if isinstance(y := x.__globals__[n], nn.Module)]
    return list(found.values())


def _leaves(modules: list[nn.Module]) -> list[Tensor]:
    """Tensors that may get a gradient: the modules' weights, and all others that there are."""
    found = {id(p): p for x in modules for p in x.parameters() if p.requires_grad}
    plain = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return list((found | {id(x): x for x in plain if x.is_leaf and x.requires_grad}).values())


def _places(root: nn.Module) -> Iterator[HeldPlace]:
    """Modules and weights, by name."""
    for path, module in root.named_modules():
        for holder in (module._modules, module._parameters):
            for key, held in holder.items():
                name = ".".join(filter(None, (type(root).__name__, path, key)))
                yield HeldPlace(name, holder, key, held, _address(held))


def _numbers(optimizer: Optimizer) -> Iterator[HeldNumber]:
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, (*PLAIN, tuple)):
                yield HeldNumber(f"{key} of {type(optimizer).__name__}", group, key, value)


def _version(x: Tensor | None) -> int:
    return 0 if x is None or x.is_inference() else x._version


def _address(x: object) -> int:
    """Where a plain tensor lies; 0 of all else."""
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided else 0  # type: ignore[attr-defined]


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ValueError:  # a name that has nothing yet
        return None


def _word(x: object) -> str:
    return repr(x) if isinstance(x, PLAIN) else f"a {type(x).__name__}"
